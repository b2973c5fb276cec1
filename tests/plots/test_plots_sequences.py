"""Figures of forecasts and texts show the numbers that they are given."""

from __future__ import annotations

import warnings
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from workbench import plots
from workbench.plots import sequences

pytest.importorskip("matplotlib")


def test_fan_holds_the_quantiles_of_the_paths() -> None:
    paths = torch.randn(101, 5, generator=torch.Generator().manual_seed(0))
    ax = plots.fan(paths, past=torch.zeros(3), truth=torch.ones(5), levels=(0.5, 0.8))
    wide, narrow = (band.get_paths()[0].vertices for band in ax.collections)
    for vertices, level in ((wide, 0.8), (narrow, 0.5)):
        for step in range(1, 6):
            ends = vertices[vertices[:, 0] == step][:, 1]
            expected = torch.quantile(
                paths[:, step - 1].double(), torch.tensor([(1 - level) / 2, (1 + level) / 2]).double()
            )
            assert (ends.min(), ends.max()) == pytest.approx(tuple(expected.tolist()))
    median, past, truth = ax.lines
    assert np.allclose(median.get_ydata(), paths.median(0).values)
    assert list(past.get_xdata()) == [-2, -1, 0]
    assert list(truth.get_xdata()) == [1, 2, 3, 4, 5]


def test_coverage_by_step_counts_what_is_there() -> None:
    y = torch.tensor([[0.0, 5.0], [0.5, 0.5], [2.0, float("nan")]])
    ax = plots.coverage_by_step(torch.zeros(3, 2), torch.ones(3, 2), y, level=0.5)
    assert ax.lines[-1].get_ydata() == pytest.approx([2 / 3, 1 / 2])
    assert ax.get_legend_handles_labels()[1] == ["nominal", "chance, n = 2 to 3", "coverage"]
    plots.coverage_by_step(torch.zeros(3, 2), torch.full((3, 2), 9.0), y, ax, level=0.5, label="wider")
    assert ax.get_legend_handles_labels()[1] == ["nominal", "chance, n = 2 to 3", "coverage", "wider"]


def test_odd_tokens_are_drawn_without_a_warning() -> None:
    words = ["\r", "\x00", "\u202e", "\ud83d", "a\u2028b", "😀", "$x$", "\\$", "", "x" * 200]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = plots.tokens(words, torch.rand(len(words)), width=40)
        ax.figure.canvas.draw()
    shown = [text.get_text() for text in ax.texts]
    assert shown[:6] == [r"\r", r"\x00", r"\u202e", r"\ud83d", r"a\u2028b", "😀"]
    assert shown[-1] == "x" * 39 + "…"


def test_tokens_are_written_in_lines_and_words_stay_together() -> None:
    words = ["Play", "ing", " is", " un", "cert", "ain", "\n", "▁yes", "$"]
    risk = torch.tensor([0.0, 1, 0.5, 0, 2, 1, 0, float("nan"), 1])
    ax = plots.tokens(words, risk, width=12, highest=4.0, kind="aleatoric")
    written = [(text.get_text(), round(text.get_position()[1])) for text in ax.texts]
    assert written == [
        ("Play", 0),
        ("ing", 0),
        ("is", 0),
        ("un", 1),
        ("cert", 1),
        ("ain", 1),
        ("↵", 1),
        ("yes", 2),
        (r"\$", 2),
    ]
    assert len(ax.patches) == 8  # none for NaN
    white, full = ax.patches[0].get_facecolor(), ax.patches[4].get_facecolor()
    assert white[:3] == (1, 1, 1)
    expected = tuple((1 + c) / 2 for c in to_rgb(plots.COLOURS["aleatoric"]))  # half of the highest
    assert full[:3] == pytest.approx(expected, abs=0.01)


def test_every_token_has_a_ground_as_wide_as_what_it_shows() -> None:
    words = ["if", "   ", "", " 漢字", "😀", " e\u0301t\u00e9", " a"]
    ax = plots.tokens(words, torch.ones(len(words)), width=40)
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in ax.patches]
    assert spans == [(0, 2), (2, 5), (5, 6), (7, 11), (11, 13), (14, 17), (18, 19)]
    assert [text.get_text() for text in ax.texts][1:3] == ["", "∅"]
    padded = plots.tokens(["a", ""], torch.tensor([1.0, float("nan")]))
    assert [text.get_text() for text in padded.texts] == ["a", ""]  # padding is no token
    wide = plots.tokens(["漢" * 9], torch.ones(1), width=8)
    assert wide.texts[0].get_text() == "漢漢漢…"
    plt.close("all")


