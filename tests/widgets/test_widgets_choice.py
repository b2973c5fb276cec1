"""A comparison whose model and data are chosen in the form or by code: the same as one made by code alone."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from workbench import vote
from workbench.data import Data, files, load, names
from workbench.widgets import Comparison
from workbench.widgets.comparison.offers import data_kind, data_offers, model_kind, model_offers

OPTIONS = {"wrappers": ["vote"], "epochs": 2}


def rows(n=60, width=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)


def frame_of(n=60):
    x, y = rows(n)
    return pd.DataFrame(
        {**{f"x{i}": x[:, i].numpy() for i in range(3)}, "grade": np.arange(n) % 3, "y": y[:, 0].numpy()}
    )


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)


def shown(comparison):
    """The form, as a cell shows it."""
    comparison._repr_mimebundle_()
    return comparison._chooser


def pick(menu, start):
    menu.value = next(number for label, number in menu.options if label.startswith(start))


def written(html):
    return html.removeprefix("<pre>").removesuffix("</pre>").replace("&#x27;", "'").replace("&quot;", '"')


# ---- what there is to choose
def test_variables_are_told_by_what_they_are_and_nothing_of_them_is_called():
    class Loud(Line):
        def __init__(self):
            raise AssertionError("called")

        def parameters(self, recurse=True):
            raise AssertionError("called")

    def make():
        raise AssertionError("called")

    def number() -> int:
        raise AssertionError("called")

    class Endless(IterableDataset):
        def __iter__(self):
            raise AssertionError("called")

    x, y = rows()
    make.__module__ = number.__module__ = "__main__"
    loader = DataLoader(TensorDataset(x, y))
    variables = {
        **{"data": load("moons"), "frame": frame_of(), "loader": loader, "dataset": loader.dataset, "pair": (x, y)},
        **{
            "x": x,
            "unequal": (x, y[1:]),
            "endless": Endless(),
            "triple": (x, y, y),
            "text": "moons",
            "_hidden": (x, y),
        },
        **{"net": Line(), "Line": Line, "Loud": Loud, "make": make, "number": number, "loss": nn.MSELoss()},
        **{"wrapped": vote.Wrapper()(Line()), "Linear": nn.Linear, "ReLU": nn.ReLU, "print": print, "nn": nn},
        **{"broken": nn.Module.__new__(Line), "mock": SimpleNamespace()},
    }
    codes = [offer.code for offer in data_offers(variables) if offer.kind != "name"]
    assert codes == ["data", "frame", "loader", "dataset", "pair"]
    models = [offer.code for offer in model_offers(variables) if offer.kind != "ready"]
    assert models == ["net", "Line", "Loud", "make"]
    assert [data_kind(variables[name]) for name in codes] == [
        "Data",
        "DataFrame",
        "DataLoader",
        "Dataset",
        "pair (x, y)",
    ]
    assert [model_kind(variables[name]) for name in models] == ["model", "class", "class", "function"]


def test_data_sets_that_are_not_here_say_their_size_and_others_are_at_hand(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "roots", lambda: [tmp_path])
    offers = {offer.code.strip("'"): offer for offer in data_offers({})}
    assert {"cubic", "sine-gap", "moons", "diabetes"} <= offers.keys()
    assert offers["cifar10"].label == "cifar10 (to download: 170 MB)"
    assert [name for name, offer in offers.items() if offer.bytes is None] == names(available=True)
    assert "cifar10-jpeg" not in offers  # nobody offers its files
    assert "cifar10n" not in offers
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "human-train-labels.npz").touch()
    assert files.to_download("cifar10n") == 170498071


# ---- by code
def test_without_anything_it_waits_for_a_choice():
    comparison = Comparison(**OPTIONS)
    assert not comparison.running
    for ask in (lambda: comparison.data, lambda: comparison.results, lambda: comparison.start(), comparison.snapshot):
        with pytest.raises(
            RuntimeError, match=r"no data and no model chosen yet .* choose\(model=\.\.\., data=\.\.\.\)"
        ):
            ask()
    assert "no data and no model" in comparison._repr_mimebundle_()["text/plain"]
    with pytest.raises(AttributeError):
        comparison.nothing  # noqa: B018


@pytest.mark.slow
def test_what_is_chosen_by_code_is_what_code_makes():
    expected = Comparison(Line, rows(), **OPTIONS).start(block=True).results.drop(columns=["seconds", "passes"])
    for begun, chosen in (
        ({}, {"model": Line, "data": rows()}),
        ({"model": Line}, {"data": rows()}),
        ({"data": rows()}, {"model": Line}),
    ):
        comparison = Comparison(**begun, **OPTIONS)
        assert comparison.choose(**chosen) is comparison
        got = comparison.start(block=True).results.drop(columns=["seconds", "passes"])
        pd.testing.assert_frame_equal(got, expected, check_exact=True)


@pytest.mark.slow
def test_one_after_the_other():
    comparison = Comparison(**OPTIONS).choose(data="moons")
    with pytest.raises(RuntimeError, match=r"no model chosen yet .* choose\(model=\.\.\.\)"):
        comparison.start()
    assert comparison.choose("mlp").start(block=True).results.index.tolist() == ["plain", "vote"]


@pytest.mark.slow
def test_what_does_not_fit_changes_nothing():
    comparison = Comparison(**OPTIONS)
    with pytest.raises(ValueError, match="did you mean 'moons'"):
        comparison.choose(Line, "mons")
    with pytest.raises(RuntimeError, match="no data and no model"):
        comparison.start()
    comparison.choose(Line, rows())
    before = comparison.data
    with pytest.raises(ValueError, match="fails on rows"):
        comparison.choose(data="diabetes")
    with pytest.raises(TypeError, match="model: found int"):
        comparison.choose(3)
    assert comparison.data is before
    assert comparison.choose("linear", "diabetes").data.name == "diabetes"
    comparison.start(block=True)
    with pytest.raises(RuntimeError, match="there are runs of linear on diabetes"):
        comparison.choose(Line, rows())
    assert comparison.results.index.tolist() == ["plain", "vote"]


def test_what_was_made_of_a_model_and_data_stays_so():
    with pytest.raises(RuntimeError, match="make another Comparison"):
        Comparison(Line, rows()).choose(data="diabetes")


def test_wrong_settings_are_refused_before_anything_is_chosen(tmp_path):
    (tmp_path / "a.session").write_text("no session")
    for options, error, message in (
        ({"epochs": 0}, ValueError, "epochs"),
        ({"wrappers": ["nothing"]}, ValueError, "no wrapper 'nothing'"),
        ({"splits": 0}, ValueError, "splits"),
        ({"output": "odds"}, ValueError, "output"),
        ({"model": "resnet"}, ValueError, "there are tabular, mlp, cnn, linear"),
        ({"model": "mlp(widht=3)"}, ValueError, "no argument 'widht'"),
        ({"data": "mons"}, ValueError, "did you mean 'moons'"),
        ({"session": tmp_path / "a.session"}, ValueError, "is no session file"),
    ):
        with pytest.raises(error, match=message):
            Comparison(**options)


def test_ready_models_are_of_the_data_and_drawn_by_the_seed(tmp_path):
    comparison = Comparison("mlp(width=7)", "diabetes", ["vote"], epochs=1)
    made = comparison._prepared.model
    assert [tuple(p.shape) for p in made.new(0).parameters()][:2] == [(7, 10), (7,)]
    first, again, other = (made.new(seed)[1].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    text = comparison.export(tmp_path / "c.ipynb").read_text(encoding="utf-8")
    assert "model = 'mlp(width=7)'" in text


# ---- the form
@pytest.mark.slow
def test_the_form_makes_what_its_line_of_code_makes():
    net, frame, data, loader = Line(), frame_of(), load("moons"), DataLoader(TensorDataset(*rows()), batch_size=20)
    flat = nn.Linear(2, 2)
    space = {"Comparison": Comparison, "net": net, "flat": flat, "frame": frame, "data": data, "loader": loader}
    for on, model, expected in (
        ("loader", "net", "Comparison(net, loader, ['vote'], epochs=2)"),
        ("data", "flat", "Comparison(flat, data, ['vote'], epochs=2)"),
        ("diabetes", "mlp", "Comparison('mlp', 'diabetes', ['vote'], epochs=2)"),
        (
            "frame",
            "mlp",
            "from workbench.data import Data\nComparison('mlp', Data.from_dataframe(frame, 'y'), ['vote'], epochs=2)",
        ),
    ):
        comparison = Comparison(**OPTIONS)
        form = shown(comparison)
        pick(form.data, on)
        pick(form.model, model)
        line = written(form.code.value)
        assert line == expected
        form.compare.click()
        assert form.status.value == ""
        assert comparison.controls.root in form.root.children
        assert written(form.code.value) == line
        *imports, expression = line.split("\n")
        exec("\n".join(imports), space)
        by_code = eval(expression, space).start(block=True).results
        drop = ["seconds", "passes"]
        got = comparison.start(block=True).results
        pd.testing.assert_frame_equal(got.drop(columns=drop), by_code.drop(columns=drop), check_exact=True)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_words_and_another_choice_is_made():
    narrow, frame = nn.Linear(2, 1), frame_of()  # noqa: F841
    form = shown(comparison := Comparison(**OPTIONS))
    pick(form.data, "frame")
    pick(form.model, "narrow")
    assert form.target.options[form.target.index][0] == "y"
    form.compare.click()
    assert "Linear fails on rows [n, 4]" in form.status.value
    assert not form.compare.disabled
    pick(form.target, "grade")
    assert form.status.value == ""
    pick(form.model, "mlp")
    form.compare.click()
    assert "are they classes" in form.status.value
    assert "_findings" not in vars(comparison)
    form.task.value = "classification"
    assert "Data.from_dataframe(frame, 'grade', task='classification')" in written(form.code.value)
    form.compare.click()
    assert comparison.data.task == "classification"
    form.others.click()
    assert comparison.controls.root not in form.root.children
    pick(form.data, "moons")
    form.compare.click()
    assert comparison.data.name == "moons"
    comparison.start(block=True)
    form.others.click()
    assert "there are runs of mlp on moons" in form.status.value
    assert comparison.controls.root in form.root.children


@pytest.mark.slow
def test_the_form_says_what_takes_a_while():
    form, said = shown(Comparison(**OPTIONS)), []
    form.status.observe(lambda change: said.append(change["new"]), "value")
    pick(form.data, "diabetes")
    pick(form.model, "tabular")
    form.compare.click()
    assert "Reading &#x27;diabetes&#x27; and choosing how &#x27;tabular&#x27; embeds its columns …" in said[-2]
    assert said[-1] == ""


def test_variables_are_read_anew():
    net, frame = Line(), frame_of()
    shell = {"net": net, "frame": frame, "__name__": "__main__"}
    exec("from workbench.widgets import Comparison\ncomparison = Comparison(epochs=2)", shell)
    form = shown(shell["comparison"])
    pick(form.data, "frame")
    pick(form.model, "net")
    shell["frame"] = "gone"
    form.compare.click()
    assert "the variable frame, which was a DataFrame, is a str now" in form.status.value
    del shell["net"]
    shell["pair"], shell["frame"], shell["other"] = rows(), frame, Line()
    assert not any(label.startswith("pair") for label, _ in form.data.options)
    form.refresh.click()
    pick(form.data, "pair")
    assert next(label for label, _ in form.model.options) == "other: your Line"
    pick(form.model, "other")
    form.compare.click()
    assert shell["comparison"].data.name == "your data"


def test_in_a_notebook_its_variables_are_meant(monkeypatch):
    user = {"mine": rows(), "net": Line(), "__name__": "__main__"}
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(user_ns=user))
    inner = rows()
    comparison = Comparison()
    assert inner is not None
    labels = [offer.code for offer in comparison._choice.data_offers() if offer.kind != "name"]
    assert labels == ["mine", "inner"]
    assert [o.code for o in comparison._choice.model_offers() if o.kind != "ready"] == ["net"]
    assert list(user) == ["mine", "net", "__name__"]


def test_a_data_set_is_downloaded_by_a_click_and_not_before(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(files, "roots", lambda: [tmp_path])
    monkeypatch.setattr(files, "_download", lambda name, file: (asked.append(file), 1 / 0))
    form = shown(Comparison(**OPTIONS))
    pick(form.data, "cifar10 (")
    pick(form.model, "mlp")
    assert form.compare.description == "Download 170 MB and compare"
    assert asked == []
    form.compare.click()
    assert asked == ["cifar10/cifar-10-python.tar.gz"]
    assert "division by zero" in form.status.value
    pick(form.data, "digits")
    assert form.compare.description == "Compare"
    form.compare.click()
    assert form.status.value == ""


def test_images_are_offered_a_convolutional_network_and_tables_a_tabular_one():
    form = shown(Comparison())
    pick(form.model, "mlp")
    for name, model in (("digits", "cnn"), ("moons", "tabular"), ("fashion-mnist", "cnn")):
        pick(form.data, name)
        assert f"Comparison('{model}', '{name}')" in written(form.code.value)
    pick(form.model, "linear")
    pick(form.data, "digits")
    assert "Comparison('cnn', 'digits')" in written(form.code.value)


def test_what_was_given_in_code_can_be_kept_or_left():
    net, others = Line(), rows()
    form = shown(comparison := Comparison(net, **OPTIONS))
    assert form.model.options[0][0] == "net: chosen in code"
    pick(form.data, "moons")
    form.compare.click()
    assert "Line fails" in form.status.value
    pick(form.data, "others")
    assert written(form.code.value) == "Comparison(net, others, ['vote'], epochs=2)"
    form.compare.click()
    assert comparison._prepared.model.source is net
    assert len(others) == 2


def test_what_code_chooses_is_shown_in_the_form():
    form = shown(comparison := Comparison(**OPTIONS))
    comparison.choose(data="moons")
    assert form.data.options[0][0] == "'moons': chosen in code"
    comparison.choose("linear")
    assert comparison.controls.root in form.root.children
    assert written(form.code.value) == "Comparison('linear', 'moons', ['vote'], epochs=2)"
    with pytest.raises(ValueError, match="cnn takes images"):
        comparison.choose("cnn")
    assert written(form.code.value) == "Comparison('linear', 'moons', ['vote'], epochs=2)"


def test_settings_are_in_the_line(tmp_path):
    wrappers = {"five": vote.Wrapper(5)}
    comparison = Comparison(wrappers=wrappers, lr=0.1, splits=3, session=tmp_path / "a.session", seed=0)
    line = written(shown(comparison).code.value)
    assert line.startswith("from workbench import vote\nComparison(")
    assert "{'five': vote.Wrapper(n_voters=5)}, lr=0.1, splits=3, session='" in line
    assert "seed=" not in line


# ---- sessions
@pytest.mark.slow
def test_a_session_file_says_what_it_needs_and_goes_on(tmp_path):
    path = tmp_path / "a.session"
    before = Comparison("mlp", "diabetes", session=path, **OPTIONS).start(block=True)
    comparison = Comparison(session=path, **OPTIONS)
    assert str(comparison._choice.saved) == "a.session holds 2 runs of mlp on diabetes, split 0"
    form = shown(comparison)
    assert "a.session holds 2 runs of mlp on diabetes" in form.root.children[2].value
    pick(form.data, "digits")
    form.compare.click()
    assert "holds runs of diabetes" in form.status.value
    pick(form.data, "diabetes")
    pick(form.model, "mlp")
    form.compare.click()
    assert form.status.value == ""
    assert comparison.results.equals(before.results)
    assert comparison.runs.index.tolist() == [1, 2]
    first = shown(Comparison(session=path, **OPTIONS))
    assert written(first.code.value).startswith("Comparison('mlp', 'diabetes', ")


@pytest.mark.slow
def test_a_session_file_of_an_earlier_version_is_read(tmp_path):
    path = tmp_path / "a.session"
    before = Comparison(Line, rows(), session=path, **OPTIONS).start(block=True)
    content = torch.load(path, weights_only=True)
    del content["model"]
    torch.save(content, path)
    comparison = Comparison(session=path, **OPTIONS)
    assert str(comparison._choice.saved) == "a.session holds 2 runs on your data, split 0"
    assert comparison.choose(Line, rows()).results.equals(before.results)


# ---- threads
@pytest.mark.slow
def test_two_clicks_at_once_make_one_comparison():
    net, pair = Line(), rows()  # noqa: F841
    form = shown(comparison := Comparison(**OPTIONS))
    pick(form.data, "pair")
    pick(form.model, "net")
    threads = [threading.Thread(target=form.compare.click) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert form.status.value == ""
    assert comparison.controls.root in form.root.children
    assert comparison.start(block=True).results.index.tolist() == ["plain", "vote"]


def test_without_ipython_the_variables_of_the_caller_are_read(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython")
    local = rows()
    comparison = Comparison()
    assert len(local) == 2
    assert "local" in [offer.code for offer in comparison._choice.data_offers()]
    assert isinstance(comparison.choose("linear", local).data, Data)
