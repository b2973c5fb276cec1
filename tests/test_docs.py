"""What the pages under docs/ show runs, what they link to exists, and every test that they name is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

PAGES = sorted((ROOT / "docs").glob("**/*.md"))
LINK = re.compile(r"\[((?:`[^`]*`|[^`\]])*)\]\((?!https?:|mailto:)([^)#\s]+)[^)]*\)")
TESTED = re.compile(r"`(test_\w+)?(?:\[([\w-]+)\])?`")


def pages(*, code: bool) -> list[Any]:
    """The pages, those with Python blocks only if `code`."""
    chosen = [page for page in PAGES if not code or "```python" in page.read_text(encoding="utf-8")]
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in chosen]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def names(test_file: Path) -> tuple[set[str], set[str]]:
    """The functions of a test file, and the texts in it, which the ids of its cases are among."""
    nodes = list(ast.walk(ast.parse(test_file.read_text(encoding="utf-8"))))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return functions, {str(node.value) for node in nodes if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("page", pages(code=True))
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)  # what the code writes is not left in the repository
    monkeypatch.setattr("workbench.core.registry._REGISTERED", {})  # the guide's wrapper stays in the guide
    scope: dict[str, Any] = {"__name__": page.stem}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{page.name}, python block {number}", "exec", dont_inherit=True), scope)


@pytest.mark.parametrize("page", pages(code=False))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for _, target in LINK.findall(without_code(page))]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", pages(code=False))
def test_tests_that_are_named_exist(page: Path) -> None:
    missing = []
    for text, target in LINK.findall(without_code(page)):
        tested = TESTED.fullmatch(text)
        if tested is None or not any(tested.groups()):
            continue
        functions, texts = names(page.parent / target)
        function, case = tested.groups()
        if (function and function not in functions) or (case and case not in texts):
            missing.append(f"{text} in {target}")
    assert missing == []


def test_every_line_about_a_limitation_has_a_test() -> None:
    page = ROOT / "docs" / "limitations.md"
    rows = [line for line in without_code(page).splitlines() if line.startswith("|")]
    rows = [row for row in rows if row.rsplit("|", 2)[1].strip(" -") not in ("", "test")]
    assert len(rows) > 50
    untested = [row for row in rows if "](../tests/test_" not in row.rsplit("|", 2)[1]]
    assert untested == []


def test_requirements_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "limitations.md").read_text(encoding="utf-8")
    found = re.search(r"pure Python, ([\d.]+) or newer, torch ([\d.]+) or newer", page)
    assert found
    python, torch_version = found.groups()
    assert f'requires-python = ">={python}"' in project
    assert f'"torch>={torch_version}"' in project
    suffixes = {path.suffix for path in (ROOT / "workbench").rglob("*")}
    assert suffixes.isdisjoint({".c", ".cpp", ".cu", ".pyx", ".so", ".pyd"})
