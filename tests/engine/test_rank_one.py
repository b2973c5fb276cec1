"""Rank-one voters: layers that use their weight as factors equal plain models with the products, or receive the products."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.rank_one_models import (
    Again,
    Attention,
    ByFunction,
    Compiled,
    Copies,
    Differentiates,
    Gives,
    InBackward,
    Keeps,
    Listed,
    Net,
    Normed,
    OwnGradient,
    Penalty,
    Plainly,
    Script,
    Swallows,
    Tells,
    Tied,
    Writes,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from workbench import compose, neo, sample, sculpt, vote
from workbench.core.calls.predict import plan_of
from workbench.core.method import Call
from workbench.core.ownership import engine_of
from workbench.engine import branch as body
from workbench.engine import plan
from workbench.engine import rank_one as factored

VOTERS = 3
STRATEGIES = ("loop", "vmap", "rescue")


def wrap(model: nn.Module, strategy: str = "loop", **settings: Any) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return vote.Wrapper(VOTERS, share="rank1", strategy=strategy, **settings)(model.double())


def branches(wrapped: Any, *args: Any) -> Any:
    """The output of every voter, stacked."""
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        branched, _ = engine_of(wrapped).run(
            plan_of(wrapped, Call(wrapped.training, True)), args, {}, wrapped._workbench.strategy
        )
    return branched.rebuild(branched.leaves)


def voter(model: nn.Module, wrapped: Any, i: int) -> nn.Module:
    """A copy of the plain model with the products in place, whose gradients reach the wrapped model's own tensors."""
    parameters, twin = dict(wrapped.named_parameters()), copy.deepcopy(model).double().train(wrapped.training)
    dense: dict[int, Tensor] = {}
    for name, parameter in twin.named_parameters():
        if f"{name}@vote" in parameters:
            value = parameters[f"{name}@vote"][i]
        elif f"{name}@vote_in" in parameters:
            left, right, ones = (
                parameters[f"{name}@vote_out"][i],
                parameters[f"{name}@vote_in"][i],
                (1,) * (parameter.dim() - 2),
            )
            value = parameters[name] * left.reshape(-1, 1, *ones) * right.reshape(1, -1, *ones)
        else:
            value = parameters[name] * parameters[f"{name}@vote_out"][i]
        dense[id(parameter)] = value
    for module in twin.modules():
        held: dict[str, Any] = module._parameters
        held.update({name: dense[id(parameter)] for name, parameter in held.items() if parameter is not None})
    return twin


def assert_as_plain(model: nn.Module, wrapped: Any, *args: Any) -> None:
    """Outputs and gradients are those of a loop over plain copies; twice, since the first call may find something out."""
    for _ in range(2):
        with torch.random.fork_rng([]):
            torch.manual_seed(2)
            want = torch.stack([voter(model, wrapped, i)(*args) for i in range(VOTERS)])
        outputs = branches(wrapped, *args)
        torch.testing.assert_close(outputs, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradients(outputs, wrapped), gradients(want, wrapped), rtol=1e-9, atol=1e-9)


def gradients(output: Tensor, wrapped: Any) -> list[Any]:
    if not output.requires_grad:
        return []
    scale = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape).sin()
    return list(
        torch.autograd.grad((output * scale).sum(), [*wrapped.parameters()], allow_unused=True, materialize_grads=True)
    )


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take factors whatever their size."""
    monkeypatch.setattr(body, "SMALL", 0)
    monkeypatch.setattr(factored.FactoredWeight, "_is_cheaper", lambda *_: True)


@pytest.fixture
def no_products(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may multiply W, s and r."""

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a product was made")

    for module in (body, factored, plan):
        monkeypatch.setattr(module, "product", refuse)


