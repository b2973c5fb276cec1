"""Export of a comparison as a notebook that repeats it, and the command line that runs that notebook."""

from __future__ import annotations

import builtins
import inspect
import os
import shlex
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import atomic
from workbench.data import Data, load, names
from workbench.errors import require

from ..common.inputs import Model
from .settings import PLAIN, Candidate, Unwritable, reference
from .trials import Training

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


@dataclass(frozen=True)
class Exported:
    """Model, data and current settings of a comparison."""

    model: Model
    user_data: Any
    data: Data
    split: int
    candidates: list[Candidate]
    training: Training
    output: Any
    repeats: tuple[int, int] = (1, 1)  # seeds and splits


def write(path: str | os.PathLike[str], what: Exported) -> Path:
    """Write the notebook; see `Comparison.export`."""
    nbformat = require("nbformat")
    path = Path(path)
    if path.suffix != ".ipynb":
        raise ValueError(f"export: expected a file name that ends in .ipynb, found {path.name!r}")
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for name, kind, source, tags in _cells(what):
        new = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        nb.cells.append(new(source, id=name, metadata={"tags": tags} if tags else {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, nbformat.writes(nb) + "\n")
    return path


def command(path: str | os.PathLike[str], what: Exported) -> str:
    """Return the command line; see `Comparison.command`."""
    values = {name: value for name, value in _parameters(what).items() if name != "wrappers"}
    words = ["workbench", "report", shlex.quote(os.fspath(path))]
    return " ".join([*words, *(f"-p {name} {shlex.quote(str(value))}" for name, value in values.items())])


def _parameters(what: Exported) -> dict[str, Any]:
    training = what.training
    loaded: dict[str, Any] = {}
    name, options = _named(what)
    if name is not None:
        loaded["data"] = name
        if "split" in options:
            loaded["split"] = options["split"]
    if max(what.repeats) > 1:
        loaded["seeds"], loaded["splits"] = what.repeats
    return {
        **loaded,
        "wrappers": [candidate.name for candidate in what.candidates],
        "epochs": training.epochs,
        "lr": training.lr,
        "weight_decay": training.weight_decay,
        "seed": training.seed,
    }


def _cells(what: Exported) -> list[tuple[str, str, str, list[str]]]:
    imports = {"from workbench import record_table", "from workbench.widgets import Comparison"}
    wrappers, unwritten = [], []
    for candidate in what.candidates:
        try:
            wrappers.append(f'    "{candidate.name}": {candidate.source(imports, what.output)},')
        except Unwritable as error:
            unwritten.append(f"# {candidate.name}: {error}; add it here, and its name to the parameters")
    data, model = _data(what, imports), _model(what.model, imports)
    shown = dict(_parameters(what))
    left_out = {line.split(":")[0][2:] for line in unwritten}
    shown["wrappers"] = [name for name in shown["wrappers"] if name not in left_out]
    parameters = "\n".join(f"{name} = {value!r}" for name, value in shown.items())
    title = f"# Wrappers of {_title(what.model)} on {what.data.name}"
    about = f"""{title}

Each wrapper starts at the same weights and trains on the same rows; the {len(what.data.test):,} test rows are only used for evaluation.
Written by `Comparison.export`; run it with other parameters by `workbench report`."""
    choose = "\n".join(["wrap = {", *wrappers, "}", *unwritten])
    options = [f"{name}={name}" for name in ("epochs", "lr", "weight_decay", "seed")]
    options += ["seeds=seeds", "splits=splits"] if max(what.repeats) > 1 else []
    options += [f"batch_size={what.training.batch_size}"] if what.training.batch_size is not None else []
    options += [f"device={what.training.device!r}"] if what.training.device is not None else []
    options += [f"output={what.output!r}"] if isinstance(what.output, str) and what.output != "values" else []
    build = (
        "unknown = sorted(set(wrappers) - set(wrap))\n"
        "if unknown:\n"
        "    raise ValueError(f\"wrappers: there is no {', '.join(unknown)} here; there are {', '.join(wrap)}\")\n"
        "comparison = Comparison(\n    model,\n    dataset,\n    {name: wrap[name] for name in wrappers},\n"
        + "".join(f"    {option},\n" for option in options)
        + ")\ncomparison.start(block=True)\ncomparison.snapshot()"
    )
    table = 'record_table("comparison", comparison.results.drop(columns=["seconds", "passes"], errors="ignore"))'
    return [
        ("title", "markdown", about, []),
        ("parameters", "code", parameters, ["parameters"]),
        ("imports", "code", "\n".join(sorted(imports)), []),
        ("data", "code", data, []),
        ("model", "code", model, []),
        ("wrappers", "code", choose, []),
        ("train", "code", build, []),
        ("results", "code", table, []),
    ]


def _title(model: Model) -> str:
    return str(model).removesuffix("()")


# ---- data
def _named(what: Exported) -> tuple[str | None, dict[str, Any]]:
    """Return the name and options with which `load` gives these data; None if it does not."""
    if isinstance(what.user_data, str):
        return what.user_data, {"split": what.split}
    if not isinstance(what.user_data, Data) or what.data.name not in names(available=True):
        return None, {}
    sizes = {"n_train": len(what.data.train), "n_test": len(what.data.test)}
    for options in ({}, sizes, {**sizes, "test_noise": True}):
        try:
            if load(what.data.name, split=what.data.split, **options).checksum == what.data.checksum:
                return what.data.name, {"split": what.data.split, **options}
        except (TypeError, ValueError, OSError):
            continue
    return None, {}


def _data(what: Exported, imports: set[str]) -> str:
    name, options = _named(what)
    if name is None:
        shape, n = list(what.data.input_shape), len(what.data.train) + len(what.data.test)
        return (
            f"# These data ({n:,} rows {shape}, {what.data.task}) were made in a notebook, and can't be written as source code.\n"
            "# Assign them here: a workbench Data, the name of a data set, or a pair (x, y).\n"
            "dataset = ..."
        )
    imports.add("import workbench")
    rest = "".join(f", {key}={value!r}" for key, value in options.items() if key != "split")
    return f"dataset = workbench.data.load(data, split=split{rest})"


# ---- model
def _model(model: Model, imports: set[str]) -> str:
    """Return source code that assigns the model to `model`."""
    if isinstance(model.source, str):
        return f"model = {model.source!r}"
    try:
        if model.makes is None:
            raise Unwritable(f"the model was an object of class {type(model.source).__name__}, with weights of its own")
        try:
            name = reference(model.makes, imports)
            return f"model = {name}" if name != "model" else "# `model` is imported above"
        except Unwritable:
            return _source(model.makes, imports)
    except Unwritable as error:
        return (
            f"# {str(error)[:1].upper()}{str(error)[1:]}, and can't be written as source code.\n"
            "# Define it here, such as:  def model(): return MyModel(...)\n"
            "model = ..."
        )


def _source(function: Any, imports: set[str]) -> str:
    """Return the source of a function defined in a notebook, with the globals that it uses."""
    if not isinstance(function, types.FunctionType) or function.__closure__ or function.__name__ == "<lambda>":
        raise Unwritable(f"the model is not made by a top-level function: {function!r:.80}")
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise Unwritable(f"the source of {function.__name__} was not found") from error
    before = [
        _needed(name, function.__globals__[name], imports)
        for name in _globals(function.__code__)
        if name in function.__globals__
    ]
    lines = [line for line in before if line]
    lines += ["", ""] if lines else []
    after = "" if function.__name__ == "model" else f"\n\nmodel = {function.__name__}"
    return "\n".join(lines) + source.rstrip() + after


def _globals(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _globals(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _needed(name: str, value: Any, imports: set[str]) -> str:
    """Return the line that defines a global name used by a function; "" if an import, added to `imports`, or a builtin does."""
    if isinstance(value, types.ModuleType):
        imports.add(f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}")
        return ""
    if isinstance(value, bool | int | float | str | None.__class__ | tuple | list | dict):
        return f"{name} = {value!r}"
    if getattr(builtins, name, None) is value:
        return ""
    if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
        return _source(value, imports).partition("\n\nmodel = ")[0] + "\n\n"
    name_here = reference(value, imports)
    return "" if name_here == name else f"{name} = {name_here}"


__all__ = ["PLAIN", "Exported", "command", "write"]
