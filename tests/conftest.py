"""Fixtures and collection hooks of the test suite; each distinct notebook run happens once."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads than cores make them many times slower

import pytest

from workbench.experiments.environment import source_digest
from workbench.notebook import Run, run_notebook

ROOT = Path(__file__).parent.parent

THROWAWAY = {
    "ok": """
import os

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from workbench.notebook import record, record_figure, record_table

print("backend", os.environ["MPLBACKEND"], "threads", os.environ["GOMP_SPINCOUNT"], "in", os.getcwd())
record(loss=float("nan"), bound=np.float64("inf"), n=n, third=1 / 3, single=np.float32(0.1), scores=np.arange(3))
fig, ax = plt.subplots(figsize=(3, 2))
record_figure("line_plot", ax, alt="a straight line")
record_table("results", pd.DataFrame({"wrapper": ["vote", "a < b"], "rmse": [0.5, float("nan")]}))
---
plt.plot([1, 2])
plt.show()
""",
    "failed": """
from workbench.notebook import record

record(before=1.5)
---
record(**{"before": 2.5} if n == 2 else {"after": 2.5})
raise ValueError("the <loss> is NaN")
---
record(never=0)
""",
    "timeout": """
from pathlib import Path
import time

print("going to sleep")
Path(f"{name}.started").touch()
---
time.sleep(60)
---
print("never")
""",
    "died": """
import os

os._exit(3)
---
print("never")
""",
    "nested": """
from workbench.notebook import run_notebook

inner = run_notebook("ok.ipynb", "inner.ipynb", {"n": 8})
print(inner.status, inner.records["n"])
""",
}

# a shell that starts pytest in the background ignores SIGINT, and the processes that tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    """Return a header line that says why the browser tests are skipped, if they are."""
    from browser.lab import REQUIRED, missing

    return [f"browser tests: skipped; they need {missing()}"] if missing() and not REQUIRED else []


# with --dist loadfile: folders whose tests run in one process, since they share expensive fixtures and would slow each other down in parallel,
# and long files whose tests share nothing and can be spread over processes
TOGETHER = ("tests/browser", "tests/notebook")
APART = (
    "tests/test_conformance.py",
    "tests/test_meanings.py",
    "tests/engine/test_compile.py",
    "tests/engine/test_other_device.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule tests by folder, by file or one by one. Groups of xdist (--dist loadgroup) would do, but have no effect under pytest 9.2."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return folder if folder in TOGETHER else nodeid if file in APART else file

    return Scheduling(config, log)


def _turn(item: pytest.Item) -> int:
    """Return when an item runs: notebooks, of which some take long, at the start, and what is spread one by one at the end.

    A worker that starts a long file when there is nothing else left keeps the others waiting.
    """
    file = item.nodeid.partition("::")[0]
    return 0 if file.startswith("notebooks/") else 2 if file in APART else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests, and mark those that compare bit by bit, directly or in a test helper that they call."""
    items.sort(key=_turn)
    cache: dict[FunctionType, bool] = {}
    for item in items:
        function = getattr(item, "function", None)
        if isinstance(function, FunctionType) and _compares_bits(function, cache):
            item.add_marker(pytest.mark.exact)


def _compares_bits(function: FunctionType, cache: dict[FunctionType, bool]) -> bool:
    if function not in cache:
        cache[function] = False  # ends the recursion for functions that call themselves
        codes = [function.__code__]
        for code in codes:
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        callees = [function.__globals__.get(name) for code in codes for name in code.co_names]
        cache[function] = any(_says_exact(code) for code in codes) or any(
            _compares_bits(callee, cache)
            for callee in callees
            if isinstance(callee, FunctionType) and Path(callee.__code__.co_filename).is_relative_to(ROOT / "tests")
        )
    return cache[function]


def _says_exact(code: CodeType) -> bool:
    """Return whether code calls torch.equal or compares with rtol=0 and atol=0."""
    return "equal" in code.co_names or (("rtol", "atol") in code.co_consts and 0 in code.co_consts)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections, which find little, and exclude what is imported from later ones, which would scan it.

    Later ones run after 10,000 new objects instead of 700 (2,000 in Python 3.13): copies of models live for one test, and scanning them as
    often takes 5 % of the processor time in the conformance tests. Tests of what is freed collect by themselves.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude from garbage collections also what the tests of a file have imported or left.

    They grow with every library that a test imports, and transformers' Trainer asks for several collections in every training.
    """
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _seed()  # before the fixtures of whole files and folders


def _seed() -> None:
    """Seed the global generators, whose numbers would otherwise depend on which tests this process has run before."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_of_others() -> None:
    """Seed the global generators, and clear what earlier tests and notebooks have left in this process.

    pyplot keeps their figures. absl, with which Keras and TensorBoard log, keeps the stream of pytest that it found first, and closes it if
    logging is configured again while a test captures with `capsys`. Dynamo stops compiling code that it has compiled for several models,
    and all wrapped models share their code.
    """
    _seed()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")
    if absl := sys.modules.get("absl.logging"):
        absl.get_absl_handler().python_handler.stream = sys.__stderr__


def write_notebook(path: Path, cells: str, **metadata: Any) -> Path:
    """Write a notebook with a title, a parameters cell (n = 3, rate = 0.5, name = "x", tags = ["a"]) and the given cells."""
    import nbformat  # takes seconds, which tests that start pytest in a new process would lose

    v4 = nbformat.v4
    parameters = "n = 3\nrate = 0.5\nname = 'x'\ntags = ['a']"
    nb = v4.new_notebook(
        metadata=metadata,
        cells=[
            v4.new_markdown_cell("# A small notebook\n\nwith a formula: $\\sigma^2$", id="title"),
            v4.new_code_cell(parameters, id="parameters", metadata={"tags": ["parameters"]}),
            *(v4.new_code_cell(code.strip(), id=f"cell-{i}") for i, code in enumerate(cells.split("---\n"))),
            v4.new_markdown_cell("Closing words.", id="end"),
        ],
    )
    nbformat.write(nb, path)
    return path


def _digest_for_tests() -> str:
    """Return a constant digest inside tests, and the true one for notebooks that run later in this process and that the documentation shows."""
    return "as it is" if os.environ.get("PYTEST_CURRENT_TEST", "").startswith("tests/") else source_digest()


@pytest.fixture(scope="session")
def jupyter_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep notebook signatures out of the user's home, and edits of the package from invalidating runs."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(home / "data"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(home / "runtime"))
        patch.setattr("workbench.notebook.run._source_digest", _digest_for_tests)
        yield home


@pytest.fixture(scope="session")
def throwaway(jupyter_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return a function that runs the small notebook of a name, such as throwaway("failed"), once per session, with Agg as the backend."""
    folder = tmp_path_factory.mktemp("throwaway")
    runs: dict[str, Run] = {}
    for name, cells in THROWAWAY.items():
        write_notebook(folder / f"{name}.ipynb", cells)

    def run(name: str) -> Run:
        if name not in runs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MPLBACKEND", "Agg")
                timeout = 2 if name == "timeout" else 300
                runs[name] = run_notebook(folder / f"{name}.ipynb", folder / "out" / f"{name}.ipynb", timeout=timeout)
        return runs[name]

    return run
