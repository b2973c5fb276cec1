"""record, record_figure and record_table, and what read_records returns."""

from __future__ import annotations

import base64
import datetime
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from workbench.notebook import read_records, record, record_check, record_comparison, record_figure, record_table

module = sys.modules["workbench.notebook.record"]


class Kernel:
    """Stands in for a kernel: collects what is displayed, and gives it back as a saved and re-read notebook."""

    def __init__(self, folder: Path) -> None:
        self.cell: tuple[str, str] = ("first", "run 1")
        self.path = folder / "executed.ipynb"
        self.outputs: list[nbformat.NotebookNode] = []

    def display(self, data: dict[str, str], *, raw: bool, metadata: dict[str, Any]) -> None:
        assert raw
        self.outputs.append(nbformat.v4.new_output("display_data", data, metadata=metadata))

    def saved(self) -> Path:
        cell = nbformat.v4.new_code_cell("", outputs=self.outputs)
        nb = nbformat.v4.new_notebook(cells=[cell])
        nbformat.validate(nb)
        nbformat.write(nb, self.path)
        return self.path


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    fake = Kernel(tmp_path)
    monkeypatch.setattr(module, "_execution", lambda: fake.cell)
    monkeypatch.setattr(module, "_recorded", {})
    monkeypatch.setattr("IPython.display.display", fake.display)
    return fake


def test_values_come_back_exactly(kernel: Kernel) -> None:
    values = {
        "third": 1 / 3,
        "tiny": 5e-324,
        "single": np.float32(0.1),
        "half": torch.tensor(0.1, dtype=torch.float16),
        "big": 2**62 + 1,
        "yes": np.bool_(True),
        "text": 'a "quote" & <tag> σ',
        "nothing": None,
        "array": np.array([[1.0, np.inf], [-np.inf, 0.25]]),
        "gradient": torch.tensor([1.5, 2.5], requires_grad=True),
        "nested": {"b": [1, {"c": (2, 3)}], "a": 0.1},
    }
    record(**values)
    records = read_records(kernel.saved())
    assert records == {
        **values,
        "single": float(np.float32(0.1)),
        "half": float(np.float16(0.1)),
        "yes": True,
        "array": [[1.0, math.inf], [-math.inf, 0.25]],
        "gradient": [1.5, 2.5],
        "nested": {"b": [1, {"c": [2, 3]}], "a": 0.1},
    }
    assert records["yes"] is True
    assert records["single"] != 0.1


def test_nan_survives_and_the_file_stays_valid_json(kernel: Kernel) -> None:
    record(loss=float("nan"), losses=[1.0, np.nan])
    text = kernel.saved().read_text(encoding="utf-8")
    assert "NaN" not in text
    records = read_records(kernel.path)
    assert math.isnan(records["loss"])
    assert records["losses"][0] == 1.0
    assert math.isnan(records["losses"][1])


def test_what_is_shown_is_escaped_and_short(kernel: Kernel) -> None:
    record(**{"a<b": "<script>"}, count=123456.7, share=0.123456, many=list(range(1000)))
    shown = kernel.outputs[0].data["text/html"]
    assert "<script>" not in shown
    assert "a&lt;b" in shown
    assert "123,457" in shown
    assert "0.1235" in shown
    assert len(shown) < 600


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, [3j], {"deep": [b"x"]}, {"__float__": "nan"}, np.array(["x", None, {}, set()])]
)
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="wrong_one"):
        record(fine=1, wrong_one=value)


@pytest.mark.parametrize("value", ["data-\udcff.csv", ["a", {"deep": "\ud800"}], {"\ud800": 1}])
def test_text_that_no_notebook_can_hold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"wrong_one.*: .* lone surrogates"):
        record(fine="\U0001f389", wrong_one=value)


LONE = "data-\udcff.csv"


