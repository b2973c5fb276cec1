"""The first screen of a report and of an index shows the verdict, and nothing is wider than a small screen."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat import v4

from workbench import record_comparison
from workbench.notebook import comparison as module
from workbench.notebook import render
from workbench.notebook.dark import darkened
from workbench.notebook.index import Index
from workbench.notebook.run import Run


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that recorded a comparison of five splits, with long names and a long environment."""
    outputs: list[Any] = []

    def display(_: str, __: list[str], data: Any, stamp: Any) -> None:
        outputs.append(v4.new_output("display_data", data, metadata={"workbench": stamp}))

    monkeypatch.setattr(module, "_display", display)
    plain = [5.6, 5.1, 5.4, 5.9, 5.3]
    scores = {
        name: {
            "rmse": [v + by for v in plain],
            "nll": [v / 2 + by / 3 for v in plain],
            "crps": plain,
            "picp90": [0.9] * 5,
        }
        for name, by in (("baseline", 0.0), ("vote", -0.8), ("vote + sculpt + neo", -0.7), ("sample", 0.0))
    }
    record_comparison(
        scores, passes={"baseline": 1, "vote": 5}, units={"rmse": "MPa"}, labels={"rmse": "RMSE"}, rows=(900, 100)
    )
    run = Run(
        "one", "elsewhere/one.ipynb", str(tmp_path / "one.ipynb"), "ok", 61.0, {"data": "concrete", "seed": 0},
        environment={"git": "v1", "torch": "2.11", "packages": "a_very_long_name_" * 12},
    )  # fmt: skip
    cells = [v4.new_markdown_cell("# Which wrapper?\n\nWords before."), v4.new_code_cell("x = 1", outputs=outputs)]
    cells += [v4.new_markdown_cell(f"## Section {i}\n\n" + "word " * 300) for i in range(4)]
    nbformat.write(v4.new_notebook(cells=cells, metadata={"workbench": asdict(run)}), run.output)
    return Path(run.output)


@pytest.mark.slow
def test_a_report_opens_with_its_answer(executed: Path) -> None:
    soup = BeautifulSoup(render(executed).read_text(encoding="utf-8"), "html.parser")
    first = soup.select_one("header.first")
    assert first is not None
    assert [tag.name for tag in first.find_all(["h1", "figure", "nav"])] == ["h1", "figure", "nav"]
    assert "vote (by 0.8" in first.get_text()
    assert len(first.select(".strip-row.better")) == 2
    assert len(first.select(".track")[0].select("i")) == 5
    assert [link["href"] for link in first.select("nav a")] == [f"#{h['id']}" for h in soup.select("main h2")]
    assert len(soup.select("h1")) == 1
    assert soup.select("body > footer .banner .environment")
    assert not soup.select("main ~ header, main .banner")


def test_an_index_opens_with_the_answer_of_each_run(executed: Path) -> None:
    index = Index(executed.parent)
    index.write()
    soup = BeautifulSoup((executed.parent / "index.html").read_text(encoding="utf-8"), "html.parser")
    section = soup.select_one("main section")
    assert section is not None
    order = [tag.name if not tag.get("class") else tag["class"][0] for tag in section.find_all(recursive=False)]
    assert order.index("verdict") < order.index("counts")
    assert "vote (by 0.8" in section.select(".verdict")[0].get_text()


@pytest.mark.parametrize(("runs", "wanted"), [(3, []), (4, ["1 more answer"]), (5, ["2 more answers"])])
def test_an_index_folds_all_answers_but_three(executed: Path, runs: int, wanted: list[str]) -> None:
    for i in range(1, runs):
        nb, output = nbformat.read(executed, 4), executed.with_stem(f"one_{i}")
        nb.metadata["workbench"] |= {"name": output.stem, "output": str(output), "parameters": {"seed": i}}
        nbformat.write(nb, output)
    Index(executed.parent).write()
    soup = BeautifulSoup((executed.parent / "index.html").read_text(encoding="utf-8"), "html.parser")
    assert [tag.get_text() for tag in soup.select("main summary") if "answer" in tag.get_text()] == wanted


def test_a_darkened_figure_is_as_before_afterwards() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.subplots()
    (line,) = ax.plot([0, 1], color="black")
    (blue,) = ax.plot([1, 0], color="#0072B2")
    title = ax.set_title("t")
    before = [(a, a.get_facecolor()) for a in (figure.patch, ax.patch)]
    with darkened(figure):
        assert line.get_color()[0] > 0.9
        assert blue.get_color() == "#0072B2"
        assert title.get_color()[0] > 0.9
        assert ax.get_facecolor()[0] < 0.2
    assert line.get_color() == title.get_color() == "black"
    assert before == [(a, a.get_facecolor()) for a in (figure.patch, ax.patch)]
