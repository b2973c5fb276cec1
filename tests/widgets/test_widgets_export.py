"""A comparison exported as a notebook and as a command line reproduces the comparison."""

from __future__ import annotations

import linecache
import types

import nbformat
import pytest
import torch
from torch import nn

from workbench import compose, data, sculpt, vote
from workbench.notebook import read_records, render, run_notebook
from workbench.notebook.parameters import declared_parameters
from workbench.widgets import Comparison

HELPER = """
def layers(width):
    return [nn.Linear(10, width), nn.Tanh(), nn.Linear(width, OUTPUTS)]
"""
MODEL = """
def model():
    return nn.Sequential(*layers(8))
"""


def in_notebook(source, **names):
    """A function as a notebook defines it: in __main__, its source known to linecache only."""
    name = f"<cell {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = {"__name__": "__main__", **names}
    exec(compile(source, name, "exec"), space)
    return next(value for key, value in space.items() if isinstance(value, types.FunctionType) and key not in names)


def model():
    layers = in_notebook(HELPER, nn=nn, OUTPUTS=1)
    return in_notebook(MODEL, nn=nn, layers=layers)


def sources(path):
    return {cell.id: cell.source for cell in nbformat.read(path, 4).cells}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    wrappers = {"both": compose(vote.Wrapper(2), sculpt.Wrapper(sculpt.Normal(beta=0.5))), "three": vote.Wrapper(3)}
    comparison = Comparison(model(), "diabetes", wrappers, epochs=2, seed=3)
    comparison.controls.rows["three"].form.forms[0].controls["finetune"].value = True
    comparison.start(block=True)
    path = comparison.export(tmp_path_factory.mktemp("export") / "comparison.ipynb")
    return comparison, path


@pytest.mark.slow
def test_the_notebook_is_stripped_named_and_parametrized(exported):
    comparison, path = exported
    nb = nbformat.read(path, 4)
    nbformat.validate(nb)
    assert [cell.id for cell in nb.cells] == [
        "title",
        "parameters",
        "imports",
        "data",
        "model",
        "wrappers",
        "train",
        "results",
    ]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in nb.cells)
    assert nb.metadata.kernelspec.name == "python3"
    assert [cell.id for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])] == ["parameters"]
    assert declared_parameters(nb) == {
        "data": "diabetes",
        "split": 0,
        "wrappers": ["both", "three"],
        "epochs": 2,
        "lr": 0.01,
        "weight_decay": 0.0,
        "seed": 3,
    }
    text = sources(path)
    assert "vote.Wrapper(finetune=True)" in text["wrappers"]
    assert "sculpt.Normal(beta=0.5)" in text["wrappers"]
    assert comparison.command("a b.ipynb") == (
        "workbench report 'a b.ipynb' -p data diabetes -p split 0 -p epochs 2 -p lr 0.01 -p weight_decay 0.0 -p seed 3"
    )


@pytest.mark.slow
def test_the_notebook_runs_and_gives_the_same_numbers_and_a_report(exported, tmp_path):
    comparison, path = exported
    run = run_notebook(path, tmp_path / "executed.ipynb", timeout=300)
    assert run.status == "ok", run.error
    records = read_records(tmp_path / "executed.ipynb")
    table = records.tables["comparison"]
    frame = comparison.results
    assert table["model"] == ["plain", "both", "three"]
    for name in ("rmse", "nll", "coverage", "calibration_error", "parameters_added"):
        assert table[name] == pytest.approx(frame[name].tolist(), rel=1e-6)
    page = render(tmp_path / "executed.ipynb").read_text(encoding="utf-8")
    assert page.count('<svg aria-label="') + page.count('<svg class="wb-picture"') >= 3
    assert "wb-spot" in page
    assert (tmp_path / "executed.ipynb").stat().st_size < 500_000


def test_a_model_that_cannot_be_written_leaves_a_cell_to_fill_in(tmp_path):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    comparison = Comparison(nn.Linear(3, 1), (x, x[:, :1]), ["vote"], epochs=1)
    text = sources(comparison.export(tmp_path / "c.ipynb"))
    assert text["model"].endswith("model = ...")
    assert "object of class Linear" in text["model"]
    assert text["data"].endswith("dataset = ...")
    assert "data" not in text["parameters"]
    space: dict[str, object] = {}
    exec(text["model"], space)
    with pytest.raises(TypeError, match=r"model: found \.\.\."):
        Comparison(space["model"], (x, x[:, :1]))


def test_functions_of_notebooks_are_written_with_what_they_need(tmp_path):
    space: dict[str, object] = {}
    text = sources(Comparison(model(), "diabetes", epochs=1).export(tmp_path / "c.ipynb"))
    exec(text["imports"] + "\n" + text["model"], space)
    made = space["model"]()
    assert [tuple(p.shape) for p in made.parameters()] == [(8, 10), (8,), (1, 8), (1,)]


def test_a_function_over_variables_of_another_is_not_written(tmp_path):
    width = 4
    closure = in_notebook("def make(w):\n    def model():\n        return nn.Linear(w, 1)\n    return model\n", nn=nn)(
        10
    )
    text = sources(Comparison(closure, "diabetes", epochs=1).export(tmp_path / "c.ipynb"))
    assert text["model"].endswith("model = ...")
    text = sources(Comparison(lambda: nn.Linear(10, width - 3), "diabetes", epochs=1).export(tmp_path / "c.ipynb"))
    assert text["model"].endswith("model = ...")


def test_importable_models_are_imported(tmp_path):
    moons = data.load("moons", n_train=60, n_test=30)
    made = Comparison(Importable, moons, ["vote+neo"], epochs=1)
    text = sources(made.export(tmp_path / "c.ipynb"))
    assert text["model"] == "model = Importable"
    assert f"from {__name__} import Importable" in text["imports"]
    assert text["data"] == "dataset = workbench.data.load(data, split=split, n_train=60, n_test=30)"
    assert "output='logits'" in text["train"]
    space: dict[str, object] = {"data": "moons", "split": 0}
    exec(text["imports"] + "\n" + text["data"], space)
    assert space["dataset"].checksum == moons.checksum


class Importable(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def test_the_button_writes_the_notebook(tmp_path):
    comparison = Comparison(model(), "diabetes", ["vote"], epochs=1)
    comparison.controls.path.value = str(tmp_path / "new" / "it.ipynb")
    comparison.controls.export.click()
    assert (tmp_path / "new" / "it.ipynb").exists()
    assert "workbench report" in comparison.controls.status.value
    comparison.controls.path.value = "it.txt"
    comparison.controls.export.click()
    assert "ends in .ipynb" in comparison.controls.status.value


def test_the_button_replaces_only_what_it_has_written(tmp_path):
    comparison = Comparison(model(), "diabetes", epochs=1)
    path = tmp_path / "mine.ipynb"
    path.write_text("of somebody's")
    comparison.controls.path.value = str(path)
    comparison.controls.export.click()
    assert path.read_text() == "of somebody's"
    assert "already exists" in comparison.controls.status.value
    path.unlink()
    comparison.controls.export.click()
    first = path.read_text()
    comparison.controls.epochs.value = 2
    comparison.controls.export.click()
    assert path.read_text() != first
