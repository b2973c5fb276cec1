"""Parts of an output that no layer of the voters or of the risk head reaches are told or refused; others are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, compose, sculpt, vote

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Detector(nn.Module):
    """Boxes and scores in one tensor, [rows, 4 + classes, places]."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.boxes, self.scores = nn.Linear(4, 8), nn.Linear(8, 4 * 5), nn.Linear(8, 3 * 5)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.trunk(x).tanh()
        boxes, scores = self.boxes(h).unflatten(1, (4, 5)), self.scores(h).unflatten(1, (3, 5))
        return torch.cat([boxes.exp(), scores.sigmoid()], 1), {"scores": scores}


class Head(nn.Module):
    """A trunk and a layer, whose outputs `end` changes."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.trunk, self.head, self.end = nn.Linear(4, 8), nn.Linear(8, 3), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x, self.head(self.trunk(x).tanh()))


def plain_spread(wrapped: Any, x: Tensor) -> Tensor:
    """The standard deviation over plain copies, one after another."""
    return torch.stack([voter.eval()(x)[0] for voter in wrapped.voters()]).std(0, correction=0)


TOLD = r"vote: no layer .* reaches output\[0\] at 0 to 3 of dimension 1: .* share=None"


def test_concatenated_parts_of_a_shared_layer_are_told_once() -> None:
    wrapped: Any = vote.Wrapper(3, share=1)(Detector()).eval()
    with pytest.warns(WorkbenchWarning, match=TOLD) as told:
        _, risk = wrapped(X, return_risk=True)
    assert len(told) == 1
    torch.testing.assert_close(risk[0], plain_spread(wrapped, X), rtol=1e-4, atol=1e-6)
    assert (risk[0][:, :4] == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(X, return_risk=True)


def test_an_example_shows_them_when_the_model_is_wrapped() -> None:
    with pytest.warns(WorkbenchWarning, match=TOLD):
        wrapped = vote.Wrapper(3, share=1, example=X)(Detector()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(X, return_risk=True)  # and says so once


@pytest.mark.parametrize("share", [2, 3, None])
def test_nothing_is_told_where_every_part_is_reached(share: Any) -> None:
    wrapped = vote.Wrapper(3, share=share)(Detector()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, risk = wrapped(X, return_risk=True)
    assert (risk[0] > 0).all()


class Decoded(nn.Module):
    """Boxes end in a layer of fixed weights, as the expected corners of a detector; scores are an output of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.bins, self.scores = nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(8, 3)
        self.expected = nn.Linear(5, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.expected(self.bins(h).softmax(1)), self.scores(h), h


def test_an_output_whose_last_layer_is_frozen_is_told() -> None:
    with pytest.warns(WorkbenchWarning, match=r"vote: no layer .* reaches output\[0\]: all share"):
        vote.Wrapper(3, share=1, example=X)(Decoded())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # hidden features, from which the others are computed, may have none
        vote.Wrapper(3, share=2, example=X)(Decoded()).eval()(X, return_risk=True)


def test_voters_that_start_equal_are_told_once_they_differ() -> None:
    wrapped: Any = vote.Wrapper(3, share=1, finetune=True)(Detector()).eval()

    def answer_and_change() -> None:
        wrapped(X, return_risk=True)
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        wrapped(X, return_risk=True)

    with pytest.warns(WorkbenchWarning, match=TOLD):
        answer_and_change()


ENDS: dict[str, Any] = {
    "inputs passed through": lambda x, y: torch.cat([x, y], 1),
    "an unused unit": lambda x, y: torch.cat([(y[:, :1] - 100).relu(), y], 1),
    "decisions": lambda x, y: torch.cat([(x[:, :1] + 1e-6 * y[:, :1]).sign(), y], 1),
    "a normalized sum": lambda x, y: y.softmax(1),
}


@pytest.mark.parametrize("end", ENDS)
def test_parts_that_are_equal_for_other_reasons_are_not_told(end: str) -> None:
    for wrapper in (vote.Wrapper(3, share=1), compose(vote.Wrapper(2, share=1), sculpt.Wrapper(n_layers=1))):
        wrapped: Any = wrapper(Head(ENDS[end])).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped(X, return_risk=True)


def test_hidden_features_of_shared_layers_are_not_told_also_if_a_unit_is_unused() -> None:
    class Features(Head):
        def forward(self, x: Tensor) -> Any:
            h = self.trunk(x).tanh() * torch.tensor([0.0, *[1.0] * 7])
            return self.head(h), h

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vote.Wrapper(3, share=1)(Features(None)).eval()(X, return_risk=True)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x)], 1)


def test_a_risk_head_that_would_repeat_the_prediction_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"sculpt: .* reaches output at 0 to 1 of dimension 1, .* give a larger n_layers="
    ):
        sculpt.Wrapper(n_layers=2)(Towers()).eval()(X, return_risk=True)
    wrapped: Any = sculpt.Wrapper(n_layers=2)(Towers())
    with pytest.raises(ValueError, match="give a larger n_layers="):
        wrapped.loss(nn.MSELoss(), X, torch.zeros(6, 4))
    for n_layers in (3, 4):
        _, risk = sculpt.Wrapper(n_layers=n_layers)(Towers()).eval()(X, return_risk=True)
        assert (risk > 0).all()
