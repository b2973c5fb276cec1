"""Rendering of executed notebooks as reports: single HTML files that load nothing."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from .. import atomic
from ..errors import require
from .headline import first_screen
from .parameters import declared_parameters, load_notebook
from .record import failed_checks, read_records

if TYPE_CHECKING:
    from nbformat import NotebookNode

_TEMPLATES = Path(__file__).parent / "templates"
_STATIC = Path(__file__).parents[1] / "widgets" / "static"
# the scripts that a page may contain, by the attribute of the elements that they work on
_SCRIPTS = {"data-wb-linked": "linked.js", "data-wb-tokens": "tokens.js"}


def render(executed: Path | str, target: Path | str | None = None, *, code: bool = False) -> Path:
    """Render an executed notebook as one self-contained HTML file.

    The page opens with the verdicts of recorded comparisons (`record_comparison`), each with a figure, and a table of contents; it ends with
    the status of the run, its parameters and its environment. If the run failed or a check does not hold, this comes first. The code is
    hidden behind a switch. A failed run is shown up to the cell that stopped it. Scripts and frames in outputs are removed, and the page's
    content security policy forbids loading anything, even pictures by URL. Interactive widgets, which need a kernel, are left out, and so
    are cells tagged ``no-report``. The cases of an `Explorer`, saved by `snapshot()` or as last displayed, become a plot that reacts to
    pointer and keys, and generated texts show the alternatives of each token; both use scripts of this package, the only ones that the
    policy allows.

    Args:
        executed: path of a notebook that `run_notebook` wrote (other executed notebooks are shown without status).
        target: path of the HTML file; default: beside the notebook, with the suffix ``.html``.
        code: whether the code is visible at first.

    Returns:
        Path of the HTML file.

    Raises:
        FileNotFoundError, ValueError: `executed` can't be read as a notebook.

    Example:
        >>> import nbformat, tempfile
        >>> path = Path(tempfile.mkdtemp()) / "small.ipynb"
        >>> nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Results")]), path)
        >>> render(path).name
        'small.html'
    """
    executed = Path(executed)
    target = executed.with_suffix(".html") if target is None else Path(target)
    nb = load_notebook(executed)
    run: dict[str, Any] = nb.metadata.get("workbench", {})
    parameters, environment = run.get("parameters", {}), run.get("environment", {})
    report: dict[str, Any] = {
        "run": run,
        "code": code,
        "title": title(nb) or executed.stem,
        # files store these sorted by name; pages show parameters in the order of their cell, and git, device and torch first
        "parameters": {name: parameters[name] for name in declared_parameters(nb) if name in parameters},
        "environment": dict(sorted(environment.items(), key=lambda item: item[0] not in ("git", "device", "torch"))),
    }
    with contextlib.suppress(ValueError):  # a name recorded twice must not prevent the page
        records = read_records(nb)
        report["checks"] = records.checks
        report["failed_checks"] = failed_checks(report["checks"])
        has_several = len(records.comparisons) > 1
        report["first_screen"] = "".join(
            first_screen(comparison, name.replace("_", " ") if has_several else "")
            for name, comparison in records.comparisons.items()
        )
    hidden = {"no-report", "papermill-error-cell-tag"}  # the banner replaces papermill's own error cells
    nb.cells = [cell for cell in nb.cells if not hidden & set(cell.metadata.get("tags", []))]
    report["left_out"] = _cut_where_it_stopped(nb) if run and run["status"] != "ok" else 0
    report["has_code"] = any(cell.cell_type == "code" and cell.source.strip() for cell in nb.cells)
    # pictures in the text have paths relative to the original notebook, not to its output
    folder = Path(run["notebook"]).parent if run else executed.parent
    resources = {"metadata": {"name": executed.stem, "path": str(folder)}, "report": report}
    page, _ = _exporter().from_notebook_node(nb, resources=resources)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(target, _finished(page, report["title"], target.parent))
    return target


def _finished(page: str, title: str, folder: Path) -> str:
    """Return the finished page: remove active content and dead links, and add title, contents and scripts."""
    soup = require("bs4").BeautifulSoup(page, "html.parser")
    for element in soup.select("main :is(script, link, meta, base, iframe, object, embed)"):
        element.decompose()
    for link in soup.select("main a[href]"):
        _check_link(link, folder)
    heading = soup.select_one("main h1")  # the page's header shows it already
    if heading is not None and heading.get_text() in (title, soup.select_one("header.first h1").get_text()):
        heading.extract()
    elif heading is not None:  # it has formulas or emphasis, which the plain title lacks
        soup.select_one("header.first h1").replace_with(heading.extract())
    sections = [heading for heading in soup.select("main h2") if heading.get_text(strip=True)]
    if len(sections) > 2:
        contents = soup.new_tag("nav", attrs={"class": "contents", "aria-label": "contents"})
        used_ids = {element["id"] for element in soup.select("[id]")}
        for place, section in enumerate(sections):
            if not section.get("id"):
                section["id"] = next(n for k in range(1000) if (n := f"section-{place + k}") not in used_ids)
                used_ids.add(section["id"])
            link = soup.new_tag("a", href=f"#{section['id']}")
            link.string = section.get_text(" ", strip=True)
            contents.append(link)
        soup.select_one("header.first").append(contents)
    return _with_scripts(soup)


def _check_link(link: Any, folder: Path) -> None:
    """Make a link to a file that is not where the page lies, such as another notebook, the name of that file."""
    try:
        parts = urlsplit(link["href"])
        path = Path(unquote(parts.path))
        if parts.scheme or parts.netloc or not parts.path or (folder / path).exists():
            return
    except (ValueError, OSError):  # no address, or no path
        return
    if path.name not in link.get_text():
        link.append(f" ({path.name})")
    link.name, link.attrs = "span", {"title": str(path)}


def _with_scripts(soup: Any) -> str:
    """Return the page with those of our scripts that its outputs need, and a security policy that allows only these."""
    scripts = [
        (_STATIC / name).read_text(encoding="utf-8") + "\nupgrade();\n"
        for attribute, name in _SCRIPTS.items()
        if soup.select_one(f"main [{attribute}]")
    ]
    if not scripts:
        return str(soup)
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts]
    policy = soup.select_one('meta[http-equiv="Content-Security-Policy"]')
    policy["content"] = f"{policy['content']}; script-src {' '.join(digests)}"
    before, body, after = str(soup).rpartition("</body>")
    elements = "".join(f'<script type="module">{script}</script>\n' for script in scripts)
    return f"{before}{elements}{body}{after}"


def _cut_where_it_stopped(nb: NotebookNode) -> int:
    """Drop everything after the last cell that ran, and return the number of dropped code cells."""
    code = [i for i, cell in enumerate(nb.cells) if cell.cell_type == "code"]
    ran = [i for i in code if nb.cells[i].metadata.get("papermill", {}).get("start_time")]
    last = ran[-1] if ran else -1
    nb.cells = nb.cells[: last + 1]
    return sum(i > last for i in code)


def title(nb: NotebookNode) -> str | None:
    """Return the first level-1 heading of a notebook, or None."""
    lines = (line for cell in nb.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line[2:].strip() for line in lines if line.startswith("# ")), None)


def prepare() -> None:
    """Import, compile and cache what `render` needs, so that the first page takes no longer than others."""
    v4 = require("nbformat").v4
    resources = {"metadata": {"name": "", "path": ""}, "report": {}}
    page, _ = _exporter().from_notebook_node(v4.new_notebook(cells=[v4.new_code_cell("print()")]), resources=resources)
    _finished(page, "", Path())


def _exporter() -> Any:
    require("nbconvert")
    from jinja2 import pass_context
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    from .formulas import markdown_to_html
    from .pictures import embedded

    class Report(HTMLExporter):
        @pass_context
        def markdown2html(self, context: Any, source: str) -> str:
            folder = context["resources"]["metadata"]["path"]
            attachments = context.get("cell", {}).get("attachments", {})
            return markdown_to_html(
                source, escape=False, attachments=attachments, embed_images=True, path=folder, exclude_anchor_links=True
            )

    report = Report(
        config=Config(CoalesceStreamsPreprocessor={"enabled": True}),
        template_name="workbench",
        extra_template_basedirs=[str(_TEMPLATES)],
        exclude_input=False,
        embed_images=True,
    )
    report.register_filter("embedded", embedded)
    return report
