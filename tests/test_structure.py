"""Imports run one way, from public modules down to introspection, without cycles; comments stand above the lines they explain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

PACKAGE = ROOT / "workbench"
# from the ground up; what shares a line may import each other, as long as no files stand in a circle
LAYERS = (
    ("errors", "atomic", "deprecation", "version", "trackers"),
    ("introspect",),
    ("engine",),
    ("risk", "distributions", "console"),
    ("core",),
    ("methods", "outputs"),
    ("data", "metrics", "models", "plots", "text", "training", "calibration", "attributions"),
    ("doctor", "testing", "experiments"),
    ("notebook", "widgets"),
    ("cli", "pytest_plugin", "__main__", ""),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _name(path: str) -> str:
    return path.removesuffix("/__init__").replace("/", ".").removeprefix("__init__")


MODULES = {
    _name(path.relative_to(PACKAGE).with_suffix("").as_posix()): path
    for path in PACKAGE.rglob("*.py")
    if "templates" not in path.parts
}


def _imports(module: str, annotations: bool) -> Iterator[str]:
    """The modules of the package that a file imports, lazily or not; those that only annotate if asked for."""
    path = MODULES[module]
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (id(node) in checking and not annotations):
            continue
        if node.level == 0:
            first, *rest = (node.module or "").split(".")
            if first != "workbench":
                continue
            base = rest
        else:
            base = [*filter(None, package)][: len([*filter(None, package)]) - node.level + 1]
            base += node.module.split(".") if node.module else []
        for alias in node.names:
            target = ".".join([*base, alias.name])
            yield target if target in MODULES else ".".join(base)


def _level(module: str) -> int:
    return LEVEL[module.partition(".")[0]]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_one_way(module: str) -> None:
    upward = sorted(target for target in _imports(module, annotations=module != "") if _level(target) > _level(module))
    assert not upward, f"workbench.{module} imports what stands above it: {', '.join(upward)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: {*_imports(module, annotations=True)} - {module, ""} for module in MODULES if module}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_engine_needs_torch_only() -> None:
    """What the engine and the readers of user code import from other packages."""
    others = set()
    for module, path in MODULES.items():
        if _level(module) > LEVEL["engine"]:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            others |= {name.partition(".")[0] for name in names}
    assert others - set(__import__("sys").stdlib_module_names) <= {"torch", "numpy", "workbench"}


@pytest.mark.parametrize("method", ["vote", "sample", "sculpt", "neo", "laplace", "swag", "snapshot", "augment"])
def test_core_and_engine_know_no_method_by_name(method: str) -> None:
    """No literal of theirs is the name of a method; docstrings may give examples."""
    for module, path in MODULES.items():
        if module.partition(".")[0] in ("core", "engine", "introspect"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            literals = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in (method, f"@{method}")]
            assert not literals, f"workbench.{module}, line {literals[0].lineno}"


def test_comments_stand_above_lines_that_are_broken() -> None:
    """The formatter breaks a line that its comment makes too long, and leaves the comment behind the last bracket."""
    behind = re.compile(r"\s*[])}][])}:,]*( = [\[{(]+[])}]*)?\s+#(?! (noqa|fmt|type|pragma))")
    files = [path for folder in ("workbench", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    lines = [(path, i, line) for path in files for i, line in enumerate(path.read_text("utf-8").splitlines(), 1)]
    assert not [f"{path.relative_to(ROOT)}:{i}: {line.strip()}" for path, i, line in lines if behind.match(line)]