@pytest.mark.parametrize("kind", ["total", "aleatoric", "epistemic", "vacuitic"])
def test_letters_are_readable_on_every_shade(kind: str) -> None:
    def luminance(colour: Any) -> float:  # of WCAG 2, whose AA asks for a contrast of 4.5
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ax = plots.tokens(["word"] * 30, torch.linspace(0, 1, 30), kind=kind)
    for text, background in zip(ax.texts, ax.patches, strict=True):
        low, high = sorted([luminance(text.get_color()), luminance(background.get_facecolor())])
        assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plots.fan(torch.randn(1, 5)), "two paths"),
        (lambda: plots.fan(torch.randn(9, 5), truth=torch.zeros(4)), "shapes do not match"),
        (lambda: plots.fan(torch.randn(9, 5), levels=(90,)), "levels"),
        (lambda: plots.fan(torch.full((9, 5), float("nan"))), "NaN"),
        (lambda: plots.coverage_by_step(torch.ones(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)), "lower end above"),
        (lambda: plots.coverage_by_step(torch.zeros(3), torch.zeros(3), torch.zeros(3)), r"\[rows, steps\]"),
        (
            lambda: plots.coverage_by_step(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[0, float("nan")]])),
            "step 2",
        ),
        (lambda: plots.coverage_by_step(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), level=90), "level"),
        (lambda: plots.tokens(["a"], torch.zeros(2)), "text for each of 2"),
        (lambda: plots.tokens(torch.tensor(1.0), torch.zeros(1)), r"text for each of 1 risks, found tensor\(1"),
        (lambda: plots.tokens(["a"], torch.tensor([-1.0])), "at least 0"),
        (lambda: plots.tokens(["a"], torch.tensor([float("nan")])), "finite"),
        (lambda: plots.tokens(["a"], torch.tensor([1.0]), kind="odd"), "kind"),
        (lambda: plots.tokens(["a"], torch.tensor([1.0]), highest=-1), "highest: expected a finite risk of at least 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_figure_is_made(call: Any, words: str) -> None:
    import matplotlib.pyplot as plt

    with pytest.raises(ValueError, match=words):
        call()
    assert not plt.get_fignums()


def test_coverage_over_time_stands_at_the_end_of_each_window() -> None:
    y = torch.tensor([0.5, 0.5, 3.0, float("nan"), 3.0])
    ax = plots.coverage_over_time(torch.zeros(5), torch.ones(5), y, 2, level=0.8)
    line = ax.lines[-1]
    assert list(line.get_xdata()) == [1, 2, 3, 4]
    assert list(line.get_ydata()) == [1, 0.5, 0, 0]
    assert len(plots.coverage_over_time(torch.zeros(5), 4 + torch.zeros(5), y, 2, ax, label="wide").lines) == 3
    assert ax.get_legend_handles_labels()[1] == ["nominal", "chance, n = 2", "coverage", "wide"]
    with pytest.raises(ValueError, match="level: expected a share"):
        plots.coverage_over_time(torch.zeros(5), torch.ones(5), y, 2, level=90)


def test_lines_of_a_long_text_without_spaces_read_each_token_a_few_times() -> None:
    reads = 0

    class Token(str):
        __slots__ = ()

        def startswith(self, *args: Any) -> bool:
            nonlocal reads
            reads += 1
            return super().startswith(*args)

    words = [Token(f"{i:04}") for i in range(2000)]
    places, lines = sequences._set_in_lines(words, 60)
    assert places == [(i // 15, 4 * (i % 15)) for i in range(2000)]
    assert lines == 134
    assert reads <= 3 * len(words)


def test_many_words_are_placed_without_limits_of_data_for_each(monkeypatch):
    from matplotlib.axes import Axes

    calls = []
    monkeypatch.setattr(Axes, "_update_patch_limits", lambda *args: calls.append(args))
    ax = plots.tokens([" word"] * 50, np.ones(50))
    assert len(ax.patches) == len(ax.texts) == 50
    assert not calls
    assert not any(artist.get_in_layout() for artist in (*ax.patches, *ax.texts))
