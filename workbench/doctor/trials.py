"""Trials of every wrapper on copies of a model, and the verdicts that follow from them."""

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
from .findings import KINDS, WRAPPERS, Finding, make_finding
from .isolation import copy_with_tensors
from .observed_run import ExampleCall
from .tracers import READS

_WRAPPER_MAKERS: dict[str, Callable[..., Any]] = {
    "vote": lambda **common: vote.Wrapper(2, **common),
    "sample": lambda **common: sample.Wrapper(2, **common),
    "sculpt": lambda **common: sculpt.Wrapper(**common),
    "neo": lambda **common: neo.Wrapper(**common),
}
_ONE_PASS = [strategy for strategy in ("vmap", "rescue") if strategy in STRATEGIES]
# nothing is to be known about findings of these kinds where they do not stand in the way
_HARMLESS_IN_ONE_PASS = {*READS.values(), "vmap"}


@dataclass
class WrapperTrial:
    """What a wrapper did.

    Args:
        refusal: the error that it raised.
        vmap_error: the error of running all branches in one pass.
        refused_at, vmap_failed_at: where, in the user's code.
        in_layer: whether a layer of torch's own stood in the way of one pass, as `nn.LSTM` does.
        ran: whether it was run.
    """

    refusal: Exception | None = None
    vmap_error: Exception | None = None
    refused_at: Location = NOWHERE
    vmap_failed_at: Location = NOWHERE
    in_layer: bool = False
    ran: bool = False


# ---- trials
def try_wrappers(model: nn.Module, call: ExampleCall | None, modes: list[bool]) -> dict[str, WrapperTrial]:
    """Put every wrapper on a copy of a model, and run it.

    Args:
        model: plain or wrapped.
        call: the plain model and its call; None for wrapping only.
        modes: those in which the plain model runs.
    """
    return {name: _try_wrapper(name, model, call, modes) for name in WRAPPERS}


def _try_wrapper(name: str, model: nn.Module, call: ExampleCall | None, modes: list[bool]) -> WrapperTrial:
    trial = WrapperTrial()
    try:
        wrapped = _wrap(name, model)
        if call is not None and modes:
            _run(name, wrapped, call, modes)
            trial.ran = True
    except Exception as error:
        trial.refusal = error
        trial.refused_at, _ = locate_error(error, is_wrapped)
        return trial
    if not trial.ran or name == "neo" or call is None:
        return trial
    for training in modes:
        errors = [_one_pass_error(strategy, name, model, call, training) for strategy in _ONE_PASS]
        if errors[-1] is not None and None not in errors:
            trial.vmap_error = errors[-1]
            trial.vmap_failed_at, trial.in_layer = locate_error(errors[-1], is_wrapped)
            break
    return trial


def _one_pass_error(strategy: str, name: str, model: nn.Module, call: ExampleCall, training: bool) -> Exception | None:
    """Why all branches can't run in one pass by a strategy; None if they can."""
    wrapped = _wrap(name, model, strategy=strategy)
    try:
        with torch.set_grad_enabled(training):
            wrapped.train(training)
            call_model(wrapped, *_inputs(call, return_risk=True))
    except Exception as error:
        # the wrapper says that the strategy is not possible; the cause tells where
        return error.__cause__ if isinstance(error.__cause__, Exception) else error
    return None


