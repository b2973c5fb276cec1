"""Checks of a model by running copies of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.batches.dealing import alike
from ..core.wrapped import is_wrapped
from ..engine.dependence import reached
from ..engine.tree import flatten, is_float, names, paths, tensors, tree_map
from ..introspect.locations import NOWHERE, Location, locate_error
from ..introspect.source_lines import first_sentence
from .described_outputs import DescribedOutput, describe_outputs, squashed_remedy, sums_to_one
from .findings import Finding, Means, Role, make_finding
from .isolation import generators
from .observed_run import MISSING, ExampleCall, ObservedRun, SameObject, copy_leaf, snapshot
from .tracers import DATA, HOW_READ, PARAMETER, SQUASHING


class Seen(NamedTuple):
    """Results of running a model.

    Args:
        findings: findings about the model.
        modes: modes in which it runs, as values of `training`.
        outputs: descriptions of its outputs.
    """

    findings: list[Finding]
    modes: list[bool]
    outputs: list[DescribedOutput]


def check_runs(call: ExampleCall) -> Seen:
    """Run copies of the model in both modes, and report what they show."""
    runs = [ObservedRun(call, training) for training in (call.model.training, not call.model.training)]
    successful = [run for run in runs if run.error is None]
    modes_seen: dict[Finding, set[bool]] = {}
    for run in runs:
        for finding in (_error(run),) if run.error is not None else (*_changes(run), *_calls(run)):
            known = next((f for f in modes_seen if _is_same(f, finding)), finding)
            modes_seen.setdefault(known, set()).add(run.training)
    findings = [_with_modes(finding, modes, len(successful)) for finding, modes in modes_seen.items()]
    modes = [run.training for run in successful]
    outputs: list[DescribedOutput] = []
    if successful:
        run = next((each for each in successful if not each.training), successful[0])
        findings += [*_output(run), *_rows(run), *_gradients(successful), *_mixing(call, modes)]
        outputs = describe_outputs(run)
    return Seen(findings, modes, outputs)


def _is_same(one: Finding, other: Finding) -> bool:
    """Whether two findings, possibly from different modes, are about the same place."""
    return (one.kind, one.where, one.line) == (other.kind, other.where, other.line)


def _with_modes(finding: Finding, modes: set[bool], n_successful: int) -> Finding:
    """A finding that names the mode in which it occurred, unless it occurred in every mode in which the model runs."""
    if len(modes) < 2 and (finding.kind == "error" or n_successful != 1):
        mode = "training" if True in modes else "evaluation"
        finding = replace(finding, what=f"{finding.what} (in {mode} mode)".strip())
    if finding.kind == "error" and n_successful:  # the other mode runs
        finding = replace(finding, means=MappingProxyType(dict.fromkeys(finding.means, "note")))
    return finding


def _error(run: ObservedRun) -> Finding:
    error = run.error
    assert error is not None
    location, _ = locate_error(error, is_wrapped)
    return make_finding("error", run.call.name, f"{type(error).__name__}: {first_sentence(str(error))}", location)


# ---- changes made by a run
def _changes(run: ObservedRun) -> Iterator[Finding]:
    """Values that the call changed, and the lines that did it, which a second run finds line by line."""
    keys = [key for key in run.changed() if not (run.training and key == ("random", "torch"))]
    if not keys:
        return
    watched_run = ObservedRun(run.call, run.training, watch=keys)
    changed_again = run.repeat()
    for key in keys:
        kind, path, what = _change(run, key)
        if key[0] == "attribute" and key not in changed_again:
            kind, what = "state" if kind == "grows" else kind, f"{what}, in the first call only"
        for location in watched_run.lines.changes.get(key) or [NOWHERE]:
            yield make_finding(kind, run.call.name, what, replace(location, path=path or location.path))


def _change(run: ObservedRun, key: Any) -> tuple[str, str, str]:
    """Kind of finding, path of the module and description of one change."""
    kind, *rest = key
    if kind == "random":
        source = {"numpy": "numpy.random", "random": "Python's random"}.get(rest[0], "")
        return ("randomness", "", f"draws from {source}") if source else ("random_eval", "", "draws random numbers")
    if kind == "generator":
        path, name = rest
        library = type(generators(run.model)[path, name]).__module__.split(".")[0]
        return "randomness", path, f"draws from {name}, a {library} generator of its own"
    if kind == "input":
        return "input_write", "", "writes in place"
    if kind == "outside":
        holder, name = rest
        what = f"{holder.__name__}.{name}" if isinstance(holder, type) else f"the global variable {name}"
        return "global_write", "", what
    path, name = rest
    if kind == "buffer":
        return "buffers", path, name
    missing = snapshot(MISSING)
    kind, what = _change_of_attribute(name, run.before.get(key, missing), run.after.get(key, missing))
    return kind, path, what


def _change_of_attribute(name: str, before: Any, after: Any) -> tuple[str, str]:
    """Kind of finding and description of a change between two snapshots of an attribute."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        is_object = isinstance(before[0], SameObject), isinstance(after[0], SameObject)
        if all(is_object) and before[0] == after[0]:
            return "state", f"the contents of {name}, a {type(before[0].value).__name__}"
        if len(before) == 3 and before[1] < after[1]:
            return "grows", f"{name}: {_count(before[1])} before the call, {after[1]} after"
        if len(before) == 3:
            return "state", f"the items of {name}"
        if not any(is_object):
            return "state", f"{name}: {before[1]!r} before the call, {after[1]!r} after"
    if isinstance(after, SameObject) and isinstance(after.value, Tensor):
        return "state", f"{name} is left as a tensor of the call"
    return "state", name


