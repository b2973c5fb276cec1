"""Linear layers, and convolutions of one input, by the weights of all voters: one call, equal to plain copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import compose, neo, sample, sculpt, vote

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), (3, 4, 11)),
    "2d": (lambda: nn.Conv2d(4, 6, 1), (3, 4, 7, 5)),
    "2d, no rows": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (4, 7, 5)),
    "3d": (lambda: nn.Conv3d(4, 6, 2, dilation=2), (2, 4, 5, 4, 6)),
    "reflected": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (3, 4, 7, 5)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 5)),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (3, 4, 7, 5)),
    "linear": (lambda: nn.Linear(4, 6), (3, 4)),
    "linear, steps": (lambda: nn.Linear(4, 6), (3, 5, 2, 4)),
    "linear, no rows": (lambda: nn.Linear(4, 6), (4,)),
    "linear, one feature": (lambda: nn.Linear(1, 6), (3, 1)),
    "linear, twice": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5)), (3, 4)),
    "linear, twice, steps": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)), (3, 7, 4)),
}


class Kernels(TorchDispatchMode):
    """Counts convolutions, batched products, and additions to what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = self.products = self.additions = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function.overloadpacket.__name__
        self.convolutions += name == "convolution"
        self.products += name in ("bmm", "baddbmm")
        self.additions += name == "add"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_voters_are_plain_copies(name: str, training: bool, layout: torch.memory_format) -> None:
    build, shape = LAYERS[name]
    x = torch.randn(shape, dtype=torch.float64)
    if len(shape) == 4:
        x = x.to(memory_format=layout)
    model = nn.Sequential(nn.Tanh(), build()).double()
    wrapped = vote.Wrapper(3, strategy="vmap", output="values")(model).train(training)
    copies = [voter.train(training) for voter in wrapped.voters()]
    y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([copy(x) for copy in copies])
    torch.testing.assert_close(y, answers.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(risk, answers.var(0, correction=0).sqrt(), rtol=1e-9, atol=1e-9)
    with torch.no_grad():  # where linear layers are joint
        again, spread = wrapped(x, return_risk=True)
    torch.testing.assert_close(again, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(spread, risk, rtol=1e-9, atol=1e-9)
    y.square().sum().backward()
    answers.mean(0).square().sum().backward()
    stacked = dict(wrapped.named_parameters())
    assert len(stacked) == len(list(model.parameters()))
    for path, parameter in stacked.items():
        wanted = torch.stack([copy.get_parameter(path.partition("@")[0]).grad for copy in copies])
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-9)


def test_one_call_for_all_heads_on_a_trunk_with_the_bias_in_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1))
    wrapped: Any = vote.Wrapper(4, share=1, strategy="vmap", output="values")(model).eval()
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        wrapped(x)  # the first call looks for what outlives it
        with Kernels() as kernels:
            wrapped(x)
    assert (kernels.convolutions, kernels.additions) == (2, 0)


def test_one_product_for_each_linear_layer_of_all_voters_from_the_first_call_on() -> None:
    wrapped: Any = vote.Wrapper(4, strategy="vmap")(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))).eval()
    x = torch.randn(5, 3)
    with torch.no_grad():
        first = wrapped(x)
        with Kernels() as kernels:
            second = wrapped(x)
    assert (kernels.products, kernels.additions) == (2, 0)
    assert torch.equal(first, second)


def test_a_single_feature_is_multiplied_elementwise_and_never_broadcast() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 4))
    wrapped: Any = vote.Wrapper(4, strategy="vmap")(model).eval()
    x = torch.randn(5, 1)
    learning = wrapped(x)
    with torch.no_grad():
        with Kernels() as kernels:
            assert torch.equal(wrapped(x), learning)
        assert (kernels.products, kernels.additions) == (1, 1)
        with torch.autocast("cpu", torch.bfloat16):
            assert wrapped(x).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="shapes"):
            wrapped(torch.randn(5, 4))


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_a_layer_inside_a_function_transform_of_the_model(transform: Any) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            def inner(h: Tensor) -> Tensor:
                h = self.second(self.first(h.expand(2, 3)).tanh())
                return h if transform is torch.func.vmap else h.sum()

            return transform(inner)(x)

    wrapped: Any = vote.Wrapper(3, strategy="vmap", output="values")(Inside().double()).eval()
    x = torch.randn((5, 3) if transform is torch.func.vmap else (2, 3), dtype=torch.float64)
    voters = torch.stack([voter(x) for voter in wrapped.voters()])
    with torch.no_grad():
        for _ in range(2):
            y, risk = wrapped(x, return_risk=True)
            torch.testing.assert_close(y, voters.mean(0))
            torch.testing.assert_close(risk, voters.std(0, correction=0))


@pytest.mark.slow
def test_a_layer_whose_output_outlives_the_pass_is_noticed() -> None:
    kept: list[Tensor] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            kept.append(self.first(x))
            return self.second(kept[-1])

    wrapped: Any = vote.Wrapper(4)(Keeping()).eval()
    wrapped(torch.zeros(2, 3))
    assert "keeps a tensor outside its modules" in str(wrapped.explain())
    assert not any(map(torch._C._functorch.is_batchedtensor, kept[-4:]))


