"""The benchmark `ood`: its networks, its images and one small cell."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT
from scipy.ndimage import gaussian_filter
from torch import nn

from workbench import data
from workbench.experiments.worker import load_file

IMAGES = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def ood() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "ood.py")


@pytest.fixture(scope="module")
def models(ood: ModuleType) -> ModuleType:
    return load_file(ROOT / "benchmarks" / "ood_models.py")


def test_cells_are_json_and_differ(ood: ModuleType) -> None:
    for smoke in (True, False):
        keys = [json.dumps(cell, sort_keys=True) for cell in ood.cells(smoke)]
        assert len(set(keys)) == len(keys) > 3
        assert ood.cells(smoke) == ood.cells(smoke)


@pytest.mark.parametrize(("name", "parameters"), [("lenet5", 61_706), ("resnet8", 308_074)])
def test_networks_have_the_sizes_that_are_told(models: ModuleType, name: str, parameters: int) -> None:
    net: nn.Module = models.build(name).eval()
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net(IMAGES).shape == (6, 10)


def test_augmented_images_are_shifted_and_half_of_them_mirrored(models: ModuleType) -> None:
    x = IMAGES.repeat(40, 1, 1, 1)
    images = models.augmented(x, torch.Generator().manual_seed(1))
    assert images.shape == x.shape
    padded = nn.functional.pad(x, (2,) * 4, value=-models.MEAN / models.SCALE)
    ways = []
    for before, after in zip(padded[:, 0], images[:, 0], strict=True):
        ways += [
            (flip, i, j)
            for flip, image in enumerate((before, before.flip(1)))
            for i in range(5)
            for j in range(5)
            if torch.equal(image[i : i + 28, j : j + 28], after)
        ]
    assert len(ways) == len(x)
    assert 80 < sum(flip for flip, _, _ in ways) < 160
    assert len(set(ways)) > 40


def test_corruptions_blur_flatten_and_add_noise_by_their_formulas(models: ModuleType) -> None:
    before = torch.get_rng_state()
    for severity in (1, 3):
        blurred = models.corrupted(IMAGES, "blur", severity)
        theirs = gaussian_filter(IMAGES[2, 0].numpy(), 0.6 * severity, mode="constant", radius=5)
        torch.testing.assert_close(blurred[2, 0], torch.from_numpy(theirs), atol=1e-4, rtol=1e-3)
        flat = models.corrupted(IMAGES, "contrast", severity)
        torch.testing.assert_close(flat.std((2, 3)), 0.6**severity * IMAGES.std((2, 3)))
        torch.testing.assert_close(flat.mean((2, 3)), IMAGES.mean((2, 3)))
        noise = models.corrupted(IMAGES, "noise", severity) - IMAGES
        assert torch.equal(noise, models.corrupted(IMAGES, "noise", severity) - IMAGES)
        grey = models.corrupted(torch.full((100, 1, 28, 28), 0.5), "noise", 1) - 0.5
        assert grey.std().item() == pytest.approx(0.1, rel=0.02)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="noise, blur or contrast, not 'fog'"):
        models.corrupted(IMAGES, "fog", 1)


@pytest.mark.slow
def test_a_cell_and_its_summary(
    ood: ModuleType, models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    if "fashion-mnist" not in data.names(available=True) or "mnist" not in data.names(available=True):
        pytest.skip("the images are not on this machine")
    monkeypatch.setenv("WORKBENCH_BENCH_CACHE", str(tmp_path))
    before = torch.get_rng_state()
    methods = ("max_softmax", "signature", "vote entropy")
    rows: list[dict[str, Any]] = []
    for cell in ood.cells(smoke=True):
        if cell["method"] in methods:
            rows += [{**cell, **row} for row in ood.run(**cell)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(tmp_path.glob("ood-lenet5*.pt"))) == 2  # trained once each, the net and the voters
    frame = pandas.DataFrame(rows)
    mnist = frame[frame["out"] == "mnist"].set_index("method")
    assert len(frame) == len(methods) * (1 + len(ood.CORRUPTIONS))
    assert frame["nll_tempered"].notna().all()
    assert mnist["accuracy"].nunique() <= 2
    assert mnist.loc["signature", "auroc"] > 0.9
    text = ood.summary(frame, tmp_path)
    assert "| signature | lenet5 |" in text
    assert (tmp_path / "ood-corruptions.png").stat().st_size > 10_000


@pytest.mark.slow
def test_rows_that_choose_the_temperature_are_not_trained_on(models: ModuleType) -> None:
    if "fashion-mnist" not in data.names(available=True):
        pytest.skip("the images are not on this machine")
    for n in (0, 500):
        clothes, kept, held = models.rows_of(n)
        assert len(held) == (2500 if not n else 100)
        assert sorted(torch.cat([kept, held]).tolist()) == list(range(len(clothes.train)))
