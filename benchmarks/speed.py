"""The cost of wrappers: time and memory of forward passes and training steps, compared with a plain pass, a loop over copies of the model, a
batched version by hand, and a lower bound from operations and bytes.

Times are measured in one process, in turn: processor time on a CPU, time between two events on a GPU. A ratio is the median, over at least 9
rounds, of the ratio within a round.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speed_page
import torch
from speed_cases import WRAPPERS, case_of
from speed_clock import middle, peak, timed
from speed_fit import TRAININGS, raced, trained
from speed_models import MODELS
from speed_peers import TASKS, against, lacking
from speed_targets import AS_IN_FIT, BUSY, LAUNCHES, TARGETS

from workbench.experiments.environment import processor

if TYPE_CHECKING:
    import pandas as pd

N, BATCHES = (1, 5, 16, 64), (1, 64, 1024)
ONE = ("sculpt", "sculpt 1", "neo")  # wrappers without a number of voters or samples
WHOLE = ("vote", "vote rank1", "sample")  # wrappers that are compared with the loop over copies
LOW = ("sculpt 1", "vote last", "vote", "sample")  # also measured under autocast
# millions of operations, and milliseconds, of a pass of one row: the duration of a cell is estimated from them
COST = {
    "tiny": (0.0001, 0.015),
    "small": (0.006, 0.03),
    "mlp": (0.136, 0.03),
    "cnn": (5.61, 0.4),
    "resnet18": (70.1, 2.0),
    "transformer": (10.3, 0.4),
    "lstm": (6.29, 0.25),
    "gpt2": (52.7, 1.3),
    "unet": (10_050.0, 4.0),
}
COST_LARGE = {
    "resnet18": (1111.0, 2.0),
    "gpt2": (22_420.0, 4.0),
    "resnet50": (8178.0, 6.0),
    "vit": (35_128.0, 4.0),
    "gpt2-1024": (212_678.0, 4.0),
}
# large enough to keep a GPU busy, with room for five voters in its memory
ROWS = {
    "resnet50": 64,
    "vit": 32,
    "gpt2-1024": 8,
}
RATE = {"cpu": 50e3, "cuda": 30e6}  # approximate millions of operations per second
RATE_LOW = 150e6  # the same on a GPU in bfloat16
COMPILING = 30.0  # seconds of a compilation
BESIDE = ("plain", "loop", "hand", "func")
BUDGET = 2.5  # maximum estimated seconds of a cell
BUDGET_TARGET = {"cpu": 10.0, "cuda": 30.0}  # the same for a cell that a target concerns


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return all cells, those of targets first; cells that would take too long are left out.

    GPUs may be available for minutes only: there, the targets of GPUs come first, then other packages, compiled models, and everything else.
    """
    if smoke:
        return [
            _cell("mlp", "vote", 5, 1, "forward"),
            _cell("tiny", "sculpt 1", 1, 8, "step"),
            _cell("tiny", "vote last", 5, 8, "forward", how="tune"),
            _cell("tiny", "vote", 5, 8, "forward", how="compiled"),
            _cell("vit", "vote", 2, 2, "forward", dtype="bfloat16"),
            {"peer": "torch-uncertainty", "task": "deep ensemble, n = 5", "on": "cpu"},
        ]
    peers = [{"peer": peer, "task": task} for peer, tasks in TASKS.items() for task in tasks]
    trainings = [{"training": name, "on": "cpu"} for name in TRAININGS]
    races = [{"race": name, "on": "cpu"} for name, training in TRAININGS.items() if training.heads is not None]
    aimed, others = _by_aim("cpu")
    cpu_cells = [*aimed, *others, *({**peer, "on": "cpu"} for peer in peers), *trainings, *races]
    aimed, others = _by_aim("cuda")
    compiled = [cell for cell in aimed + others if cell["how"] == "compiled"]
    aimed = sorted((cell for cell in aimed if cell["how"] != "compiled"), key=lambda cell: not _aimed(cell, "GPU"))
    others = [cell for cell in others if cell["how"] != "compiled"]
    return [*cpu_cells, *aimed, *({**peer, "on": "cuda"} for peer in peers), *compiled, *others]


