"""Expected answers of a wrapped model used with the rest of PyTorch, as a differentiable function of its `state_dict`.

The reference is independent of the code under test: plain models are called one by one, each with the tensors of one branch, found by their
keys (`workbench.testing.reference.NamedTensors`), noise is drawn and risks are computed here, and no wrapped object runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from workbench import Risk, Wrapper, compose, neo, sample, sculpt, vote
from workbench.testing.reference import NamedTensors

VOTERS, SAMPLES, ROWS, AMOUNT = 3, 2, 6, 0.2


class Net(nn.Module):
    """A network [rows, 3] -> [rows, 2] in double precision, with batch statistics that training updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
        self.second, self.last = nn.Linear(6, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A wrapper, and the branches that it gives a model.

    Args:
        make: Returns the wrapper.
        voters, samples: Number of each.
        noise: Where noise is added: "activations", "weights" or "" (nowhere).
        head: Whether there is a risk head.
    """

    make: Callable[..., Wrapper]
    voters: int = 1
    samples: int = 1
    noise: str = ""
    head: bool = False


def _sample(where: str, **common: Any) -> Wrapper:
    distribution = sample.Normal(AMOUNT) if where == "weights" else sample.Bernoulli(AMOUNT)
    return sample.Wrapper(SAMPLES, distribution, where=where, **common)


KINDS = {
    "vote": Kind(lambda **c: vote.Wrapper(VOTERS, **c), VOTERS),
    "vote_rank1": Kind(lambda **c: vote.Wrapper(VOTERS, share="rank1", **c), VOTERS),
    "vote_last2": Kind(lambda **c: vote.Wrapper(VOTERS, share=2, **c), VOTERS),
    "sculpt": Kind(lambda **c: sculpt.Wrapper(**c), head=True),
    "sample_activations": Kind(lambda **c: _sample("activations", **c), samples=SAMPLES, noise="activations"),
    "sample_weights": Kind(lambda **c: _sample("weights", **c), samples=SAMPLES, noise="weights"),
    "vote_sculpt": Kind(lambda **c: compose(vote.Wrapper(VOTERS, **c), sculpt.Wrapper()), VOTERS, head=True),
    "sample_sculpt": Kind(
        lambda **c: compose(_sample("activations", **c), sculpt.Wrapper()),
        samples=SAMPLES,
        noise="activations",
        head=True,
    ),
}
CERTAIN = [name for name, kind in KINDS.items() if not kind.noise]  # deterministic, whatever the random state


def wrap(name: str, model: nn.Module | None = None, **common: Any) -> Any:
    """Return a wrapped model that is the same at every call; "neo" is fitted."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = Net() if model is None else model
        if name == "neo":
            wrapped: Any = neo.Wrapper(**common)(model)
            return wrapped.eval().fit(torch.randn(60, 3, dtype=torch.float64))
        return KINDS[name].make(**common)(model)


def data(rows: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs [rows, 3] and targets [rows, 2]."""
    numbers = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers[:, :3], numbers[:, 3:]


def state_of(wrapped: nn.Module) -> dict[str, Tensor]:
    """Return copies of a wrapped model's tensors, in which parameters require gradients."""
    parameters = dict(wrapped.named_parameters())
    return {
        name: tensor.detach().clone().requires_grad_(name in parameters and parameters[name].requires_grad)
        for name, tensor in wrapped.state_dict(keep_vars=True).items()
        if "@workbench" not in name
    }


def seeded(function: Callable[..., Any], *args: Any, seed: int = 5, **kwargs: Any) -> Any:
    """Call a function with torch's global generator at a seed, and restore its state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return function(*args, **kwargs)


# ---- the reference --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    """The combined answer of all branches.

    Args:
        y: The prediction.
        risks: Standard deviations by name.
        buffers: The buffers after the call, by their key in the state.
        outputs: The single answers [voters, samples, heads, ...].
    """

    y: Tensor
    risks: dict[str, Tensor]
    buffers: dict[str, Tensor]
    outputs: Tensor


def expected(
    name: str,
    state: dict[str, Tensor],
    x: Tensor,
    training: bool = False,
    risk: bool = True,
    loss: bool = False,
    make: Callable[[], nn.Module] = Net,
) -> Answer:
    """Return the answer of plain models with the tensors of a state; random numbers come from torch's global generator."""
    kind = KINDS.get(name, Kind(neo.Wrapper))
    samples = kind.samples if (risk or not training) and not loss else 1
    heads = 2 if kind.head and (risk or loss) else 1
    named = NamedTensors(state, ["vote"])
    moved: dict[tuple[str, int | None], list[Tensor]] = {}
    outputs = []
    for voter in range(kind.voters):
        for _ in range(samples):
            start = torch.get_rng_state()
            for head in range(heads):
                torch.set_rng_state(start)  # both heads see the same noise
                model = seeded(make).train(training)  # seeded, since building a model draws numbers, too
                place = {"vote": voter, "sculpt": head}
                tensors = {
                    tensor_name: named.value(tensor_name, place)
                    for tensor_name, _ in [*model.named_parameters(), *model.named_buffers()]
                }
                for tensor_name, parameter in model.named_parameters():
                    if kind.noise == "weights" and parameter.dim() > 1:
                        noise = 1 + AMOUNT * torch.randn_like(parameter)
                        tensors[tensor_name] = tensors[tensor_name] * noise
                buffers = {tensor_name: tensors[tensor_name].clone() for tensor_name, _ in model.named_buffers()}
                if kind.noise == "activations":
                    _disturb(model)
                outputs.append(functional_call(model, {**tensors, **buffers}, (x.clone(),)))
                for tensor_name, value in buffers.items():
                    moved.setdefault(named.home(tensor_name, place), []).append(value)
    stacked = torch.stack(outputs).reshape(kind.voters, samples, heads, *outputs[0].shape)
    y, raw = stacked[:, :, 0].flatten(0, 1), stacked[:, :, 1:].flatten(0, 2)
    variances = {"epistemic": y.var(0, correction=0)} if kind.voters * kind.samples > 1 else {}
    if len(raw):
        variances["aleatoric"] = (F.softplus(raw) + 1e-9).square().mean(0)
    if len(variances) > 1:
        variances["total"] = variances["epistemic"] + variances["aleatoric"]
    after = {key: state[key].detach().clone() for key, _ in moved}
    for (key, row), values in moved.items():
        mean = torch.stack(values).double().mean(0).to(values[0])
        after[key] = mean if row is None else after[key].index_copy(0, torch.tensor([row]), mean[None])
    risks = {key: root(variance) for key, variance in variances.items()} if risk else {}
    return Answer(y.mean(0) if len(y) > 1 else y[0], risks, after, stacked)


def root(variance: Tensor) -> Tensor:
    """Return the standard deviation, with zero gradient where all branches agree."""
    spread = variance > 0
    return torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), 0.0)


