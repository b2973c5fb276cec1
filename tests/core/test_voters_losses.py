"""Losses per voter: each on its own answers, as for plain models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

from workbench import compose, fit, sculpt, vote
from workbench.core.calls import training_losses
from workbench.distributions import JointNormal, Normal, Quantiles, StudentT


class TwoHeads(nn.Module):
    """A dict of a tensor per row, a map, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.value, self.field = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.trunk(x).tanh()
        return {"value": self.value(h), "field": self.field(h).unflatten(1, (2, 3)), "name": "two heads"}


def plain(prediction: dict[str, Any], target: Tensor) -> Tensor:
    return F.mse_loss(prediction["value"], target) + prediction["field"].square().mean()


def writing(prediction: dict[str, Any], target: Tensor) -> Tensor:
    """Writes into what the model gives."""
    return prediction["value"].clamp_(-0.3, 0.3).sub_(target).square().mean() + prediction["field"].mul_(2).sum()


@pytest.mark.parametrize("share", [None, 2])
@pytest.mark.parametrize("criterion", [plain, writing])
@pytest.mark.parametrize("rows", [7, 8])
def test_gradients_are_those_of_plain_models(
    criterion: Callable[[dict[str, Any], Tensor], Tensor], share: int | None, rows: int
) -> None:
    torch.manual_seed(0)
    model, x, y = TwoHeads(), torch.randn(rows, 2), torch.randn(rows, 1)
    wrapped = vote.Wrapper(3, share=share)(model).train()
    copies = [copy.train() for copy in wrapped.voters()]
    expected = torch.stack([criterion(copy(x), y) for copy in copies]).mean()
    of_copies = torch.autograd.grad(expected, [p for copy in copies for p in copy.parameters()])
    loss = wrapped.loss(criterion, x, y)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    n_parameters = len(of_copies) // 3
    parameters = dict(wrapped.named_parameters())
    for i, (name, _) in enumerate(copies[0].named_parameters()):
        of_each = torch.stack(of_copies[i::n_parameters])
        if name in parameters:  # the shared trunk has the sum over the voters
            torch.testing.assert_close(parameters[name].grad, of_each.sum(0))
        else:
            torch.testing.assert_close(parameters[f"{name}@vote"].grad, of_each)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def values(rows: int) -> Tensor:
    return torch.randn(rows, 2)


def labels(rows: int) -> Tensor:
    return torch.randint(2, (rows,))


class OwnLoss(nn.MSELoss):
    """Of a class that nobody knows."""


NORMAL = sculpt.Wrapper(Normal)
# wrappers, criterion, targets, and whether one call does for 16 rows of all voters
KNOWN: dict[str, tuple[list[Any], Any, Callable[[int], Tensor], bool]] = {
    "mse": ([], F.mse_loss, values, True),
    "huber": ([], nn.HuberLoss(), values, True),
    "classes": ([], F.cross_entropy, labels, True),
    "shares of classes": ([], nn.CrossEntropyLoss(label_smoothing=0.1), lambda rows: values(rows).softmax(1), True),
    "weights of classes": ([], nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), labels, True),
    "normal": ([NORMAL], None, values, True),
    "normal and mse": ([NORMAL], F.mse_loss, values, True),
    "student": ([sculpt.Wrapper(StudentT)], None, values, True),
    "joint": ([sculpt.Wrapper(JointNormal)], None, values, True),
    "quantiles": ([sculpt.Wrapper(Quantiles)], None, values, True),
    "a sum": ([], nn.MSELoss(reduction="sum"), values, False),
    "own class": ([], OwnLoss(), values, False),
    "own function": ([], lambda y, target: F.mse_loss(y, target), values, False),
}


@pytest.mark.parametrize("n_voters", [3, 10, 16])
@pytest.mark.parametrize("name", KNOWN)
def test_one_call_for_all_voters_gives_the_gradients_of_one_for_each(
    name: str, n_voters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, criterion, targets, together = KNOWN[name]
    torch.manual_seed(0)
    output = "logits" if "classes" in name else "values"
    wrapped = compose(vote.Wrapper(n_voters, output=output), *inner)(net()).train()
    counted: list[bool] = []
    joined = training_losses.joined

    def count(*arguments: Any) -> Any:
        rows = joined(*arguments)
        counted.append(rows is not None)
        return rows

    def gradients(rows: int) -> tuple[Tensor, list[Tensor]]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(rows, 3, generator=generator)
        torch.manual_seed(2)
        wrapped.zero_grad()
        loss = wrapped.loss(criterion, x, targets(rows))
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]

    gradients(8)  # in the first batch it is listened to what a criterion does
    for rows, possible in ((16, together), (12, False), (96, together and n_voters == 16)):
        counted.clear()
        monkeypatch.setattr(training_losses, "joined", count)
        loss, at_once = gradients(rows)
        monkeypatch.setattr(training_losses, "joined", lambda *arguments: None)
        expected, one_by_one = gradients(rows)
        assert counted == [possible]
        torch.testing.assert_close(loss, expected)
        assert all(map(torch.equal, at_once, one_by_one))


