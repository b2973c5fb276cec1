"""Imports run one way, from public modules down to introspection, without cycles; comments stand above the lines they explain."""

from __future__ import annotations

import ast
import re
from functools import cache
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


@cache
def _imports(module: str) -> dict[str, bool]:
    """The modules of the package that a file imports, lazily or not, and whether they do more than annotate."""
    path = MODULES[module]
    imports: dict[str, bool] = {}
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
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
            target = target if target in MODULES else ".".join(base)
            imports[target] = imports.get(target, False) or id(node) not in checking
    return imports


def _level(module: str) -> int:
    return LEVEL[module.partition(".")[0]]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_one_way(module: str) -> None:
    imports = _imports(module).items()
    upward = sorted(target for target, used in imports if (used or module) and _level(target) > _level(module))
    assert not upward, f"workbench.{module} imports what stands above it: {', '.join(upward)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: {*_imports(module)} - {module, ""} for module in MODULES if module}
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


def test_core_and_engine_know_no_method_by_name() -> None:
    """No literal of theirs is the name of a method; docstrings may give examples."""
    methods = ("vote", "sample", "sculpt", "neo", "laplace", "swag", "snapshot", "augment")
    names = {*methods, *(f"@{method}" for method in methods)}
    for module, path in MODULES.items():
        if module.partition(".")[0] in ("core", "engine", "introspect"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            literals = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in names]
            assert not literals, f"workbench.{module}, line {literals[0].lineno}: {literals[0].value}"


def test_comments_stand_above_lines_that_are_broken() -> None:
    """The formatter breaks a line that its comment makes too long, and leaves the comment behind the last bracket."""
    behind = re.compile(r"\s*[])}][])}:,]*( = [\[{(]+[])}]*)?\s+#(?! (noqa|fmt|type|pragma))")
    files = [path for folder in ("workbench", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    lines = [(path, i, line) for path in files for i, line in enumerate(path.read_text("utf-8").splitlines(), 1)]
    assert not [f"{path.relative_to(ROOT)}:{i}: {line.strip()}" for path, i, line in lines if behind.match(line)]
