"""The matrix of several models: what each panel shows, on one scale for all models, and refusals."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers import plotting
from matplotlib.figure import Figure
from torch import nn

from workbench import compose, data, neo, outputs, plots, sculpt, vote
from workbench.data import Data, Split
from workbench.data.texts import Vocabulary

untouched = plotting.untouched


@pytest.fixture(autouse=True)
def weights(untouched):
    """The same weights in each test, without a trace."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pair(inputs, outs, **options):
    """Two models of a table: one with both risks, one without aleatoric risk."""
    return {
        "both": compose(vote.Wrapper(2, **options), sculpt.Wrapper())(nn.Linear(inputs, outs)),
        "voters": vote.Wrapper(3, **options)(nn.Linear(inputs, outs)),
    }


def asked(model, x):
    """Prediction and risks of a wrapped model."""
    with torch.no_grad():
        return model.eval()(x, return_risk=True)


def titles(axes):
    return [ax.get_title().split("\n")[0] for ax in axes[0]]


def inside(axes):
    """All that is drawn lies on the page."""
    figure = axes.ravel()[0].figure
    figure.canvas.draw()
    box, page = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 > -0.05
    assert box.y0 > -0.05
    assert box.x1 < page[0] + 0.05
    assert box.y1 < page[1] + 0.05


@pytest.mark.slow
def test_constant_inputs_have_a_plane_of_a_width():
    d = data.Data.from_arrays(torch.ones(40, 3), torch.randn(40, 1))
    axes = plots.matrix({"both": compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(3, 1))}, d)
    inside(axes)


