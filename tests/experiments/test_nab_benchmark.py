"""The benchmark `nab`: risks that use no future values, a rival compared with its formula, and scores on a synthetic corpus."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import Tensor

from workbench.data.registry import entries
from workbench.experiments.store import read
from workbench.experiments.worker import load_file

FILE = "nab/nab.json.gz"


def walk(n: int = 420, seed: int = 0) -> Tensor:
    """A noisy wave with a level of its own after two thirds."""
    time, g = torch.arange(n), torch.Generator().manual_seed(seed)
    values = (time / 7).sin() + 0.2 * torch.randn(n, generator=g)
    values[2 * n // 3 : 2 * n // 3 + 20] += 4
    return values.double().mul(100).round().div(100)


@pytest.fixture
def nab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The benchmark on eight short series, in each of which a level is strange."""
    times = [f"2014-01-01 {at // 60:02}:{at % 60:02}:00" for at in range(420)]
    whole: dict[str, dict[str, object]] = {"series": {}, "windows": {}}
    for number in range(8):
        lines = [f"{time},{value}" for time, value in zip(times, walk(420, number).tolist(), strict=True)]
        whole["series"][f"made/{number}"] = "\n".join(["timestamp,value", *lines])
        whole["windows"][f"made/{number}.csv"] = [[f"{times[270]}.000000", f"{times[309]}.000000"]]
    raw = json.dumps(whole).encode()
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_bytes(gzip.compress(raw))
    monkeypatch.setitem(entries()["nab"]["files"], FILE, hashlib.sha256(raw).hexdigest())
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    module = load_file(ROOT / "benchmarks" / "nab.py")
    module.corpus.cache_clear()
    yield module
    module.corpus.cache_clear()


@pytest.mark.parametrize("detector", ["clock", "random", "change", "novelty of 1", "novelty of 10", "forecaster"])
@pytest.mark.parametrize("until", [100, 300])
def test_the_future_changes_no_risk(detector: str, until: int) -> None:
    """By another future, and by none; a forecaster has been trained again at 240."""
    bench = load_file(ROOT / "benchmarks" / "nab.py")
    values, options = walk(), {"epochs": 1} if detector == "forecaster" else {}
    series = [bench.Series("made", values, [(270, 309)], 60)]
    whole = bench.RISKS[detector](values, 60, **options)
    for other in (torch.cat([values[:until], -50 * values[until:]]), values[:until]):
        risks = bench.RISKS[detector](other, 60, **options)
        assert list(risks) == list(whole)
        for name, risk in whole.items():
            torch.testing.assert_close(risks[name][:until], risk[:until], rtol=1e-4, atol=1e-5)
            for short in bench.LIKELIHOODS.values():
                for rest in (False, True):
                    before, after = (
                        bench.alarm_scores([r], series, short, rest)[0][:until] for r in (risk, risks[name])
                    )
                    # a tie that rounding broke may be told or not
                    both = before.isfinite() & after.isfinite()
                    assert both.double().mean() > 0.9 * before.isfinite().double().mean()
                    torch.testing.assert_close(before[both], after[both], rtol=1e-2, atol=1e-3)


def test_relative_entropy_is_that_of_its_paper() -> None:
    """Step by step, with the histogram and the entropy of numpy and scipy."""
    stats = pytest.importorskip("scipy.stats")
    bench = load_file(ROOT / "benchmarks" / "nab.py")
    values = walk()
    risk = bench.RISKS["relative entropy"](values, 60)["relative entropy"]
    x, bins, window = values.numpy(), 5, 52
    step = (x.max() - x.min()) / bins
    known: list[np.ndarray] = []
    expected = np.zeros(len(x))
    for at in range(window - 1, len(x)):
        places = np.ceil((x[at - window + 1 : at + 1] - x.min()) / step)
        share = np.histogram(places, bins=bins, range=(0, bins), density=True)[0]
        if known and all(2 * window * stats.entropy(share, other) >= stats.chi2.isf(0.01, bins - 1) for other in known):
            expected[at] = 1
        if not known or expected[at]:
            known.append(share)
    assert expected.any()
    assert risk.tolist() == expected.tolist()


@pytest.mark.slow
def test_a_cell_and_its_summary(nab: ModuleType, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    reference = pytest.importorskip("sklearn.metrics")
    state, rows = torch.get_rng_state(), []
    for detector in ("clock", "relative entropy", "novelty of 1", "forecaster"):
        rows += [{"detector": detector, **row} for row in nab.run(detector, 8, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    frame = pandas.DataFrame(rows)
    assert not frame.isna().any().any()
    assert len(frame) == 6 * (3 + 3)
    assert frame["share"].between(0.112, 0.113).all()  # 40 of the 357 values that count
    novel = frame[(frame["risk"] == "novelty of 1") & (frame["by"] == "risk")].set_index("rest")
    assert novel.loc[True, "standard"] > 80  # the first value of the strange level is worth the most
    strange = np.isin(np.arange(63, 420), np.arange(270, 310))
    aurocs = [
        reference.roc_auc_score(strange, nab.RISKS["novelty of 1"](of.values, of.start)["novelty of 1"][63:])
        for of in nab.corpus()
    ]
    assert novel.loc[False, "auroc"] == pytest.approx(math.fsum(aurocs) / 8)
    text = nab.summary(frame, tmp_path)
    best = frame.sort_values("first_half", ascending=False, kind="stable").iloc[0]
    assert f"every second series by name: *{best['risk']}*" in text
    assert "| clock |" in text
    assert "| forecaster, vacuitic |" in text


def test_every_second_series_chooses(nab: ModuleType) -> None:
    """With an alarm at the right place in the second half only."""
    series = nab.corpus()
    risks = [torch.zeros(420) for _ in series]
    for risk in risks[1::2]:
        risk[270] = 1.0
    scores = nab.judged(risks, list(series))
    assert (scores["first_half"], scores["second_half"], scores["standard"]) == pytest.approx((0, 100, 50))
    assert scores["second_half_by_first"] == 0  # where silence was best


def test_the_results_show_what_the_page_claims() -> None:
    frame = read(ROOT / "benchmarks" / "results" / "nab.csv")
    best = frame.sort_values("first_half", ascending=False, kind="stable").iloc[0]
    assert best["risk"] == "novelty of 1"
    assert best["standard"] > 70
    assert frame.loc[frame["risk"].str.startswith("forecaster"), "standard"].max() < 50
    plain = frame[(frame["by"] == "risk") & ~frame["rest"].astype(bool)].set_index("risk")
    assert plain.loc["clock", "standard"] > 25
    bench = load_file(ROOT / "benchmarks" / "nab.py")
    scores = plain.loc["relative entropy", ["standard", "low_fp", "low_fn"]].tolist()
    assert [round(score, 1) for score in scores] == list(bench.PUBLISHED["relative entropy"])
