"""The distributions build, contain the whole package, and work with the core's dependencies only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

import workbench

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

TRAIN = """
import sys

import workbench

assert "torch" not in sys.modules
assert workbench.__file__.startswith(sys.prefix), workbench.__file__

import torch
from torch import nn

from workbench import compose, fit, laplace, load, neo, sample, save, sculpt, snapshot, swag, vote

torch.manual_seed(0)
x = torch.randn(60, 3)
y = x.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


wrappers = {
    "vote": vote.Wrapper(3),
    "sample": sample.Wrapper(3),
    "sculpt": sculpt.Wrapper(),
    "student": sculpt.Wrapper(sculpt.StudentT),
    "quantiles": sculpt.Wrapper(sculpt.Quantiles),
    "evidential": sculpt.Wrapper(sculpt.NormalInverseGamma),
    "neo": neo.Wrapper(),
    "flow": neo.Wrapper(density="flow"),
    "laplace": laplace.Wrapper(),
    "swag": swag.Wrapper(),
    "snapshot": snapshot.Wrapper(),
    "composed": compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper()),
}
for name, wrapper in wrappers.items():
    wrapped = wrapper(network())
    history = fit(wrapped, (x, y), epochs=8, folds=3 if name == "composed" else None)
    assert len(history.records) == 8, history
    save(wrapped, f"{name}.safetensors")
    again = load(f"{name}.safetensors", network()).eval()
    answers = []
    for model in (wrapped, again):
        torch.manual_seed(2)
        prediction, risk = model(x, return_risk=True)
        risks = [risk] if isinstance(risk, torch.Tensor) else [risk[kind] for kind in risk.names()]
        assert risks and all(r.isfinite().all() and (r >= 0).all() or len(r.shape) == 1 for r in risks), name
        answers.append([prediction, *risks])
    assert all(map(torch.equal, *answers)), name
print("trained", len(wrappers))
"""

ASK_FOR_MORE = """
import torch

import workbench
from workbench import metrics, plots
from workbench.distributions import StudentT

calls = {
    "matplotlib": lambda: plots.predicted_against_true(torch.zeros(9), torch.ones(9)),
    "pandas": lambda: workbench.History([], best_epoch=0).frame,
    "scipy": lambda: StudentT().cdf(torch.zeros(1), torch.zeros(1), torch.ones(1)),
    "torchmetrics": lambda: metrics.RMSE,
}
for missing, call in calls.items():
    try:
        call()
    except ImportError as error:
        assert str(error) == f"this needs {missing}, which is not installed: pip install 'risk-workbench[lab]'", error
    else:
        raise AssertionError(f"{missing} was found")
print("named", len(calls))
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of the working tree, and the wheel that is built from it, both by the build backend itself."""
    folder = tmp_path_factory.mktemp("distributions")
    tree = folder / "tree"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "site", "reports", "datasets")
    shutil.copytree(ROOT, tree, ignore=left_out)
    build("sdist", tree, folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def build(kind: str, tree: Path, folder: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def core_distributions() -> Iterator[metadata.Distribution]:
    """The core's dependencies and theirs, as they are installed here."""
    pending, known = list(PROJECT["dependencies"]), set()
    while pending:
        requirement = Requirement(pending.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in known or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        known.add(name)
        distribution = metadata.distribution(name)
        yield distribution
        pending += distribution.requires or []


@pytest.fixture(scope="module")
def bare_python(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel and the core's dependencies, which are links to those installed here."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for distribution in core_distributions():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link, target = packages / top, Path(str(distribution.locate_file(top)))
            if target.exists() and not link.exists():
                link.symlink_to(target)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, distributions[1]], check=True)
    return python


def run_bare(python: Path, code: str, folder: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-c", code], cwd=folder, env=kept, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = set(wheel.namelist())
        header = Parser().parsestr(wheel.read(next(n for n in names if n.endswith("/METADATA"))).decode())
        entry_points = wheel.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "workbench").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert sources - names == set()
    notebooks = {f"share/workbench/notebooks/{file.name}" for file in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks <= {name.partition(".data/data/")[2] for name in names}
    assert {name.split("/")[0] for name in names if "-info/" not in name and ".data/" not in name} == {"workbench"}
    assert (header["Name"], header["Version"]) == ("risk-workbench", workbench.__version__)
    core = {Requirement(line).name for line in header.get_all("Requires-Dist") if "extra ==" not in line}
    assert core == {"torch", "numpy", "safetensors", "tqdm"}
    assert "workbench = workbench.cli:main" in entry_points
    assert "workbench = workbench.pytest_plugin" in entry_points


@pytest.mark.slow
def test_the_core_alone_wraps_trains_saves_and_loads(bare_python: Path, tmp_path: Path) -> None:
    assert run_bare(bare_python, TRAIN, tmp_path) == "trained 12\n"


@pytest.mark.slow
def test_what_is_missing_is_named_with_its_extra(bare_python: Path, tmp_path: Path) -> None:
    assert run_bare(bare_python, ASK_FOR_MORE, tmp_path) == "named 4\n"


def test_the_changelog_and_the_citation_are_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert [str(Version(number)) for number in released] == sorted(released, key=Version, reverse=True)
    assert released[0] == workbench.__version__
    assert f"version: {workbench.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
