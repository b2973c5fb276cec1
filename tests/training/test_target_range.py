"""Models that end in a function of limited range can still predict the targets after `fit`, which moves none of them out of reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, fit, sculpt, vote
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


@pytest.mark.parametrize("wrapper", [compose(), vote.Wrapper(2), compose(vote.Wrapper(2), sculpt.Wrapper())], ids=str)
@pytest.mark.parametrize("end", ENDS)
def test_targets_below_their_mean_are_learned(end: str, wrapper: Any) -> None:
    torch.manual_seed(0)
    wrapped = wrapper(Ending(ENDS[end]))
    fit(wrapped, (X, Y), epochs=60, lr=0.02, batch_size=32, progress=False)
    assert (wrapped(X) - Y).abs().max().item() < 0.3  # the mean is 2.5, and targets start at 1.05


def test_one_bounded_column_beside_a_free_one_is_learned() -> None:
    torch.manual_seed(0)
    wrapped: Any = compose()(Ending(lambda z: torch.cat([z[:, :1], F.softplus(z[:, 1:])], 1), outputs=2))
    y = torch.cat([-Y, Y], 1)
    fit(wrapped, (X, y), epochs=60, lr=0.02, batch_size=32, progress=False)
    assert (wrapped(X) - y).abs().max().item() < 0.3


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
def test_ranges(end: Callable[[Tensor], Tensor], expected: Range) -> None:
    prediction = Ending(end)(X[:5])
    assert limits_of([prediction], Y[:5]).range == expected
    assert limits_of([prediction], Y[:5, 0]).range == Range.FREE  # of another shape than the targets


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
        assert limits_of([infected], infected) == (Range.FIXED, None)
        assert bounded_end(infected.grad_fn) == "sigmoid"