def test_a_curve_has_the_models_own_numbers_and_the_true_noise_dashed():
    d, models = data.toy.cubic(n_train=30, n_test=40), pair(1, 1)
    axes = plots.matrix(models, d)
    assert titles(axes) == ["prediction", "aleatoric", "epistemic"]
    assert axes.shape == (2, 3)
    y, risk = asked(models["both"], d.test.x)
    np.testing.assert_allclose(axes[0, 0].lines[0].get_ydata(), y[:, 0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(axes[0, 1].lines[0].get_ydata(), risk.aleatoric[:, 0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(axes[0, 1].lines[1].get_ydata(), d.test.sigma[:, 0].numpy(), rtol=1e-6)
    assert axes[1, 1].texts[0].get_text() == "not measured"
    for j in range(3):
        assert axes[0, j].get_ylim() == axes[1, j].get_ylim()


def test_vacuitic_risk_that_grows_without_end_leaves_room_for_what_is_near():
    d = data.toy.cubic(n_train=60, n_test=40)
    model = neo.Wrapper()(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    model.fit(d.train)
    far = Split(torch.cat([d.test.x, torch.tensor([[40.0]])]), torch.cat([d.test.y, torch.zeros(1, 1)]))
    risk = asked(model, far.x)[1]
    assert float(risk.max()) > 12
    low, high = plots.matrix(model, far)[0, 1].get_ylim()
    assert high == 10
    assert -2 < low < float(risk.min())


def test_baselines_that_do_not_say_so_are_scores_where_the_call_does():
    d = data.toy.moons(60, 20)
    plain = compose()(nn.Linear(2, 2))
    axes = plots.matrix({"plain": plain, "vote": vote.Wrapper(2, output="logits")(nn.Linear(2, 2))}, d, output="logits")
    assert axes.shape == (3, 3)
    with pytest.raises(ValueError, match=r"'plain' gives values \[2\] .* pass output=\"logits\""):
        plots.matrix({"plain": plain, "vote": vote.Wrapper(2, output="logits")(nn.Linear(2, 2))}, d)


def test_one_row_of_a_table_is_a_point():
    axes = plots.matrix(pair(3, 1), (torch.randn(1, 3), torch.randn(1, 1)))
    assert axes[1, 0].collections[0].get_offsets().tolist() == [[0, 0]]


def test_constant_rows_of_a_table_have_components_of_no_share():
    axes = plots.matrix(pair(3, 1), (torch.ones(5, 3), torch.ones(5, 1)))
    assert (
        axes[0, 0].figure.get_supxlabel() == "across: 1st principal component (0 %);  up: 2nd principal component (0 %)"
    )


@pytest.mark.slow
def test_a_plane_shows_two_classes_on_one_scale_below_the_true_entropy():
    d = data.toy.moons(n_train=60, n_test=80)
    models = {
        "a": vote.Wrapper(2, output="logits")(nn.Linear(2, 2)),
        "b": vote.Wrapper(3, output="logits")(nn.Linear(2, 2)),
    }
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = plots.matrix(models, d, figure=figure)
    assert plt.get_fignums() == []
    assert titles(axes) == ["prediction", "aleatoric", "epistemic"]
    for j in range(3):
        assert axes[1, j].collections[0].get_clim() == axes[2, j].collections[0].get_clim()
    true = axes[0, 1].collections[0].get_array()
    entropy = -(0.2 * np.log(0.2) + 0.8 * np.log(0.8))
    assert int(np.isclose(true, entropy, atol=1e-6).sum()) == int(d.test.regions["blob"].sum())
    assert int(np.isclose(true, 0, atol=1e-6).sum()) == int(d.test.regions["clean"].sum())
    nodes = torch.from_numpy(axes[1, 0].collections[0].get_coordinates())
    middle = (nodes[:-1, :-1] + nodes[1:, 1:]) / 2
    y, risk = asked(models["a"], middle.reshape(-1, 2).float())
    drawn = axes[1, 2].collections[0].get_array().ravel()
    np.testing.assert_allclose(drawn, risk.numpy() if torch.is_tensor(risk) else risk.epistemic.numpy(), atol=1e-4)
    np.testing.assert_allclose(axes[1, 0].collections[0].get_array().ravel(), y.softmax(-1)[:, 1].numpy(), atol=1e-3)
    inside(axes)


def test_a_table_shows_the_spread_of_rows_with_the_same_input():
    x = torch.rand(30, 4)
    x[1] = x[0]
    y = torch.rand(30)
    axes = plots.matrix(pair(4, 1), (x, y))
    assert axes.shape == (3, 3)
    spread = axes[0, 1].collections[0].get_array()
    np.testing.assert_allclose(spread, [y[:2].std().item()] * 2, rtol=1e-5)
    assert "principal component" in axes[0, 0].figure.get_supxlabel()
    chosen = plots.matrix(pair(4, 1), (x, y), features=["x4", 0])
    points = chosen[1, 0].collections[0].get_offsets()
    order = np.argsort(asked(pair(4, 1)["both"], x)[0][:, 0].numpy())
    assert {tuple(p) for p in points.round(5)} == {tuple(p) for p in x[order][:, [3, 0]].double().numpy().round(5)}


def test_a_strip_of_images_has_bars_and_the_entropy_of_people():
    shares = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]).repeat(20, 1)
    d = Data.from_arrays(torch.rand(40, 1, 6, 6), shares, task="probabilities", classes=["a", "b", "c"])
    models = {"m": vote.Wrapper(2, output="logits")(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))}
    axes = plots.matrix(models, d, rows=[3, 1, 5])
    assert titles(axes) == ["image", "prediction", "aleatoric", "epistemic"]
    _, risk = asked(models["m"], d.test.x[[3, 1, 5]])
    np.testing.assert_allclose([bar.get_width() for bar in axes[0, 2].patches], risk.aleatoric.numpy(), rtol=1e-4)
    people = axes[0, 2].collections[0].get_offsets()[:, 0]
    wanted = [np.log(2) if d.test.y[i].max() < 1 else 0.0 for i in (3, 1, 5)]
    np.testing.assert_allclose(people, wanted, atol=1e-6)
    inside(axes)


def test_maps_stand_below_input_and_truth_with_void_left_out():
    y = torch.randint(0, 3, (30, 6, 8))
    y[:, 0] = -100
    d = Data.from_arrays(torch.rand(30, 3, 6, 8), y, classes=["a", "b", "c"])
    models = {"m": vote.Wrapper(2, output=outputs.Logits(dim=1))(nn.Conv2d(3, 3, 1))}
    axes = plots.matrix(models, d, rows=[2])
    assert titles(axes) == ["input; error", "prediction", "aleatoric", "epistemic"]
    scores, risk = asked(models["m"], d.test.x[[2]])
    predicted = axes[1, 1].images[0].get_array()
    np.testing.assert_array_equal(predicted, scores[0].argmax(0).numpy())
    np.testing.assert_allclose(axes[1, 2].images[0].get_array(), risk.aleatoric[0].numpy(), rtol=1e-4)
    error = axes[1, 0].images[0].get_array()
    assert error.mask[0].all()
    np.testing.assert_array_equal(error[1:], scores[0].argmax(0)[1:] != d.test.y[2, 1:])
    inside(axes)


def tagger(seed=0):
    torch.manual_seed(seed)
    return vote.Wrapper(2, output=outputs.Logits(dim=-1))(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)))