def _count(n: int) -> str:
    return "1 item" if n == 1 else f"{n} items"


def _calls(run: ObservedRun) -> Iterator[Finding]:
    """Findings about the calls of torch functions."""
    for kind, name, location, sources in run.calls.reads:
        if location.file and sources & (DATA | PARAMETER):
            means: Means = {} if sources & PARAMETER else {Role.BRANCHES: "ok"}
            what = HOW_READ.get(name, f"by {name}") + ("" if sources & PARAMETER else ", of inputs only")
            yield make_finding(kind, run.call.name, what, location, means=means)
    for kind, function, location in [*(("autograd", *grad) for grad in run.calls.grads), *run.lines.events]:
        if kind != "reentrant":
            yield make_finding(kind, run.call.name, f"by {function}", location)


# ---- outputs
def _leaves(run: ObservedRun) -> Iterator[tuple[str, Any, str, Location]]:
    """(path, leaf, name of the function that made it, location of that call) of the leaves of the output."""
    for path, leaf in zip(paths(run.output), flatten(run.output)[0], strict=True):
        maker = run.calls.maker(leaf) if isinstance(leaf, Tensor) else None
        yield path, leaf, maker.name if maker is not None else "", maker.location if maker is not None else NOWHERE


def _output(run: ObservedRun) -> Iterator[Finding]:
    has_float = False
    for name, (path, leaf, made_by, location) in zip(names(run.output), _leaves(run), strict=True):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            yield make_finding("non_tensor_output", run.call.name, f"{path}: {type(leaf).__name__}")
        elif not is_float(leaf):
            what = f"{path}: {str(leaf.dtype).removeprefix('torch.')}{f', made by {made_by}' if made_by else ''}"
            means: Means = {Role.ANY: "ok", Role.BRANCHES: "note"} if run.float_outputs() else {}
            yield make_finding("integer_output", run.call.name, what, location, means=means)
        elif made_by in SQUASHING or (not has_float and _sums_to_one(leaf)):
            what = f"{path}: made by {made_by}" if made_by in SQUASHING else f"{path}: numbers that sum to one"
            yield make_finding("probabilities", run.call.name, what, location, squashed_remedy(name, leaf, made_by))
        has_float = has_float or is_float(leaf)


def _sums_to_one(leaf: Tensor) -> bool:
    return not leaf.is_complex() and leaf.dim() == 2 and leaf.shape[1] > 1 and len(leaf) > 0 and sums_to_one(leaf, 1)


def _rows(run: ObservedRun) -> Iterator[Finding]:
    n_rows, name = run.call.n_rows(), run.call.name
    shapes = [list(leaf.shape) for leaf in tensors((run.call.args, run.call.kwargs))]
    if n_rows is None and shapes:
        what = f"the inputs have no common number of rows: {', '.join(map(str, shapes))}"
        remedy = "nothing, if that is how the data are"
        yield make_finding("no_rows", name, what, remedy=remedy, means={Role.OWN_PASS: "ok"})
    for path, leaf, _, location in _leaves(run):
        if isinstance(leaf, Tensor) and not (leaf.dim() and n_rows in (None, leaf.shape[0])):
            what = f"{path}: {f'shape {list(leaf.shape)} for {n_rows} rows' if leaf.dim() else 'a single number'}"
            means: Means = {Role.OWN_PASS: "ok"} if any(other.dim() for other in tensors(run.output)) else {}
            yield make_finding("no_rows", name, what, location, means=means)


