"""`experiments.grid`: models x wrappers x data x seeds, the same wherever and in whatever order cells run."""

from __future__ import annotations

import doctest
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn

from workbench import compose, data, experiments, neo, sculpt, vote
from workbench.core import registry, texts
from workbench.experiments import environment, measure, models, pool, run_cells, specs, sweep, user_code
from workbench.models import Standardization
from workbench.training import fit

TINY: dict[str, Any] = {"epochs": 2, "rows": 60, "progress": False}
OWN = """
from torch import nn
from beside import WIDTH
from workbench import data as sets

def net(data, width=3):
    return nn.Sequential(nn.Linear(data.input_shape[0], width), nn.Tanh(), nn.Linear(width, data.n_outputs))

class Fixed(nn.Sequential):
    def __init__(self, bias=True):
        super().__init__(nn.Linear(1, WIDTH, bias=bias), nn.Linear(WIDTH, 1))

def cubic(seed):
    return sets.toy.cubic(n_train=50, seed=seed)

def largest(wrapped, data):
    return {"largest": max(float(p.detach().abs().max()) for p in wrapped.parameters())}

def clash(wrapped, data):
    return {"rmse": 0.0}

word = "no function"
"""


@pytest.fixture
def reference(tmp_path: Path) -> Callable[[str], str]:
    """reference("net") refers to what the file above defines."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def repeatable(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows and columns in one order, without what a clock or the memory told."""
    frame = frame.sort_values(["data", "model", "wrapper", "seed"], ignore_index=True)
    return frame[sorted(set(frame) - set(sweep.MEASURED))]


# ---- the grid
@pytest.mark.slow
def test_results_do_not_depend_on_where_and_in_which_order_cells_run() -> None:
    wrappers = ["plain", "sample", "vote(n_voters=2) + sculpt"]
    alone = experiments.grid("mlp(width=8)", wrappers, ["diabetes", "wine"], [0, 1], **TINY)
    assert len(alone) == 12
    assert alone.attrs["failed"] == []
    two = experiments.grid(["mlp( width = 8 )"], wrappers[::-1], ["wine", "diabetes"], (1, 0), jobs=2, **TINY)
    pd.testing.assert_frame_equal(repeatable(alone), repeatable(two), check_exact=True)
    assert alone["checksum"].nunique() == 4  # two sets, two splits each
    assert (alone["train_rows"] == 60).all()
    assert set(alone["task"]) == {"regression", "classification"}
    assert alone.groupby("data")[["rmse", "accuracy"]].count().to_numpy().tolist() == [[6, 0], [0, 6]]
    assert (alone["predict_seconds"] > 0).all()
    assert alone["peak_memory"].between(50, 20_000).all()


