"""render: one HTML file that loads nothing and states how the run ended."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import write_notebook
from nbformat import v4

from workbench.errors import WorkbenchWarning
from workbench.notebook import Run, read_records, render
from workbench.notebook.curves import curves_plot
from workbench.notebook.formulas import formula, markdown_to_html
from workbench.notebook.plots import grid_plot

REQUESTS = re.compile(
    r"""(?:src|href|data|action|poster)\s*=\s*(?!["']?(?:data:|\#))|url\(\s*(?!["']?(?:data:|\#))|@import|<script|<link""",
    re.IGNORECASE,
)


def page_of(target: Path) -> tuple[str, BeautifulSoup]:
    page = target.read_text(encoding="utf-8")
    return page, BeautifulSoup(page, "html.parser")


def shown(folder: Path, *cells: nbformat.NotebookNode, **options: Any) -> tuple[str, BeautifulSoup]:
    path = folder / "shown.ipynb"
    nbformat.write(v4.new_notebook(cells=list(cells)), path)
    return page_of(render(path, **options))


def html_cell(html: str, **metadata: Any) -> nbformat.NotebookNode:
    return v4.new_code_cell("1", outputs=[v4.new_output("display_data", {"text/html": html})], metadata=metadata)


@pytest.fixture
def ok(throwaway: Callable[[str], Run], tmp_path: Path) -> tuple[Run, str, BeautifulSoup]:
    run = throwaway("ok")
    return run, *page_of(render(run.output, tmp_path / "new" / "ok.html"))


@pytest.fixture
def failed(throwaway: Callable[[str], Run], tmp_path: Path) -> tuple[Run, str, BeautifulSoup]:
    run = throwaway("failed")
    return run, *page_of(render(run.output, tmp_path / "failed.html"))


@pytest.mark.slow
def test_the_file_lies_beside_the_notebook(throwaway: Callable[[str], Run], tmp_path: Path) -> None:
    copy = Path(shutil.copy(throwaway("ok").output, tmp_path / "copy.ipynb"))
    assert render(copy) == tmp_path / "copy.html"
    assert (tmp_path / "copy.html").stat().st_size < 100_000


@pytest.mark.slow
def test_nothing_is_loaded_from_anywhere(ok: tuple[Run, str, BeautifulSoup]) -> None:
    _, page, soup = ok
    assert not REQUESTS.findall(page)
    assert REQUESTS.findall("<img src='https://a.b/c.png'> url(x.png)") == ["src=", "url("]
    policy = soup.select_one("head meta[http-equiv='Content-Security-Policy']")
    assert policy is not None
    assert str(policy["content"]).startswith("default-src 'none'; img-src data:;")
    assert str(policy["content"]).endswith("object-src 'none'; base-uri 'none'; form-action 'none'")


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "image/svg+xml"])
def test_alternative_texts_and_pictures_stay_within_their_attributes(tmp_path: Path, kind: str) -> None:
    evil = 'x" onerror="alert(1)"><b>'
    data = "<svg/>" if "svg" in kind else f'AAAA" onload="{evil}'
    output = v4.new_output("display_data", {kind: data}, metadata={kind: {"alt": evil, "width": evil}})
    _, soup = shown(tmp_path, v4.new_code_cell("1", outputs=[output]), v4.new_markdown_cell(f"![{evil}](a.png)"))
    picture = soup.select("main .output img")[0]
    assert picture["alt"] == evil
    assert set(picture.attrs) <= {"src", "alt", "width"}
    assert all(set(image.attrs) <= {"src", "alt", "width"} for image in soup.select("img"))


def test_a_broken_record_is_named_and_costs_no_page(tmp_path: Path) -> None:
    for stamp in ({"figure": "a"}, {"table": 3}, {"check": {"claim": "x"}}, {"records": [1]}):
        output = v4.new_output("display_data", {"text/plain": "shown"}, metadata={"workbench": stamp})
        cell = v4.new_code_cell("1", outputs=[output], id="abc")
        with pytest.raises(ValueError, match=r"the records of cell 1 \(abc\) are damaged"):
            read_records(v4.new_notebook(cells=[cell]))
        page, _ = shown(tmp_path, cell)
        assert "shown" in page


