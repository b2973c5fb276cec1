"""Pages of the site that are made from the README, the notebooks and the public names, and links that lead out of docs/."""

from __future__ import annotations

import html
import importlib
import inspect
import logging
import posixpath
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from workbench.methods import BUILT_IN

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
EXECUTED = ROOT / "build" / "notebooks"  # by the tests or here; again only when a notebook or the package has changed
LINK = re.compile(r"(!?)\[((?:`[^`]*`|!\[[^\]]*\]\([^)]*\)|[^\]`])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
log = logging.getLogger("mkdocs.hooks.site")

# page of the site -> file of the repository that it is made from
COPIES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

# page of the reference -> modules whose public names it lists
REFERENCE = {
    "index": ("workbench",),
    "wrappers": tuple(f"workbench.methods.{name}" for name in BUILT_IN),
    "outputs": ("workbench.outputs",),
    "distributions": ("workbench.distributions",),
    "calibration": ("workbench.calibration",),
    "attributions": ("workbench.attributions",),
    "metrics": ("workbench.metrics",),
    "text": ("workbench.text",),
    "data": ("workbench.data",),
    "models": ("workbench.models",),
    "plots": ("workbench.plots",),
    "widgets": ("workbench.widgets",),
    "notebook": ("workbench.notebook", "workbench.pytest_plugin"),
    "experiments": ("workbench.experiments",),
    "trackers": ("workbench.trackers",),
    "doctor": ("workbench.doctor",),
    "testing": ("workbench.testing",),
    "errors": ("workbench.errors",),
    "cli": ("workbench.cli",),
}


def public_names(module: ModuleType) -> Iterator[str]:
    """The functions and classes that a module offers, but for hooks of pytest."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    for name in sorted(names, key=str.lower):
        value = getattr(module, name)
        if (inspect.isclass(value) or inspect.isroutine(value)) and not name.startswith("pytest_"):
            yield name


def undocumented(module: ModuleType) -> list[str]:
    """Public functions, classes and members of a module's classes that have no docstring, also none that is inherited."""
    missing = []
    for name in public_names(module):
        value = getattr(module, name)
        if not (value.__doc__ or "").strip():
            missing.append(f"{module.__name__}.{name}")
        for member, definition in vars(value).items() if inspect.isclass(value) else ():
            is_code = inspect.isroutine(definition) or isinstance(definition, property) or hasattr(definition, "func")
            documented = inspect.getdoc(definition) or inspect.getdoc(getattr(value, member))
            if is_code and not member.startswith("_") and not documented:
                missing.append(f"{module.__name__}.{name}.{member}")
    return missing


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
    from mkdocs.structure.files import File

    for page, source in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relink(text, "", page)))
    for page, content in notebook_pages():
        files.append(File.generated(config, page, content=content))
    for page, content in reference_pages():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links of the pages under docs/ to what the site has of the repository."""
    source = page.file.src_uri
    is_generated = source in COPIES or source.startswith(("tutorials/", "reference/"))
    return markdown if is_generated else relink(markdown, posixpath.join("docs", posixpath.dirname(source)), source)


def relink(text: str, folder: str, page: str) -> str:
    """Rewrite the links of a text for a page of the site.

    Args:
        text: Markdown whose links are relative to a folder of the repository.
        folder: that folder, from the root of the repository.
        page: the page that the text is shown on, from the root of the site.

    Returns:
        The text; what the site does not have, such as tests and sources, is shown with its path as a hint. What is not
        in the repository is reported, which a strict build takes for an error.
    """

    def rewrite(match: re.Match[str]) -> str:
        picture, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        address = address_of(path)
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", page, path)
        elif address is not None:
            label = LINK.sub(rewrite, label)
            return f"{picture}[{label}]({posixpath.relpath(address, posixpath.dirname(page) or '.')}{anchor})"
        label = LINK.sub(rewrite, label)
        return f'<abbr title="{html.escape(path)}" markdown>{label}</abbr>'

    pieces = FENCE.split(text)
    return "".join(piece if piece.startswith("```") else LINK.sub(rewrite, piece) for piece in pieces)


def address_of(path: str) -> str | None:
    """Where the site has a file of the repository, None if it has not."""
    if path in COPIES.values():
        return next(page for page, source in COPIES.items() if source == path)
    if path.startswith("docs/") and Path(path).suffix in (".md", ".png", ".svg"):
        return path.removeprefix("docs/")
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return f"tutorials/{Path(path).stem}.md"
    return None


def notebook_pages() -> Iterator[tuple[str, str | bytes]]:
    """The notebooks, executed with their smoke parameters, as Markdown with pictures."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    with ThreadPoolExecutor(2) as pool:
        executed = list(pool.map(execute, notebooks))
    for path in executed:
        if path is not None:
            yield from markdown_of(path)


def execute(notebook: Path) -> Path | None:
    """Run a notebook, unless an earlier run still counts; report one that fails."""
    from workbench.notebook import run_notebook

    log.info("executing %s", notebook.name)
    output = EXECUTED / f"{notebook.stem}-smoke.ipynb"  # as `pytest --executed-notebooks` calls it
    run = run_notebook(notebook, output, {"smoke": True}, resume=True, timeout=600)
    if run.status != "ok":
        log.warning("%s ended as %s", notebook.name, run.status)
        return None
    return output


def markdown_of(executed: Path) -> Iterator[tuple[str, str | bytes]]:
    """An executed notebook's page and its pictures."""
    import nbformat
    from nbconvert import MarkdownExporter

    notebook, name = nbformat.read(executed, as_version=4), executed.stem.removesuffix("-smoke")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = draw_formulas(relink(cell.source, "notebooks", f"tutorials/{name}.md"))
    exporter = MarkdownExporter()
    resources = {"output_files_dir": f"{name}_files", "unique_key": name}
    text, resources = exporter.from_notebook_node(notebook, resources)
    note = (
        f"*This page is `notebooks/{name}.ipynb`, executed with `smoke=True`: little data and short trainings, to see what it does. "
        "Run it yourself for results that mean something.*"
    )
    title, _, rest = text.lstrip().partition("\n")
    yield f"tutorials/{name}.md", f"{title}\n\n{note}\n{rest}"
    for file, picture in resources["outputs"].items():
        yield f"tutorials/{file}", picture


def draw_formulas(text: str) -> str:
    """Replace the formulas of a text by pictures, since the site loads no scripts for them."""
    from workbench.notebook.formulas import formula

    text = re.sub(r"\$\$(.+?)\$\$", lambda match: formula(match[1], block=True), text, flags=re.DOTALL)
    return re.sub(r"(?<![\\$])\$([^$\n]+)\$", lambda match: formula(match[1]), text)


def reference_pages() -> Iterator[tuple[str, str]]:
    """A page for each room's public names; what has no docstring is reported."""
    for page, modules in REFERENCE.items():
        parts = [f"# {page.capitalize()}" if len(modules) > 1 else f"# {modules[0]}"]
        for name in modules:
            module = importlib.import_module(name)
            for missing in undocumented(module):
                log.warning("%s has no docstring", missing)
            if len(modules) > 1:
                parts.append(f"## {name.replace('.methods', '')}")
            parts.append(
                f"::: {name}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}"
            )
            level = 3 if len(modules) > 1 else 2
            parts += [
                f"::: {name}.{public}\n    options: {{heading_level: {level}}}" for public in public_names(module)
            ]
        yield f"reference/{page}.md", "\n\n".join(parts) + "\n"