def test_a_cell_is_the_training_that_anyone_would_do_by_hand() -> None:
    state = torch.get_rng_state()
    row = sweep.run("mlp(width=8)", "vote(n_voters=2) + sculpt", "diabetes", 1, epochs=2, rows=60)
    assert torch.equal(torch.get_rng_state(), state)
    d = data.load("diabetes", split=1)
    few = d.train.take(torch.randperm(len(d.train), generator=torch.Generator().manual_seed(1))[:60])
    train, held = replace(d, train=few).validation(0.1, seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped = compose(vote.Wrapper(n_voters=2), sculpt.Wrapper())(models.mlp(d, width=8))
        fit(wrapped, train, validation=held, epochs=2, seed=1, progress=False)
    with torch.no_grad():
        assert row["rmse"] == float((wrapped(d.test.x).double() - d.test.y).square().mean().sqrt())
    assert row["checksum"] == f"sha256:{replace(d, train=few).checksum[:12]}"
    assert (row["split"], row["train_rows"], row["task"]) == (1, 60, "regression")


def test_folds_take_the_place_of_held_rows() -> None:
    row = sweep.run("mlp(width=8)", "vote(n_voters=4)", "diabetes", 0, epochs=2, rows=80, folds=2)
    assert row["sharpness"] > row["epistemic"]  # cross-fitting has found the noise
    assert row["mixture_nll"] == pytest.approx(row["nll"], abs=math.log(4))


@pytest.mark.slow
def test_what_is_in_the_file_is_not_run_again(tmp_path: Path, reference: Callable[[str], str]) -> None:
    path = tmp_path / "a.csv"
    options: dict[str, Any] = {"path": path, "metrics": reference("largest"), **TINY}
    first = experiments.grid(reference("net(width=2)"), "plain", reference("cubic"), 0, **options)
    assert first.attrs["failed"] == []
    assert first["model"].tolist() == [reference("net(width=2)")]
    assert first["parameters"].tolist() == [7]
    assert first["largest"][0] > 0
    before = path.read_text()
    again = experiments.grid(reference("net( width=2 )"), "plain", reference("cubic"), 0, **options)
    assert path.read_text() == before
    assert again["cell"].tolist() == first["cell"].tolist()


def test_other_code_of_the_users_is_another_cell(reference: Callable[[str], str]) -> None:
    def cells() -> list[dict[str, Any]]:
        return sweep.grid_cells([reference("net"), "mlp"], "plain", "diabetes", 0)[0]

    before = cells()
    Path(reference("").rstrip(":")).with_name("beside.py").write_text("WIDTH = 5\n")
    after = cells()
    assert before[0]["source"] != after[0]["source"]
    assert before[1] == after[1]


PACKAGE = {
    "net.py": "import parts.shapes\nfrom parts import layers as used\nfrom torch import nn\n",
    "parts/__init__.py": "",
    "parts/layers.py": "from .deep.width import WIDTH\nfrom . import names\n",
    "parts/names.py": "",
    "parts/shapes.py": "",
    "parts/unused.py": "",
    "parts/deep/width.py": "from parts.deep import depth\nWIDTH = 3\n",
    "parts/deep/depth.py": "",
    "torch/nn.py": "",
}


@pytest.mark.parametrize(
    ("start", "used"),
    [
        ("net.py", {*PACKAGE} - {"parts/unused.py"}),
        ("parts/layers.py", {name for name in PACKAGE if "parts" in name} - {"parts/unused.py", "parts/shapes.py"}),
    ],
)
def test_code_in_packages_of_the_users_makes_other_cells(start: str, used: set[str], tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = user_code.digest(tmp_path / start)
    noticed = set()
    for name, text in PACKAGE.items():
        (tmp_path / name).write_text(f"{text}# another\n")
        noticed |= {name} if user_code.digest(tmp_path / start) != before else set()
        (tmp_path / name).write_text(text)
    assert noticed == used
    assert user_code.digest(tmp_path / start) == before


def test_models_are_given_the_data_if_they_ask(reference: Callable[[str], str]) -> None:
    cubic = data.toy.cubic(n_train=50)
    model_of: Any = specs.model_of
    assert model_of(reference("net"), cubic)[0].out_features == 3
    assert model_of(reference("Fixed(bias=False)"), cubic)[0].bias is None
    assert isinstance(model_of("workbench.experiments.models:linear", cubic)[1], nn.Linear)
    assert model_of("tabular(width=8)", cubic)[-1].in_features == 8
    assert isinstance(model_of("auto", cubic)[0], Standardization)
    assert specs.reference(models.linear, "a model") == "workbench.experiments.models:linear"
    assert set(specs.sources(Path(reference("").rstrip(":")))) == {"own.py", "beside.py"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wrappers": "voter"}, "did you mean vote"),
        ({"wrappers": "vote(n_voter=2)"}, "did you mean n_voters"),
        ({"wrappers": "vote(n_voters=0)"}, "whole number of at least 1"),
        ({"wrappers": "vote +"}, "can't be read"),
        ({"wrappers": "vote - sculpt"}, "not the name of a wrapper"),
        ({"wrappers": "plain + vote"}, "stands alone"),
        ({"wrappers": "sculpt(__import__('os'))"}, "neither a literal nor a known distribution"),
        ({"wrappers": "sculpt(Normal)(model)"}, "not the name of a wrapper"),
        ({"wrappers": "vote(**{'n_voters': 2})"}, "name=value"),
        ({"wrappers": "vote + vote"}, "vote"),
        ({"wrappers": ["vote", "vote"]}, "give each value once"),
        ({"wrappers": []}, "needs at least one"),
        ({"models": "mlpp"}, "did you mean mlp"),
        ({"models": "mlp(widht=3)"}, "did you mean width"),
        ({"models": "mlp(3)"}, "name=value"),
        ({"data": "diabets"}, "did you mean 'diabetes'"),
        ({"seeds": -1}, "seed must be a whole number of at least 0"),
        ({"seeds": [0.5]}, "seed must be a whole number"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"rows": 1}, "rows must be a whole number of at least 2"),
        ({"batchsize": 8}, "did you mean batch_size"),
        ({"metrics": "rmse"}, "is not the name of a function"),
        ({"seeds": None}, "seed must be a whole number"),
        ({"lr": -1.0}, "lr must be above 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be 0 or more"),
        ({"device": "gpu"}, 'device must be "auto" or the name of a device, not .gpu'),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        experiments.grid(**{"path": tmp_path / "out" / "a.csv", "progress": False, **arguments})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wrappers": vote.Wrapper(2)}, r"wrapper must be a text, not vote.Wrapper\(n_voters=2\); write"),
        ({"wrappers": [vote.Wrapper(2)]}, "wrapper must be a text"),
        ({"data": data.toy.cubic(n_train=9)}, "a data set must be defined at the top level"),
        ({"lr": "fast"}, "lr must be a number; found 'fast'"),
        ({"standardize": "false"}, "standardize must be True, False or None"),
    ],
)
def test_arguments_of_another_type_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        experiments.grid(**{"path": tmp_path / "out" / "a.csv", "progress": False, **arguments})
    assert not (tmp_path / "out").exists()