@pytest.mark.parametrize(
    "call",
    [
        lambda: record(**{LONE: 1}),
        lambda: record_check(LONE, True),
        lambda: record_check("a claim", True, **{LONE: 1}),
        lambda: record_figure(LONE, Figure()),
        lambda: record_figure("plot", Figure(), alt=LONE),
        lambda: record_table(LONE, pd.DataFrame({"a": [1]})),
        lambda: record_table("table", pd.DataFrame([[1]], columns=pd.Index([LONE], dtype=object))),
        lambda: record_table("table", pd.DataFrame({"a": [1]}).style.set_caption(LONE)),
        lambda: record_comparison({"a": {"rmse": [1]}, LONE: {"rmse": [2]}}),
        lambda: record_comparison({"a": {LONE: [1]}, "b": {LONE: [2]}}, higher={LONE: True}),
        lambda: record_comparison({"a": {"rmse": [1]}, "b": {"rmse": [2]}}, units={"rmse": LONE}),
    ],
)
def test_names_that_no_notebook_can_hold_are_refused(call: Any, kernel: Kernel, monkeypatch: Any) -> None:
    for inside in (True, False):
        if not inside:
            monkeypatch.setattr(module, "_execution", lambda: None)
        with pytest.raises(ValueError, match=r"^record_.*data-.udcff.*lone surrogates|^record: .*lone surrogates"):
            call()
    assert kernel.outputs == []


def test_nothing_to_record_is_refused() -> None:
    with pytest.raises(TypeError, match="name=value"):
        record()


def test_outside_a_kernel_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    figure = Figure()
    for _ in range(2):
        record(rmse=1.0)
        record_figure("plot", figure)
        record_table("table", pd.DataFrame({"a": [1]}))
    assert capsys.readouterr().out == ""
    assert module._recorded == {}


