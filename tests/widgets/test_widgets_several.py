"""`Comparison` of maps, tokens and several columns: scores equal plain loops over the voters, with complete images."""

from __future__ import annotations

import pytest
import torch
from helpers.map_rows import Depth, class_maps, rng, two_targets, value_maps
from sklearn.metrics import roc_auc_score
from torch import nn

from workbench.data import Data
from workbench.widgets import Comparison


def tokens():
    x = torch.randn(40, 5, 2, generator=rng(2))
    lengths = [1 + i % 5 for i in range(40)]
    return Data.from_arrays(x, (x[..., 0] > 0).long() + (x[..., 1] > 0).long(), classes=3, lengths=lengths)


def labels():
    x = torch.randn(80, 3, generator=rng(6))
    return Data.from_arrays(x, x + torch.randn(80, 3, generator=rng(7)) > 0.3, classes=["cat", "dog", "owl"])


def trained(model, dataset, **options):
    comparison = Comparison(model, dataset, ["vote(n_voters=4)"], epochs=2, **options).start(block=True)
    assert comparison.errors == {}
    return comparison


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_data", "model", "dim"), [(class_maps, lambda: nn.Conv2d(3, 3, 1), 1), (tokens, lambda: nn.Linear(2, 3), -1)]
)
def test_pixels_and_tokens_count_alike_where_they_have_a_class(make_data, model, dim):
    comparison = trained(model, make_data())
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


@pytest.mark.slow
def test_columns_of_targets_are_scored_each_in_its_unit():
    comparison = trained(lambda: nn.Linear(3, 2), two_targets())
    x, y = comparison.data.test.x, comparison.data.test.y
    with torch.no_grad():
        off = comparison.models["plain"](x) - y
    row = comparison.results.loc["plain"]
    assert [row.rmse_cold, row.rmse_hot] == pytest.approx(off.square().mean(0).sqrt().tolist(), rel=1e-5)
    assert "rmse" not in comparison.results
    assert "RMSE hot" in comparison.controls.metrics.value


@pytest.mark.slow
def test_columns_without_names_are_told_by_their_numbers():
    x = torch.randn(60, 3, generator=rng(3))
    comparison = trained(lambda: nn.Linear(3, 2), Data.from_arrays(x, x[:, :2]))
    assert "RMSE target 1" in comparison.controls.metrics.value


@pytest.mark.slow
def test_labels_count_alike_each_as_no_or_yes():
    comparison = trained(lambda: nn.Linear(3, 3), labels())
    x, y = comparison.data.test.x, comparison.data.test.y.double()
    voters = comparison.models["vote(n_voters=4)"].voters()
    for name, models in {"plain": [comparison.models["plain"]], "vote(n_voters=4)": voters}.items():
        with torch.no_grad():
            yes = torch.stack([model(x).sigmoid() for model in models]).double().mean(0)
        wrong = ((yes > 0.5) != (y == 1)).double()
        entropy = -(yes * yes.log() + (1 - yes) * (1 - yes).log())
        row = comparison.results.loc[name]
        assert row.accuracy == pytest.approx(1 - wrong.mean().item())
        assert row.nll == pytest.approx(nn.functional.binary_cross_entropy(yes, y).item(), rel=1e-5)
        assert row.error_auroc == pytest.approx(roc_auc_score(wrong.flatten(), entropy.flatten()), abs=1e-6)
    assert "mean_iou" not in comparison.results
    losses = nn.functional.binary_cross_entropy_with_logits
    with torch.no_grad():  # trained on yes and no, not on their numbers
        kept = comparison.histories["plain"].records[-1]
        assert losses(comparison.models["plain"](x), y.float()).item() == pytest.approx(kept[2], rel=0.5)


@pytest.mark.slow
def test_probabilities_of_labels_are_not_squashed_twice(tmp_path):
    comparison = trained(lambda: nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()), labels())
    x, y = comparison.data.test.x, comparison.data.test.y.float()
    with torch.no_grad():
        yes = comparison.models["plain"](x)
    assert comparison.results.nll["plain"] == pytest.approx(nn.functional.binary_cross_entropy(yes, y).item(), rel=1e-5)
    comparison.export(tmp_path / "own.ipynb")
    assert "Binary(logits=False)" in (tmp_path / "own.ipynb").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_data", "model", "words"),
    [
        (labels, lambda: nn.Linear(3, 3), "no picture of targets [n, 3]"),
        (class_maps, lambda: nn.Conv2d(3, 3, 1), "as maps"),
        (value_maps, Depth, "as maps"),
        (two_targets, lambda: nn.Linear(3, 2), "no picture of targets [n, 2]"),
    ],
)
def test_what_can_be_drawn_is_drawn_and_the_rest_says_so(make_data, model, words, monkeypatch):
    import IPython.display

    monkeypatch.setattr(IPython.display, "display", lambda data, **options: None)
    comparison = trained(model, make_data())
    comparison._repr_mimebundle_()
    for row in comparison.controls.rows.values():
        if row.name in comparison.models:
            assert words in row.panel.value
            assert "no picture:" not in row.panel.value
    comparison.snapshot()


def test_models_and_outputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must return \[2, 3, 6, 8\]"):
        Comparison(lambda: nn.Conv2d(3, 4, 1), class_maps())
    with pytest.raises(ValueError, match=r"must return \[2, 2\]"):
        Comparison(lambda: nn.Linear(3, 1), two_targets())
    with pytest.raises(ValueError, match="does not fit"):
        Comparison(lambda: nn.Conv2d(3, 3, 1), class_maps(), output="probs")
    with pytest.raises(ValueError, match=r"must return \[2, 3\], one score for each label"):
        Comparison(lambda: nn.Linear(3, 2), labels())
    for output in ("logits", "values"):  # a softmax over labels would be a number, and nonsense
        with pytest.raises(ValueError, match="does not fit labels data"):
            Comparison(lambda: nn.Linear(3, 3), labels(), output=output)
    with pytest.raises(ValueError, match="does not fit"):
        Comparison(lambda: nn.Linear(3, 2), two_targets(), output="binary")
