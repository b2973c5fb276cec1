"""Models that end in a function of limited range can still predict the targets after `fit`, which moves none of them out of reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, fit, sample, sculpt, vote
from workbench.core.calls.bounded_ends import bounded_end
from workbench.errors import WorkbenchWarning
from workbench.training.target_range import Range, limits_of


class Ending(nn.Module):
    """A small network whose last layer's result goes through a function."""

    def __init__(self, end: Callable[[Tensor], Tensor], outputs: int = 1) -> None:
        super().__init__()
        self.body, self.end = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, outputs)), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x))


X = torch.linspace(-2, 2, 200)[:, None]
Y = 1 + 3 * torch.sigmoid(2 * X)
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "relu": lambda z: (z + 1).relu(),
    "exp": torch.exp,
    "square": torch.square,
    "twice": lambda z: 2 * F.softplus(z),
    "sigmoid, moved": lambda z: 5 * torch.sigmoid(z),
    "softplus, moved": lambda z: F.softplus(z) + 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [compose(), vote.Wrapper(2), compose(vote.Wrapper(2), sculpt.Wrapper())], ids=str)
@pytest.mark.parametrize("end", ENDS)
def test_targets_below_their_mean_are_learned(end: str, wrapper: Any) -> None:
    torch.manual_seed(0)
    wrapped = wrapper(Ending(ENDS[end]))
    fit(wrapped, (X, Y), epochs=60, lr=0.02, batch_size=32, progress=False)
    assert (wrapped(X) - Y).abs().max().item() < 0.3  # the mean is 2.5, and targets start at 1.05


@pytest.mark.slow
def test_one_bounded_column_beside_a_free_one_is_learned() -> None:
    torch.manual_seed(0)
    wrapped: Any = compose()(Ending(lambda z: torch.cat([z[:, :1], F.softplus(z[:, 1:])], 1), outputs=2))
    y = torch.cat([-Y, Y], 1)
    fit(wrapped, (X, y), epochs=60, lr=0.02, batch_size=32, progress=False)
    assert (wrapped(X) - y).abs().max().item() < 0.3


def _mixed(z: Tensor) -> Tensor:
    return torch.cat([z[:, :2], z[:, 2:3].sigmoid(), F.softplus(z[:, 3:])], -1)


def _stacked(z: Tensor) -> Tensor:
    return torch.stack([z[:, 0], z[:, 1], z[:, 2].sigmoid(), F.softplus(z[:, 3])], 1)


MIXED_TARGETS = torch.cat([1000 + 300 * X, 0.01 * X.sin(), (2 * X).sigmoid(), 50 * (1 + X.square())], 1)


@pytest.mark.slow
@pytest.mark.parametrize("end", [_mixed, _stacked])
@pytest.mark.parametrize(
    "wrapper",
    [compose(), vote.Wrapper(2), vote.Wrapper(2, strategy="vmap"), vote.Wrapper(2, share=1), sample.Wrapper(2), sculpt.Wrapper()],
    ids=str,
)  # fmt: skip
def test_each_column_is_standardized_as_far_as_its_end_lets_it(end: Callable[[Tensor], Tensor], wrapper: Any) -> None:
    torch.manual_seed(0)
    wrapped, y = wrapper(Ending(end, outputs=4)), MIXED_TARGETS
    fit(wrapped, (X, y), epochs=40, lr=0.02, batch_size=32, validation=0, progress=False)
    means, sizes = y.double().mean(0), y.double().square().mean(0).sqrt()
    spreads = y.double().std(0, correction=0)
    torch.testing.assert_close(wrapped.scaling.y_mean.double(), means * torch.tensor([1, 1, 0, 0]))
    torch.testing.assert_close(wrapped.scaling.y_scale[[0, 1]].double(), spreads[:2])
    torch.testing.assert_close(
        wrapped.scaling.y_scale[[2, 3]].double(), torch.stack([torch.ones_like(sizes[2]), sizes[3]])
    )
    assert ((wrapped(X) - y).square().mean(0).sqrt() < 0.5 * spreads).all()


@pytest.mark.slow
def test_columns_written_by_autoregression_are_followed_without_recursion() -> None:
    z = [Ending(torch.sigmoid)(X[:5])]
    for _ in range(1500):
        z = [torch.cat([*z, z[0][:, :1]], 1)]
    limits = limits_of(z, z[0].detach())
    assert set(limits.ranges) == {Range.FIXED}
    assert set(limits.ends) == {"sigmoid"}


