"""The index of a folder of reports, from executed notebooks written by hand, without kernels."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers import executed_reports
from helpers.executed_reports import PNG, executed, own_text, page
from matplotlib.figure import Figure
from nbformat import v4
from PIL import Image
from torchmetrics import Metric

from workbench.experiments.directions import directions, higher_is_better, metric_of
from workbench.experiments.paired import Comparison, differences
from workbench.metrics import modules
from workbench.notebook.index import Index
from workbench.notebook.pictures import THUMBNAIL, embedded, thumbnail
from workbench.notebook.plots import grid_plot
from workbench.notebook.tables import runs_table, summary_table

folder = executed_reports.folder


def test_columns_of_the_table_have_names_of_their_own(tmp_path: Path) -> None:
    executed(tmp_path, "run", {"metric": "rmse", "value": 3, "n": 1}, rmse=0.5)
    Index(tmp_path).write()
    row = next(csv.DictReader((tmp_path / "index.csv").read_text().splitlines()))
    assert (row["metric"], float(row["value"]), row["n"]) == ("rmse", 0.5, "1")
    assert (row["parameter metric"], row["parameter value"]) == ("rmse", "3")


def test_the_page_lists_every_run_with_all_its_numbers(folder: Path) -> None:
    text, soup = page(folder)
    table = soup.select("table.runs")[0]
    heads = [own_text(head.button) for head in table.select("thead th") if head.button]
    assert heads == ["run", "status", "data", "seed", "accuracy", "sculpt_rmse", "vote_rmse", "seconds", "peak MiB"]
    # in the button, where it stands behind the last word of a name that wraps
    assert [arrow.get_text() for arrow in table.select("thead th button > .arrow")] == ["\xa0↑", "\xa0↓", "\xa0↓"]
    rows = {row.th.a.get_text() if row.th.a else row.th.get_text(): row for row in table.select("tbody tr") if row.th}
    assert list(rows) == ["many_a_0", "many_a_1", "many_b_0", "many_b_1", "many_c_0", "many_c_1"]
    assert [cell["data-value"] for cell in rows["many_b_0"].select("td")] == [
        "ok", "b", "0", "0.5", "30.0", "10.0", "2.0", "100"
    ]  # fmt: skip
    assert rows["many_a_0"].select_one("a")["href"] == "many_a_0.html"
    assert rows["many_c_1"].select_one("a") is None
    assert "waiting" in rows["many_c_1"].get_text()
    assert "ValueError: &lt;bad&gt; &amp; worse" in text
    chips = [chip.get_text() for chip in soup.select(".counts li")]
    assert chips == ["4 ok", "1 failed", "1 waiting"]
    same = {line.dt.get_text(): line.dd.get_text() for line in soup.select("dl.same div") if line.dt and line.dd}
    assert same == {"epochs": "5", "git": "v1", "torch": "2.9", "diabetes": "ab" * 32}


def test_the_best_is_marked_among_runs_that_ended_well(folder: Path) -> None:
    _, soup = page(folder)
    best = {
        (row.th.get_text(), cell["data-value"])
        for row in soup.select("table.runs tbody tr")
        for cell in row.select("td.best")
        if row.th
    }
    # higher accuracy, lower errors; the failed run's 0.001 does not count
    assert best == {
        ("many_a_1", "0.6"), ("many_b_1", "0.6"), ("many_a_0", "1.0"), ("many_b_0", "10.0"), ("many_a_1", "1.5")
    }  # fmt: skip


@pytest.mark.slow
def test_the_summary_averages_over_seeds_and_compares_within_a_data_set(folder: Path) -> None:
    index = Index(folder)
    table = summary_table([entry for entry in index.entries.values() if entry.run.status == "ok"])
    assert table is not None
    columns = {column.name: column for column in table.columns}
    assert list(columns) == ["data", "of", "accuracy", "rmse", "runs"]
    rows = list(zip(*([cell.value for cell in columns[name].cells] for name in ("data", "of")), strict=True))
    rmse = dict(zip(rows, columns["rmse"].cells, strict=True))
    assert rmse["a", "vote"].value == 1.5
    assert rmse["a", "vote"].spread == f" ± {statistics.stdev([1.0, 2.0]):.2g}"
    assert rmse["b", "sculpt"].value == 30.0  # the NaN is left out
    assert [row for row, cell in rmse.items() if cell.best] == [("a", "vote")]  # of b the two have other seeds
    assert summary_table([next(iter(index.entries.values()))]) is not None  # two wrappers in one run
    assert summary_table([]) is None


def stars(table: Any) -> dict[str, list[Any]]:
    """Column -> runs that are marked in it."""
    names = [row.run.name if hasattr(row, "run") else row for row in table.rows]
    return {
        column.name: [name for name, cell in zip(names, column.cells, strict=True) if cell.best]
        for column in table.columns
        if any(cell.best for cell in column.cells)
    }


def grid(folder: Path, runs: list[tuple[str, dict[str, Any], dict[str, float]]]) -> list[Any]:
    for name, parameters, numbers in runs:
        executed(folder, name, parameters, **numbers)
    return list(Index(folder).entries.values())


@pytest.mark.parametrize(("parameter", "first", "second"), [("data", "mine", "yours"), ("of", "energy", "yacht")])
def test_no_star_over_other_data(parameter: str, first: str, second: str, tmp_path: Path) -> None:
    entries = grid(
        tmp_path,
        [
            (f"r_{data}_{wrapper}", {parameter: data, "wrapper": wrapper}, {"crps": crps})
            for data, wrapper, crps in (
                (first, "vote", 0.3), (first, "plain", 0.4), (second, "vote", 3.2), (second, "plain", 3.0)
            )
        ],
    )  # fmt: skip
    assert stars(runs_table(entries))["crps"] == sorted([f"r_{first}_vote", f"r_{second}_plain"])
    shared = grid(tmp_path / "one", [("r", {}, {"energy_crps": 0.3, "yacht_crps": 3.0, "train_crps": 0.1})])
    summary = summary_table(shared)
    assert summary is not None
    assert not stars(summary)  # names of metrics that speak of different rows


def test_no_star_over_some_of_the_rows(tmp_path: Path) -> None:
    numbers = {"rmse": 3.0, "rmse_of_the_surer_half": 2.0, "error_of_all": 3.0, "error_of_answered": 2.0}
    accuracies = {"accuracy": 0.98, "accuracy_clean": 1.0}
    summary = summary_table(grid(tmp_path, [("r", {}, {**numbers, **accuracies})]))
    assert summary is not None
    assert not stars(summary)
    models = summary_table(grid(tmp_path / "models", [("r", {}, {"rmse_of_plain": 3.0, "rmse_of_vote": 2.0})]))
    assert models is not None
    assert [subject for _, subject in stars(models)["rmse"]] == ["of_vote"]


def test_no_star_over_data_of_another_checksum(tmp_path: Path) -> None:
    entries = grid(tmp_path, [("r_a", {"lr": 0.1}, {"rmse": 1.0}), ("r_b", {"lr": 0.2}, {"rmse": 2.0})])
    assert stars(runs_table(entries)) == {"rmse": ["r_a"]}
    entries[1].run.data = {"diabetes": "cd" * 32}
    assert stars(runs_table(entries)) == {}


def test_stars_are_given_split_for_split(tmp_path: Path) -> None:
    numbers = {("vote", 0): 1.0, ("plain", 0): 1.5, ("vote", 1): 0.5, ("plain", 1): 0.4, ("sculpt", 1): 0.1}
    runs = [(f"r_{w}_{s}", {"wrapper": w, "split": s}, {"rmse": value}) for (w, s), value in numbers.items()]
    entries = grid(tmp_path, runs)
    assert stars(runs_table(entries))["rmse"] == ["r_sculpt_1", "r_vote_0"]
    summary = summary_table(entries)
    assert summary is not None
    best = [c.best for c in next(c for c in summary.columns if c.name == "rmse").cells]
    wrappers = [c.value for c in next(c for c in summary.columns if c.name == "wrapper").cells]
    assert dict(zip(wrappers, best, strict=True)) == {"vote": True, "plain": False, "sculpt": False}


def test_the_narrowest_interval_is_best_only_where_it_covers(tmp_path: Path) -> None:
    numbers = {"a": (1.0, 0.5), "b": (4.0, 0.9), "c": (3.0, 0.896), "d": (3.5, 0.95), "e": (0.5, None)}
    runs = [
        (f"r_{name}", {"wrapper": name}, {"mpiw90": width, "vote_mpiw90": width, "sharpness": width}
         | ({} if covered is None else {"picp90": covered, "vote_picp90": covered}))
        for name, (width, covered) in numbers.items()
    ]  # fmt: skip
    starred = stars(runs_table(grid(tmp_path, runs)))
    assert starred == {"mpiw90": ["r_c"], "vote_mpiw90": ["r_c"], "sharpness": ["r_c"]}


def test_no_star_is_given_for_noise_where_splits_were_compared(tmp_path: Path) -> None:
    splits = {"plain": [5.0, 5.2, 5.1], "vote+sculpt": [4.0, 4.1, 4.1], "noisy": [4.0, 6.9, 3.9]}
    by = {
        model: {"rmse": values, "nll": [v + len(model) * (-1) ** i for i, v in enumerate(values)]}
        for model, values in splits.items()
    }
    numbers = {
        f"{model.replace('+', '_')}_{metric}": statistics.fmean(values)
        for model, scores in by.items()
        for metric, values in scores.items()
    }
    entries = grid(tmp_path, [("r_0", {"data": "a"}, {**numbers, "vote_sculpt_crps": 1.0, "plain_crps": 2.0})])
    best = [("[]", "vote_sculpt")]
    assert stars(summary_table(entries)) == {"rmse": best, "nll": [("[]", "noisy")], "crps": best}
    labels, higher = {"rmse": "RMSE", "nll": "NLL"}, {"rmse": False, "nll": False}
    compared = Comparison(by, [0, 1, 2], higher, "plain", "rmse", labels=labels, units={"rmse": "MPa"})
    assert {pair for pair, d in differences(compared).items() if d.better} == {("vote+sculpt", "rmse")}
    entries[0].comparisons = {"of splits": compared}
    table = summary_table(entries)
    assert stars(table) == {"RMSE (MPa)": best, "crps": best}
    entries[0].comparisons = {
        "of one": Comparison({m: {"rmse": v["rmse"][:1]} for m, v in by.items()}, [0], higher, "plain", "rmse")
    }
    assert stars(summary_table(entries))["rmse"] == best


def lines_of(monkeypatch: pytest.MonkeyPatch, runs: list[Any]) -> list[Any]:
    """The lines of a plot of a grid that join points."""
    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    assert grid_plot(runs) is not None
    return [
        line for ax in figures[0].axes for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata())
    ]


@pytest.mark.slow
def test_no_line_joins_different_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ("energy", "yacht", "mine")
    over_data: list[Any] = [({"data": d}, {"rmse": i}) for i, d in enumerate(data)]
    assert not lines_of(monkeypatch, over_data)
    by_wrapper: list[Any] = [
        ({"data": d, "wrapper": w}, {"rmse": i + len(w)}) for i, d in enumerate(data) for w in "ab"
    ]
    assert not lines_of(monkeypatch, by_wrapper)
    splits: list[Any] = [({"split": s}, {"rmse": s}) for s in range(4)]
    assert not lines_of(monkeypatch, splits)
    epochs: list[Any] = [
        ({"data": d, "wrapper": w, "epochs": n}, {"rmse": 10 * i + n})
        for i, d in enumerate(data) for w in "ab" for n in (1, 2)
    ]  # fmt: skip
    assert not lines_of(monkeypatch, epochs)
    numbers: list[Any] = [
        ({"data": d, "epochs": n}, {"rmse": 10.0 * i + n}) for i, d in enumerate(data) for n in (1, 2)
    ]
    lines = lines_of(monkeypatch, numbers)
    assert sorted(tuple(line.get_ydata()) for line in lines) == [(1, 2), (11, 12), (21, 22)]  # each of one data set
    many: list[Any] = [({"data": f"d{i}", "epochs": n}, {"rmse": i + n}) for i in range(9) for n in (1, 2)]
    assert not lines_of(monkeypatch, [({**p, "data_set": p["data"]}, s) for p, s in many])


def test_the_page_loads_nothing_and_runs_only_its_own_script(folder: Path) -> None:
    text, soup = page(folder)
    policy = soup.select_one("meta[http-equiv=Content-Security-Policy]")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert str(policy["content"]) == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"src=\"(?!data:)|url\(|@import|<link|https?://", text)
    assert all(image["alt"] for image in soup.select("img"))
    assert all(
        image["src"].startswith("data:image/") and image.find_parent("a")["href"].endswith(".html#figure-curve")
        for image in soup.select(".strip img")
    )
    assert len(soup.select(".strip img")) == 5
    plot = soup.select_one("img.plot")
    assert plot is not None
    assert "rmse over data" in str(plot["alt"])


def test_json_holds_all_exactly_and_csv_a_row_for_each_number(folder: Path) -> None:
    content = json.loads((folder / "index.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    runs = {run["name"]: run for run in content["runs"]}
    assert runs["many_b_1"]["records"]["sculpt_rmse"] == {"__float__": "nan"}
    assert runs["many_a_0"]["records"]["history"] == [1.0, 3.0]
    assert runs["many_a_0"]["data"] == {"diabetes": "ab" * 32}
    assert (runs["many_c_1"]["status"], runs["many_c_1"]["page"]) == ("waiting", "")
    assert runs["many_c_0"]["error"] == "ValueError: <bad> & worse"
    assert str(folder) not in (folder / "index.json").read_text(encoding="utf-8")  # it can be moved, and published
    with (folder / "index.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["notebook", "run", "status", "data", "epochs", "seed", "metric", "value"]
    values = {(row["run"], row["metric"]): float(row["value"]) for row in rows}
    assert values["many_b_0", "sculpt_rmse"] == 30.0
    assert values["many_a_0", "seconds"] == 2.0
    assert len(rows) == 4 * 5 + 1


@pytest.mark.slow
def test_other_notebooks_in_the_folder_have_sections_of_their_own(folder: Path) -> None:
    executed(folder, "other", {"n": 1}, rmse=1.0)
    nbformat.write(v4.new_notebook(), folder / "never-run.ipynb")
    Index(folder).write()
    _, soup = page(folder)
    assert len(soup.select("h1")) == 2
    assert "never-run" not in soup.get_text()
    assert len(soup.select("table.runs")) == 2


def test_plots_are_of_what_changes() -> None:
    assert grid_plot([({"n": 1}, {"rmse": 1.0})]) is None
    assert grid_plot([({"n": n}, {"rows": 5.0}) for n in (1, 2)]) is None
    plot = grid_plot([({"n": n, "lr": lr}, {"rmse": n * lr, "rows": 5.0}) for n in (1, 2) for lr in (0.1, 0.2)])
    assert plot is not None
    assert plot[1] == "rmse over n, for lr 0.1,lr 0.2"
    plot = grid_plot([({"seed": s}, {"vote_rmse": s, "sculpt_rmse": 2.0 * s}) for s in (1, 2)])
    assert plot is not None
    assert plot[1] == "rmse over vote, sculpt"  # lines over seeds would mean nothing


def test_thumbnails_are_small_and_embedded_pictures_lose_nothing() -> None:
    address = thumbnail(PNG)
    with Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))) as small:
        assert small.width <= THUMBNAIL[0]
        assert small.height <= THUMBNAIL[1]
    assert len(address) < 20_000
    whole = embedded(base64.b64encode(PNG).decode())
    assert len(whole) < len(PNG)
    with Image.open(io.BytesIO(base64.b64decode(whole.split(",")[1]))) as now, Image.open(io.BytesIO(PNG)) as before:
        assert now.convert("RGB").tobytes() == before.convert("RGB").tobytes()


def test_directions_are_those_of_the_metrics() -> None:
    for name in modules.__all__:
        metric = getattr(modules, name)
        assert issubclass(metric, Metric)
        known = name.lower() if name.isupper() or name == "FPR95" else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        known = {"adaptiveece": "adaptive_ece", "mean_io_u": "mean_iou"}.get(known, known)
        assert directions()[known] == metric.higher_is_better, name
        assert higher_is_better(f"vote_sculpt_{known}") == metric.higher_is_better
        assert metric_of(f"vote_{known}") == ("vote", known)
    assert higher_is_better("parameters") is None
