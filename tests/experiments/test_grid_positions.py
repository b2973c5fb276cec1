"""Grids of maps, tokens and several targets: scores equal those of the flat list of targets, or are refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.map_rows import rng, two_targets
from sklearn.metrics import jaccard_score, roc_auc_score
from torch import Tensor, nn

from workbench import compose, metrics, neo, sculpt, vote
from workbench.data import Data
from workbench.experiments import sweep
from workbench.experiments.compare import summary
from workbench.experiments.measure import measure
from workbench.experiments.positions import measurable, output_for
from workbench.outputs import Binary, Logits

OWN = """
from torch import nn
import torch
from workbench.data import Data

def maps(seed):
    x = torch.randn(30, 2, 4, 6, generator=torch.Generator().manual_seed(seed))
    return Data.from_arrays(x, (x[:, 0] > 0).long(), classes=2)

def labels(seed):
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(seed))
    return Data.from_arrays(x, x > 0)

def conv():
    return nn.Conv2d(2, 2, 1)
"""


def class_maps() -> Data:
    x = torch.randn(30, 2, 4, 6, generator=rng(0))
    y = torch.randint(0, 3, (30, 4, 6), generator=rng(1))
    y[torch.rand(y.shape, generator=rng(2)) < 0.3] = 255
    return Data.from_arrays(x, y, classes=3, void=255)


def tokens() -> Data:
    x = torch.randn(30, 5, 2, generator=rng(0))
    return Data.from_arrays(
        x, torch.randint(0, 3, (30, 5), generator=rng(1)), classes=3, lengths=[1 + i % 5 for i in range(30)]
    )


def seeded(model: Any) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return model()


@pytest.mark.parametrize("kind", ["maps", "tokens"])
def test_pixels_and_tokens_are_scored_as_a_flat_list_of_those_with_a_class(kind: str) -> None:
    d, dim = (class_maps(), 1) if kind == "maps" else (tokens(), -1)
    plain = seeded(lambda: nn.Conv2d(2, 3, 1) if kind == "maps" else nn.Linear(2, 3))
    assert output_for(plain, d) == Logits(dim=dim)
    for wrapper in (compose(output=Logits(dim=dim)), vote.Wrapper(3, output=Logits(dim=dim))):
        wrapped: Any = wrapper(plain)
        scores = measure(wrapped, plain, d, None)
        known = d.test.y != -100
        with torch.no_grad():
            members = [m(d.test.x) for m in (wrapped.voters() if wrapped._workbench.methods else [plain])]
        p = torch.stack(members).movedim(dim % 4 + 1 if kind == "maps" else -1, -1).softmax(-1).mean(0)[known].double()
        y, entropy = d.test.y[known], torch.special.entr(p).sum(-1)
        wrong = (p.argmax(-1) != y).double()
        assert scores["accuracy"] == pytest.approx(1 - wrong.mean().item())
        assert scores["mean_iou"] == pytest.approx(jaccard_score(y, p.argmax(-1), average="macro"))
        assert scores["nll"] == pytest.approx(-p.gather(1, y[:, None]).log().mean().item(), rel=1e-5)
        assert scores["ece"] == pytest.approx(metrics.ece(p, y).item(), rel=1e-4)
        assert scores["error_auroc"] == pytest.approx(roc_auc_score(wrong, entropy.float()), abs=1e-3)
        assert scores["aurc"] == pytest.approx(metrics.aurc(entropy, wrong).item(), rel=1e-2)
    assert scores["epistemic"] == pytest.approx(
        wrapped(d.test.x, return_risk=True)[1].epistemic[known].mean().item(), rel=1e-4
    )


def test_one_number_an_image_ranks_no_pixels() -> None:
    d, plain = class_maps(), seeded(lambda: nn.Conv2d(2, 3, 1))
    images = neo.Wrapper(per="image", output=Logits(dim=1))(plain)
    scores = measure(images.fit(d.train.x), plain, d, None)
    assert {"aurc", "error_auroc", "risk_error_correlation"}.isdisjoint(scores)
    with torch.no_grad():
        assert scores["vacuitic"] == pytest.approx(images(d.test.x, return_risk=True)[1].mean().item(), rel=1e-5)
    pixels = neo.Wrapper(output=Logits(dim=1))(plain)
    ranked = measure(pixels.fit(d.train.x), plain, d, None)
    known = d.test.y != -100
    with torch.no_grad():
        y, risk = pixels(d.test.x, return_risk=True)
    assert ranked["aurc"] == pytest.approx(metrics.aurc(risk[known], (y.argmax(1) != d.test.y)[known]).item())


def test_several_targets_are_scored_each_in_its_unit() -> None:
    d, plain = two_targets(), seeded(lambda: nn.Linear(3, 2))
    scores = measure(compose()(plain), plain, d, d.train)
    with torch.no_grad():
        errors, held = plain(d.test.x) - d.test.y, plain(d.train.x) - d.train.y
    noise = held.square().mean(0).sqrt()
    assert noise[1] > 20 * noise[0]  # one noise of both would fit neither
    assert scores["rmse_cold"] == pytest.approx(errors[:, 0].square().mean().sqrt().item(), rel=1e-5)
    assert scores["rmse_hot"] == pytest.approx(errors[:, 1].square().mean().sqrt().item(), rel=1e-5)
    normal = torch.distributions.Normal(torch.zeros(2), noise)
    assert scores["nll"] == pytest.approx(-normal.log_prob(errors).mean().item(), rel=1e-5)
    assert scores["sharpness_hot"] == pytest.approx(noise[1].item(), rel=1e-5)
    assert {"rmse", "mae", "crps", "mpiw90", "aurc"}.isdisjoint(scores)

    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper())(plain).fit(d.train.x)
    scores = measure(wrapped, plain, d, None)
    with torch.no_grad():
        y, risk = wrapped.eval()(d.test.x, return_risk=True)
    assert scores["aurc_hot"] == pytest.approx(
        metrics.aurc(risk.total[:, 1], (y - d.test.y)[:, 1].abs()).item(), rel=1e-5
    )
    assert scores["epistemic_cold"] == pytest.approx(risk.epistemic[:, 0].square().mean().sqrt().item(), rel=1e-5)
    alone = neo.Wrapper()(plain).fit(d.train.x)
    by = alone(d.test.x, return_risk=True)[1]
    ranked = measure(alone, plain, d, None)
    assert ranked["aurc_cold"] == pytest.approx(
        metrics.aurc(by, (plain(d.test.x) - d.test.y)[:, 0].detach().abs()).item()
    )


def test_maps_of_values_are_scored_over_all_numbers() -> None:
    x = torch.randn(30, 2, 4, 6, generator=rng(0))
    d, plain = Data.from_arrays(x, 2 * x[:, :1]), seeded(lambda: nn.Conv2d(2, 1, 1))
    scores = measure(compose()(plain), plain, d, d.train)
    with torch.no_grad():
        assert scores["rmse"] == pytest.approx((plain(d.test.x) - d.test.y).square().mean().sqrt().item(), rel=1e-5)
    alone = neo.Wrapper(per="row")(plain)
    assert "aurc" not in measure(alone.fit(d.train.x), plain, d, None)  # one number a row, and many errors


def test_a_table_has_a_column_for_each_target() -> None:
    rows = [("plain", 2.0, 30.0, 0.3), ("vote", 1.0, 40.0, 0.2)]
    frame = pd.DataFrame(rows, columns=["wrapper", "rmse_cold", "rmse_hot", "nll"])
    printed = summary(frame.assign(model="mlp", data="two", task="regression", epochs=9, seed=0)).splitlines()
    assert printed[1].split() == ["rmse_cold", "rmse_hot", "nll"]
    assert [line.count("*") for line in printed[2:4]] == [1, 2]


def test_a_cell_of_maps_is_trained_and_scored(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    for wrapper in ("plain", "vote(n_voters=2) + sculpt"):
        row = sweep.run(f"{path}:conv", wrapper, f"{path}:maps", seed=0, epochs=2)
        assert 0 < row["mean_iou"] <= 1
        assert row["task"] == "classification"
    with pytest.raises(
        ValueError,
        match=r"Sequential returns \[2, 2\].*must return \[2, 2, 4, 6\] \(maps\) or \[2, 4, 6, 2\] \(tokens\)",
    ):
        sweep.run("linear", "plain", f"{path}:maps", seed=0, epochs=10**9)


@pytest.mark.slow
def test_a_cell_of_labels_is_trained_on_yes_and_no(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    for wrapper in ("plain", "vote(n_voters=2) + sculpt + neo"):
        row = sweep.run("linear", wrapper, f"{path}:labels", seed=0, epochs=25)
        assert row["accuracy"] > 0.8
        assert row["nll"] < 0.6
        assert row["task"] == "labels"


@pytest.mark.parametrize(
    ("y", "options", "words"),
    [
        (torch.full((30, 4), 0.25), {"task": "probabilities", "classes": 4}, "class probabilities as targets"),
        ({"a": torch.rand(30, 1), "b": torch.rand(30, 1)}, {}, "the targets a, b"),
    ],
)
def test_targets_without_scores_are_refused(y: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"your data has {words}.*workbench.metrics"):
        measurable(Data.from_arrays(torch.rand(30, 2), y, **options))


@pytest.mark.parametrize("logits", [True, False])
def test_labels_are_scored_as_a_flat_list_of_no_and_yes(logits: bool) -> None:
    data = measurable(Data.from_arrays(torch.randn(60, 4, generator=rng(5)), torch.rand(60, 3, generator=rng(6)) > 0.4))
    plain = seeded(lambda: nn.Linear(4, 3) if logits else nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()))
    assert output_for(plain, data) == ("binary" if logits else Binary(logits=False))
    wrapped = seeded(lambda: vote.Wrapper(3, output=Binary(logits=logits))(plain)).eval()
    with torch.no_grad():
        said = torch.stack([voter(data.test.x) for voter in wrapped.voters()])
    yes = (said.sigmoid() if logits else said).double()
    mean = yes.mean(0).flatten()
    target = data.test.y.flatten()
    entropies = [torch.special.entr(torch.stack([1 - p, p], -1)).sum(-1) for p in (yes, yes.mean(0))]
    scores = measure(wrapped, plain, data, None)
    assert scores["brier"] == pytest.approx(2 * (mean - target).square().mean().item(), rel=1e-5)
    assert scores["ece"] == pytest.approx(float(metrics.ece(torch.stack([1 - mean, mean], -1), target)), abs=1e-6)
    assert scores["aleatoric"] == pytest.approx(entropies[0].mean().item(), rel=1e-5)
    assert scores["epistemic"] == pytest.approx((entropies[1] - entropies[0].mean(0)).mean().item(), rel=1e-3)
    assert scores["error_auroc"] == pytest.approx(
        roc_auc_score((mean > 0.5) != (target == 1), entropies[1].flatten()), abs=1e-6
    )


def test_labels_are_scored_of_models_that_say_so_only() -> None:
    data = measurable(Data.from_arrays(torch.randn(60, 4, generator=rng(5)), torch.rand(60, 3, generator=rng(6)) > 0.4))
    plain = nn.Linear(4, 3)
    for output in (None, "logits"):
        with pytest.raises(ValueError, match=r'wrapped with output="binary"; this one has output='):
            measure(vote.Wrapper(2, output=output)(plain), plain, data, None)


def test_inputs_by_name_are_refused_and_bytes_and_counts_are_values() -> None:
    with pytest.raises(ValueError, match="the inputs left, right"):
        measurable(Data.from_arrays({"left": torch.rand(30, 2), "right": torch.rand(30, 2)}, torch.rand(30)))
    counts = Data.from_arrays(torch.zeros(30, 3, dtype=torch.uint8), torch.arange(30), task="counts")
    data = measurable(counts)
    assert (data.task, data.train.x.dtype) == ("regression", torch.float32)


def test_scores_whose_classes_could_be_in_two_dimensions_are_refused() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, None].expand(-1, 3, 3)

    d = Data.from_arrays(torch.rand(30, 3), torch.randint(0, 3, (30, 3)), classes=3, task="classification")
    with pytest.raises(ValueError, match="could be dimension 1 or the last one"):
        output_for(Square(), d)


def test_a_plain_baseline_can_be_told_what_its_outputs_mean() -> None:
    assert repr(compose(output=Logits(dim=1))) == "compose(output=Logits(dim=1))"
    assert compose(vote.Wrapper(3), output="logits").output == "logits"
    with pytest.raises(ValueError, match="different output"):
        compose(vote.Wrapper(3, output="values"), output="logits")
