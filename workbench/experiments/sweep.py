"""Grids of models, wrappers, data sets and seeds: every combination is trained and measured, with the results in one tidy table."""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.settings import hint
from ..core.texts import wrapper_of
from ..errors import as_count
from ..trackers.base import Tracker
from .cells import run_cells
from .specs import REFERENCE, check_model, file_of, model_of, one_spelling, reference
from .user_code import digest
from .worker import RESERVED, load

if TYPE_CHECKING:
    import pandas as pd

    from ..data import Data

AXES = ("model", "wrapper", "data", "seed")
OPTIONS = ("batch_size", "lr", "weight_decay", "folds", "patience", "standardize", "device", "rows")
ARGUMENTS = {"device": "fit_device"}  # other names of options in cells: the column "device" is the machine's
MEASURED = ("seconds", "fit_seconds", "predict_seconds", "peak_memory")  # columns that differ from run to run
VALIDATION_SHARE = 0.1  # share of the training rows by which the best epoch is chosen


def grid(
    models: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = "auto",
    wrappers: str | Iterable[str] = ("plain", "sculpt", "vote", "vote + sculpt"),
    data: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = "diabetes",
    seeds: int | Iterable[int] = (0, 1, 2),
    *,
    path: Path | str | None = None,
    epochs: int = 100,
    metrics: Iterable[str | Callable[..., Any]] = (),
    jobs: int = 1,
    threads: int = 1,
    scheduler: Any = None,
    timeout: float | None = None,
    resume: bool = True,
    progress: bool = True,
    command: str | None = None,
    log_to: str | Tracker | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Train every model in every wrapper on every data set with every seed, and measure each on the test rows.

    All randomness of a cell (initial weights, training, split of the data) comes from its seed, so that results do not depend on where and in
    which order cells run. A tenth of the training rows is used to choose the best epoch; the test rows are used once, at the end. Cells whose
    results are in the file already are not run again.

    Args:
        models: one or several of: a ready model ("linear", "mlp(width=100)", "cnn", "tabular"), "module:factory", "path/to/file.py:factory",
            or a factory function. "auto" is `workbench.models.tabular` for a table of numbers and "mlp" for anything else. A factory with a
            parameter without default is called with the data set.
        wrappers: one or several texts such as "plain", "vote", "vote(n_voters=5) + sculpt".
        data: one or several names for `workbench.data.load`, or references to functions that take a seed and return a `Data`.
        seeds: integers of at least 0. Data sets with a fixed number of splits use split number seed % splits.
        path: .csv or .parquet file for the results, see `run_cells`; None: results are only returned.
        epochs: number of training epochs.
        metrics: functions metric(wrapped, data) -> dict of numbers, or references to them, measured in addition to those of the task.
        jobs: number of cells run in parallel on this machine, each in its own process; with several GPUs, each process sees one of them.
        threads: torch threads per cell.
        scheduler: address of a dask.distributed scheduler, or a Client or Cluster, whose workers run the cells; see `run_cells`.
        timeout: time limit per cell in seconds; None: no limit.
        resume: whether to skip cells whose results are in the file.
        progress: whether to print a line per cell and show a progress bar.
        command: command to record as the origin of the file.
        log_to: tracker to which each cell is logged as a separate run, see `run_cells`.
        options: arguments of `workbench.fit`: batch_size, lr, weight_decay, folds, patience, standardize, device ("auto"); and rows, the maximum
            number of training rows, drawn by the seed.

    Returns:
        One row per cell: model, wrapper, data, seed, epochs and options (device as fit_device); the scores and costs of
        `measure.measure`; fit_seconds, peak_memory (MiB); network, the model that "auto" chose; task, split, train_rows and checksum of the
        data; cell, seconds, version and device. ``frame.attrs["failed"]`` lists the cells without results, see `run_cells`.

    Raises:
        ValueError: a name is unknown, a text can't be parsed, or an argument is out of range; raised before any cell runs.
        TypeError: an argument is of the wrong type.
        ConnectionError: no scheduler answers at the address.
        ConnectionAbortedError: the connection to the scheduler was lost while cells ran. Run again to resume.

    Example:
        >>> frame = grid("linear", ["plain", "vote(n_voters=2)"], "cubic", [0], epochs=1, rows=40, progress=False)
        >>> frame["wrapper"].tolist(), bool((frame["rmse"] > 0).all())
        (['plain', 'vote(n_voters=2)'], True)
    """
    cells, files = grid_cells(models, wrappers, data, seeds, epochs=epochs, metrics=metrics, **options)
    if scheduler is None:
        _fetch(cells)
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        return run_cells(
            f"{__name__}:run",
            cells,
            Path(folder) / "grid.csv" if path is None else path,
            jobs=jobs,
            threads=threads,
            timeout=timeout,
            resume=resume,
            progress=progress,
            command=command or "workbench.experiments.grid",
            scheduler=scheduler,
            files=files,
            log_to=log_to,
        )


def grid_cells(
    models: Any, wrappers: Any, data: Any, seeds: Any, *, epochs: int = 100, metrics: Any = (), **options: Any
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Return the cells of a grid, and the files of the user's code that they need; arguments and errors are those of `grid`."""
    from ..data.registry import resolve

    wrappers = _as_list(wrappers)
    for text in wrappers:
        wrapper_of(text)
    chosen: dict[str, list[Any]] = {
        "model": [one_spelling(reference(model, "a model")) for model in _as_list(models)],
        "wrapper": [one_spelling(text) for text in wrappers],
        "data": [reference(name, "a data set") for name in _as_list(data)],
        "seed": [as_count("seed", seed, 0) for seed in _as_list(seeds)],
    }
    for name, values in chosen.items():
        if not values:
            raise ValueError(f"{name}: the grid needs at least one value")
        if repeated := {str(value) for value in values if values.count(value) > 1}:
            raise ValueError(f"{name}: give each value once, not several times {', '.join(sorted(repeated))}")
    for text in chosen["model"]:
        check_model(text)
    chosen["data"] = [name if REFERENCE.fullmatch(name) else resolve(name) for name in chosen["data"]]
    metric_names = [reference(metric, "a metric") for metric in _as_list(metrics)]
    for text in (*metric_names, *(name for name in chosen["data"] if REFERENCE.fullmatch(name))):
        _function(text)
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"grid has no argument {name!r}: {hint(name, OPTIONS)}")
        if name in ("batch_size", "folds", "patience", "rows") and value is not None:
            as_count(name, value, 1 if name == "patience" else 2)
    _check_options(**options)
    shared: dict[str, Any] = {"epochs": as_count("epochs", epochs, 1)}
    options |= {"device": str(options["device"])} if options.get("device") is not None else {}
    shared |= {ARGUMENTS.get(name, name): value for name, value in options.items() if value is not None}
    if metric_names:
        shared["metrics"] = metric_names
    cells, files = [], []
    # seeds vary slowest, so that unfinished results compare all wrappers
    for seed, name, model, wrapper in itertools.product(
        *(chosen[axis] for axis in ("seed", "data", "model", "wrapper"))
    ):
        user_files = [file for text in (model, name, *metric_names) if (file := file_of(text)) is not None]
        files += [file for file in user_files if file not in files]
        source = {"source": digest(*user_files)} if user_files else {}
        cells.append({"model": model, "wrapper": wrapper, "data": name, "seed": seed, **shared, **source})
    return cells, files


