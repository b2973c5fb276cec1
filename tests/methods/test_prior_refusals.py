"""What gets no prior function: outputs beside others are told, everything else is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, laplace, vote
from workbench.errors import WorkbenchWarning
from workbench.outputs import Binary, Mean, Values


def _x() -> Tensor:
    return torch.randn(6, 2, generator=torch.Generator().manual_seed(1))


class _Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("wrapper", "model", "words"),
    [
        (lambda: vote.Wrapper(prior=1, output="probs"), nn.Linear(2, 3), "holds probabilities"),
        (lambda: vote.Wrapper(prior=1, output=Binary(logits=False)), nn.Linear(2, 3), "holds probabilities"),
        (lambda: vote.Wrapper(prior=1, output={"a": "probs"}), nn.Linear(2, 3), "holds probabilities"),
        (lambda: vote.Wrapper(prior=1, state="1"), nn.GRU(2, 3), "passes from call to call"),
        (lambda: vote.Wrapper(prior=1, finetune=True), nn.Linear(2, 3), "finetune"),
        (lambda: compose(vote.Wrapper(prior=1), laplace.Wrapper()), nn.Linear(2, 3), "laplace"),
        (lambda: vote.Wrapper(prior=1), _Constant(), "would differ between untrained models"),
        (lambda: vote.Wrapper(prior=1), vote.Wrapper(prior=1)(nn.Linear(2, 1)).unwrap(), "has one already"),
    ],
)
def test_what_has_no_prior_is_refused_when_wrapping(wrapper: Any, model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrapper()(model)


def test_laplace_is_refused_behind_a_prior() -> None:
    with pytest.raises(ValueError, match="laplace models the posterior of the last layer only"):
        laplace.Wrapper()(vote.Wrapper(prior=1)(nn.Linear(2, 3)))


@pytest.mark.parametrize("prior", [-1.0, float("nan"), float("inf"), "much", True])
def test_scales_are_numbers_that_are_not_negative(prior: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="prior must be"):
        vote.Wrapper(prior=prior)


class _Several(nn.Module):
    """What a model may give beside its scores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.last = nn.Linear(2, 3), kind, None

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        y = self.layer(x)
        if self.kind == "loss":
            return {"y": y, "loss": y.square().mean()}
        if self.kind == "whole numbers":
            return {"y": y, "best": y.argmax(-1)}
        if self.kind == "attribute":
            self.last = y
        if self.kind == "noise":
            return y + torch.randn_like(y)
        if self.kind == "list":
            kept.append(y)
        if self.kind == "hidden":
            return {"y": y, "hidden": x + 1}
        return y


@pytest.mark.parametrize("end", [nn.Softplus(), nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.ELU()])
def test_priors_of_limited_range_are_refused(end: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"the model ends in .* would leave its range"):
        vote.Wrapper(prior=1)(nn.Sequential(nn.Linear(2, 1), end))


@pytest.mark.parametrize("output", [None, "logits"])
@pytest.mark.parametrize("end", [nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_priors_are_not_added_to_probabilities(end: nn.Module, output: Any) -> None:
    wrapped = vote.Wrapper(prior=1, output=output)(nn.Sequential(nn.Linear(2, 3), end)).eval()
    with pytest.raises(ValueError, match=r"holds (log )?probabilities, to which no prior can be added"):
        wrapped(_x())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("loss", "'loss' is a number without dimensions"),
        ("whole numbers", "'best' is of torch.int64"),
        ("attribute", "changes attributes of the model"),
        ("list", "changes objects or lists"),
        ("noise", "draws random numbers in evaluation mode"),
    ],
)
def test_what_would_lack_the_prior_is_refused_when_called(kind: str, words: str) -> None:
    wrapped = vote.Wrapper(prior=1)(_Several(kind)).eval()
    with pytest.raises(ValueError, match=words):
        wrapped(_x(), *([[]] if kind == "list" else []))


