"""Colours of figures are told apart by readers with colour blindness and in greyscale print, and stand out from their ground.

Thresholds: 1 is about the smallest difference that can be seen between large patches side by side. Thin lines and small points need several
times as much (Szafir 2018, "Modeling color difference for visualization design"), and more if they are matched with a legend some way off.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.colour_vision import SIGHTS, contrast, difference, lab

from workbench.plots._common import COLOURS, MODELS, SERIES, TOTAL_ON_DARK

LEAST = 15.0  # CIEDE2000
LEAST_GREY = 8.0  # in lightness, 0 to 100
DARK = {**COLOURS, "total": TOTAL_ON_DARK}
ON = {"#FFFFFF": COLOURS, "#212121": DARK}  # page -> colours; the grounds of JupyterLab's two themes


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [  # of the test data of Sharma, Wu and Dalal (2005)
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((50.0, -1.0, 2.0), (50.0, 0.0, 0.0), 2.3669),
        ((50.0, 2.49, -0.001), (50.0, -2.49, 0.0011), 7.2195),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_is_that_of_the_paper(one: tuple[float, ...], other: tuple[float, ...], expected: float) -> None:
    assert difference(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)


def test_risks_are_in_the_order_of_legends() -> None:
    assert list(COLOURS) == ["aleatoric", "epistemic", "vacuitic", "total"]


@pytest.mark.parametrize("page", ON)
@pytest.mark.parametrize("sight", SIGHTS)
def test_risks_are_told_apart(sight: str, page: str) -> None:
    apart = {
        (one, other): difference(lab(ON[page][one], sight), lab(ON[page][other], sight))
        for one, other in itertools.combinations(COLOURS, 2)
    }
    assert min(apart.values()) >= LEAST, apart


@pytest.mark.parametrize("page", ON)
def test_risks_stand_out_and_differ_in_print_without_colours(page: str) -> None:
    assert min(contrast(colour, page) for colour in ON[page].values()) >= 3  # of graphics, WCAG 2.2
    assert np.diff(sorted(lab(colour)[0] for colour in ON[page].values())).min() >= LEAST_GREY


def test_two_series_are_told_apart() -> None:
    assert min(difference(*(lab(colour, sight) for colour in SERIES)) for sight in SIGHTS) >= LEAST
    assert abs(np.diff([lab(colour)[0] for colour in SERIES])) >= LEAST_GREY
    assert min(contrast(colour, page) for colour in SERIES for page in ON) >= 3


def test_models_that_look_alike_have_other_dashes() -> None:
    assert len(set(MODELS)) == len(MODELS)
    for (one, dashes), (other, other_dashes) in itertools.combinations(MODELS[:6], 2):
        if dashes == other_dashes:
            assert min(difference(lab(one, sight), lab(other, sight)) for sight in SIGHTS) >= LEAST
            assert abs(lab(one)[0] - lab(other)[0]) >= LEAST_GREY