def test_what_outputs_would_load_is_dropped_or_forbidden(tmp_path: Path) -> None:
    away = "https://example.org/x"
    evil = (
        f"<script src='{away}'></script><link href='{away}'><meta http-equiv='refresh' content='0;{away}'>"
        f"<base href='{away}'><iframe src='{away}'></iframe><object data='{away}'></object><embed src='{away}'>"
        "<b>what stays</b>"
    )
    page, soup = shown(tmp_path, html_cell(evil))
    assert "what stays" in page
    assert "example.org" not in page
    # pictures by address stay in the page, where its policy keeps the browser from asking for them
    page, soup = shown(tmp_path, html_cell(f"<img src='{away}'>"))
    policy = page.index("Content-Security-Policy")
    assert policy < page.index(away)
    assert soup.select("img")[0]["alt"]


def test_only_our_own_script_runs_and_only_for_the_rows_of_a_plot(tmp_path: Path) -> None:
    html = '<div data-wb-linked="{}"><p>instead</p></div><script>alert(1)</script>'
    page, soup = shown(tmp_path, html_cell(html))
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.S)
    module = files("workbench.widgets").joinpath("static/linked.js").read_text(encoding="utf-8")
    assert script == f"{module}\nupgrade();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = soup.select_one("meta[http-equiv=Content-Security-Policy]")
    assert policy is not None
    assert str(policy["content"]).endswith(f"; script-src 'sha256-{digest}'")
    assert str(policy["content"]).startswith("default-src 'none';")
    assert page.count("<script") == 1
    assert "<p>instead</p>" in page


def test_the_banner_says_how_it_went_and_with_what(ok: tuple[Run, str, BeautifulSoup]) -> None:
    run, _, soup = ok
    banner = soup.select_one(".banner")
    assert banner is not None
    assert "bad" not in banner["class"]
    text = " ".join(banner.get_text(" ").split())
    assert f"ok after {run.seconds:.1f} s" in text
    assert "n 3 rate 0.5 name x tags a" in text  # in the order of the parameters cell
    for name, value in run.environment.items():
        assert f"{name} {value}" in text
    assert soup.title is not None
    assert soup.title.string == "A small notebook"


def test_results_are_shown_and_code_is_folded(ok: tuple[Run, str, BeautifulSoup]) -> None:
    _, page, soup = ok
    assert "record_figure" in soup.select("main .code")[1].get_text()
    assert ".code { display: none" in page
    (switch,) = soup.select("input#code")
    assert "checked" not in switch.attrs
    assert "a &lt; b" in page
    assert [cell.get_text() for cell in soup.select("table")[1].select("thead th")] == ["wrapper", "rmse"]
    recorded, plain = soup.select("img")
    (dark,) = soup.select("picture source")
    assert dark["media"] == "screen and (prefers-color-scheme: dark)"
    assert str(dark["srcset"]) != recorded["src"]
    assert (recorded["alt"], bool(recorded["width"])) == ("a straight line", True)
    assert plain["alt"]
    assert all(str(image["src"]).startswith("data:image/webp;base64,") for image in (recorded, plain))
    assert recorded["id"] == "figure-line_plot"  # where the index links to
    assert soup.select("meta[name=viewport]")
    assert "prefers-color-scheme: dark" in page
    assert "Closing words." in page


def test_code_is_shown_on_request(throwaway: Callable[[str], Run], tmp_path: Path) -> None:
    page, soup = page_of(render(throwaway("ok").output, tmp_path / "code.html", code=True))
    assert "checked" in soup.select("input#code")[0].attrs
    assert ".highlight" in page


