"""The matrix of all models of a comparison: drawn while it is open, from runs of the current settings only."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

from workbench import data
from workbench.widgets import Comparison


def small():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def moons(**options):
    return Comparison(small, data.toy.moons(n_train=60, n_test=30), ["vote", "sculpt"], **{"epochs": 1, **options})


def columns(figure):
    return [title.split("\n")[0] for ax in figure.get_axes() if (title := ax.get_title())]


@pytest.mark.slow
def test_a_figure_of_the_models_own_numbers_that_pyplot_knows_nothing_of():
    comparison, before = moons(), plt.get_fignums()
    with pytest.raises(ValueError, match=r"nothing is trained with the current settings$"):
        comparison.matrix()
    figure = comparison.start(block=True).matrix()
    assert columns(figure) == ["prediction", "aleatoric", "epistemic"]
    assert plt.get_fignums() == before
    sides = [text.get_text() for ax in figure.get_axes() for text in ax.texts]
    assert [name for name in sides if name != "not measured"] == ["truth", "plain", "vote", "sculpt"]
    # the plain model gives scores as well, though it was wrapped without a word on it
    mesh = figure.get_axes()[3].collections[0]
    corner = torch.from_numpy(mesh.get_coordinates()[0, :1]).float()
    with torch.no_grad():
        wanted = comparison.models["plain"](corner).softmax(-1)[0, 1]
    shown = float(mesh.get_array().ravel()[0])  # of the middle of the first square
    np.testing.assert_allclose(shown, float(wanted), atol=0.05)


@pytest.mark.slow
def test_the_widget_draws_it_when_it_is_opened_and_when_other_models_are_there():
    comparison = moons()
    c = comparison.controls
    assert c.matrix_fold.layout.display == "none"
    comparison.start(block=True)
    assert c.matrix_fold.layout.display is None
    assert c.matrix.value == ""
    c.matrix_fold.selected_index = 0
    first = c.matrix.value
    assert "<svg" in first
    assert "prediction and risks of plain, vote, sculpt on moons" in first
    comparison._refresh()
    assert c.matrix.value is first  # not drawn again
    c.epochs.value = 2  # so that none of them is of the present settings
    assert "Train models first" in c.matrix.value
    c.epochs.value = 1
    assert "<svg" in c.matrix.value
    c.matrix_fold.selected_index = None
    comparison.start(block=True, again=True)
    kept = c.matrix.value
    c.matrix_fold.selected_index = 0
    assert "<svg" in c.matrix.value
    assert c.matrix.value is not kept


@pytest.mark.slow
def test_models_that_were_read_from_a_file_have_no_weights_to_ask(tmp_path):
    moons(session=tmp_path / "session.zip").start(block=True)
    opened = moons(session=tmp_path / "session.zip")
    with pytest.raises(ValueError, match="plain, vote, sculpt were read from a file, without weights"):
        opened.matrix()
    opened.controls.matrix_fold.selected_index = 0
    assert "no picture: matrix: nothing is trained" in opened.controls.matrix.value


@pytest.mark.slow
def test_data_without_a_matrix_say_why_in_its_place():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)
    comparison = Comparison(small, (x, x > 0), ["vote"], epochs=1).start(block=True)
    comparison.controls.matrix_fold.selected_index = 0
    assert "no picture: data: " in comparison.controls.matrix.value
    assert "several labels a row" in comparison.controls.matrix.value