def run(
    model: str,
    wrapper: str,
    data: str,
    seed: int,
    epochs: int,
    rows: int | None = None,
    metrics: Sequence[str] = (),
    source: str = "",
    fit_device: str = "auto",
    **options: Any,
) -> dict[str, Any]:
    """Run one cell: train, and measure on the test rows. Arguments are those of `grid`; fit_device is its device."""
    import torch

    from ..training import fit
    from .measure import PeakMemory, measure
    from .models import suited
    from .positions import measurable, output_for

    del source  # a digest of the user's files; it only makes the key of the cell change with them
    loaded = measurable(_load(data, seed))
    if rows is not None and rows < len(loaded.train):
        order = torch.randperm(len(loaded.train), generator=torch.Generator().manual_seed(seed))
        drawn = order[:rows]  # windows of a series stay in time order
        loaded = replace(loaded, train=loaded.train.take(drawn if loaded.horizon is None else drawn.sort().values))
    # folds of a Data of windows are periods, those of its rows alone are drawn
    train, validation = (loaded, None) if "folds" in options else loaded.validation(VALIDATION_SHARE, seed)
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    memory = PeakMemory()
    with torch.random.fork_rng(cuda):
        torch.manual_seed(seed)
        plain = model_of(model, loaded)
        wrapped: Any = wrapper_of(wrapper, output=output_for(plain, loaded))(plain)
        _warm_up()
        start = time.perf_counter()
        chosen: dict[str, Any] = {} if validation is None else {"validation": validation}
        fit(wrapped, train, epochs=epochs, seed=seed, device=fit_device, progress=False, **chosen, **options)
        seconds = time.perf_counter() - start
        torch.manual_seed(seed)
        device_used = next((p.device for p in wrapped.parameters()), torch.device("cpu"))
        measured: dict[str, Any] = measure(wrapped, plain.to(device_used), loaded, validation)
        for metric in metrics:
            scores = _function(metric)(wrapped, loaded)
            if not isinstance(scores, dict) or (duplicates := set(scores) & {*measured, *RESERVED, *AXES, *OPTIONS}):
                raise TypeError(
                    f"metric {metric} must return a dict of numbers with new names, found "
                    f"{type(scores).__name__ if not isinstance(scores, dict) else f'{sorted(duplicates)}, which are there already'}"
                )
            measured |= scores
    return {
        **measured,
        "fit_seconds": seconds,
        "peak_memory": memory.read(),
        **({"network": suited(loaded)} if model == "auto" else {}),
        "task": loaded.task,
        "split": loaded.split,
        "train_rows": len(loaded.train),
        "checksum": f"sha256:{loaded.checksum[:12]}",
    }