def _by_aim(device: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the cells that a target concerns, and the others."""
    grid = list(_grid(device))
    aimed = [cell for cell in grid if _aimed(cell) and seconds(cell, compiling=0) <= BUDGET_TARGET[device]]
    return aimed, [cell for cell in grid if not _aimed(cell) and seconds(cell, compiling=0) <= BUDGET]


def _cell(model: str, wrapper: str, n: int, batch: int, phase: str, **how: str) -> dict[str, Any]:
    same = {"model": model, "wrapper": wrapper, "n": n, "batch": batch, "phase": phase}
    return {**same, "on": "cpu", "dtype": "float32", "how": "auto", **how}


def _grid(device: str) -> Iterator[dict[str, Any]]:
    for model in MODELS:
        for wrapper in WRAPPERS:
            for n in _numbers(wrapper):
                for batch in BATCHES:
                    for phase in _phases(wrapper, n, batch):
                        yield _cell(model, wrapper, n, batch, phase, on=device)
    yield _cell("unet", "vote last", 4, 1, "forward", on=device)
    for wrapper in ("sculpt", "sample", "neo"):
        yield _cell("tiny", wrapper, 1, 1, "predict", on=device)
    # compared with one plain pass over the rows that neo is fitted on; few rows are the hardest case
    for model in ("cnn", "resnet18"):
        for batch in BATCHES[1:]:
            yield _cell(model, "neo", 1, batch, "fit", on=device)
    low_precision = tuple(MODELS)[1:] if device == "cuda" else ("cnn", "transformer", "gpt2")
    for model in low_precision:
        for wrapper in LOW:
            n = 1 if wrapper in ONE else 16
            for phase in ("forward", "step") if wrapper != "sample" else ("forward",):
                yield _cell(model, wrapper, n, 64, phase, on=device, dtype="bfloat16")
    for model in ("mlp", "cnn", "transformer", "lstm"):
        for wrapper in ("vote", "vote last"):
            for batch in (1, 64):
                yield _cell(model, wrapper, 16, batch, "forward", on=device, how="tune")
        yield _cell(model, "vote", 5, 64, "step", on=device, how="tune")
    for model in (*AS_IN_FIT, "tiny", "small") if device == "cpu" else ():  # as in fit
        for n in (5, 16):
            yield _cell(model, "vote", n, 64, "step", how="backward")
    for model in ("tiny", "small") if device == "cpu" else ():  # served
        for batch in (1, 64):
            for n in (5, 16):
                yield _cell(model, "vote", n, batch, "forward", how="frozen")
    for wrapper in ("sculpt", "sample", "neo") if device == "cpu" else ():
        yield _cell("tiny", wrapper, 1, 1, "forward", how="frozen")
    yield from _compiled(device)
    if device == "cuda":
        yield from _busy()


def _compiled(device: str) -> Iterator[dict[str, Any]]:
    if device == "cpu":  # only two, because compiling them takes a minute
        yield _cell("mlp", "vote", 16, 1, "forward", on=device, how="compiled")
        yield _cell("cnn", "vote last", 16, 64, "forward", on=device, how="compiled")
        return
    for model in LAUNCHES:
        for n in (16, 5):
            for phase in ("forward", "step"):
                yield _cell(model, "vote", n, 64, phase, on=device, how="compiled")
    for model in LAUNCHES[:-1]:
        for wrapper in ("vote last", "sculpt 1"):
            for phase in ("forward", "step"):
                n = 1 if wrapper in ONE else 16
                yield _cell(model, wrapper, n, 64, phase, on=device, how="compiled")


def _busy() -> Iterator[dict[str, Any]]:
    for model in BUSY:
        for phase in ("forward", "step"):
            for wrapper, n in (("vote", 5), ("vote last", 16)):
                yield _cell(model, wrapper, n, ROWS[model], phase, on="cuda", dtype="bfloat16")


def _numbers(wrapper: str) -> tuple[int, ...]:
    if wrapper in ONE:
        return (1,)
    if wrapper == "vote dealt":
        return (5, 16)
    return N if wrapper in ("vote", "sample", "vote last") else N[1:3]


def _phases(wrapper: str, n: int, batch: int) -> tuple[str, ...]:
    """Return the phases to measure, without those that would repeat another cell."""
    if wrapper == "vote dealt":
        return ("step",) if batch > 1 else ()
    if n == 1 and wrapper not in (*ONE, "vote") and batch > 1:  # only measures the overhead
        return ()
    if wrapper == "sample last" or (wrapper == "sample" and n > 1):  # training mode takes one draw per call
        return ("forward",)
    return ("forward",) if n == 64 else ("forward", "step")


def _aimed(cell: dict[str, Any], at: str = "") -> bool:
    """Whether a cell is concerned by a target whose case starts with `at`."""
    return any(target.holds(cell) for target in TARGETS if target.case.startswith(at))


def seconds(cell: dict[str, Any], loop: bool | None = None, compiling: float = COMPILING) -> float:
    """Return the estimated seconds of a cell.

    Args:
        cell: arguments of the cell.
        loop: whether the loop over copies is measured; None for the choice of `run`.
        compiling: seconds of a compilation, if the cell has one.
    """
    on_gpu = cell["on"] == "cuda"
    operations, least = (COST | COST_LARGE if on_gpu else COST_LARGE | COST)[cell["model"]]
    rate = RATE_LOW if on_gpu and cell["dtype"] == "bfloat16" else RATE[cell["on"]]
    one = least / 1e3 + operations * cell["batch"] / rate
    many = cell["n"] if cell["wrapper"] in WHOLE and (cell["phase"], cell["wrapper"]) != ("step", "sample") else 1
    copies = 1 if cell["wrapper"] == "vote dealt" else cell["n"]  # dealt rows are as many as those of one
    ways = 1 + many + (copies if (with_loop(cell) if loop is None else loop) else 0)
    if cell["how"] == "tune":
        ways += 8 * cell["n"]
    fixed = compiling if cell["how"] == "compiled" else 0.0
    return fixed + 0.5 + 13 * ways * max(one * (3.5 if cell["phase"] == "step" else 1), 0.2e-3)


def with_loop(cell: dict[str, Any]) -> bool:
    """Whether the loop over copies is measured: always for methods that run all layers n times, otherwise if it is quick."""
    if cell["wrapper"] in ONE:
        return False
    most = BUDGET_TARGET[cell["on"]] if cell["wrapper"] == "vote dealt" else BUDGET
    return cell["wrapper"] in WHOLE or seconds(cell, loop=True, compiling=0) <= most


def possible(cell: dict[str, Any]) -> str:
    """Return why a cell can't run here, "" if it can."""
    if cell["on"] == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    if "peer" in cell:
        return lacking(cell["peer"])
    if cell.get("how") == "compiled" and cell["on"] == "cpu" and not (shutil.which("g++") or shutil.which("clang")):
        return "there is no C++ compiler"
    return ""


def run(**cell: Any) -> dict[str, Any]:
    """Measure a cell and return its row of results."""
    hardware = torch.cuda.get_device_name() if cell["on"] == "cuda" else processor()
    # without TF32, which matrix products do not use by default either: the rate of the floor is the best of both
    full = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), full:
        torch.manual_seed(0)
        special = {"peer": against, "training": trained, "race": raced}
        measure = next((special[name] for name in special if name in cell), _row)
        return {"hardware": hardware, **measure(**cell)}


