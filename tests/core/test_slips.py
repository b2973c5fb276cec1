"""Wrongly declared outputs, detected by their values, loss or type, and objects that have no mean."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import WorkbenchWarning, compose, fit, laplace, sculpt, vote
from workbench.errors import NonTensorOutputError, OutputShapeError
from workbench.outputs import Binary, Logits

X, LABELS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


class Gives(nn.Module):
    """A linear layer, and what a function makes of its output."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.fc(x))


def messages(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if issubclass(w.category, WorkbenchWarning)]


# ---- numbers
def test_probabilities_that_are_said_to_be_scores_of_yes_or_no_are_told_once() -> None:
    wrapped = vote.Wrapper(3, output="binary")(Gives(torch.sigmoid)).eval()
    (said,) = messages(lambda: wrapped(X))
    assert "output=Binary(logits=False)" in said
    assert messages(lambda: wrapped(X)) == []
    assert messages(lambda: vote.Wrapper(3, output="binary")(Gives(lambda h: 3 * h)).eval()(X)) == []
    assert messages(lambda: vote.Wrapper(3, output="binary")(Gives(lambda h: 0 * h)).eval()(X)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_half_precision_are_no_logits(dtype: torch.dtype) -> None:
    wrapped = vote.Wrapper(3, output="logits")(Gives(lambda h: h.softmax(-1))).eval().to(dtype)
    with pytest.raises(ValueError, match='use output="probs"'):
        wrapped(X.to(dtype))


def test_classes_chosen_inside_are_told() -> None:
    (said,) = messages(lambda: vote.Wrapper(3)(Gives(lambda h: h.argmax(-1).float())).eval()(X))
    assert "whole numbers" in said
    assert messages(lambda: vote.Wrapper(3)(Gives(lambda h: (h, torch.ones(40, 1)))).eval()(X)) == []
    large = vote.Wrapper(3)(Gives(lambda h: 3 * h + 200)).eval().to(torch.bfloat16)  # which has no other numbers there
    assert messages(torch.no_grad()(lambda: large(X.to(torch.bfloat16)))) == []


# ---- losses
@pytest.mark.parametrize(
    ("output", "criterion", "line"),
    [
        ("logits", nn.BCEWithLogitsLoss(), 'output="binary"'),
        ("binary", F.cross_entropy, 'output="logits"'),
        ("probs", nn.CrossEntropyLoss(label_smoothing=0.1), 'output="logits"'),
        ("binary", nn.BCELoss(), "output=Binary(logits=False)"),
        (Binary(logits=False), F.binary_cross_entropy_with_logits, 'output="binary"'),
    ],
)
def test_a_loss_that_contradicts_the_meaning_is_told(output: Any, criterion: Any, line: str) -> None:
    probabilities = output == "probs" or isinstance(output, Binary) or isinstance(criterion, nn.BCELoss)
    wrapped = vote.Wrapper(2, output=output)(Gives(lambda h: h.softmax(-1) if probabilities else 3 * h))
    entropy = isinstance(criterion, nn.CrossEntropyLoss) or criterion is F.cross_entropy
    y = LABELS if entropy else F.one_hot(LABELS, 3).float()
    said = messages(lambda: wrapped.loss(criterion, X, y))
    assert any(line in message for message in said), said
    assert messages(lambda: wrapped.loss(criterion, X, y)) == []


def test_a_loss_that_agrees_is_not_told() -> None:
    maps = vote.Wrapper(2, output=Logits(dim=1))(nn.Conv2d(3, 5, 1))
    pixels = torch.zeros(2, 4, 4, dtype=torch.int64)
    assert messages(lambda: maps.loss(F.cross_entropy, torch.randn(2, 3, 4, 4), pixels)) == []
    labels = vote.Wrapper(2, output="binary")(Gives(lambda h: 3 * h))
    assert messages(lambda: labels.loss(nn.BCEWithLogitsLoss(), X, torch.ones(40, 3))) == []


class Smoothed(nn.Module):
    """A loss of the user's own, which names torch's inside."""

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores.float().view(-1, 3), y, label_smoothing=0.1)


