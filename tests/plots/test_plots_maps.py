"""Figures of maps and boxes: each pixel drawn once, in the same place and on the same scale; each side with its spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workbench import plots
from workbench.risk import Risk

pytest.importorskip("matplotlib")


def drawn(ax: Any) -> Any:
    return np.ma.filled(ax.images[-1].get_array().astype(float), np.nan)


IMAGE = torch.rand(2, 3, 6, 8)
LABELS = torch.arange(96).view(2, 6, 8) % 3


def test_class_maps_have_aligned_columns_and_one_scale() -> None:
    truth = LABELS.clone()
    truth[0, 0] = 255
    risk = Risk(aleatoric=torch.rand(2, 6, 8), epistemic=3 * torch.rand(2, 6, 8), vacuitic=torch.randn(2, 6, 8))
    predicted = LABELS.roll(1, 2)
    axes = plots.maps(IMAGE, predicted, truth, risk, classes=["a", "b", "c"], void=255)
    assert axes.shape == (2, 7)
    titles = ["image", "truth", "prediction", "error", "aleatoric", "epistemic", "vacuitic"]
    assert [ax.get_title() for ax in axes[0]] == titles
    for i in range(2):
        shown = {name: drawn(ax) for name, ax in zip(titles, axes[i], strict=True)}
        assert np.allclose(shown["image"], IMAGE[i].permute(1, 2, 0))
        assert np.array_equal(shown["prediction"], predicted[i])
        expected = np.where(truth[i] == 255, np.nan, truth[i])
        assert np.array_equal(shown["truth"], expected, equal_nan=True)
        wrong = np.where(truth[i] == 255, np.nan, truth[i] != predicted[i])
        assert np.array_equal(shown["error"], wrong, equal_nan=True)
        assert np.allclose(shown["epistemic"], risk.epistemic[i])
    limits = {name: ax.images[-1].get_clim() for name, ax in zip(titles, axes[1], strict=True)}
    highest = float(max(risk.aleatoric.max(), risk.epistemic.max()))
    assert limits["aleatoric"] == limits["epistemic"] == (0, pytest.approx(highest))
    assert limits["truth"] == limits["prediction"]
    assert limits["vacuitic"] == pytest.approx((float(risk.vacuitic.min()), float(risk.vacuitic.max())))
    legend = [text.get_text() for text in axes[0, 0].figure.legends[0].get_texts()]
    assert legend == ["a", "b", "c", "no label"]


def test_values_have_absolute_errors_and_holes_where_nothing_is_known() -> None:
    truth = torch.randn(1, 5, 7)
    truth[0, 2, 3] = float("nan")
    predicted = torch.randn(1, 1, 5, 7)
    axes = plots.maps(torch.rand(1, 5, 7), predicted, truth, torch.rand(1, 5, 7), unit="m")
    assert [ax.get_title() for ax in axes[0]] == ["image", "truth", "prediction", "error", "total"]
    assert np.allclose(drawn(axes[0, 3]), (truth - predicted[:, 0]).abs()[0], equal_nan=True)
    assert axes[0, 1].images[-1].get_clim() == axes[0, 2].images[-1].get_clim()
    labels = {ax.get_xlabel() for ax in axes[0, 0].figure.axes}
    assert {"truth (m)", "prediction (m)", "error (m)", "total risk (m)"} <= labels


def test_one_image_bytes_and_a_risk_of_the_whole_image() -> None:
    picture = torch.randint(0, 255, (3, 6, 8), dtype=torch.uint8)
    axes = plots.maps(picture, LABELS[0], risk=Risk(epistemic=torch.rand(1, 6, 8), vacuitic=torch.rand(1)))
    assert [ax.get_title() for ax in axes[0]] == ["image", "prediction", "epistemic"]
    assert np.allclose(drawn(axes[0, 0]), picture.permute(1, 2, 0) / 255)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prediction": torch.rand(2, 4, 6, 8)}, "argmax"),
        ({"truth": LABELS.float()}, "class numbers"),
        ({"truth": LABELS[:1]}, "shapes do not match: truth"),
        ({"truth": torch.where(LABELS == 0, 255, LABELS)}, "void=255"),
        ({"risk": {"epistemic": -torch.rand(2, 6, 8)}}, "at least 0"),
        ({"risk": {"epistemc": torch.rand(2, 6, 8)}}, "kind"),
        ({"risk": torch.full((2, 6, 8), float("nan"))}, "finite"),
        ({"risk": torch.rand(2, 3, 4)}, "risk.total"),
        ({"image": torch.rand(2, 4, 6, 8)}, r"1 or 3 channels .* image\[:, :3\]"),
        ({"image": torch.rand(2, 6, 8, 4)}, r"1 or 3 channels .*moveaxis\(image\[\.\.\., :3\], -1, -3\)"),
        ({"image": torch.rand(1, 3, 6, 8)}, "1 images, 2 predictions"),
        ({"classes": ["a", "b"]}, "2 names"),
        ({"max_rows": 0}, "max_rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_figure_is_made(arguments: dict[str, Any], words: str) -> None:
    import matplotlib.pyplot as plt

    with pytest.raises(ValueError, match=words):
        plots.maps(**{"image": IMAGE, "prediction": LABELS, **arguments})
    assert not plt.get_fignums()


def test_overlay_hides_nothing_where_the_risk_is_low() -> None:
    risk = torch.zeros(6, 8)
    risk[2, 3] = 2.0
    ax = plots.overlay(torch.rand(3, 6, 8), risk, kind="aleatoric", unit="nats")
    opacity = ax.images[-1].get_alpha()
    assert opacity[2, 3] == 0.85
    assert opacity.sum() == 0.85
    with pytest.raises(ValueError, match="pick an image"):
        plots.overlay(torch.rand(3, 6, 8), torch.rand(2, 6, 8))


def test_overlay_draws_infinite_risk_as_the_highest_and_leaves_the_others() -> None:
    risk = torch.tensor([[0.0, 1.0], [2.0, float("inf")]])
    ax = plots.overlay(torch.rand(1, 2, 2), risk)
    assert ax.images[-1].get_clim() == (0, 2)
    assert ax.images[-1].get_alpha().ravel().tolist() == pytest.approx([0, 0.425, 0.85, 0.85])
    assert ax.images[-1].get_array().ravel().tolist() == [0, 1, 2, 2]


def test_boxes_have_bands_of_two_deviations_around_each_side() -> None:
    y = {"boxes": torch.tensor([[2.0, 1.0, 6.0, 4.0]]), "scores": torch.tensor([0.75]), "labels": torch.tensor([1])}
    spread = torch.tensor([[0.5, 0.25, 1.0, 0.0]])
    ax = plots.boxes(
        torch.rand(3, 6, 8), y["boxes"], spread=spread, scores=y["scores"], labels=y["labels"], truth=y["boxes"]
    )
    left, top, right, bottom, outline, truth = [patch.get_bbox().extents.tolist() for patch in ax.patches]
    assert left == [1, 1, 3, 4]
    assert top == [2, 0.5, 6, 1.5]
    assert right == [4, 1, 8, 4]
    assert bottom == [2, 4, 6, 4]
    assert outline == truth == [2, 1, 6, 4]
    assert [text.get_text() for text in ax.texts] == ["class 1 0.75"]
    assert not plots.boxes(torch.rand(6, 8), torch.zeros(0, 4), scores=torch.zeros(0)).patches


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"corners": [[5, 1, 2, 4]]}, "x1 <= x2"),
        ({"corners": [[1, 2, 5]]}, r"\[k, 4\]"),
        ({"spread": [[1, 1]]}, "shapes do not match: spread"),
        ({"spread": [[-1, 1, 1, 1]]}, "at least 0"),
        ({"scores": [0.5, 0.5]}, "2 scores, 1 boxes"),
        ({"labels": [3], "classes": ["a"]}, "1 names"),
        ({"image": torch.rand(2, 3, 6, 8)}, "image"),
        ({"image": torch.rand(4, 6, 8)}, r"found \[4, 6, 8\]; of more channels pick"),
        ({"image": torch.rand(6, 8, 3)}, r"which is \.transpose\(2, 0, 1\) of .*found \[6, 8, 3\]"),
    ],
)
def test_boxes_that_do_not_fit_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plots.boxes(**{"image": IMAGE[0], "corners": [[2, 1, 6, 4]], **arguments})


def test_panels_of_all_columns_stand_at_one_height_below_whole_titles() -> None:
    labels = torch.arange(36).reshape(1, 6, 6) % 3
    axes = plots.maps(
        torch.rand(1, 3, 6, 6), labels, labels, {"epistemic": torch.rand(1, 6, 6)}, figure=figure_of(8, 3)
    )
    figure = axes[0, 0].figure
    figure.canvas.draw()
    tops = [ax.get_window_extent().y1 for ax in axes[0]]
    np.testing.assert_allclose(tops, tops[0], atol=1)
    assert max(ax.title.get_window_extent().y1 for ax in axes[0]) <= figure.bbox.y1


def figure_of(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