def test_of_voters_of_unknown_likelihoods_each_is_asked() -> None:
    class Twice(Normal):
        def loss_function(self, y: Any, y_pred: Any, y_risk: Any, reduction: str = "mean") -> Any:
            return 2 * super().loss_function(y, y_pred, y_risk, reduction)

    torch.manual_seed(0)
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(Twice()))(net()).train()
    assert not wrapped._workbench.methods[-1].likelihood_of_rows
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    doubled = wrapped.loss(None, x, y)
    wrapped._workbench.methods[-1].distribution = Normal()
    torch.testing.assert_close(doubled, 2 * wrapped.loss(None, x, y))


def test_targets_of_another_shape_are_judged_by_each_voter() -> None:
    """[16] against [16, 1] is spread over [16, 16], which torch warns of."""
    torch.manual_seed(0)
    wrapped = vote.Wrapper(3, output="values")(nn.Linear(3, 1)).train()
    x, y = torch.randn(16, 3), torch.randn(16)
    with pytest.warns(UserWarning, match="target size"):
        loss = wrapped.loss(F.mse_loss, x, y)
    expected = torch.stack([(voter(x) - y).square().mean() for voter in wrapped.voters()]).mean()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    "wrapper", [compose(), vote.Wrapper(2), sculpt.Wrapper(), compose(vote.Wrapper(2), sculpt.Wrapper())]
)
@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (lambda y, target: F.mse_loss(y, target).item(), "criterion: it returned float; .* as a tensor"),
        (lambda y, target: None, "criterion: it returned NoneType"),
        (nn.MSELoss, r"criterion: found the class MSELoss; give an object of it, MSELoss\(\)"),
        (0.5, "criterion: found 0.5; give a function of prediction and target"),
        (torch.ones(20, 5), r"criterion: found a Tensor; give .* wrapped.loss\(nn.MSELoss\(\), x, y\)"),
    ],
)
def test_what_is_no_criterion_is_refused(wrapper: Any, criterion: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        wrapper(nn.Linear(3, 2)).loss(criterion, torch.zeros(4, 3), torch.zeros(4, 2))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 4), nn.Linear(4, 1)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.head(self.rnn(x)[1][0])


def test_a_packed_sequence_is_one_input() -> None:
    torch.manual_seed(0)
    wrapped: Any = vote.Wrapper(3)(Packed()).train()
    x, y = pack_sequence([torch.randn(n, 2) for n in (5, 2, 4)], enforce_sorted=False), torch.randn(3, 1)
    expected = torch.stack([F.mse_loss(copy.train()(x), y) for copy in wrapped.voters()]).mean()
    torch.testing.assert_close(wrapped.loss(F.mse_loss, x, y), expected)
    batches: Any = [(x, y)]
    fit(wrapped, DataLoader(batches, batch_size=None), epochs=1, validation=0, progress=False)
    losses = [F.mse_loss(copy(x), y) for copy in wrapped.voters()]
    assert torch.stack(losses).mean() < expected


def nearest(features: Tensor, _: Tensor) -> Tensor:
    """The two views of a row, n rows apart, should be more alike than others (van den Oord et al. 2018)."""
    features = F.normalize(features, dim=1)
    rows = len(features)
    alike = features @ features.T - 1e9 * torch.eye(rows)
    return F.cross_entropy(alike, torch.arange(rows).roll(rows // 2))


def test_a_loss_that_compares_rows_is_computed_within_each_voter() -> None:
    torch.manual_seed(0)
    wrapped: Any = vote.Wrapper(3)(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))).train()
    x = torch.randn(6, 2)
    views = torch.cat([x, x + 0.1 * torch.randn_like(x)])
    copies = wrapped.voters()
    wrapped.loss(nearest, views, torch.zeros(12)).backward()
    torch.stack([nearest(copy(views), views) for copy in copies]).mean().backward()
    gradient = dict(wrapped.named_parameters())["0.weight@vote"].grad
    torch.testing.assert_close(gradient, torch.stack([copy[0].weight.grad for copy in copies]))


def test_a_batch_without_rows_has_the_loss_of_plain_models() -> None:
    """As what a mask leaves of a batch, in a loop that sums losses over parts; reshaping it was an error of torch."""
    none = torch.zeros(0, 2)
    voters = vote.Wrapper(3)(nn.Linear(2, 1))
    assert voters.loss(nn.MSELoss(reduction="sum"), none, none[:, :1]) == 0
    assert voters.loss(nn.MSELoss(), none, none[:, :1]).isnan()
    both = compose(vote.Wrapper(3), sculpt.Wrapper())(nn.Linear(2, 1)).eval()
    assert both.predictive(none).log_prob(none[:, :1]).shape == (0, 1)
    with pytest.raises(ValueError, match="nothing to score"):
        both.loss(None, none, none[:, :1])