# ---- layers
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (6, 5)),
    "linear, sequences": (lambda: nn.Linear(5, 4), (2, 3, 5)),
    "linear, a vector": (lambda: nn.Linear(5, 4), (5,)),
    "linear, one row": (lambda: nn.Linear(5, 4), (1, 5)),
    "linear, no rows": (lambda: nn.Linear(5, 4), (0, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular", groups=2), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2), (2, 4, 7, 8)),
    "conv2d, same": (lambda: nn.Conv2d(4, 6, 3, padding="same", bias=False), (2, 4, 7, 8)),
    "conv2d, reflect": (lambda: nn.Conv2d(4, 6, (3, 2), padding=(1, 0), padding_mode="reflect"), (2, 4, 7, 8)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 7, 8)),
    "conv2d, no batch": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 8)),
    "conv2d, no rows": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 7, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, groups=2), (2, 2, 3, 4, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (2, 4, 7)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (2, 4, 5, 6)),
    "conv_transpose2d, no batch": (lambda: nn.ConvTranspose2d(4, 6, 3, bias=False), (4, 5, 6)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 4, 2), (2, 2, 3, 4, 3)),
    "embedding": (lambda: nn.Embedding(7, 4), (2, 3)),
    "embedding, one token": (lambda: nn.Embedding(7, 4), (1,)),
    "embedding, no rows": (lambda: nn.Embedding(7, 4), (0, 3)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_answer_as_plain_ones_without_a_product(name: str, strategy: str, no_products: Any) -> None:
    make, shape = LAYERS[name]
    model = make()
    x = rand(*shape)
    # of few words, so that some come twice
    assert_as_plain(model, wrap(model, strategy), x.abs().long() if isinstance(model, nn.Embedding) else x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [{"padding_idx": 1}, {"padding_idx": -6}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_with_special_gradients_are_right(options: dict[str, Any], strategy: str, always: None) -> None:
    model = nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 2))
    nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(0))
    assert_as_plain(model, wrap(model, strategy), torch.tensor([[1, 0, 1], [3, 1, 6]]))


# ---- models that use a weight by themselves
MODELS = [
    *(Net, ByFunction, Normed, Penalty, OwnGradient, Differentiates, Tells, Gives, Keeps, Swallows, Copies, Plainly),
    *(InBackward, Listed, Tied, Attention, Again, Script, Compiled),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cls", MODELS)
def test_models_that_use_weights_by_themselves_are_right(cls: type[Net], training: bool, always: None) -> None:
    model = cls().double().train(training)
    assert_as_plain(model, wrap(copy.deepcopy(model)).train(training), rand(6, 5))


REFUSED = [(OwnGradient, "vmap"), (OwnGradient, "rescue"), (Again, "replay")]  # as without factors


@pytest.mark.parametrize("strategy", ["vmap", "rescue", "replay"])
@pytest.mark.parametrize("cls", [Net, Normed, OwnGradient, Penalty, Tied, Again])
def test_together_they_are_right_or_refused(cls: type[Net], strategy: str, always: None) -> None:
    model = cls().double().eval()
    wrapped = wrap(copy.deepcopy(model), strategy).eval()
    if (cls, strategy) in REFUSED:
        with pytest.raises(RuntimeError, match="is not possible"):
            branches(wrapped, rand(6, 5))
    else:
        assert_as_plain(model, wrapped, rand(6, 5))


def test_what_uses_its_weight_later_is_right_then(always: None) -> None:
    class Later(Net):
        by_itself = False

        def use(self, h: Tensor) -> Tensor:
            return h @ self.b.weight if Later.by_itself else self.b(h)

    model = Later().double().eval()
    wrapped = wrap(copy.deepcopy(model)).eval()
    for Later.by_itself in (False, True, False):
        assert_as_plain(model, wrapped, rand(6, 5))
    assert engine_of(wrapped).clones.dense_slots == {"b.weight"}


def test_what_writes_into_its_inputs_does_so_once(always: None) -> None:
    model = Writes().double().eval()
    wrapped, x = wrap(copy.deepcopy(model)).eval(), rand(6, 5)
    outputs = branches(wrapped, x)
    torch.testing.assert_close(x, 2 * rand(6, 5))
    torch.testing.assert_close(outputs, torch.stack([voter(model, wrapped, i)(rand(6, 5)) for i in range(VOTERS)]))


def test_one_voter_that_cannot_be_started_again_says_so(always: None) -> None:
    with torch.random.fork_rng([]):
        wrapped: Any = vote.Wrapper(1, share="rank1")(Writes().double().eval())
    with pytest.raises(RuntimeError, match=r"Writes.* writes into its inputs .*b\.weight.*call once more"):
        wrapped(rand(6, 5))
    x = rand(6, 5)
    torch.testing.assert_close(wrapped(x), wrapped.voters()[0](rand(6, 5)))


# ---- around them
def test_errors_are_those_of_the_plain_model(always: None) -> None:
    wrapped = wrap(nn.Linear(5, 4))
    for x, words in (
        (rand(6, 3), "shapes cannot be multiplied"),
        (rand(6, 1), "shapes cannot be multiplied"),
        (rand(6, 5, dtype=torch.float32), "same dtype"),
    ):
        with pytest.raises(RuntimeError, match=words):
            branches(wrapped, x)
    assert branches(wrapped, rand(6, 5)).shape == (VOTERS, 6, 4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again(reentrant: bool, no_products: None) -> None:
    class Checkpointed(Net):
        def use(self, h: Tensor) -> Tensor:
            return checkpoint(lambda h: self.b(torch.tanh(self.b(h))), h, use_reentrant=reentrant)

    model = Checkpointed().double().eval()
    wrapped = wrap(copy.deepcopy(model)).eval()
    want = [torch.stack([voter(model, wrapped, i)(rand(6, 5)) for i in range(VOTERS)])]
    outputs = branches(wrapped, rand(6, 5))
    torch.testing.assert_close(outputs, want[0])
    for output in (outputs, want[0]):
        wrapped.zero_grad()
        output.square().sum().backward()  # reentrant checkpoints know no torch.autograd.grad
        want.append([parameter.grad for parameter in wrapped.parameters()])
    torch.testing.assert_close(want[1], want[2])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_applied_in_single_and_double_precision(
    dtype: torch.dtype, strategy: str, no_products: None
) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
    wrapped = wrap(copy.deepcopy(model), strategy).to(dtype)
    want = torch.stack([voter(model, wrapped, i).to(dtype)(rand(6, 2, 7, dtype=dtype)) for i in range(VOTERS)])
    outputs = branches(wrapped, rand(6, 2, 7, dtype=dtype))
    assert outputs.dtype is dtype
    torch.testing.assert_close(outputs, want)


@pytest.mark.parametrize("low", ["autocast", "bfloat16"])
def test_low_precision_is_as_near_to_the_truth_as_products_are(low: str, always: None) -> None:
    wrapped = wrap(nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.Tanh()))), finetune=True)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "@vote_" in name:
                parameter.copy_(1 + 0.3 * rand(*parameter.shape))
    x = rand(64, 32)
    truth = branches(wrapped, x)
    wrapped = wrapped.bfloat16() if low == "bfloat16" else wrapped.float()
    x = x.bfloat16() if low == "bfloat16" else x.float()
    answers = []
    for whole in ([], wrapped._workbench.rules):
        engine_of(wrapped).clones.dense_slots.update(whole)
        engine_of(wrapped).clones.forget()
        with torch.autocast("cpu", torch.bfloat16, enabled=low == "autocast"):
            answers.append(branches(wrapped, x))
    assert answers[0].dtype is answers[1].dtype
    ours, theirs = (float((answer.double() - truth).norm()) for answer in answers)
    assert ours < 1.5 * theirs < 0.1 * float(truth.norm())


