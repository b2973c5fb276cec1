"""The store of a sweep: what it returns, which files it accepts as its own, and truncated files."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers.default_suite import one_in

from workbench.cli import main
from workbench.errors import WorkbenchWarning
from workbench.experiments import run_cells
from workbench.experiments import store as store_module
from workbench.experiments.pool import CellOutcome
from workbench.experiments.store import HEAD, Store, key, read

STAMP = {"version": "007", "device": "CPU, of any make"}
LONG = "x" * 200_000
VALUES: list[Any] = [
    *(
        LONG,
        "\ud800",
        "\udfff lone",
        "\ud83d\ude00 pair",
        "😀",
        "007",
        "",
        "nan",
        "None",
        "True",
        " 7 ",
        "1_000",
        'a,b\r\n"c"\n',
        "\0",
    ),
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**53 + 1,
        -(2**53) - 1,
        2**63,
        2**200,
        0.1,
        1.0,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
    ),
    *([], {}, [1, "1", None], {"a": [True, 1, 1.0]}),
]


def same(a: Any, b: Any) -> bool:
    """Equal, of one type (numpy's count as Python's), signs of zeros and NaN included."""
    a = a.item() if hasattr(a, "item") else a
    return type(a) is type(b) and repr(a) == repr(b)


def filled(path: Path, rows: list[list[dict[str, Any]]]) -> Store:
    """A store with these rows, a list for each cell."""
    store = Store(path)
    store.made_by("a command", "a:function", {"python": "3"}, 1, 1)["cells"] = len(rows)
    for number, cell in enumerate(rows):
        store.add(CellOutcome({"number": number}, "ok", 1.5, cell), STAMP, {})
    store.add(CellOutcome({"number": -1}, "failed", 1.5, error="Traceback\n=== 0123456789ab is no head"), STAMP, {})
    return store


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_values_come_back_as_they_went_in(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    # all in one column, and each in a column of its own that has gaps in every other row
    rows = [[{"all": value, f"gaps_{number}": value}] for number, value in enumerate(VALUES)]
    filled(path, rows)
    for frame in (Store(path).frame(), read(path)):
        for number, value in enumerate(VALUES):
            assert same(frame["all"][number], value), value
            column = frame[f"gaps_{number}"].tolist()
            rest = column[:number] + column[number + 1 :]
            assert all(type(gap) is float and math.isnan(gap) for gap in rest)
            if type(value) is int and abs(value) <= 2**53:  # as pandas has whole numbers in columns with gaps: exact
                assert type(column[number]) is float
                assert column[number] == value
            else:
                assert same(column[number], value), value
        assert frame["version"].tolist() == ["007"] * len(VALUES)
        assert frame["number"].dtype == "int64"
    assert Store(path).failures.keys() == {key({"number": -1})}


def odd(n: int) -> dict[str, Any]:
    values: dict[int, Any] = {0: LONG, 1: "\ud800", 2: math.nan, 3: 2**53 + 1, 4: True, 5: "007", 6: "", 7: None}
    return {"value": values[n], "\ud800 name": n} if n else {"value": values[n]}


@pytest.mark.slow
def test_a_sweep_of_odd_values_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [{"n": n} for n in range(8)]
    first = run_cells(odd, cells[:4], tmp_path / "a.csv", jobs=2)
    again = run_cells(odd, cells, tmp_path / "a.csv", jobs=2)
    assert all(same(a, odd(n)["value"]) for n, a in enumerate(again["value"]))
    assert all(same(a, b) for a, b in zip(first["value"], again["value"].tolist()[:4], strict=True))
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_tables_of_versions_without_a_store_are_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    cell = {"number": 0, "name": "x"}
    head = f"number,name,score,far,cell,seconds,version,device\n0,x,0.25,{LONG},{key(cell)},1.500,v1,CPU\n"
    path.write_text(head)
    record = {
        "command": "c",
        "started": "s",
        "ended": "e",
        "cells": 1,
        "seconds": 1.5,
        "jobs": 1,
        "threads": 1,
        "environment": {},
    }
    path.with_suffix(".json").write_text(json.dumps({"runs": [record]}, indent=1) + "\n")
    path.with_suffix(".failed.txt").write_text("=== 0123456789ab failed after 1.0 s: {}\nTraceback\n\n")
    frame = read(path)
    assert frame.loc[0, ["number", "name", "score", "far"]].tolist() == [0, "x", 0.25, LONG]
    store = Store(path)
    assert store.keys() == {key(cell)}
    assert store.runs == [record]
    assert store.failures.keys() == {"0123456789ab"}
    store.add(CellOutcome({"number": 1}, "ok", 1.0, [{"score": "007"}]), STAMP, {})
    assert Store(path).frame()["score"].tolist() == [0.25, "007"]
    assert path.read_text().startswith(head.replace("1.500", "1.5"))


FOREIGN = {
    ".jsonl": [b'{"name": "mine"}\n', b"\xff\xfe\0", b"[1, 2]", b'{"workbench": 3}\n'],
    ".csv": [b"x,y\n1,2\n", b"\xff\xfe\0", b"cell\n1\n", b"{}"],
    ".json": [b'{"accuracy": 0.5}', b"[]", b'{"runs": 3}', b'{"runs": [{"id": 1}]}\n', b"\xff\xfe\0", b'{"runs": '],
    ".failed.txt": [b"my notes\n", b"=== heading\n", b"\xff\xfe\0", b"=== notes"],
}


@pytest.mark.parametrize("before", [False, True], ids=["no results", "with results"])
@pytest.mark.parametrize(("suffix", "data"), [(suffix, data) for suffix, all_of in FOREIGN.items() for data in all_of])
def test_files_of_others_are_refused_by_name_and_left_alone(
    tmp_path: Path, suffix: str, data: bytes, before: bool
) -> None:
    path = tmp_path / "m3.csv"
    if before:
        filled(path, [[{"score": 1}]])
    path.with_suffix(suffix).write_bytes(data)
    there = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf"m3\{suffix} is not (a results|the) file|m3\{suffix} is damaged"):
        run_cells(odd, [{"n": 1}], path, progress=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if not file.name.endswith(".lock")} == there


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json", ".failed.txt"])
def test_the_command_names_files_of_others_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    path = tmp_path / "m3.csv"
    path.with_suffix(suffix).write_bytes(FOREIGN[suffix][0])
    assert main(["compare", "-g", "data=cubic", "-g", "seed=0", "-g", "wrapper=plain", "--smoke", "-o", str(path)]) == 2
    assert f"m3{suffix} is not a results file of workbench" in capsys.readouterr().err
    assert path.with_suffix(suffix).read_bytes() == FOREIGN[suffix][0]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json", ".failed.txt"])
@pytest.mark.parametrize("there", [True, False])
def test_links_are_not_followed(tmp_path: Path, suffix: str, there: bool) -> None:
    (tmp_path / "out").mkdir()
    target = tmp_path / "elsewhere.txt"
    if there:
        target.touch()
    (tmp_path / "out" / f"a{suffix}").symlink_to(target)
    with pytest.raises(
        ValueError, match=rf"a\{suffix} is a link to .*elsewhere\.txt: give the path of the file itself"
    ):
        run_cells(odd, [{"n": 1}], tmp_path / "out" / "a.csv", progress=False)
    assert target.exists() == there


def test_a_table_that_was_changed_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    filled(path, [[{"score": 1}]])
    path.write_text(path.read_text().replace("1", "2"))
    changed = path.read_text()
    with pytest.raises(ValueError, match=r"a\.csv is not the file that was made from a\.jsonl"):
        run_cells(odd, [{"n": 1}], path, progress=False)
    assert path.read_text() == changed
    path.unlink()
    assert len(run_cells(odd, [{"n": 1}], path, progress=False)) == 1  # made anew
    assert read(path)["score"].tolist()[0] == 1


@pytest.mark.parametrize("suffix", one_in(5, [".csv", ".parquet", ".jsonl", ".json", ".failed.txt"]))
def test_files_that_were_cut_off_are_repaired(tmp_path: Path, suffix: str) -> None:
    table = ".parquet" if suffix == ".parquet" else ".csv"
    path = tmp_path / f"a{table}"
    rows = [[{"score": number, "word": "007"}, {"score": 0.5, "word": "a\nb"}] for number in range(3)]
    filled(path, rows).made_by("a command", "a:function", {"python": "3"}, 1, 1)
    file = path.with_suffix(suffix)
    whole, complete = file.read_bytes(), {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    head = whole.index(b"\n") + 1 if suffix == ".jsonl" else 0
    for end in range(head, len(whole), max(1, len(whole) // 29)):
        for name, data in complete.items():
            (tmp_path / name).write_bytes(data)
        file.write_bytes(whole[:end])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkbenchWarning)
            store = Store(path)
        lost = 3 - len(store.cells)
        assert lost == 0 or suffix == ".jsonl"
        for number in range(3 - lost, 3):
            store.add(CellOutcome({"number": number}, "ok", 1.5, rows[number]), STAMP, {})
        store.write()
        assert Store(path).frame()["score"].tolist() == [0, 0.5, 1, 0.5, 2, 0.5]
        assert Store(path).frame()["word"].tolist() == ["007", "a\nb"] * 3
        if suffix != ".jsonl":
            assert file.read_bytes() == whole


def test_a_store_that_was_cut_off_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    filled(path, [[{"score": number}] for number in range(3)])
    whole = path.with_suffix(".jsonl").read_bytes()
    path.with_suffix(".jsonl").write_bytes(whole[: whole.index(b"score") + 2])
    with pytest.warns(WorkbenchWarning, match=r"a\.jsonl was truncated: the cells that are missing"):
        assert Store(path).keys() == set()
    path.with_suffix(".jsonl").write_bytes(whole[:30])
    with pytest.warns(WorkbenchWarning, match=r"results are read from a\.csv"):
        assert len(Store(path).keys()) == 3


def test_a_table_without_a_store_that_was_cut_off_loses_whole_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    filled(path, [[{"score": n, "word": "a\nb"}, {"score": -n, "word": "c"}] for n in range(3)])
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for file in tmp_path.iterdir():
        file.unlink()
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkbenchWarning)
            store = Store(path)
        if whole[end - 1 : end] != b"\n":
            assert all(len(kept.rows) == 2 for kept in store.cells.values()), whole[:end]


def test_a_flipped_bit_is_no_other_result(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    filled(path, [[{"score": number / 3}] for number in range(3)])
    before = Store(path).frame()
    whole = path.with_suffix(".jsonl").read_bytes()
    for place in range(0, len(whole) - 1, 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 7
        path.with_suffix(".jsonl").write_bytes(damaged)
        line = whole[:place].count(b"\n") + 1
        says = "is not a results file" if place < len(HEAD) else f"is damaged in line {line} "
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkbenchWarning)
            try:
                assert Store(path).frame().equals(before)
            except ValueError as error:
                assert says in str(error)  # noqa: PT017


def test_what_a_killed_run_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ours = [tmp_path / f".a{suffix}.0123abcd.part" for suffix in (".csv", ".jsonl", ".json", ".failed.txt")]
    others = [
        tmp_path / name
        for name in (".a.csv.part", ".a.csv.01234567.tmp", ".b.csv.0123abcd.part", "a.csv.0123abcd.part")
    ]
    for file in ours + others:
        file.write_text("half")
    run_cells(odd, [{"n": 1}], tmp_path / "a.csv", progress=False)
    assert not any(file.exists() for file in ours)
    assert all(file.read_text() == "half" for file in others)


def test_two_tables_do_not_share_a_store(tmp_path: Path) -> None:
    filled(tmp_path / "a.csv", [[{"score": 1}]])
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl keeps the results of a\.csv: continue with a\.csv, or choose another name than a\.parquet",
    ):
        Store(tmp_path / "a.parquet")


@pytest.mark.parametrize("killed", [False, True])
def test_tables_that_take_long_are_exported_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    content = store_module.content

    def slow(*args: Any) -> bytes:
        clock[0] += 1
        return content(*args)

    monkeypatch.setattr(store_module, "content", slow)
    path = tmp_path / "a.csv"
    store, order = Store(path), {key({"number": number}): -number for number in range(100)}
    exported = []
    for number in range(100):
        store.add(CellOutcome({"number": number}, "ok", 1.5, [{"y": number}]), STAMP, order)
        clock[0] += 1
        exported.append(path.read_text(encoding="utf-8").count("\n") - 1)
        assert len(Store(path).cells) == number + 1
        assert clock[0] < (number + 1) * 1.05 + 2
    assert exported == sorted(exported)
    assert 80 <= exported[-1] < 100
    (Store(path) if killed else store).finish()
    assert read(path)["y"].tolist() == list(range(99, -1, -1))
    assert path.read_text(encoding="utf-8").count("\n") == 101
    written = path.stat().st_mtime_ns
    Store(path).finish()
    assert path.stat().st_mtime_ns == written


def test_a_run_that_has_nothing_to_do_exports_what_a_killed_one_had_not(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    cells = [{"y": 0}, {"y": 1}]
    run_cells("builtins:dict", cells[:1], path, progress=False)
    short = path.read_bytes()
    store = Store(path)
    store._next_exports = math.inf
    store.add(CellOutcome(cells[1], "ok", 1.5, [{"y": 1}]), STAMP, {})
    assert path.read_bytes() == short
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)  # the stamp is of another version
        run_cells("builtins:dict", cells, path, progress=False)
    assert path.read_bytes().startswith(short)
    assert path.read_bytes().count(b"\n") == 3