def test_functions_that_no_process_finds_are_refused(reference: Callable[[str], str]) -> None:
    with pytest.raises(TypeError, match=r"at the top level of a module or a \.py file"):
        experiments.grid(lambda data: nn.Linear(1, 1), progress=False)
    with pytest.raises(TypeError, match="not a function"):
        experiments.grid(reference("word"), progress=False)
    with pytest.raises(ValueError, match=r"own.py has no 'nothing': there are net, "):
        experiments.grid(reference("nothing"), progress=False)


@pytest.mark.slow
def test_a_cell_that_cannot_be_trained_fails_alone(reference: Callable[[str], str]) -> None:
    frame = experiments.grid(["cnn", "linear"], "plain", "diabetes", 0, metrics=[reference("clash")], **TINY)
    assert len(frame) == 0
    errors = {failure["cell"]["model"]: failure["error"] for failure in frame.attrs["failed"]}
    assert "cnn takes images" in errors["cnn"]
    assert "['rmse'], which are there already" in errors["linear"]


# ---- wrappers as texts
@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("vote(n_voters=5)+sculpt", ["vote(n_voters=5, use_bias=True)", "sculpt(distribution=Normal)"]),
        ("vote.Wrapper(5)", ["vote(n_voters=5, use_bias=True)"]),
        ("sculpt(StudentT(df=4), n_layers=1)", ["sculpt(distribution=StudentT, n_layers=1)"]),
        (
            "sample(distribution=Normal(0.2))",
            ["sample(n_samples=5, distribution=Normal(0.2), where=activations, trainable=False)"],
        ),
        ("neo(density='knn')", ["neo(density=knn)"]),
        ("plain", []),
    ],
)
def test_texts_name_wrappers(text: str, methods: list[str]) -> None:
    assert [repr(method) for method in texts.wrapper_of(text).make()] == methods


def test_every_wrapper_of_the_package_has_a_name() -> None:
    folder = Path(importlib.import_module("workbench.methods").__path__[0])
    defined = {path.stem for path in folder.glob("*.py") if "class Wrapper(" in path.read_text()}
    assert set(registry.wrapper_names()) == defined
    for name in registry.wrapper_names():
        texts.wrapper_of(name, output="logits")