@pytest.mark.slow
def test_reading_needs_neither_torch_nor_pandas(kernel: Kernel) -> None:
    record(rmse=0.5)
    code = (
        "import sys; from workbench.notebook import read_records, record; record(x=1);"
        f"assert read_records({str(kernel.saved())!r}) == dict(rmse=0.5);"
        "assert not {'torch', 'pandas', 'matplotlib', 'IPython'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_name_is_recorded_once(kernel: Kernel) -> None:
    record(rmse=1.0)
    with pytest.raises(ValueError, match="'rmse' is recorded already"):
        record(other=1.0, rmse=2.0)
    kernel.cell = ("second", "run 2")
    with pytest.raises(ValueError, match="'rmse' is recorded already"):
        record(rmse=2.0)
    record(other=1.0)
    record_table("rmse", pd.DataFrame({"a": [1]}))  # values, figures and tables each have names of their own
    assert len(kernel.outputs) == 3


def test_running_a_cell_again_is_no_second_recording(kernel: Kernel) -> None:
    record(rmse=1.0)
    kernel.cell = ("first", "run 2")
    kernel.outputs.clear()  # as a front end does
    record(rmse=2.0)
    assert read_records(kernel.saved()) == {"rmse": 2.0}


def test_reading_refuses_a_name_that_is_there_twice(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    record(rmse=1.0)
    monkeypatch.setattr(module, "_recorded", {})
    record(rmse=1.0)
    with pytest.raises(ValueError, match=r"'rmse' is recorded twice.*cell 1"):
        read_records(kernel.saved())


def test_a_figure_is_stored_sharp_and_shown_once(kernel: Kernel) -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    _, axes = plt.subplots(figsize=(3, 2))
    axes.plot([1, 2])
    record_figure("two_lines", axes, dpi=50)
    assert plt.get_fignums() == before
    png = read_records(kernel.saved()).figures["two_lines"]
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    told = kernel.outputs[0].metadata["image/png"]
    assert (told["width"], told["height"], told["alt"]) == (width // 2, height // 2, "two lines")
    assert width == pytest.approx(3 * 50 * 2, rel=0.15)
    assert base64.b64decode(kernel.outputs[0].data["image/png"]) == png


def test_a_figure_is_laid_out_once_for_light_and_dark_mode(kernel: Kernel) -> None:
    layouts = []

    class Counted(ConstrainedLayoutEngine):
        def execute(self, fig: Any) -> Any:
            layouts.append(fig)
            return super().execute(fig)

    engine = Counted()
    figure = Figure(layout=engine)
    axes = figure.subplots(1, 2)
    figure.colorbar(axes[0].imshow(np.eye(3)), ax=axes[0])
    record_figure("two_panels", axes[1])
    assert layouts == [figure]
    assert figure.get_layout_engine() is engine
    assert kernel.outputs[0].data["image/png"]


@pytest.mark.parametrize("wrong", [None, "plot.png", pd.DataFrame()])
def test_only_figures_are_figures(wrong: Any) -> None:
    with pytest.raises(TypeError, match="matplotlib Figure or Axes"):
        record_figure("plot", wrong)


def test_a_table_keeps_its_columns_in_order(kernel: Kernel) -> None:
    frame = pd.DataFrame(
        {"z": ["vote", "<b>"], "rmse": [0.1, np.nan], "a<b": pd.array([1, None], dtype="Int64")},
        index=pd.Index([10, 20], name="split"),
    )
    copy = frame.copy()
    record_table("results", frame)
    pd.testing.assert_frame_equal(frame, copy)
    columns = read_records(kernel.saved()).tables["results"]
    assert list(columns) == ["split", "z", "rmse", "a<b"]
    assert columns["split"] == [10, 20]
    assert columns["z"] == ["vote", "<b>"]
    assert columns["rmse"][0] == 0.1
    assert math.isnan(columns["rmse"][1])
    assert columns["a<b"] == [1, None]
    shown = kernel.outputs[0].data["text/html"]
    assert "<b>" not in shown
    assert "a&lt;b" in shown
    assert shown.count("–") == 2


def test_of_a_long_table_the_first_rows_are_shown_and_all_are_stored(kernel: Kernel) -> None:
    record_table("long", pd.DataFrame({"row": range(1200)}))
    assert read_records(kernel.saved()).tables["long"] == {"row": [*range(1200)]}
    data = kernel.outputs[0].data
    assert data["text/html"].count("<tr>") == 1 + 1000
    assert "the first 1,000 of 1,200 rows; all are stored" in data["text/html"]
    assert data["text/plain"].split() == ["row", *map(str, range(1000))]


def test_dates_of_a_table_are_stored_as_text(kernel: Kernel) -> None:
    days = pd.to_datetime(["2024-01-02", None])
    frame = pd.DataFrame({"day": days, "hour": pd.to_datetime(["2024-01-02 03:00+01:00", "2024-01-03 04:30+01:00"])})
    frame["date"] = [datetime.date(2024, 1, 2), None]
    record_table("series", frame)
    assert read_records(kernel.saved()).tables["series"] == {
        "day": ["2024-01-02T00:00:00", None],
        "hour": ["2024-01-02T03:00:00+01:00", "2024-01-03T04:30:00+01:00"],
        "date": ["2024-01-02", None],
    }
    assert "2024-01-02 00:00:00" in kernel.outputs[0].data["text/html"]


def test_a_styled_table_is_shown_as_it_is_styled(kernel: Kernel) -> None:
    style = pd.DataFrame({"wrapper": ["vote"], "rmse": [0.12345]}).style.format({"rmse": "{:.1f} MPa"})
    before = style.to_html(table_uuid="t")
    record_table("results", style)
    assert "0.1 MPa" in kernel.outputs[0].data["text/html"]
    assert read_records(kernel.saved()).tables["results"] == {"wrapper": ["vote"], "rmse": [0.12345]}
    assert style.to_html(table_uuid="t") == before


def test_tables_that_cannot_be_carried_are_refused() -> None:
    with pytest.raises(ValueError, match="more than one column named a"):
        record_table("t", pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(TypeError, match=r"t\[what\]\[0\] is of type object"):
        record_table("t", pd.DataFrame({"what": [object()]}))
    with pytest.raises(TypeError, match="not dict"):
        record_table("t", {"a": [1]})  # type: ignore[arg-type]


def test_names_are_said_in_words_and_the_one_for_scripts_is_a_tooltip(kernel: Kernel) -> None:
    record(vote_sculpt_ood_auroc=0.7, neo_mpiw90=1.5, rows_train=100, error_of_answered=0.1, cells=3)
    shown = kernel.outputs[0].data["text/html"]
    for said, value, name in (
        ("OOD AUROC, vote+sculpt", "0.7", "vote_sculpt_ood_auroc"),
        ("width of 90 % interval, neo", "1.5", "neo_mpiw90"),
        ("rows train", "100", "rows_train"),
        ("error of answered", "0.1", "error_of_answered"),
        ("cells", "3", "cells"),
    ):
        assert f'<tr><th title="{name}">{said}</th><td>{value}</td></tr>' in shown