def _row(**cell: Any) -> dict[str, Any]:
    device = cell["on"]
    case = case_of(**cell, loop=with_loop(cell))
    times = timed(case.passes, device)
    row: dict[str, Any] = {"executor": case.executor(), "rounds": len(times["wrapped"])}
    for name in ("wrapped", *BESIDE):
        if name in times:
            row[f"{name}_ms"] = 1e3 * middle(times[name])[0]
    others = {name: times[name] for name in BESIDE if name in times}
    strategies = {name: values for name, values in times.items() if name.startswith("strategy ")}
    if strategies:
        best = min(strategies, key=lambda name: middle(strategies[name])[0])
        row["best_executor"], others["best"] = best.removeprefix("strategy "), strategies[best]
    for name, values in others.items():
        ratios = [wrapped / other for wrapped, other in zip(times["wrapped"], values, strict=True)]
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), middle(ratios), strict=True))
    over = [wrapped - other for wrapped, other in zip(times["wrapped"], times["plain"], strict=True)]
    row |= dict(zip(("over_us", "over_us_low", "over_us_high"), (1e6 * value for value in middle(over)), strict=True))
    if device == "cpu" and (guard := case.guard()) is not None:
        row["guard_us"] = 1e6 * middle(timed({"guard": guard}, device)["guard"])[0]
    row |= {"floor_ms": 1e3 * case.floor, "floor": row["wrapped_ms"] / 1e3 / case.floor, "bound": case.bound}
    if cell["model"] in BUSY and cell["wrapper"] == "vote":
        row |= case.utilization(row["wrapped_ms"] / 1e3, row["loop_ms"] / 1e3)
    if "func" in case.refused:
        row["func_refused"] = case.refused["func"]
    # a CUDA graph allocates its memory when it is recorded
    counted = () if cell["how"] == "compiled" and device == "cuda" else ("wrapped", "plain", "loop")
    for name in counted:
        if name in case.passes:
            row[f"memory_{name}"] = peak(case.passes[name], device)
    return row


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return targets, ratios by model and wrapper, and figures, for each device."""
    return speed_page.page(frame, images)