# ---- gradients
def _gradients(runs: list[ObservedRun]) -> Iterator[Finding]:
    """Parameters that no output depends on in any mode."""
    if any(kind == "reentrant" for run in runs for kind, *_ in run.lines.events):
        return  # the graph of the outputs does not contain what is recomputed
    run = runs[0]
    trainable = [name for name, p in run.model.named_parameters() if p.requires_grad]
    if not trainable or not run.float_outputs():
        return
    used: set[str] = set().union(*(_parameters_reached(each) for each in runs))
    if not used:
        function, location = run.calls.gradient_stop
        yield make_finding("no_gradient", run.call.name, f"lost by {function}", location)
        return
    unused: dict[str, list[str]] = {}
    for name in trainable:
        if name not in used:
            unused.setdefault(name.rpartition(".")[0], []).append(name)
    for path, parameters in unused.items():
        yield make_finding("unused", path or run.call.name, ", ".join(parameters))


def _parameters_reached(run: ObservedRun) -> set[str]:
    """Names of the parameters that the outputs of a run depend on."""
    ids = reached([leaf for leaf in run.float_outputs() if leaf.requires_grad])
    return {name for name, p in run.model.named_parameters() if id(p) in ids}


# ---- rows
def _mixing(call: ExampleCall, modes: list[bool]) -> Iterator[Finding]:
    """A finding if the outputs for some rows differ when the other rows are missing."""
    n_rows = call.n_rows()
    if n_rows is None or n_rows < 2:
        return
    rows = torch.arange(0, n_rows, 2)
    for training in sorted(modes):
        whole, again = (ObservedRun(call, training, calm=True, record=True) for _ in range(2))
        if not _agree(whole, again):
            continue  # random numbers: every call differs, whatever the rows
        if any(not leaf.dim() or leaf.shape[0] != n_rows for leaf in whole.float_outputs()):
            return  # the finding "no_rows" says so already
        partial = ObservedRun(call, training, inputs=_rows_of_inputs(call, rows), calm=True, record=True)
        mode = " (in training mode)" if training and False in modes else ""
        if partial.error is not None:
            location, _ = locate_error(partial.error, is_wrapped)
            what = f"it does not run on {len(rows)} of {n_rows} rows: {first_sentence(str(partial.error))}"
            yield make_finding("batch_mixing", call.name, what + mode, location)
            return
        pairs = zip(whole.float_outputs(), partial.float_outputs(), strict=True)
        if not all(alike(a[rows.to(a.device)], b) for a, b in pairs):
            what = f"the outputs for {len(rows)} rows differ when they are among {n_rows}{mode}"
            yield make_finding("batch_mixing", call.name, what, _first_difference(whole, partial, rows, n_rows))
            return


def _agree(run: ObservedRun, again: ObservedRun) -> bool:
    """Whether two runs succeeded and gave the same floating-point outputs, at least one."""
    if run.error or again.error or not run.float_outputs():
        return False
    return all(alike(a, b) for a, b in zip(run.float_outputs(), again.float_outputs(), strict=True))


def _rows_of_inputs(call: ExampleCall, rows: Tensor) -> Any:
    """Copies of the inputs with only some of the rows."""
    return tree_map(
        lambda leaf: (
            copy_leaf(leaf).index_select(0, rows.to(leaf.device)) if isinstance(leaf, Tensor) and leaf.dim() else leaf
        ),
        (call.args, call.kwargs),
    )


def _first_difference(whole: ObservedRun, partial: ObservedRun, rows: Tensor, n_rows: int) -> Location:
    """Where the two runs first compute different values for the same rows."""
    for (name, location, a), (other, _, b) in zip(whole.calls.values, partial.calls.values, strict=False):
        if name != other or not _same_rows(a, b, rows, n_rows):
            return location
    return NOWHERE


def _same_rows(a: Tensor, b: Tensor, rows: Tensor, n_rows: int) -> bool:
    if a.dim() != b.dim():
        return False
    axes = [i for i in range(a.dim()) if a.shape[i] != b.shape[i]]
    if not axes:
        return alike(a, b)
    if len(axes) > 1:
        return False
    i = axes[0]
    if a.shape[i] == n_rows:
        return b.shape[i] == len(rows) and alike(a.index_select(i, rows.to(a.device)), b)
    return a.shape[i] * len(rows) == b.shape[i] * n_rows  # rows flattened together with another axis
