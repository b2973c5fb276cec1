"""What is found by running copies of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..core.dealing import _alike
from ..core.wrapped import is_wrapped
from ..engine.dependence import reached
from ..engine.tree import flatten, is_float, paths, tensors, tree_map
from ..introspect.locations import NOWHERE, Location, locate_error
from ..introspect.source_lines import first_sentence
from .passes import MISSING, Pass, Same, Subject, copied, printed
from .report import Finding, finding
from .untouched import generators
from .watching import DATA, PARAMETER, SQUASHING, WORDS


# ---- all checks
@dataclass
class Seen:
    """What running the model has shown.

    Args:
        findings: in words.
        modes: those in which it runs, as values of `training`.
    """

    findings: list[Finding] = field(default_factory=list)
    modes: list[bool] = field(default_factory=list)


def watched(subject: Subject) -> Seen:
    """Run copies of the model in both modes, and say what is seen."""
    seen = Seen()
    passes: list[Pass] = []
    for training in (subject.model.training, not subject.model.training):
        one = Pass(subject, training)
        passes.append(one)
    found: dict[Finding, set[bool]] = {}
    for one in passes:
        for each in (*_changes(one), *_calls(one)) if one.error is None else [_error(one)]:
            like = next((f for f in found if (f.kind, f.where, f.line) == (each.kind, each.where, each.line)), each)
            found.setdefault(like, set()).add(one.training)
    passes = [one for one in passes if one.error is None]
    seen.modes = [one.training for one in passes]
    for each, modes in found.items():
        both = len(modes) == 2 or (each.kind != "error" and len(passes) == 1)
        mode = "training" if True in modes else "evaluation"
        if not both:
            each = replace(each, what=f"{each.what} (in {mode} mode)".strip())
        if each.kind == "error" and passes:  # the other mode runs
            each = replace(each, means=MappingProxyType(dict.fromkeys(each.means, "note")))
        seen.findings.append(each)
    if passes:
        one = next((p for p in passes if not p.training), passes[0])
        seen.findings += [*_output(one), *_rows(one), *_gradients(passes), *_mixing(subject, seen.modes)]
    return seen


def _error(one: Pass) -> Finding:
    error = one.error
    assert error is not None
    place, _ = locate_error(error, is_wrapped)
    return finding(
        "error",
        place.path or one.subject.name,
        place.line,
        f"{type(error).__name__}: {first_sentence(str(error))}",
        place.code,
    )


def _changes(one: Pass) -> Iterator[Finding]:
    """What is another after the call, and which lines did it: found in a second pass, line by line."""
    keys = [key for key in one.changed() if not (one.training and key == ("random", "torch"))]
    if not keys:
        return
    watching = Pass(one.subject, one.training, watch=keys)
    lasting = one.again()
    for key in keys:
        kind, path, what = _change(one, key)
        if key[0] == "attribute" and key not in lasting:
            kind, what = "state" if kind == "grows" else kind, f"{what}, in the first call only"
        for place in watching.lines.changes.get(key) or [NOWHERE]:
            yield finding(kind, path or place.path or one.subject.name, place.line, what, place.code)


def _change(one: Pass, key: Any) -> tuple[str, str, str]:
    """Kind, path and words of one change."""
    kind, *rest = key
    if kind == "random":
        source = {"numpy": "numpy.random", "random": "Python's random"}.get(rest[0], "")
        return ("randomness", "", f"draws from {source}") if source else ("random_eval", "", "draws random numbers")
    if kind == "generator":
        each = generators(one.model)[rest[0], rest[1]]
        return (
            "randomness",
            rest[0],
            f"draws from {rest[1]}, a {type(each).__module__.split('.')[0]} generator of its own",
        )
    if kind == "input":
        return "input_write", "", "writes in place"
    if kind == "outside":
        holder, name = rest
        what = f"{holder.__name__}.{name}" if isinstance(holder, type) else f"the global variable {name}"
        return "global_write", "", what
    path, name = rest
    if kind == "buffer":
        return "buffers", path, name
    before, after = one.before.get(key, printed(MISSING)), one.after.get(key, printed(MISSING))
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        objects = [isinstance(part[0], Same) for part in (before, after)]
        if all(objects) and before[0] == after[0]:
            return "state", path, f"the contents of {name}, a {type(before[0].value).__name__}"
        if len(before) == 3 and before[1] < after[1]:
            return "grows", path, f"{name}: {_count(before[1])} before the call, {after[1]} after"
        if len(before) == 3:
            return "state", path, f"the items of {name}"
        if not any(objects):
            return "state", path, f"{name}: {before[1]!r} before the call, {after[1]!r} after"
    if isinstance(after, Same) and isinstance(after.value, Tensor):
        return "state", path, f"{name} is left as a tensor of the call"
    return "state", path, name


def _count(n: int) -> str:
    return "1 item" if n == 1 else f"{n} items"


def _calls(one: Pass) -> Iterator[Finding]:
    """What torch functions were seen to do."""
    name = one.subject.name
    for kind, by, place, sources in one.calls.reads:
        if place.file and sources & (DATA | PARAMETER):
            shared = {} if sources & PARAMETER else dict.fromkeys(("vote", "sample", "sculpt"), "ok")
            what = WORDS.get(by, f"by {by}") + ("" if sources & PARAMETER else ", of inputs only")
            yield finding(kind, place.path or name, place.line, what, place.code, means=shared)
    for kind, function, place in [*(("autograd", *grad) for grad in one.calls.grads), *one.lines.events]:
        if kind != "reentrant":
            yield finding(kind, place.path or name, place.line, f"by {function}", place.code)


# ---- outputs
def _output(one: Pass) -> Iterator[Finding]:
    leaves = flatten(one.output)[0]
    found = False
    for path, leaf in zip(paths(one.output), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            if leaf is not None:
                yield finding("non_tensor_output", one.subject.name, what=f"{path}: {type(leaf).__name__}")
            continue
        maker = one.calls.maker(leaf)
        place = maker.place if maker is not None else NOWHERE
        where, made = place.path or one.subject.name, maker.name if maker is not None else ""
        if not is_float(leaf):
            what = f"{path}: {str(leaf.dtype).removeprefix('torch.')}{f', made by {made}' if made else ''}"
            means = {"neo": "ok"} if one.floats() else {}
            yield finding("integer_output", where, place.line, what, place.code, means=means)
        elif made in SQUASHING or (not found and _sums_to_one(leaf)):
            what = f"{path}: made by {made}" if made in SQUASHING else f"{path}: numbers that sum to one"
            remedy = (
                'wrap with output="logits", for which log-probabilities are as good' if made == "log_softmax" else ""
            )
            yield finding("probabilities", where, place.line, what, place.code, remedy=remedy)
        found = found or is_float(leaf)


def _sums_to_one(leaf: Tensor) -> bool:
    if leaf.is_complex() or leaf.dim() != 2 or leaf.shape[1] < 2 or not len(leaf):
        return False
    total = leaf.detach().sum(1)
    return bool((leaf >= 0).all()) and torch.allclose(total, torch.ones_like(total), atol=1e-3)


def _rows(one: Pass) -> Iterator[Finding]:
    rows, name = one.subject.rows(), one.subject.name
    given = [list(leaf.shape) for leaf in tensors((one.subject.args, one.subject.kwargs))]
    if rows is None and given:
        what = f"the inputs have no common number of rows: {', '.join(map(str, given))}"
        yield finding("no_rows", name, what=what, remedy="nothing, if that is how the data are", means={"neo": "ok"})
    for path, leaf in zip(paths(one.output), flatten(one.output)[0], strict=True):
        if not isinstance(leaf, Tensor) or (leaf.dim() and rows in (None, leaf.shape[0])):
            continue
        maker = one.calls.maker(leaf)
        place = maker.place if maker is not None else NOWHERE
        what = f"{path}: {f'shape {list(leaf.shape)} for {rows} rows' if leaf.dim() else 'a single number'}"
        means = {"neo": "ok"} if any(other.dim() for other in tensors(one.output)) else {}
        yield finding("no_rows", place.path or name, place.line, what, place.code, means=means)


def _gradients(passes: list[Pass]) -> Iterator[Finding]:
    """Parameters that no output depends on, in no mode."""
    if any(kind == "reentrant" for one in passes for kind, *_ in one.lines.events):
        return  # the graph of the outputs does not show what is recomputed
    first = passes[0]
    reach: set[str] = set()
    carried = False
    for one in passes:
        found = reached([leaf for leaf in one.floats() if leaf.requires_grad])
        reach |= {name for name, p in one.model.named_parameters() if id(p) in found}
        carried = carried or any(leaf.requires_grad for leaf in one.floats())
    wanted = [name for name, p in first.model.named_parameters() if p.requires_grad]
    if not wanted or not first.floats():
        return
    if not reach:
        by, place = first.calls.lost
        yield finding("no_gradient", place.path or first.subject.name, place.line, f"lost by {by}", place.code)
        return
    owners: dict[str, list[str]] = {}
    for name in wanted:
        if name not in reach:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
    for path, names in owners.items():
        yield finding("unused", path or first.subject.name, what=", ".join(names))


# ---- rows
def _mixing(subject: Subject, modes: list[bool]) -> Iterator[Finding]:
    """Whether some rows alone are answered as among all."""
    count = subject.rows()
    if count is None or count < 2:
        return
    rows = torch.arange(0, count, 2)
    for training in sorted(modes):
        whole, again = (Pass(subject, training, calm=True, record=True) for _ in range(2))
        pairs = list(zip(whole.floats(), again.floats(), strict=True)) if not (whole.error or again.error) else []
        if not pairs or not all(_alike(a, b) for a, b in pairs):
            continue  # random numbers: every call differs, whatever the rows
        if any(not leaf.dim() or leaf.shape[0] != count for leaf in whole.floats()):
            return  # said already
        some = tree_map(
            lambda leaf: (
                copied(leaf).index_select(0, rows.to(leaf.device)) if isinstance(leaf, Tensor) and leaf.dim() else leaf
            ),
            (subject.args, subject.kwargs),
        )
        part = Pass(subject, training, inputs=some, calm=True, record=True)
        only = " (in training mode)" if training and False in modes else ""
        if part.error is not None:
            place, _ = locate_error(part.error, is_wrapped)
            what = f"it does not run on {len(rows)} of {count} rows: {first_sentence(str(part.error))}"
            yield finding("batch_mixing", place.path or subject.name, place.line, what + only, place.code)
            return
        if all(_alike(a[rows.to(a.device)], b) for a, b in zip(whole.floats(), part.floats(), strict=True)):
            continue
        place = _first_difference(whole, part, rows, count)
        what = f"the answer to {len(rows)} rows differs when they are among {count}{only}"
        yield finding("batch_mixing", place.path or subject.name, place.line, what, place.code)
        return


def _first_difference(whole: Pass, part: Pass, rows: Tensor, count: int) -> Location:
    for (name, place, a), (other, _, b) in zip(whole.calls.values, part.calls.values, strict=False):
        if name != other or not _same_rows(a, b, rows, count):
            return place
    return NOWHERE


def _same_rows(a: Tensor, b: Tensor, rows: Tensor, count: int) -> bool:
    if a.dim() != b.dim():
        return False
    axes = [i for i in range(a.dim()) if a.shape[i] != b.shape[i]]
    if not axes:
        return _alike(a, b)
    if len(axes) > 1:
        return False
    i = axes[0]
    if a.shape[i] == count:
        return b.shape[i] == len(rows) and _alike(a.index_select(i, rows.to(a.device)), b)
    return a.shape[i] * len(rows) == b.shape[i] * count  # rows flattened together with another axis