# ---- the measures, held against their definitions
def trained(wrapper: Any, d: data.Data, epochs: int = 5) -> tuple[Any, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = models.mlp(d, width=8, depth=1)
        wrapped = wrapper(plain)
        fit(wrapped, d, epochs=epochs, progress=False)
    return wrapped, plain


def test_measures_of_values_are_computed_again_from_predictions() -> None:
    d = data.load("diabetes")
    wrapped, plain = trained(compose(vote.Wrapper(3), sculpt.Wrapper()), d)
    measures = measure.measure(wrapped, plain, d, None)
    with torch.no_grad():
        y, risk = wrapped(d.test.x, return_risk=True)
        exact = -float(wrapped.predictive(d.test.x).log_prob(d.test.y).double().mean())
    y, total, target = (t.double().numpy() for t in (y, risk.total, d.test.y))
    assert measures["nll"] == pytest.approx(-stats.norm.logpdf(target, y, total).mean(), rel=1e-9)
    low, high = stats.norm.interval(0.9, y, total)
    assert measures["picp90"] == pytest.approx(((low <= target) & (target <= high)).mean(), abs=1e-12)
    assert measures["mpiw90"] == pytest.approx((high - low).mean(), rel=1e-6)
    assert measures["mae"] == pytest.approx(np.abs(y - target).mean(), rel=1e-9)
    correlation = stats.spearmanr(total.ravel(), np.abs(y - target).ravel()).statistic
    assert measures["risk_error_correlation"] == pytest.approx(correlation, abs=1e-9)
    assert measures["parameters"] == 2 * sum(p.numel() for voter in wrapped.voters() for p in voter.parameters())
    assert measures["passes"] == 6  # three voters, each with a risk head as large as itself
    assert measures["epistemic"] == pytest.approx(float(risk.epistemic.double().square().mean().sqrt()), rel=1e-9)
    # the exact mixture is no worse than the one Normal by more than its own entropy of which voter it is
    assert measures["nll"] - math.log(3) < measures["mixture_nll"] < measures["nll"] + math.log(3)
    assert measures["mixture_nll"] == pytest.approx(exact, rel=1e-9)


def test_a_model_without_noise_gets_that_of_held_rows() -> None:
    d = data.load("diabetes")
    held = d.validation(0.2)[1]
    wrapped, plain = trained(compose(), d)
    measures = measure.measure(wrapped, plain, d, held)
    with torch.no_grad():
        noise = float((wrapped(held.x) - held.y).double().square().mean().sqrt())
        y = wrapped(d.test.x).double().numpy()
    assert measures["sharpness"] == pytest.approx(noise, rel=1e-6)
    assert measures["nll"] == pytest.approx(-stats.norm.logpdf(d.test.y.double().numpy(), y, noise).mean(), rel=1e-6)
    assert measures["passes"] == 1
    assert not {"aurc", "risk_error_correlation", "epistemic"} & set(measures)  # it tells no rows apart


def test_vacuitic_risk_ranks_rows_where_it_is_all_there_is() -> None:
    d = data.load("diabetes")
    wrapped, plain = trained(neo.Wrapper(), d)
    measures = measure.measure(wrapped, plain, d, None)
    with torch.no_grad():
        y, risk = wrapped(d.test.x, return_risk=True)
    error = (y - d.test.y).abs().flatten().numpy()
    assert measures["risk_error_correlation"] == pytest.approx(stats.spearmanr(risk.numpy(), error).statistic, abs=1e-6)
    assert measures["vacuitic"] == pytest.approx(float(risk.mean()), abs=1e-6)


def test_measures_of_classes_are_computed_again_from_predictions() -> None:
    d = data.load("wine")
    wrapped, plain = trained(vote.Wrapper(2, output="logits"), d)
    measures = measure.measure(wrapped, plain, d, None)
    with torch.no_grad():
        y, risk = wrapped(d.test.x, return_risk=True)
    p = y.double().softmax(-1).numpy()
    target = d.test.y.numpy()
    assert measures["accuracy"] == pytest.approx((p.argmax(1) == target).mean())
    assert measures["nll"] == pytest.approx(-np.log(p[np.arange(len(target)), target]).mean(), rel=1e-6)
    assert measures["brier"] == pytest.approx(((p - np.eye(3)[target]) ** 2).sum(1).mean(), rel=1e-6)
    assert measures["epistemic"] == pytest.approx(float(risk.epistemic.double().mean()), rel=1e-6)
    assert measures["passes"] == 2


# ---- devices
@pytest.mark.slow
def test_a_device_is_an_option_beside_the_column_of_the_machines() -> None:
    frame = experiments.grid("linear", iter(["plain"]), "cubic", np.int64(0), device=torch.device("cpu"), **TINY)
    assert frame.attrs["failed"] == []
    assert frame["fit_device"].tolist() == ["cpu"]
    assert frame["device"].tolist() == [environment.device()]


LIGHT = """
import os

def visible(n):
    return {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES", "all"), "process": os.getpid()}

def rows(n):
    return {"third": n / 3, "word": "NA" if n % 2 else "x", "flag": n > 1, **({"extra": n} if n == 2 else {})}
"""


@pytest.fixture
def light(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of functions: what this one imports would take each process longer than its cells."""
    file = tmp_path_factory.mktemp("light") / "light.py"
    file.write_text(LIGHT)
    return str(file)


def test_each_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, light: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert pool.visible_gpus() == ["GPU-a", "GPU-b", "GPU-c"]
    cells = [{"n": n} for n in range(2)]
    ended = pool.outcomes(f"{light}:visible", cells, jobs=2, threads=1, timeout=None, gpus=["GPU-a", "GPU-b"])
    gpus = {outcome.rows[0]["process"]: outcome.rows[0]["gpu"] for outcome in ended}
    assert len(gpus) == 2
    assert set(gpus.values()) == {"GPU-a", "GPU-b"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pool.visible_gpus() == ["0", "1", "2"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert pool.visible_gpus() == []  # no choice to make


# ---- Parquet
@pytest.mark.slow
def test_parquet_keeps_what_csv_keeps(tmp_path: Path, light: str) -> None:
    pytest.importorskip("pyarrow")
    cells = [{"n": n} for n in (2, 0, 1)]
    plain = run_cells(f"{light}:rows", cells, tmp_path / "a.csv", progress=False)
    run_cells(f"{light}:rows", cells[:2], tmp_path / "b.parquet", progress=False)
    frame = run_cells(f"{light}:rows", cells, tmp_path / "b.parquet", progress=False)
    pd.testing.assert_frame_equal(frame.drop(columns="seconds"), plain.drop(columns="seconds"), check_dtype=False)
    assert frame["third"].tolist() == [2 / 3, 0.0, 1 / 3]
    assert pd.read_parquet(tmp_path / "b.parquet")["word"].tolist() == ["x", "x", "NA"]
    assert not list(tmp_path.glob("*.part"))


def test_parquet_without_pyarrow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, light: str) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pyarrow.*risk-workbench\[parquet\]"):
        run_cells(f"{light}:rows", [{"n": 1}], tmp_path / "a.parquet", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["models", "specs", "measure", "sweep", "compare"])
@pytest.mark.slow
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"workbench.experiments.{name}")
    failed, run = doctest.testmod(module)
    assert failed == 0
    assert run


def test_grid_is_a_product() -> None:
    cells, files = sweep.grid_cells(["mlp", "linear"], ["plain", "vote"], ["diabetes", "yacht"], [0, 1, 2], lr=0.01)
    assert files == []
    assert len(cells) == 24
    wanted = set(itertools.product(["mlp", "linear"], ["plain", "vote"], ["diabetes", "yacht"], [0, 1, 2]))
    assert {tuple(cell[axis] for axis in ("model", "wrapper", "data", "seed")) for cell in cells} == wanted
    assert {cell["lr"] for cell in cells} == {0.01}