class Change(nn.Module):
    """Adds a limited change to its input, as to the last value of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.body(x))


def test_a_limited_change_of_data_is_not_limited() -> None:
    wrapped: Any = compose()(Change())
    fit(wrapped, (1000 * X, 1000 * X), epochs=1, progress=False)
    assert wrapped.scaling.y_scale is not None
    assert (wrapped(1000 * X) / 1000 - X).abs().max().item() < 0.5


def test_units_of_positive_targets_do_not_matter() -> None:
    """Targets are divided by their size, since softplus times a positive number is still any positive number."""
    errors = []
    for unit in (1.0, 1e4):
        torch.manual_seed(0)
        wrapped: Any = compose()(Ending(F.softplus))
        fit(wrapped, (X, Y * unit), epochs=5, progress=False)
        errors.append((wrapped(X) - Y * unit).detach() / unit)
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda z: z, Range.FREE),
        (lambda z: F.leaky_relu(z), Range.FREE),
        (lambda z: torch.tanh(z) * z, Range.FREE),
        (lambda z: -F.softplus(z), Range.HALF),
        (lambda z: F.softplus(z).squeeze(1)[:, None], Range.HALF),
        (lambda z: z.clamp(0, 1), Range.FIXED),
        (lambda z: 1 - torch.sigmoid(z), Range.FIXED),
    ],
)
def test_the_range_of_predictions_follows_from_the_last_operation(
    end: Callable[[Tensor], Tensor], expected: Range
) -> None:
    prediction = Ending(end)(X[:5])
    assert limits_of([prediction], Y[:5]).ranges == (expected,)
    assert limits_of([prediction], Y[:5, 0]).ranges == (Range.FREE,)  # of another shape than the targets


@pytest.mark.parametrize(
    ("end", "words"),
    [(torch.sigmoid, "ends in sigmoid, so that no prediction is below 0 or above 1"), (F.softplus, "below 0, but")],
)
def test_targets_out_of_range_are_told_once(end: Callable[[Tensor], Tensor], words: str) -> None:
    wrapped: Any = vote.Wrapper(2)(Ending(end))
    with pytest.warns(WorkbenchWarning, match=words):
        fit(wrapped, (X, Y - 2), epochs=1, progress=False)
    fit(wrapped, (X, Y - 2), epochs=1, progress=False)  # a warning would be an error
    fit(vote.Wrapper(2)(Ending(end)), (X, Y / 5), epochs=1, progress=False)


def test_each_column_has_its_own_range() -> None:
    def two(end: Callable[[Tensor], Tensor]) -> Any:
        return vote.Wrapper(2)(Ending(lambda z: torch.cat([z[:, :1].sigmoid(), end(z[:, 1:])], 1), outputs=2))

    fit(two(F.softplus), (X, torch.cat([Y / 5, 50 * Y], 1)), epochs=1, progress=False)
    with pytest.warns(WorkbenchWarning, match=r"ends in softplus, so that no prediction of y\[:, 1\] is below 0, but"):
        fit(two(F.softplus), (X, torch.cat([Y / 5, -50 * Y], 1)), epochs=1, progress=False)
    with pytest.warns(
        WorkbenchWarning, match=r"ends in sigmoid, so that no prediction of y\[:, 0\] is below 0 or above 1"
    ):
        fit(two(lambda z: z), (X, torch.cat([50 * Y, Y], 1)), epochs=1, progress=False)


class Epidemic(nn.Module):
    """Solves a differential equation whose every step takes each result of the step before several times."""

    def __init__(self, n_steps: int) -> None:
        super().__init__()
        self.n_steps, self.start = n_steps, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        susceptible, infected = self.start(x).sigmoid().split(1, 1)
        for _ in range(self.n_steps):
            new = 0.01 * susceptible * infected
            susceptible, infected = susceptible - new, infected + new - 0.02 * infected
        return infected


def test_the_graph_of_a_solver_is_looked_at_once() -> None:
    """Neither in a time that doubles with each step, nor by recursion, which Python bounds."""
    x = torch.randn(8, 2)
    for n_steps in (1500, 40):
        infected = Epidemic(n_steps)(x)
        assert limits_of([infected], infected) == ((Range.FIXED,), (None,))
        assert bounded_end(infected.grad_fn) == "sigmoid"
