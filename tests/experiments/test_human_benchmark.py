"""The benchmark `human`: its cells, its split of annotators, its correlation, a tiny head, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from workbench.data.files import locate
from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "human.py")


@pytest.fixture(scope="module")
def measures(bench: ModuleType) -> ModuleType:
    return load_file(ROOT / "benchmarks" / "human_measures.py")


def test_cells_are_json_and_none_twice(bench: ModuleType) -> None:
    for smoke in (True, False):
        cells = bench.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)
    assert {cell["wrapper"] for cell in cells if "wrapper" in cell} == set(bench.WRAPPERS)


def test_halves_take_every_person_once_and_leave_an_odd_one_out(measures: ModuleType) -> None:
    counts = torch.tensor([[4, 0, 0], [3, 2, 0], [1, 1, 50]], dtype=torch.float64)
    before = torch.get_rng_state()
    first, second = measures.halves_of(counts, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.sum(1).tolist() == second.sum(1).tolist() == [2, 2, 26]
    assert first[0].tolist() == second[0].tolist() == [2, 0, 0]
    assert ((counts - first - second) >= 0).all()
    assert (counts - first - second).sum(1).tolist() == [0, 1, 0]


def test_halves_are_drawn_without_preference(measures: ModuleType) -> None:
    """Of two and two, the first half has one of each in 4 of 6 draws."""
    first, _ = measures.halves_of(torch.tensor([[2, 2]]).expand(6000, 2), 3)
    assert (first[:, 0] == 1).double().mean().item() == pytest.approx(4 / 6, abs=0.02)
    assert first[:, 0].mean().item() == pytest.approx(1, abs=0.03)


def test_ceiling_is_that_of_a_model_that_knows_the_truth(measures: ModuleType) -> None:
    """Truth plus noise twice: how the halves correlate tells how truth does with their mean."""
    assert measures.ceiling(0.5) == pytest.approx((2 / 3) ** 0.5)
    assert measures.ceiling(1.0) == 1
    generator = torch.Generator().manual_seed(0)
    truth, one, other = torch.randn(3, 200_000, generator=generator)
    halves = torch.corrcoef(torch.stack([truth + one, truth + other]))[0, 1]
    whole = torch.corrcoef(torch.stack([truth, truth + (one + other) / 2]))[0, 1]
    assert measures.ceiling(halves) == pytest.approx(whole.item(), abs=0.005)


def test_rank_correlation_is_that_of_scipy(measures: ModuleType) -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(500, generator=generator).round(decimals=1)  # with ties, and below zero
    b = a + torch.randn(500, generator=generator)
    assert measures.rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert measures.rank_correlation(a, -b) == pytest.approx(-stats.spearmanr(a, b).statistic)


def test_judged_against_a_hand_case(measures: ModuleType) -> None:
    counts = torch.tensor([[4.0, 0.0], [3.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], dtype=torch.float64)
    risk = torch.tensor([0.1, 0.3, 0.2], dtype=torch.float64)
    scores = measures.judged(probs, risk, risk, -risk, torch.tensor([0, 0, 0]), counts)
    said = [-torch.tensor(p).log() for p in (0.9, 0.6, 0.4, 0.2, 0.8)]
    expected = (said[0] + 0.75 * said[1] + 0.25 * said[2] + 0.5 * (said[3] + said[4])) / 3
    assert scores["cross_entropy"] == pytest.approx(expected.item())
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["total"] == pytest.approx(0.5)  # ranks 1 3 2 against 1 2 3
    assert scores["entangled"] == pytest.approx(-1)


def test_the_head_is_chosen_by_training_images_alone(bench: ModuleType) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [
        ("clean", "vote", 0.9, 0.9, 0.1),
        ("people", "vote", 0.3, 0.5, 0.8),
        ("people", "vote, neo", 0.2, 0.5, -0.4),
        ("judges", "plain", 0.9, 0.1, float("nan")),
    ]
    frame = pandas.DataFrame(rows, columns=["labels", "method", "aleatoric", "held", "entangled_held"])
    means = frame.assign(on="published").set_index(["on", "labels", "method"])
    assert bench.chosen(means) == ("published", "people", "vote, neo")


def test_prediction_and_risk_of_a_wrapper_that_draws_are_those_of_one_call(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 64, generator=generator)
    monkeypatch.setattr(bench, "features", lambda trunk, n: {"train": x, "held": x[:20], "test": x})
    monkeypatch.setattr(bench, "answers", lambda n: {"clean": torch.randint(10, (60,), generator=generator)})
    monkeypatch.setattr(bench, "parts", lambda n: (slice(0, 60), slice(0, 20)))
    scores, risks, scores_held, risks_held = bench.trained("published", "clean", "sample", 0, 0, 2)
    for logits, pair in ((scores, risks), (scores_held, risks_held)):
        *_, epistemic = bench._risks("sample", logits, *pair)["sample"]
        assert epistemic.min() > -1e-6, "a mutual information"


@pytest.mark.slow
def test_a_smoke_run_gives_a_page(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    cells = bench.cells(smoke=True)
    if any(map(bench.possible, cells)) or not locate("cifar10h/cifar10h-counts.npy"):
        pytest.skip("WORKBENCH_DATA has no images")
    monkeypatch.setenv("WORKBENCH_BENCH_CACHE", str(tmp_path / "cache"))
    rows = []
    for cell in cells:
        result = bench.run(**cell)
        rows += [{**cell, **row} for row in (result if isinstance(result, list) else [result])]
    text = bench.summary(pandas.DataFrame(rows), tmp_path)
    assert "| published | people | vote, design | 1 |" in text
    assert "| nine | people | vote, neo | 1 |" in text
    assert "| own | people | plain | 1 |" in text
    assert "| eleven | people | vote, neo | 1 |" in text
    assert "| all eight |" in text
    assert "at least 0.45: the head alone missed" in text