COMPOSED: dict[str, Callable[[str], Any]] = {
    "vote": lambda s: vote.Wrapper(VOTERS, share="rank1", strategy=s),
    "no bias": lambda s: vote.Wrapper(VOTERS, share="rank1", use_bias=False, strategy=s),
    "chunks": lambda s: vote.Wrapper(VOTERS, share="rank1", strategy=s, chunk=2),
    "sculpt": lambda s: compose(vote.Wrapper(VOTERS, share="rank1", strategy=s), sculpt.Wrapper(n_layers=1)),
    "quantiles": lambda s: compose(
        vote.Wrapper(VOTERS, share="rank1", strategy=s), sculpt.Wrapper(sculpt.Quantiles((0.1, 0.9)), n_layers=2)
    ),
    "noise": lambda s: compose(vote.Wrapper(VOTERS, share="rank1", strategy=s), sample.Wrapper(2)),
    "noise on weights": lambda s: compose(
        vote.Wrapper(VOTERS, share="rank1", strategy=s), sample.Wrapper(2, sample.Normal(0.1), where="weights")
    ),
    "learned noise": lambda s: compose(
        vote.Wrapper(VOTERS, share="rank1", strategy=s), sample.Wrapper(2, sample.Normal(0.1), trainable=True)
    ),
    "neo": lambda s: compose(vote.Wrapper(VOTERS, share="rank1", strategy=s), neo.Wrapper()),
    "all": lambda s: compose(
        vote.Wrapper(VOTERS, share="rank1", strategy=s),
        sculpt.Wrapper(n_layers=1),
        # which number a value gets depends on its strides
        sample.Wrapper(2, sample.Bernoulli(0.1 if s == "loop" else 0)),
        neo.Wrapper(),
    ),
}


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("name", COMPOSED)
def test_with_other_wrappers_factors_are_as_good_as_their_products(name: str, strategy: str, always: None) -> None:
    def answers(whole: bool) -> list[Any]:
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            model = nn.Sequential(
                nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(20, 5), nn.Tanh(), nn.Linear(5, 1)
            )
            wrapped = COMPOSED[name](strategy)(model.double())
            if wrapped.needs_fit:
                wrapped.fit(rand(30, 2, 7))
            results: list[Any] = []
            for training in (False, True):
                wrapped.train(training)
                if whole:
                    engine_of(wrapped).clones.dense_slots.update(wrapped._workbench.rules)
                    engine_of(wrapped).clones.forget()
                torch.manual_seed(4)
                y, risk = wrapped(rand(6, 2, 7), return_risk=True)
                risks = [risk] if isinstance(risk, Tensor) else [risk[kind] for kind in risk]
                results += [
                    y,
                    *risks,
                    gradients(torch.stack([y, *(r.reshape(-1, 1).expand_as(y) for r in risks)]), wrapped),
                ]
            held = [
                type(t)
                for c in engine_of(wrapped).clones.existing()
                for m in c.tree.values()
                for t in m._parameters.values()
            ]
            assert (factored.FactoredWeight in held) is (not whole and name != "noise on weights")
            return results

    torch.testing.assert_close(answers(whole=False), answers(whole=True), rtol=1e-8, atol=1e-8)