class Called:
    def __call__(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(scores.log_softmax(-1), y)


def weighted(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, y: 2 * loss(scores, y)


CROSS_ENTROPIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "lambda": lambda scores, y: F.cross_entropy(scores, y),
    "closure": weighted(nn.CrossEntropyLoss()),
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "module": Smoothed(),
    "object": Called(),
    "method": Called().__call__,
}


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_a_loss_inside_a_criterion_of_ones_own_is_told(name: str) -> None:
    criterion = CROSS_ENTROPIES[name]
    for output, line in (("probs", 'output="logits"'), ("binary", 'output="logits"')):
        wrapped = vote.Wrapper(2, output=output)(Gives(lambda h: h.softmax(-1)))
        said = messages(lambda model=wrapped: model.loss(criterion, X, LABELS))
        assert any(line in message and "are computed by output=" in message for message in said), said
        assert messages(lambda model=wrapped: model.loss(criterion, X, LABELS)) == []
    right = vote.Wrapper(2, output="logits")(Gives(lambda h: 3 * h))
    assert messages(lambda: right.loss(criterion, X, LABELS)) == []
    losses = torch.stack([criterion(voter(X), LABELS) for voter in right.voters()])
    torch.testing.assert_close(right.loss(criterion, X, LABELS), losses.mean())


def test_a_yes_or_no_inside_a_criterion_of_ones_own_is_told() -> None:
    y = (LABELS == 1).float()
    unsaid = vote.Wrapper(2)(Gives(lambda h: h[:, 0]))
    said = messages(lambda: unsaid.loss(lambda scores, t: F.binary_cross_entropy_with_logits(scores, t), X, y))
    assert any('output="binary"' in message for message in said), said
    probabilities = vote.Wrapper(2, output=Binary(logits=False))(Gives(lambda h: h[:, :1].sigmoid()))
    said = messages(lambda: probabilities.loss(lambda p, t: nn.BCEWithLogitsLoss()(p.squeeze(-1), t), X, y))
    assert any("binary_cross_entropy_with_logits, in" in message for message in said), said


def test_in_a_dict_the_output_that_the_loss_is_given_counts() -> None:
    y = LABELS

    def criterion(output: dict[str, Tensor], t: Tensor) -> Tensor:
        return F.cross_entropy(output["kind"], t) + output["size"].square().mean()

    def model() -> nn.Module:
        return Gives(lambda h: {"kind": h.sigmoid(), "size": h})

    wrong = vote.Wrapper(2, output={"kind": Binary(logits=False), "size": "values"})(model())
    said = messages(lambda: wrong.loss(criterion, X, y))
    assert any("output={'kind': \"logits\", ...}" in message for message in said), said
    right = vote.Wrapper(2, output={"kind": "logits", "size": "values"})(model())
    assert messages(lambda: right.loss(criterion, X, y)) == []


def test_what_a_criterion_makes_of_the_scores_first_is_its_own() -> None:
    wrapped = vote.Wrapper(2, output="probs")(Gives(lambda h: h.softmax(-1)))
    assert messages(lambda: wrapped.loss(lambda p, t: F.cross_entropy(p.clamp_min(1e-6).log(), t), X, LABELS)) == []
    assert messages(lambda: wrapped.loss(lambda p, t: F.nll_loss(p.log(), t), X, LABELS)) == []


@pytest.mark.parametrize("criterion", [nn.NLLLoss(), lambda p, t: F.nll_loss(p.double(), t)])
def test_scores_are_no_logarithms_of_probabilities(criterion: Any) -> None:
    """The loss of scores has no least value."""
    with pytest.raises(ValueError, match=r"logarithms of probabilities, and it gives scores.*CrossEntropyLoss"):
        vote.Wrapper(2, output="logits")(Gives(lambda h: h)).loss(criterion, X, LABELS)
    wrapped = vote.Wrapper(2, output="logits")(Gives(lambda h: h.log_softmax(-1)))
    expected = torch.stack([F.cross_entropy(voter(X), LABELS) for voter in wrapped.voters()]).mean()
    torch.testing.assert_close(wrapped.loss(criterion, X, LABELS), expected.to(torch.float32), check_dtype=False)
    shares = vote.Wrapper(2)(Gives(lambda h: h.softmax(-1)))  # minus their mean accuracy, which is bounded
    assert len(messages(lambda: shares.loss(criterion, X, LABELS))) <= 1


# ---- objects
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda h: (types.SimpleNamespace(logits=h), h), "SimpleNamespace"),
        (lambda h: {"h": h, "later": lambda z: z + h}, "function"),
        (lambda h: (h.detach().numpy(), h), "numpy array"),
        (lambda h: {"h": h, "chosen": {int(h.argmax())}}, "chosen"),
    ],
)
def test_objects_that_differ_from_voter_to_voter_are_refused(function: Any, words: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(NonTensorOutputError, match=words):
        vote.Wrapper(5)(Gives(function)).eval()(X)


@pytest.mark.parametrize("wrapper", [vote.Wrapper(2), sculpt.Wrapper(), laplace.Wrapper()])
def test_an_object_in_place_of_tensors_is_refused_by_the_loss_as_by_a_call(wrapper: Any) -> None:
    """Such as the flow that a module of zuko returns."""
    wrapped: Any = wrapper(Gives(lambda h: types.SimpleNamespace(log_prob=lambda y: -(y - h).square())))
    for call in (
        lambda: wrapped(X),
        lambda: wrapped.loss(lambda flow, y: -flow.log_prob(y).mean(), X, LABELS[:, None]),
    ):
        with pytest.raises(TypeError, match=r"SimpleNamespace.*return"):
            call()


def test_objects_that_are_alike_pass() -> None:
    grid = np.arange(3)
    wrapped = vote.Wrapper(3)(Gives(lambda h: (h, types.SimpleNamespace(scale=torch.ones(2)), grid.copy()))).eval()
    y, like, numbers = wrapped(X)
    torch.testing.assert_close(y, torch.stack([voter(X)[0] for voter in wrapped.voters()]).mean(0))
    assert like.scale.sum() == 2
    assert np.array_equal(numbers, grid)


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda h: h.to_sparse(), "to_dense"),
        (lambda h: torch.nested.nested_tensor([h[:3], h[3:]], layout=torch.jagged), "padded"),
    ],
)
def test_sparse_and_nested_outputs_are_refused(function: Any, remedy: str) -> None:
    with pytest.raises(OutputShapeError, match=remedy):
        vote.Wrapper(3)(Gives(function)).eval()(X)