@functools.cache
def _warm_up() -> None:
    """Train a tiny model once per process, so that lazy imports do not count towards the run time of the first cell."""
    import torch

    from ..core.wrapper import compose
    from ..training import fit

    x = torch.linspace(-1, 1, 8)[:, None]
    fit(compose()(torch.nn.Linear(1, 1)), (x, x), epochs=1, progress=False)


def _load(name: str, seed: int) -> Data:
    from .. import data
    from ..data.registry import entries

    if REFERENCE.fullmatch(name):
        loaded = _function(name)(seed)
        if not isinstance(loaded, data.Data):
            raise TypeError(
                f"{name} returned an object of type {type(loaded).__name__}; it must return a workbench.data.Data"
            )
        return loaded
    splits = entries()[name].get("splits")
    return data.load(name, split=seed % splits if splits else seed)


def _fetch(cells: Sequence[dict[str, Any]]) -> None:
    """Download missing data sets, once and before the worker processes need them."""
    from .. import data

    for name in dict.fromkeys(cell["data"] for cell in cells):
        if not REFERENCE.fullmatch(name) and name not in data.names(available=True):
            data.fetch(name)


def _function(text: str) -> Callable[..., Any]:
    if REFERENCE.fullmatch(text) is None or "(" in text:
        raise ValueError(f'{text!r} is not the name of a function; give "module:name" or "path/to/file.py:name"')
    function = load(text)
    if not callable(function):
        raise TypeError(f"{text} is an object of type {type(function).__name__}, not a function")
    return function


def _as_list(values: Any) -> list[Any]:
    if isinstance(values, str | int) or callable(values) or not isinstance(values, Iterable):
        return [values]
    return list(values)


def _check_options(
    lr: Any = None, weight_decay: Any = None, standardize: Any = None, device: Any = None, **_: Any
) -> None:
    """Raise if `fit` would refuse an option, of those that are no whole numbers."""
    import torch

    from ..training.checks import LR, check_numbers, check_objects

    check_numbers(1, None, LR if lr is None else lr, 0.0 if weight_decay is None else weight_decay, None, None, None)
    check_objects(standardize, None, None, None)
    if device not in (None, "auto"):
        try:
            torch.device(device)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f'device must be "auto" or the name of a device, not {device!r}') from error