def _wrap(name: str, model: nn.Module, **common: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapper = _WRAPPER_MAKERS[name](**common)
        return wrapper(copy.deepcopy(model) if is_wrapped(model) else copy_with_tensors(model))


def _run(name: str, wrapped: Any, call: ExampleCall, modes: list[bool]) -> None:
    """In both modes, but neo's risk in training mode, which it can be asked for before it was fitted."""
    for training in sorted(modes, reverse=True):
        for return_risk in (False, True):
            wrapped.train(training or (name == "neo" and return_risk))
            with torch.set_grad_enabled(training):
                call_model(wrapped, *_inputs(call, return_risk=return_risk))


def _inputs(call: ExampleCall, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs; few rows are repeated, since two voters with batch norm need four, and a signature two."""
    args, kwargs = call.inputs()
    n_rows = call.n_rows()
    if n_rows is not None and 0 < n_rows < 4 and all(t.dim() for t in tensors((args, kwargs))):
        args, kwargs = tree_map(
            lambda leaf: torch.cat([leaf] * 4) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
    return args, {**kwargs, **more}


# ---- verdicts
def judge(findings: list[Finding], trials: dict[str, WrapperTrial], name: str) -> tuple[list[Finding], dict[str, str]]:
    """What the findings mean in the light of the trials, and the verdict on each wrapper.

    Args:
        findings: those so far, with what is expected of them.
        trials: by wrapper.
        name: of the model.
    """
    findings = [*findings, *_new_obstacles(findings, trials, name)]
    findings = [replace(f, means=MappingProxyType(_actual_meanings(f, trials))) for f in findings]
    for wrapper, trial in trials.items():
        if trial.refusal is not None and not any(f.means[wrapper] == "refused" for f in findings):
            findings = _with_refusal(findings, wrapper, trial, name)
    return findings, {wrapper: _verdict(wrapper, trial, findings) for wrapper, trial in trials.items()}


def _new_obstacles(findings: list[Finding], trials: dict[str, WrapperTrial], name: str) -> list[Finding]:
    """A finding for each line of the user's that keeps branches from running in one pass, and that no finding names yet."""
    lines = {finding.line for finding in findings if finding.line and _is_obstacle(finding)}
    obstacles: list[Finding] = []
    for trial in trials.values():
        location = trial.vmap_failed_at
        if trial.vmap_error is not None and not trial.in_layer and location.file and location.line not in lines:
            lines.add(location.line)
            obstacles.append(make_finding("vmap", name, first_sentence(str(trial.vmap_error)), location))
    return obstacles


def _with_refusal(findings: list[Finding], wrapper: str, trial: WrapperTrial, name: str) -> list[Finding]:
    """The refusal told by the finding about the same line, by that of another wrapper in the same words, or by a new one."""
    message, location = str(trial.refusal).strip().split("\n")[0], trial.refused_at
    for i, finding in enumerate(findings):
        same_words = finding.kind == "refused" and finding.what == message
        if same_words or (location.file and finding.line == location.line and _is_obstacle(finding)):
            extended = replace(
                finding,
                what=message if same_words else f"{finding.what}; {wrapper}: {message}",
                means=MappingProxyType({**finding.means, wrapper: "refused"}),
            )
            return [*findings[:i], extended, *findings[i + 1 :]]
    return [*findings, make_finding("refused", name, message, location, means={wrapper: "refused"})]


def _is_obstacle(finding: Finding) -> bool:
    """Whether it is of a kind that stands in the way of one pass for all branches."""
    return "slower" in KINDS[finding.kind].means


def _actual_meanings(finding: Finding, trials: dict[str, WrapperTrial]) -> dict[str, str]:
    """What is expected of a finding, held against what happened."""
    means = dict(finding.means)
    for wrapper, trial in trials.items():
        failed_here = finding.line and finding.line == trial.vmap_failed_at.line
        if means[wrapper] == "refused" and trial.refusal is None:
            means[wrapper] = "note"
        elif means[wrapper] == "slower" and (trial.ran or trial.refusal) and trial.vmap_error is None:
            means[wrapper] = "ok" if trial.ran and finding.kind in _HARMLESS_IN_ONE_PASS else "note"
        elif trial.vmap_error is not None and _is_obstacle(finding) and failed_here:
            means[wrapper] = "slower"
    return means


def _verdict(wrapper: str, trial: WrapperTrial, findings: list[Finding]) -> str:
    if trial.refusal is not None:
        return "refused"
    if not trial.ran:
        return "not run"
    meanings = {finding.means[wrapper] for finding in findings}
    return next((verdict for verdict in ("slower", "note") if verdict in meanings), "ok")