def _disturb(model: nn.Module) -> None:
    """Add dropout to the input of every linear layer but the first."""
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)][1:]:
        layer.register_forward_pre_hook(lambda _, args: (F.dropout(args[0], AMOUNT, training=True),))


def expected_loss(name: str, state: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """Return the mean over voters of their squared errors, plus the negative log likelihood if there is a risk head."""
    terms = []
    for heads in expected(name, state, x, training=True, loss=True).outputs.flatten(0, 1):
        terms.append((heads[0] - target).square().mean())
        if len(heads) > 1:
            normal = torch.distributions.Normal(heads[0], F.softplus(heads[1]) + 1e-9)
            terms[-1] = terms[-1] - normal.log_prob(target).mean()
    return torch.stack(terms).mean()


# ---- comparing ------------------------------------------------------------------------------------------------------


def parts(output: Any) -> dict[str, Tensor]:
    """Return prediction and risks of a wrapped model's output by name; a single risk is named "risk"."""
    if isinstance(output, Tensor):
        return {"y": output}
    y, risk = output
    return {
        "y": y,
        **({name: getattr(risk, name) for name in risk.names()} if isinstance(risk, Risk) else {"risk": risk}),
    }


def assert_answer(output: Any, answer: Answer) -> None:
    """Assert that prediction and risks are as expected."""
    actual = parts(output)
    like = {"y": answer.y, **answer.risks}
    if len(answer.risks) == 1:
        like = {"y": answer.y, "risk": next(iter(answer.risks.values()))}
    assert actual.keys() == like.keys()
    for name, tensor in actual.items():
        close(tensor, like[name], name)


def assert_buffers(wrapped: nn.Module, answer: Answer) -> None:
    """Assert that the buffers equal those after the expected answer."""
    state = wrapped.state_dict()
    for key, value in answer.buffers.items():
        close(state[key], value, f"buffer {key}")


def assert_gradients(wrapped: nn.Module, state: dict[str, Tensor]) -> None:
    """Assert that the parameters have the gradients of the state; a missing gradient equals zero."""
    assert any(tensor.grad is not None for tensor in state.values())
    for name, parameter in wrapped.named_parameters():
        if name not in state:  # a parameter of neo's signature
            continue
        like = state[name].grad
        if like is None or parameter.grad is None:
            assert all(grad is None or not grad.any() for grad in (like, parameter.grad)), name
        else:
            close(parameter.grad, like, f"gradient of {name}")


def close(actual: Tensor, like: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, like, rtol=1e-8, atol=1e-9, msg=lambda message: f"{what}: {message}")


def objective(output: Any) -> Tensor:
    """Return a scalar in which every part of an answer has a different weight."""
    answer = {"y": output.y, **output.risks} if isinstance(output, Answer) else parts(output)
    return torch.stack([(answer[name] * (2 + i)).sin().sum() for i, name in enumerate(sorted(answer))]).sum()