@pytest.mark.slow
def test_a_failed_run_says_why_and_shows_what_there_was(failed: tuple[Run, str, BeautifulSoup]) -> None:
    _, page, soup = failed
    banner = soup.select_one(".banner.bad[role=alert]")
    assert banner is not None
    assert "failed after" in " ".join(banner.get_text(" ").split())
    assert "ValueError: the <loss> is NaN" in banner.get_text()
    traceback = soup.select_one("main .error pre")
    assert traceback is not None
    assert "raise ValueError" in traceback.get_text()
    assert "<loss>" not in page
    assert "before" in soup.get_text()
    stopped = soup.select_one("#stopped")
    assert stopped is not None
    assert "1 later code cell did not run" in stopped.get_text()
    assert "Closing words." not in page  # it would read as if there were results
    assert "papermill" not in "".join(tag.get_text() for tag in soup.select("main"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reason"), [("timeout", "took longer than 2 s"), ("died", "exit code 3")])
def test_runs_without_a_traceback_say_why_too(
    throwaway: Callable[[str], Run], tmp_path: Path, name: str, reason: str
) -> None:
    _, soup = page_of(render(throwaway(name).output, tmp_path / "page.html"))
    banner = soup.select_one(".banner.bad")
    assert banner is not None
    assert name in banner.get_text()
    assert reason in banner.get_text()
    assert "1 later code cell did not run" in soup.get_text()


def test_a_notebook_that_others_ran_has_no_banner(tmp_path: Path) -> None:
    stream = [v4.new_output("stream", name=name, text=f"to {name}\n") for name in ("stdout", "stderr")]
    page, soup = shown(
        tmp_path,
        v4.new_markdown_cell("text\n\n# Title *here*"),
        v4.new_code_cell("1", outputs=stream),
        html_cell("hidden", tags=["no-report"]),
    )
    assert not soup.select(".banner")
    assert "hidden" not in page
    assert soup.select("main pre:not(.code pre)")[0].get_text() == "to stdout\n"
    assert "to stderr" in soup.select("details")[0].get_text()


def test_pictures_beside_the_notebook_are_embedded(tmp_path: Path) -> None:
    (tmp_path / "dot.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    _, soup = shown(tmp_path, v4.new_markdown_cell("![a dot](dot.svg)"))
    assert str(soup.select("img")[0]["src"]).startswith("data:image/svg+xml;base64,")
    assert soup.select("img")[0]["alt"] == "a dot"


def test_links_to_files_that_are_elsewhere_are_names(tmp_path: Path) -> None:
    (tmp_path / "beside it.csv").write_text("1")
    kept = ["beside%20it.csv", "#a", "https://example.org/x.ipynb", "mailto:a@b.org", "//[odd", "?page=2"]
    text = "see [risks.ipynb](risks.ipynb), [there](../more%20of/it.ipynb#part), [**bold**](gone.csv)"
    links = " ".join(f'<a href="{address}">link</a>' for address in kept)
    _, soup = shown(tmp_path, v4.new_markdown_cell(f"{text} {links}"))
    assert [link["href"] for link in soup.select("main a")] == kept
    assert soup.select_one("main p").get_text().startswith("see risks.ipynb, there (it.ipynb), bold (gone.csv) link")
    assert [span["title"] for span in soup.select("main p span")] == ["risks.ipynb", "../more of/it.ipynb", "gone.csv"]


def test_formulas_are_drawn(ok: tuple[Run, str, BeautifulSoup], tmp_path: Path) -> None:
    _, _, soup = ok
    assert [svg["aria-label"] for svg in soup.select("svg.formula")] == [r"\sigma^2"]
    source = "as $a<b$ or\n\n$$\\frac{1}{2}$$\n\n\\begin{equation}x_1\\end{equation} but `$HOME` stays"
    soup = BeautifulSoup(markdown_to_html(source), "html.parser")
    assert [svg["aria-label"] for svg in soup.select("svg")] == ["a<b", r"\frac{1}{2}", "x_1"]
    assert [("block" in svg["class"]) for svg in soup.select("svg")] == [False, True, True]
    assert "$" not in soup.get_text().replace("$HOME", "")
    assert not REQUESTS.findall(str(soup).replace('xlink:href="#', ""))


def test_a_formula_that_cannot_be_drawn_is_shown_as_code_and_said() -> None:
    with pytest.warns(WorkbenchWarning, match="is shown as TeX"):
        assert formula(r"\nosuchthing{x} < 1") == r"<code>\nosuchthing{x} &lt; 1</code>"


def test_drawing_formulas_leaves_matplotlib_as_it_is() -> None:
    import matplotlib.pyplot as plt

    before, figures = dict(plt.rcParams), plt.get_fignums()
    formula(r"\int_0^1 x\,dx", block=True)
    assert (dict(plt.rcParams), plt.get_fignums()) == (before, figures)


def test_settings_of_the_user_do_not_hide_formulas_or_ask_for_latex(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    runs = [({"n": n}, {"rmse": float(n)}) for n in (1, 2)]
    curves = {"a": {"loss": [(0, 1.0), (1, 0.5)]}}
    expected = formula("x^2"), grid_plot(runs), curves_plot(curves)
    monkeypatch.setenv("PATH", "")  # where LaTeX could be
    with plt.rc_context({"text.usetex": True}):
        assert (formula("x^2"), grid_plot(runs), curves_plot(curves)) == expected
    with plt.style.context("dark_background"):
        assert formula("x^2") == expected[0]


def test_what_is_no_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no notebook"):
        render(tmp_path / "none.ipynb")
    (tmp_path / "text.ipynb").write_text("hello")
    with pytest.raises(ValueError, match="not a Jupyter notebook"):
        render(tmp_path / "text.ipynb")
    assert not list(tmp_path.glob("*.html"))
    assert render(write_notebook(tmp_path / "never-run.ipynb", "1")).is_file()
