"""`Comparison` of maps, tokens and several columns: scores are those of plain loops over the voters, pictures whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.data import Data
from workbench.widgets import Comparison


def rng(seed):
    return torch.Generator().manual_seed(seed)


def class_maps():
    x = torch.randn(40, 3, 6, 8, generator=rng(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    y[torch.rand(y.shape, generator=rng(1)) < 0.2] = 255
    return Data.from_arrays(x, y, classes=["road", "sky", "tree"], void=255)


def tokens():
    x = torch.randn(40, 5, 2, generator=rng(2))
    lengths = [1 + i % 5 for i in range(40)]
    return Data.from_arrays(x, (x[..., 0] > 0).long() + (x[..., 1] > 0).long(), classes=3, lengths=lengths)


def two_targets():
    x = torch.randn(60, 3, generator=rng(3))
    y = torch.stack([x[:, 0], 100 * x[:, 1] + 10 * torch.randn(60, generator=rng(4))], 1)
    return Data.from_arrays(x, y, target="cold, hot")


def value_maps():
    x = torch.randn(40, 1, 6, 8, generator=rng(5))
    return x, x[:, 0] * 2


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.layer(x)[:, 0]


def trained(model, given, **options):
    comparison = Comparison(model, given, ["vote(n_voters=4)"], epochs=2, **options).start(block=True)
    assert comparison.errors == {}
    return comparison


@pytest.mark.parametrize(
    ("given", "model", "dim"), [(class_maps, lambda: nn.Conv2d(3, 3, 1), 1), (tokens, lambda: nn.Linear(2, 3), -1)]
)
def test_pixels_and_tokens_count_alike_where_they_have_a_class(given, model, dim):
    comparison = trained(model, given())
    y = comparison.data.test.y
    known = y != -100
    members = comparison.models["vote(n_voters=4)"].voters()
    with torch.no_grad():
        probs = torch.stack([m(comparison.data.test.x).movedim(dim, -1).softmax(-1) for m in members]).mean(0)
    wrong = probs.argmax(-1)[known] != y[known]
    likelihood = probs[known].gather(-1, y[known][:, None])
    row = comparison.results.loc["vote(n_voters=4)"]
    assert row.accuracy == pytest.approx(1 - wrong.double().mean().item())
    assert row.nll == pytest.approx(-likelihood.log().mean().item(), rel=1e-5)
    assert 0 < row.mean_iou <= 1
    assert "mean IoU" in comparison.controls.metrics.value


def test_columns_of_targets_are_scored_each_in_its_unit():
    comparison = trained(lambda: nn.Linear(3, 2), two_targets())
    x, y = comparison.data.test.x, comparison.data.test.y
    with torch.no_grad():
        off = comparison.models["plain"](x) - y
    row = comparison.results.loc["plain"]
    assert [row.rmse_cold, row.rmse_hot] == pytest.approx(off.square().mean(0).sqrt().tolist(), rel=1e-5)
    assert "rmse" not in comparison.results
    assert "RMSE hot" in comparison.controls.metrics.value


@pytest.mark.parametrize(
    ("given", "model", "words"),
    [
        (class_maps, lambda: nn.Conv2d(3, 3, 1), "as maps"),
        (value_maps, Depth, "as maps"),
        (two_targets, lambda: nn.Linear(3, 2), "no picture of targets [n, 2]"),
    ],
)
def test_what_can_be_drawn_is_drawn_and_the_rest_says_so(given, model, words, monkeypatch):
    import IPython.display

    monkeypatch.setattr(IPython.display, "display", lambda data, **options: None)
    comparison = trained(model, given())
    comparison._repr_mimebundle_()
    for row in comparison.controls.rows.values():
        if row.name in comparison.models:
            assert words in row.panel.value
            assert "no picture:" not in row.panel.value
    comparison.snapshot()


def test_models_and_outputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"needed is \[2, 3, 6, 8\]"):
        Comparison(lambda: nn.Conv2d(3, 4, 1), class_maps())
    with pytest.raises(ValueError, match=r"needed is \[2, 2\]"):
        Comparison(lambda: nn.Linear(3, 1), two_targets())
    with pytest.raises(ValueError, match="does not fit"):
        Comparison(lambda: nn.Conv2d(3, 3, 1), class_maps(), output="probs")
    x = torch.rand(40, 3)
    with pytest.raises(ValueError, match="labels a row"):
        Comparison(lambda: nn.Linear(3, 2), Data.from_arrays(x, (x[:, :2] > 0.5).long(), task="labels"))