def test_what_is_averaged_without_a_risk_has_no_prior() -> None:
    wrapped = vote.Wrapper(prior=1, output={"y": Values(), "hidden": Mean()})(_Several("hidden")).eval()
    torch.testing.assert_close(wrapped(_x())["hidden"], _x() + 1)


class _Zeroed(nn.Module):
    """A LoRA of bare parameters, whose second factor is zero on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 3).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(1, 2)), nn.Parameter(torch.zeros(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def test_priors_that_are_all_the_same_are_told() -> None:
    torch.manual_seed(0)
    wrapped = vote.Wrapper(prior=1)(_Zeroed()).eval()
    with pytest.warns(WorkbenchWarning, match="the output is the same in all untrained models of prior="):
        wrapped(_x())


class _Beside(nn.Module):
    """Values, and an output of limited range."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.values, self.other, self.end = nn.Linear(2, 3), nn.Linear(2, 3), end

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"values": self.values(x), "other": self.end(self.other(x))}


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (nn.Sigmoid(), "ends in sigmoid"),
        (nn.Softplus(), "ends in softplus"),
        (nn.Softmax(-1), "holds probabilities"),
        (lambda y: y.softmax(-1).log(), "holds log probabilities"),
    ],
)
@pytest.mark.parametrize("called", [True, False])
def test_an_output_beside_others_that_no_sum_suits_is_that_of_the_voters(end: Any, words: str, called: bool) -> None:
    torch.manual_seed(0)
    wrapped, x = vote.Wrapper(3, prior=2.0)(_Beside(end)).eval(), _x()
    voters = [] if called else wrapped.voters()
    with pytest.warns(WorkbenchWarning, match=f"output 'other' gets no prior, since it {words}"):
        y = wrapped(x)
    state, place = wrapped.state_dict(), "extras@workbench.prior."
    for i, voter in enumerate(voters or wrapped.voters()):
        trained, untrained = (
            x @ state[f"{weight}"][i].T + state[f"{bias}"][i]
            for weight, bias in (
                ("values.weight@vote", "values.bias@vote"),
                (f"{place}values/weight", f"{place}values/bias"),
            )
        )
        other = end(x @ state["other.weight@vote"][i].T + state["other.bias@vote"][i])
        torch.testing.assert_close(voter(x), {"values": trained + 2 * untrained, "other": other})
    for again in (
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)) if isinstance(end, nn.Module) else wrapped,
    ):
        torch.testing.assert_close(again(x), y)


def test_a_prior_for_no_output_is_refused() -> None:
    class Bounded(_Beside):
        def forward(self, x: Tensor) -> Any:
            return {"scale": self.end(self.values(x)), "other": self.end(self.other(x))}

    wrapped = vote.Wrapper(3, prior=2.0)(Bounded(nn.Softplus())).eval()
    with (
        pytest.raises(ValueError, match="no output of Bounded takes one"),
        pytest.warns(WorkbenchWarning, match="gets no prior"),
    ):
        wrapped(_x())


def test_a_prediction_of_limited_range_that_output_names_is_refused() -> None:
    wrapper = vote.Wrapper(3, prior=2.0, output={"values": Values(), "other": Values()})
    with pytest.raises(ValueError, match=r"output 'other' of the model ends in sigmoid, .* would leave its range"):
        wrapper(_Beside(nn.Sigmoid()))


def test_what_only_the_first_call_sets_up_is_refused_with_the_remedy() -> None:
    """As the hooks by which models of transformers capture hidden states, installed in the first call that asks for them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.ready = nn.Linear(2, 1), False

        def forward(self, x: Tensor) -> Tensor:
            self.ready = True
            return self.layer(x)

    net, x = Net(), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"changes attributes .*\(ready\).* call the model once before it is wrapped"):
        vote.Wrapper(2, prior=1.0)(net).eval()(x)
    net(x)
    wrapped: Any = vote.Wrapper(2, prior=1.0)(net).eval()
    torch.testing.assert_close(wrapped(x), torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))