def test_a_packed_sequence_has_a_packed_risk() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 3, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.rnn(x)[0]

    x = nn.utils.rnn.pack_sequence([X[:5], X[5:8]])
    wrapped = vote.Wrapper(3)(Recurrent()).eval()
    y, risk = wrapped(x, return_risk=True)
    each = torch.stack([voter(x).data for voter in wrapped.voters()])
    torch.testing.assert_close(y.data, each.mean(0))
    torch.testing.assert_close(risk.data, each.std(0, correction=0))


# ---- names
def test_a_loss_in_the_place_of_the_scores_is_refused() -> None:
    wrapped = vote.Wrapper(3, output={0: Logits(dim=-1)})(Gives(lambda h: (h.square().mean(), h))).eval()
    with pytest.raises(ValueError, match=r"here the model gives 0: \[\], 1: \[40, 3\]"):
        wrapped(X)


def test_keys_that_are_tuples_are_names() -> None:
    wrapped = vote.Wrapper(3, output={("disp", 0): "values"})(Gives(lambda h: {("disp", 0): h, ("disp", 1): h})).eval()
    risk = wrapped(X, return_risk=True)[1]
    assert risk[("disp", 0)].shape == (40, 3)
    assert risk[("disp", 1)] is None


# ---- targets
def test_sculpt_leaves_out_what_has_no_label() -> None:
    """As torch's cross entropy does: the likelihood is that of the other tokens."""
    torch.manual_seed(0)
    wrapped = sculpt.Wrapper(output=Logits(dim=-1))(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    x, y = X.reshape(8, 5, 4), LABELS.reshape(8, 5).clone()
    y[:, 3:] = -100

    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.movedim(-1, 1), labels)

    expected = wrapped.loss(criterion, x[:, :3], y[:, :3])
    torch.testing.assert_close(wrapped.loss(criterion, x, y), expected)
    fit(wrapped, (x, y), epochs=1, progress=False)