def test_copies_and_pickles_take_no_factors_along(always: None) -> None:
    wrapped = wrap(Net()).eval()
    outputs = branches(wrapped, rand(6, 5))
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped.voters()[0])), wrapped.unwrap()):
        assert not any("forward" in vars(module) for module in other.modules())
        assert not any(isinstance(parameter, factored.FactoredWeight) for parameter in other.parameters())
    torch.testing.assert_close(branches(copy.deepcopy(wrapped), rand(6, 5)), outputs)


def test_layers_are_of_the_users_classes_and_their_hooks_fire(no_products: None) -> None:
    seen: list[Any] = []

    class Looks(Net):
        def use(self, h: Tensor) -> Tensor:
            seen.append((type(self.b), self.b.weight.shape, self.b.weight.dtype, len(self.b.weight)))
            return self.b(h)

    model = Looks()
    model.b.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    branches(wrap(model.eval()), rand(6, 5))
    assert seen == [(nn.Linear, (4, 4), torch.float64, 4), (6, 4)] * VOTERS


# ---- what it is for
class Peak(TorchDispatchMode):
    """Counts the bytes of what is made inside and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in {*storages, *self.live}:
                key = storage._cdata
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


@pytest.mark.parametrize("strategy", ["loop", "vmap", "auto"])
def test_a_large_model_needs_no_products_of_its_weights(strategy: str) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    wrapped: Any = vote.Wrapper(4, share="rank1", finetune=True, strategy=strategy)(model).eval()
    x = rand(2, 512, dtype=torch.float32)
    with torch.no_grad():
        want = model(x)
    for gradients_too in (False, True):
        with torch.set_grad_enabled(gradients_too):
            torch.testing.assert_close(wrapped(x), want)
            with Peak() as peak:
                wrapped(x)
            assert peak.most < 512 * 512 * 4 / 2, "half the bytes of one weight of one voter"


def test_rungs_for_voters_that_read_the_same_weights() -> None:
    def executor(model: nn.Module, x: Tensor, n: int = 4) -> str:
        wrapped: Any = vote.Wrapper(n, share="rank1")(model).eval()
        wrapped(x)
        (decision,) = engine_of(wrapped).dispatcher.decisions.values()
        return decision.executor

    few, many = rand(1, 256, dtype=torch.float32), rand(1024, 256, dtype=torch.float32)
    assert executor(nn.Linear(256, 256), few) == "vmap"
    assert executor(nn.Linear(256, 256), few, n=2) == "loop"
    assert executor(nn.Linear(256, 256), many) == "loop"


@pytest.mark.slow
def test_a_single_layer_is_one_graph(always: None) -> None:
    model = nn.Linear(5, 4).double().eval()
    wrapped = wrap(copy.deepcopy(model)).eval()
    y = wrapped(rand(6, 5))
    torch.testing.assert_close(torch.compile(wrapped, backend="eager", fullgraph=True)(rand(6, 5)), y)
