"""The code shown in the pages under docs/ runs, links resolve, and the tests that they name exist."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT

import workbench

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


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(code=True))
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)  # what the code writes is not left in the repository
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # which a page sets for the whole process
    monkeypatch.setattr("workbench.core.registry._REGISTERED", {})  # the guide's wrapper stays in the guide
    scope: dict[str, Any] = {"__name__": page.stem}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{page.name}, python block {number}", "exec", dont_inherit=True), scope)


@pytest.mark.parametrize("page", [*pages(code=False), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for _, target in LINK.findall(without_code(page))]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def sections(page: Path) -> set[str]:
    """The anchors of a page that are the same on GitHub, where each space is a hyphen, and in the site, where each gap is one."""
    titles = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    plain = [
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles
    ]
    return {title.replace(" ", "-") for title in plain if "  " not in title}


@pytest.mark.parametrize("page", [*pages(code=False), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
def test_links_lead_to_sections(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)", without_code(page))
    targets = [(page.parent / name if name else page, anchor) for name, anchor in links]
    pieces = {(path, anchor) for path, anchor in targets if path.suffix == ".md"}
    written = {(path, anchor) for path, anchor in pieces if f'id="{anchor}"' in path.read_text(encoding="utf-8")}
    assert [anchor for path, anchor in pieces - written if anchor not in sections(path)] == []


@pytest.mark.parametrize(
    "page", [*pages(code=False), *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
)
def test_no_merge_is_left_half_done(page: Path) -> None:
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(encoding="utf-8"), re.MULTILINE)


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
    untested = [row for row in rows if not re.search(r"\]\(\.\./tests/(\w+/)*test_", row.rsplit("|", 2)[1])]
    assert untested == []


def test_requirements_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "limitations.md").read_text(encoding="utf-8")
    match = re.search(r"pure Python, ([\d.]+) or newer, torch ([\d.]+) or newer", page)
    assert match
    python, torch_version = match.groups()
    assert f'requires-python = ">={python}"' in project
    assert f'"torch>={torch_version}"' in project
    suffixes = {path.suffix for path in (ROOT / "workbench").rglob("*")}
    assert suffixes.isdisjoint({".c", ".cpp", ".cu", ".pyx", ".so", ".pyd"})


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """What makes pages of the site from other files."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nav(entry: Any) -> list[str]:
    """The pages under an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for child in (entry.values() if isinstance(entry, dict) else entry) for page in nav(child)]


def test_the_navigation_leads_to_every_page_once(site: ModuleType) -> None:
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES}
    tutorials = {f"tutorials/{notebook.stem}.md" for notebook in (ROOT / "notebooks").glob("*.ipynb")}
    reference = {f"reference/{page}.md" for page in site.REFERENCE}
    listed = nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(written | tutorials | reference | set(site.COPIES))


def test_the_reference_has_every_public_module(site: ModuleType) -> None:
    listed = {name for modules in site.REFERENCE.values() for name in modules}
    public = {value.__name__ for name in workbench.__all__ if inspect.ismodule(value := getattr(workbench, name))}
    assert public <= listed


def test_everything_public_has_a_docstring(site: ModuleType) -> None:
    modules = [importlib.import_module(name) for names in site.REFERENCE.values() for name in names]
    assert [missing for module in modules for missing in site.undocumented(module)] == []
    assert all(module.__doc__ for module in modules)


def test_what_has_no_docstring_is_named(site: ModuleType) -> None:
    module = ModuleType("example")
    exec("class A:\n    'Doc.'\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...", vars(module))
    vars(module)["__all__"] = ["A", "h"]
    assert site.undocumented(module) == ["example.A.f", "example.h"]


def test_links_are_led_to_the_pages_of_the_site(site: ModuleType) -> None:
    text = "[a](../limitations.md#versions) ![p](../images/risks.png) [n](../../notebooks/risks.ipynb) [`t`](../../tests/test_docs.py)"
    assert site.relink(text, "docs/how_to", "how_to/wrap.md") == (
        "[a](../limitations.md#versions) ![p](../images/risks.png) [n](../tutorials/risks.md) "
        '<abbr title="tests/test_docs.py" markdown>`t`</abbr>'
    )
    assert site.relink("```\n[a](b.md)\n```", "", "index.md") == "```\n[a](b.md)\n```"


def test_a_link_that_leads_nowhere_is_reported(site: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    site.relink("[a](nowhere.md)", "docs", "sweeps.md")
    assert caplog.messages == ["sweeps.md links to docs/nowhere.md, which does not exist"]