def test_laplace_takes_targets_by_the_names_of_outputs() -> None:
    by_name = laplace.Wrapper(output={"y": "values"})(Gives(lambda h: {"y": h})).eval()
    alone = laplace.Wrapper()(Gives(lambda h: h)).eval()
    alone.load_state_dict(by_name.state_dict(), strict=False)
    y = torch.randn(40, 3)
    risk = by_name.fit((X, {"y": y}))(X, return_risk=True)[1]["y"]
    torch.testing.assert_close(risk, alone.fit((X, y))(X, return_risk=True)[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_laplace_knows_a_square_weight_that_was_transposed(transposed: bool) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.fc.weight.T if transposed else self.fc(x)

    risks = []
    for model in (Square(), nn.Sequential(Square().fc)):
        wrapped = laplace.Wrapper(output="logits", layer="fc" if isinstance(model, Square) else "0")(model).eval()
        risks.append(wrapped.fit((X, torch.arange(40) % 4))(X, return_risk=True)[1].total)
    torch.testing.assert_close(*risks)


def test_laplace_refuses_a_weight_whose_bias_is_added_elsewhere() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.fc.weight.T + self.fc.bias

    with pytest.raises(ValueError, match=r"F\.linear"):
        laplace.Wrapper(output="logits")(Split()).fit((X, LABELS))


def test_targets_far_from_standard_units_beside_others_are_told() -> None:
    wrapped = vote.Wrapper(2, output={"c": "logits", "r": "values"})(Gives(lambda h: {"c": h, "r": h[:, :1]}))
    y = {"c": LABELS, "r": 500 + 100 * torch.randn(40, 1)}
    assert any("none is standardized" in said for said in messages(lambda: fit(wrapped, (X, y), epochs=1)))
    assert messages(lambda: fit(wrapped, (X, {**y, "r": torch.randn(40, 1)}), epochs=1)) == []


@pytest.mark.parametrize(
    "wrapper", [sculpt.Wrapper(), compose(vote.Wrapper(2), sculpt.Wrapper(output="values"))], ids=str
)
@pytest.mark.parametrize("criterion", [None, F.cross_entropy])
def test_risk_heads_of_values_say_how_to_take_class_numbers(wrapper: Any, criterion: Any) -> None:
    says = r'class numbers \[n\], but the risk heads of sculpt take the outputs \[n, 3\] for values, .*: wrap with output="logits"'
    with pytest.raises(ValueError, match=says):
        wrapper(nn.Linear(4, 3)).loss(criterion, X, LABELS)
    with pytest.raises(ValueError, match=says):
        fit(wrapper(nn.Linear(4, 3)), (X, LABELS), epochs=1, criterion=criterion, progress=False)
    with pytest.raises(ValueError, match=r"\[n, 4\], .*\[n, 3, 4\] for values, .*: wrap with output=Logits\(dim=1\)"):
        wrapper(nn.Conv1d(1, 3, 1)).loss(None, X[:, None], LABELS[:, None].expand(-1, 4))


def test_risk_heads_of_classes_take_class_numbers() -> None:
    wrapped = sculpt.Wrapper(sculpt.LogitNormal)(nn.Linear(4, 3))
    with pytest.warns(WorkbenchWarning, match="the targets are class numbers, but the wrapper has no output="):
        assert wrapped.loss(F.cross_entropy, X, LABELS).isfinite()
    fit(wrapped, (X, LABELS), epochs=1, progress=False)


def test_folds_say_it_too() -> None:
    with pytest.raises(ValueError, match='wrap with output="logits"'):
        fit(compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(4, 3)), (X, LABELS), epochs=1, folds=2, progress=False)
