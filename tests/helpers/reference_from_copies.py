"""Expected answers of a wrapped model, from deep copies of the plain one that are called one by one.

The reference is independent of the code under test: each copy gets the tensors of one branch by their keys
(`workbench.testing.reference.NamedTensors`), noise is drawn and risks are computed here, and no wrapped object runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench import Wrapper, compose, sample, sculpt, vote
from workbench.testing.reference import NamedTensors

VOTERS, SAMPLES, ROWS, NOISE = 3, 3, 5, 0.3


class Net(nn.Module):
    """Three linear layers [rows, 3] -> [rows, 3], the base of models that use them in one unusual way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def h(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    def forward(self, x: Tensor) -> Any:
        return self.h(x)


def _sample(where: str, strategy: str, noise: float) -> Wrapper:
    distribution = sample.Normal(noise) if where == "weights" else sample.Bernoulli(noise)
    return sample.Wrapper(SAMPLES, distribution, where=where, strategy=strategy)


WRAPPERS: dict[str, Callable[[str, float], Wrapper]] = {
    "vote": lambda strategy, noise: vote.Wrapper(VOTERS, strategy=strategy),
    "vote_share1": lambda strategy, noise: vote.Wrapper(VOTERS, share=1, strategy=strategy),
    "sample_activations": lambda strategy, noise: _sample("activations", strategy, noise),
    "sample_weights": lambda strategy, noise: _sample("weights", strategy, noise),
    "sculpt": lambda strategy, noise: sculpt.Wrapper(strategy=strategy),
    "vote_sculpt": lambda strategy, noise: compose(vote.Wrapper(VOTERS, strategy=strategy), sculpt.Wrapper()),
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(seed))


def branches(kind: str, plain: nn.Module, wrapped: nn.Module, noise: float) -> Iterator[tuple[int, nn.Module]]:
    """Yield deep copies of the plain model with the tensors and the noise of each branch, as (head, model).

    The random stream continues from branch to branch, and both heads of sculpt see the same numbers.
    """
    named = NamedTensors({name: tensor.detach().clone() for name, tensor in wrapped.state_dict().items()}, ["vote"])
    for voter in range(VOTERS if "vote" in kind else 1):
        for _ in range(SAMPLES if "sample" in kind else 1):
            start = torch.get_rng_state()
            for head in range(2 if "sculpt" in kind else 1):
                torch.set_rng_state(start)
                model = copy.deepcopy(plain)
                with torch.no_grad():
                    for name, tensor in model.state_dict().items():  # without buffers that are recomputed
                        tensor.copy_(named.value(name, {"vote": voter, "sculpt": head}))
                    if kind == "sample_weights":
                        for weight in (p for p in model.parameters() if p.dim() > 1):
                            weight.mul_(1 + noise * torch.randn_like(weight))
                if kind == "sample_activations" and noise:
                    for layer in (getattr(model, "b", None), getattr(model, "c", None)):
                        if layer is not None:
                            layer.register_forward_pre_hook(lambda _, args: F.dropout(args[0], noise, training=True))
                yield head, model


def reduced(answers: list[tuple[int, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of the predictions and the standard deviations, by the law of total variance."""
    main = torch.stack([y for head, y in answers if not head])
    raw = [y for head, y in answers if head]
    risks = {}
    if len(main) > 1:
        risks["epistemic"] = main.std(0, correction=0)
    if raw:
        risks["aleatoric"] = torch.stack([F.softplus(y).square() for y in raw]).mean(0).sqrt()
    return main.mean(0), risks


def expected(
    kind: str, plain: nn.Module, wrapped: nn.Module, args: tuple[Any, ...], noise: float = 0.0, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return prediction and risks of a loop over the branches, each on its own copy of the inputs."""
    with seeded(seed):
        models = branches(kind, plain, wrapped, noise)
        return reduced([(head, model(*copy.deepcopy(args)).detach()) for head, model in models])


def asked(wrapped: Any, args: tuple[Any, ...], seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the prediction and the risks of the wrapped model by name, without the total."""
    with seeded(seed):
        y, risk = wrapped(*args, return_risk=True)
    if isinstance(risk, Tensor):
        kind = "aleatoric" if wrapped.methods == ("sculpt",) else "epistemic"
        return y, {kind: risk}
    return y, {name: risk[name] for name in risk.names() if name != "total"}


def close(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    (y, risks), (like, like_risks) = actual, expected
    torch.testing.assert_close(y.detach(), like, rtol=1e-4, atol=1e-5)
    assert risks.keys() == like_risks.keys()
    for name, risk in risks.items():
        torch.testing.assert_close(risk.detach(), like_risks[name], rtol=1e-3, atol=1e-4)