def grounds(ax):
    """The colours behind the words of a panel, and which words have a frame."""
    filled = [p.get_facecolor() for p in ax.patches if p.get_fill()]
    return np.array(filled), [p.get_x() for p in ax.patches if not p.get_fill()]


@pytest.mark.slow
def test_tokens_are_texts_in_the_colours_of_plots_tokens_on_one_scale():
    x = torch.randint(0, 9, (30, 4))
    y = x % 3
    y[5, 3] = -100  # padding is not shown
    models = {"a": tagger(0), "b": tagger(1)}
    axes = plots.matrix(models, (x, y), rows=[5], words=["up", " to", " you", "<pad>"])
    assert [text.get_text() for text in axes[0, 0].texts[1:]] == ["up", "to", "you"]  # the first is the name of the row
    _, risk = zip(*(asked(model, x[[5]]) for model in models.values()), strict=True)
    top = max(np.quantile(r.epistemic[0, :3], 0.98) for r in risk)
    for line, model, r in zip(axes[1:], models.values(), risk, strict=True):
        alone = plots.tokens(["up", " to", " you"], r.epistemic[0, :3], kind="epistemic", highest=float(top))
        np.testing.assert_allclose(grounds(line[2])[0], [p.get_facecolor() for p in alone.patches], atol=1e-6)
        predicted = asked(model, x[[5]])[0].argmax(-1)[0, :3]
        begins = np.array([p.get_x() for p in line[0].patches if p.get_fill()])
        np.testing.assert_array_equal(grounds(line[0])[1], begins[(predicted != y[5, :3]).numpy()])
        by_class = {int(c): tuple(g) for c, g in zip(predicted, grounds(line[0])[0], strict=True)}
        assert len(set(by_class.values())) == len(by_class)
        for c, ground in zip(y[5, :3], grounds(axes[0, 0])[0], strict=True):
            assert by_class.get(int(c), tuple(ground)) == tuple(ground)
    inside(axes)
    plt.close("all")


def test_tokens_have_the_words_of_the_data_and_else_their_numbers():
    x = torch.randint(2, 9, (40, 4))
    d = Data.from_arrays(x, x % 3, classes=["p", "q", "r"], task="classification")
    row = d.test.x[0].tolist()
    shown = [text.get_text() for text in plots.matrix(tagger(), d)[0, 0].texts[1:]]
    assert shown == [str(number) for number in row]
    known = replace(d, encoding=Vocabulary(tuple("bcdefg"), 4))  # 2 is "b", and 8 is in no list
    shown = [text.get_text() for text in plots.matrix(tagger(), known)[0, 0].texts[1:]]
    assert shown == ["bcdefg8"[number - 2] for number in row]
    assert len(plots.matrix(tagger(), d, rows=[0, 3])) == 4  # a row of truth and one of the model, each


def test_several_targets_stand_over_their_positions():
    x, y = torch.rand(30, 4), torch.rand(30, 2)
    models = pair(4, 2)
    several = plots.matrix(models, (x, y))
    _, risk = asked(models["both"], x[:1])
    np.testing.assert_allclose([b.get_height() for b in several[0, 2].patches], risk.epistemic[0].numpy(), rtol=1e-4)
    assert plots.matrix(models, (x, y), target=1).shape == (3, 3)