def test_a_second_convolution_of_each_voter_and_heads_beside_it() -> None:
    """Its input differs between voters, so that it is no call for all; under sculpt there are two axes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1)).double()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    wrapped: Any = vote.Wrapper(3, strategy="vmap", output="values")(sculpt.Wrapper()(model)).eval()
    looped: Any = vote.Wrapper(3, strategy="loop", output="values")(sculpt.Wrapper()(model)).eval()
    looped.load_state_dict(wrapped.state_dict())
    for out, wanted in zip(answers_of(wrapped, x), answers_of(looped, x), strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)


def answers_of(wrapped: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        y, risk = wrapped(x, return_risk=True)
    return y, risk.aleatoric, risk.epistemic


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()


@pytest.mark.parametrize("rows", [1, 5])
def test_three_small_voters_predict_at_once(rows: int) -> None:
    wrapped: Any = vote.Wrapper(3)(small_model()).eval()
    x = torch.randn(rows, 3, dtype=torch.float64)
    with torch.no_grad():
        voters = torch.stack([voter(x) for voter in wrapped.voters()])
        first = wrapped(x, return_risk=True)
        assert wrapped.explain().rows[-1][2:4] == ("vmap", "3 passes in one")
        for y, risk in (first, *(wrapped(x, return_risk=True) for _ in range(4)), (wrapped(x), first[1])):
            assert torch.equal(y, first[0])
            assert torch.equal(risk, first[1])
    y, risk = wrapped(x, return_risk=True)  # gradients change no number
    assert torch.equal(y, first[0])
    assert torch.equal(risk, first[1])
    torch.testing.assert_close(first[0], voters.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first[1], voters.std(0, correction=0), rtol=1e-12, atol=1e-12)


LOOPED: dict[str, tuple[Any, Callable[[], nn.Module], tuple[int, ...]]] = {
    "training": (vote.Wrapper(3), small_model, (5, 3)),
    "two": (vote.Wrapper(2), small_model, (5, 3)),
    "autocast": (vote.Wrapper(3), small_model, (5, 3)),
    "half precision": (vote.Wrapper(3), lambda: small_model().bfloat16(), (5, 3)),
    "factors": (vote.Wrapper(3, share="rank1"), small_model, (5, 3)),
    "heads": (compose(vote.Wrapper(3), sculpt.Wrapper()), small_model, (5, 3)),
    "chunk": (vote.Wrapper(3, chunk=1), small_model, (5, 3)),
    "convolution": (vote.Wrapper(3), lambda: nn.Conv1d(3, 2, 1).double(), (2, 3, 4)),
    "steps": (vote.Wrapper(3), small_model, (2, 4, 3)),
    "many weights": (vote.Wrapper(3), lambda: nn.Linear(400, 400).double(), (1, 400)),
}


@pytest.mark.parametrize("name", LOOPED)
def test_what_is_slower_at_once_is_run_voter_by_voter(name: str) -> None:
    wrapper, build, shape = LOOPED[name]
    training = name == "training"
    wrapped: Any = wrapper(build()).train(training)
    x = torch.randn(shape).to(torch.bfloat16 if name == "half precision" else torch.float64)
    with torch.no_grad(), torch.autocast("cpu", enabled=name == "autocast"):
        y, _ = wrapped(x, return_risk=True)
        assert wrapped.explain().rows[-1][2] == "loop"
        assert torch.equal(wrapped(x, return_risk=True)[0], y)
        voters = torch.stack([voter.train(training)(x) for voter in wrapped.voters()])
    torch.testing.assert_close(y, voters.mean(0))


@pytest.mark.parametrize("where", ["activations", "weights"])
def test_three_samples_draw_one_after_another(where: str) -> None:
    model, x = small_model(), torch.randn(5, 3, dtype=torch.float64)
    answers = []
    for strategy in ("auto", "loop"):
        wrapped: Any = sample.Wrapper(3, sample.Normal(0.1), where=where, strategy=strategy)(
            copy.deepcopy(model)
        ).eval()
        with torch.no_grad():
            torch.manual_seed(0)
            answers.append(wrapped(x))
        assert wrapped.explain().rows[-1][2] == "loop"
    assert torch.equal(*answers)


def test_a_prediction_with_neo_is_the_same_with_and_without_its_risk() -> None:
    wrapped: Any = compose(vote.Wrapper(3), neo.Wrapper())(small_model()).eval()
    wrapped.fit([torch.randn(64, 3, dtype=torch.float64)])
    x = torch.randn(5, 3, dtype=torch.float64)
    with torch.no_grad():
        y, _ = wrapped(x, return_risk=True)
        assert torch.equal(wrapped(x), y)
        voters = torch.stack([voter(x) for voter in wrapped.voters()])
    assert [row[2] for row in wrapped.explain().rows if row[1] == "3 vote"] == ["vmap"]
    torch.testing.assert_close(y, voters.mean(0), rtol=1e-12, atol=1e-12)
