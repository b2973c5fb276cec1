"""The verdicts: every wrapper is put on a copy of the model, and run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..core.wrapped import is_wrapped
from ..engine.run import STRATEGIES
from ..engine.tree import tensors, tree_map
from ..introspect.locations import NOWHERE, Location, call_model, locate_error
from ..introspect.source_lines import first_sentence
from ..methods import neo, sample, sculpt, vote
from .kinds import KINDS, WRAPPERS
from .passes import Subject
from .report import Finding, finding
from .untouched import separate
from .watching import READS

_MAKE: dict[str, Callable[..., Any]] = {
    "vote": lambda **common: vote.Wrapper(2, **common),
    "sample": lambda **common: sample.Wrapper(2, **common),
    "sculpt": lambda **common: sculpt.Wrapper(**common),
    "neo": lambda **common: neo.Wrapper(**common),
}


_ONE_PASS = [strategy for strategy in ("vmap", "rescue") if strategy in STRATEGIES]
_READS = {*READS.values(), "vmap"}  # nothing is to be known about them where they do not stand in the way


@dataclass
class Trial:
    """What a wrapper did.

    Args:
        refused: the error that it raised.
        vmap: the error of running all branches in one pass.
        place, vmap_place: where, in the user's code.
        layer: whether a layer of torch's own stood in the way of one pass, as `nn.LSTM` does.
        ran: whether it was run.
    """

    refused: Exception | None = None
    vmap: Exception | None = None
    place: Location = NOWHERE
    vmap_place: Location = NOWHERE
    layer: bool = False
    ran: bool = False


def tried(model: nn.Module, subject: Subject | None, modes: list[bool]) -> dict[str, Trial]:
    """Put every wrapper on a copy of a model, and run it.

    Args:
        model: plain or wrapped.
        subject: the plain model and its call; None for wrapping only.
        modes: those in which the plain model runs.
    """
    return {name: _trial(name, model, subject, modes) for name in WRAPPERS}


def _trial(name: str, model: nn.Module, subject: Subject | None, modes: list[bool]) -> Trial:
    trial = Trial()
    try:
        wrapped = _wrap(name, model)
        if subject is not None and modes:
            _run(name, wrapped, subject, modes)
            trial.ran = True
    except Exception as error:
        trial.refused = error
        trial.place, _ = locate_error(error, is_wrapped)
        return trial
    if not trial.ran or name == "neo" or subject is None:
        return trial
    for training in modes:
        obstacles = [_obstacle_to(strategy, name, model, subject, training) for strategy in _ONE_PASS]
        last = obstacles[-1]
        if last is not None and None not in obstacles:
            trial.vmap = last
            trial.vmap_place, trial.layer = locate_error(last, is_wrapped)
            break
    return trial


def _obstacle_to(strategy: str, name: str, model: nn.Module, subject: Subject, training: bool) -> Exception | None:
    """Why all branches can't run in one pass by a strategy; None if they can."""
    wrapped = _wrap(name, model, strategy=strategy)
    try:
        with torch.set_grad_enabled(training):
            wrapped.train(training)
            call_model(wrapped, *_given(subject, return_risk=True))
    except Exception as error:
        # the wrapper says that the strategy is not possible; the cause tells where
        return error.__cause__ if isinstance(error.__cause__, Exception) else error
    return None


def _wrap(name: str, model: nn.Module, **common: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _MAKE[name](**common)(copy.deepcopy(model) if is_wrapped(model) else separate(model))


def _run(name: str, wrapped: Any, subject: Subject, modes: list[bool]) -> None:
    """In both modes, but neo's risk in training mode, which it can be asked for before it was fitted."""
    for training in sorted(modes, reverse=True):
        for return_risk in (False, True):
            wrapped.train(training or (name == "neo" and return_risk))
            with torch.set_grad_enabled(training):
                call_model(wrapped, *_given(subject, return_risk=return_risk))


def _given(subject: Subject, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs; few rows are repeated, since two voters with batch norm need four, and a signature two."""
    args, kwargs = subject.inputs()
    rows = subject.rows()
    if rows is not None and 0 < rows < 4 and all(t.dim() for t in tensors((args, kwargs))):
        args, kwargs = tree_map(
            lambda leaf: torch.cat([leaf] * 4) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
    return args, {**kwargs, **more}


def judged(findings: list[Finding], trials: dict[str, Trial], name: str) -> tuple[list[Finding], dict[str, str]]:
    """What the findings mean in the light of the trials, and the verdict on each wrapper.

    Args:
        findings: those so far, with what is expected of them.
        trials: by wrapper.
        name: of the model.
    """
    slow: dict[str, dict[str, Trial]] = {}
    for wrapper, trial in trials.items():
        if trial.vmap is not None and not trial.layer and trial.vmap_place.file:
            slow.setdefault(trial.vmap_place.line, {})[wrapper] = trial
    known = {f.line for f in findings if f.line and _obstructs(f)}
    for line, found in slow.items():
        if line not in known:
            trial = next(iter(found.values()))
            findings = [*findings, _obstacle(trial, name)]
    findings = [replace(f, means=MappingProxyType(_meant(f, trials))) for f in findings]
    for wrapper, trial in trials.items():
        if trial.refused is not None and not any(f.means[wrapper] == "refused" for f in findings):
            findings = _with_refusal(findings, wrapper, trial, name)
    return findings, {wrapper: _verdict(wrapper, trial, findings) for wrapper, trial in trials.items()}


def _with_refusal(findings: list[Finding], wrapper: str, trial: Trial, name: str) -> list[Finding]:
    """The refusal told by the finding about the same line, by that of another wrapper in the same words, or by a new one."""
    message, place = str(trial.refused).strip().split("\n")[0], trial.place
    for i, found in enumerate(findings):
        same = found.kind == "refused" and found.what == message
        if same or (place.file and found.line == place.line and _obstructs(found)):
            told = replace(
                found,
                what=message if same else f"{found.what}; {wrapper}: {message}",
                means=MappingProxyType({**found.means, wrapper: "refused"}),
            )
            return [*findings[:i], told, *findings[i + 1 :]]
    means = {wrapper: "refused"}
    return [*findings, finding("refused", place.path or name, place.line, message, place.code, means=means)]


def _obstructs(found: Finding) -> bool:
    """Whether it is of a kind that stands in the way of one pass for all branches."""
    return "slower" in KINDS[found.kind].means


def _obstacle(trial: Trial, name: str) -> Finding:
    place = trial.vmap_place
    return finding("vmap", place.path or name, place.line, first_sentence(str(trial.vmap)), place.code)


def _meant(found: Finding, trials: dict[str, Trial]) -> dict[str, str]:
    """What is expected of a finding, held against what happened."""
    means = dict(found.means)
    for wrapper, trial in trials.items():
        if means[wrapper] == "refused" and trial.refused is None:
            means[wrapper] = "note"
        elif means[wrapper] == "slower" and (trial.ran or trial.refused) and trial.vmap is None:
            means[wrapper] = "ok" if trial.ran and found.kind in _READS else "note"
        elif trial.vmap is not None and _obstructs(found) and found.line == (trial.vmap_place.line or None):
            means[wrapper] = "slower"
    return means


def _verdict(wrapper: str, trial: Trial, findings: list[Finding]) -> str:
    if trial.refused is not None:
        return "refused"
    if not trial.ran:
        return "not run"
    meant = {found.means[wrapper] for found in findings}
    return next((verdict for verdict in ("slower", "note") if verdict in meant), "ok")