X, Y = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: plots.matrix({}, (X, Y)), "models: there is none"),
        (lambda m: plots.matrix(m, torch.zeros(3)), "data: expected a Data"),
        (lambda m: plots.matrix(m, (X, Y), rows=[30]), "rows: expected numbers from 0 to 29"),
        (lambda m: plots.matrix(m, (X, Y), target=0), "target: it chooses one of several values per row"),
        (lambda m: plots.matrix(m, (X, Y), features=("x1", "x9")), "there is no 'x9'; there are x1, x2, x3"),
        (lambda m: plots.matrix(m, (X, Y.long())), "y are class numbers, and the models give values"),
        (lambda m: plots.matrix(m, (X, torch.rand(30, 2))), r"y \[30, 2\], predictions \[30\]"),
        (lambda m: plots.matrix({"a": m, "b": vote.Wrapper(2)(nn.Linear(3, 2))}, (X, Y)), r"'a' gives values \[\] .* 'b' values \[2\]"),
        (lambda _: plots.matrix(vote.Wrapper(2)(nn.Linear(2, 2)), data.toy.moons(60, 9)), "2 classes; if these are class scores, pass"),
        (lambda m: plots.matrix(m, (X, Y), output="scores"), "output: expected"),
        (lambda m: plots.matrix(m, (X, Y), words=["a"]), "words: the models give one prediction per row"),
    ],
)  # fmt: skip
def test_what_can_not_be_drawn_is_refused_and_leaves_no_figure(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(vote.Wrapper(2)(nn.Linear(3, 1)))
    assert plt.get_fignums() == []


@pytest.mark.slow
def test_several_models_share_one_axis():
    """Each line is that of the model drawn alone."""
    rng = np.random.default_rng(0)
    risk = {name: rng.random(80) for name in "ab"}
    error = {name: rng.random(80) for name in "ab"}
    p = {name: np.stack([v, 1 - v], 1) for name, v in risk.items()}
    y = rng.integers(0, 2, 80)
    for draw, alone, at in (
        (lambda ax: plots.risk_coverage(risk, error, ax), lambda n, ax: plots.risk_coverage(risk[n], error[n], ax), 2),
        (lambda ax: plots.risk_against_error(risk, error, ax), lambda n, ax: plots.risk_against_error(risk[n], error[n], ax), 0),
        (lambda ax: plots.reliability(p, y, ax=ax), lambda n, ax: plots.reliability(p[n], y, ax=ax), 1),
    ):  # fmt: skip
        drawn = [line for line in draw(Figure().subplots()).lines if line.get_label()[0] in "ab"]
        assert [line.get_label()[:3] for line in drawn] == ["a: ", "b: "]
        assert drawn[0].get_color() != drawn[1].get_color()
        for line, name in zip(drawn, "ab", strict=True):
            np.testing.assert_array_equal(line.get_xydata(), alone(name, Figure().subplots()).lines[at].get_xydata())
    with pytest.raises(ValueError, match="risk has the models a, b, and error a"):
        plots.risk_coverage(risk, {"a": error["a"]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["curve", "strip"])
def test_an_outlier_flattens_no_other_model_and_is_named(kind):
    x = torch.linspace(-1, 1, 40)[:, None] if kind == "curve" else torch.rand(40, 1, 30)
    y = x.flatten(1).mean(1)
    models = {f"m{i}": vote.Wrapper(2)(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 1))) for i in range(4)}
    with torch.no_grad():
        for p in models["m3"].parameters():
            p.mul_(1000)
    axes = plots.matrix(models, (x, y))
    for column in (-2, -1):  # prediction and epistemic risk
        ax = axes[0, column]
        low, high = ax.get_ylim() if kind == "curve" else ax.get_xlim()
        assert max(abs(low), abs(high)) < 20
        label = ax.get_title() if kind == "curve" else axes[-1, column].get_xlabel()
        assert "beyond" in label
        assert "m3" in label
    inside(axes)
