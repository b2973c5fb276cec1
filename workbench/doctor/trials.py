"""Trials of every wrapper on copies of a model, and the verdicts that follow from them."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..core.calls.predict import plan_of
from ..core.method import Call
from ..core.outputs.meanings import Meaning
from ..core.wrapped import Wrapped, is_wrapped
from ..engine.run import STRATEGIES
from ..engine.tree import flatten, is_float, map_tensors, tensors, tree_map
from ..errors import SettingsNeededError
from ..introspect.locations import NOWHERE, Location, call_model, locate_error
from ..introspect.source_lines import first_sentence
from .candidates import Candidate
from .described_outputs import write
from .findings import KINDS, Finding, Role, for_wrappers, make_finding
from .isolation import copy_with_tensors, wrapped_function
from .observed_run import ExampleCall
from .tracers import READS

_ONE_PASS = [strategy for strategy in ("vmap", "rescue") if strategy in STRATEGIES]
# findings of these kinds matter only if they keep branches from running in one pass
_HARMLESS_IN_ONE_PASS = {*READS.values(), "vmap"}
_EPOCHS = 8  # enough for methods that collect weights


@dataclass
class WrapperTrial:
    """Result of trying a wrapper.

    Args:
        refusal: the error that it raised.
        settings: why its default settings do not suffice, if that is no flaw of the model.
        vmap_error: the error of running all branches in one pass.
        refused_at, vmap_failed_at: where these errors arose in the user's code.
        in_layer: whether one of torch's own layers prevented running in one pass, as `nn.LSTM` does.
        ran: whether the wrapped model was run.
    """

    refusal: Exception | None = None
    settings: str = ""
    vmap_error: Exception | None = None
    refused_at: Location = NOWHERE
    vmap_failed_at: Location = NOWHERE
    in_layer: bool = False
    ran: bool = False


# ---- trials
@dataclass(frozen=True)
class Trials:
    """The model and the call that all wrappers are tried on.

    Args:
        model: plain or wrapped.
        call: the plain model and its call; None to wrap without running.
        modes: modes in which the plain model runs, as values of `training`.
        keeps_state: whether the model keeps something from call to call, which need not fit the next one, as when rows were dealt out.
        output: what the output means if its numbers reveal it, for wrappers that refuse it as values.
    """

    model: nn.Module
    call: ExampleCall | None
    modes: list[bool]
    keeps_state: bool = False
    output: Meaning | None = None

    def of(self, candidate: Candidate) -> WrapperTrial:
        """Put a wrapper on a copy of the model, and run it."""
        trial = WrapperTrial()
        try:
            wrapper = candidate.make()
        except Exception as error:
            trial.settings = f"{candidate.name} needs settings: {error}"
            return trial
        try:
            wrapped = self._run(wrapper)
        except SettingsNeededError as error:
            trial.settings = (
                f"{candidate.name} needs {f'{error.setting}=...' if error.setting else 'settings'}: {error}"
            )
        except Exception as error:
            trial.settings = self._meaning_needed(candidate, error)
            trial.refusal = None if trial.settings else error
            trial.refused_at, _ = locate_error(error, is_wrapped)
        else:
            trial.ran = wrapped is not None
            if trial.ran and Role.BRANCHES in candidate.roles:
                self._try_one_pass(trial, wrapper, wrapped)
        return trial

    def _meaning_needed(self, candidate: Candidate, error: Exception) -> str:
        """The setting that a wrapper needs if it takes the model once it knows what the output means; else ""."""
        if self.output is None:
            return ""
        try:
            self._run(candidate.make(output=self.output))
        except Exception:
            return ""
        return f"{candidate.name} needs output={write(self.output)}: {str(error).strip().splitlines()[0]}"

    def _wrap(self, wrapper: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self.model
            return wrapper(copy.deepcopy(model) if is_wrapped(model) else copy_with_tensors(model))

    def _run(self, wrapper: Any) -> Any:
        """The wrapped model after calls in both modes, without and with risk; None if it can't be run.

        A wrapper with a pass of its own is asked for risk in training mode only, where nothing has to be fitted first.
        """
        wrapped = self._wrap(wrapper)
        if self.call is None or not self.modes:
            return None
        own_pass = any(method.own_pass for method in wrapped._workbench.methods)
        for training, return_risk in itertools.product(sorted(self.modes, reverse=True), (False, True)):
            wrapped = self._wrap(wrapper) if self.keeps_state else wrapped
            if return_risk and not training and not own_pass:
                _prepare(wrapped, self.call)
            wrapped.train(training or (own_pass and return_risk))
            with torch.set_grad_enabled(training):
                call_model(wrapped, *_inputs(self.call, return_risk=return_risk))
        return wrapped

    def _try_one_pass(self, trial: WrapperTrial, wrapper: Any, wrapped: Any) -> None:
        """Try to run all branches in one pass, in each mode with each strategy until one succeeds."""
        for training in self.modes:
            errors: list[Exception] = []
            for strategy in _ONE_PASS:
                error = self._one_pass_error(strategy, self._wrap(wrapper) if self.keeps_state else wrapped, training)
                if error is None:
                    break
                errors.append(error)
            else:
                trial.vmap_error = errors[-1]
                trial.vmap_failed_at, trial.in_layer = locate_error(errors[-1], is_wrapped)
                return

    def _one_pass_error(self, strategy: str, wrapped: Any, training: bool) -> Exception | None:
        """Why all branches can't run in one pass with a strategy; None if they can, or if the wrapper runs them one by one on any model."""
        assert self.call is not None
        if self.keeps_state and not training:
            _prepare(wrapped, self.call)
        wrapped.train(training)
        plan = plan_of(wrapped, Call(training, return_risk=True))
        if plan.size == 1 or plan.loop_only:
            return None
        wrapped._workbench.strategy = strategy
        try:
            with torch.set_grad_enabled(training):
                call_model(wrapped, *_inputs(self.call, return_risk=True))
        except Exception as error:
            # the error says that the strategy is not possible; its cause has the location
            return error.__cause__ if isinstance(error.__cause__, Exception) else error
        return None


def _prepare(wrapped: Any, call: ExampleCall) -> None:
    """Let methods that learn or collect something see the example, as `workbench.fit` would; collected weights differ as after training."""
    wrapped.eval()
    for method in wrapped._workbench.methods:
        for epoch in range(1, _EPOCHS + 1) if method.collects else ():
            with torch.no_grad():
                for parameter in filter(is_float, wrapped.parameters()):
                    parameter.mul_(1 + 0.5 * torch.randn_like(parameter))
            method.collect(wrapped, epoch, _EPOCHS)
    if not any(method.needs_fit for method in wrapped._workbench.methods):
        return
    with torch.no_grad():
        output = call_model(wrapped, *_inputs(call))
    noisy = tree_map(lambda leaf: leaf + torch.randn_like(leaf) if is_float(leaf) else leaf, output)
    # use the outputs as targets; if several are refused, use one of them
    targets = [noisy, *(leaf for leaf in flatten(noisy)[0] if is_float(leaf) and leaf is not noisy)]
    refusals: list[Exception] = []
    for target in targets:
        try:
            call_model(Wrapped.fit, (wrapped, [(_as_inputs(call, *_inputs(call)), target)]), {})
            return
        except (TypeError, ValueError) as error:
            refusals.append(error)
    raise refusals[0]


def _as_inputs(call: ExampleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs in the form that `fit` takes: a tuple of positional or a dict of keyword inputs."""
    if not kwargs:
        return args
    forward = wrapped_function(call.model) or call.model.forward
    return dict(inspect.signature(forward).bind(*args, **kwargs).arguments) if args else kwargs


def _inputs(call: ExampleCall, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs; fewer than four rows are repeated, since two voters with batch norm need four, and a signature two."""
    args, kwargs = call.inputs()
    n_rows = call.n_rows()
    if n_rows is not None and 0 < n_rows < 4 and all(t.dim() for t in tensors((args, kwargs))):
        args, kwargs = map_tensors(lambda t: torch.cat([t] * 4), (args, kwargs))
    return args, {**kwargs, **more}


# ---- verdicts
def judge(
    findings: list[Finding], trials: dict[str, WrapperTrial], roles: Mapping[str, frozenset[Role]], name: str
) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings, corrected and extended by what the trials showed, and the verdict on each wrapper.

    Args:
        findings: findings so far, with their expected verdicts.
        trials, roles: by wrapper.
        name: name of the model.
    """
    obstacles = [for_wrappers(obstacle, roles) for obstacle in _new_obstacles(findings, trials, name)]
    findings = [*findings, *obstacles]
    findings = [replace(f, means=MappingProxyType(_actual_meanings(f, trials))) for f in findings]
    for wrapper, trial in trials.items():
        if trial.refusal is not None and not any(f.means[wrapper] == "refused" for f in findings):
            findings = [for_wrappers(finding, roles) for finding in _with_refusal(findings, wrapper, trial, name)]
    return findings, {wrapper: _verdict(wrapper, trial, findings) for wrapper, trial in trials.items()}


def _new_obstacles(findings: list[Finding], trials: dict[str, WrapperTrial], name: str) -> list[Finding]:
    """A finding for each line of the user's code that keeps branches from running in one pass, and that no finding names yet."""
    lines = {finding.line for finding in findings if finding.line and _is_obstacle(finding)}
    obstacles: list[Finding] = []
    for trial in trials.values():
        location = trial.vmap_failed_at
        if trial.vmap_error is not None and not trial.in_layer and location.file and location.line not in lines:
            lines.add(location.line)
            obstacles.append(make_finding("vmap", name, first_sentence(str(trial.vmap_error)), location))
    return obstacles


def _with_refusal(findings: list[Finding], wrapper: str, trial: WrapperTrial, name: str) -> list[Finding]:
    """The findings with a refusal added: to the one about the same line, to that of another wrapper with the same message, or as a new one."""
    message, location = str(trial.refusal).strip().split("\n")[0], trial.refused_at
    for i, finding in enumerate(findings):
        same_message = finding.kind == "refused" and finding.what == message
        if same_message or (location.file and finding.line == location.line and _is_obstacle(finding)):
            extended = replace(
                finding,
                what=message if same_message else f"{finding.what}; {wrapper}: {message}",
                means=MappingProxyType({**finding.means, wrapper: "refused"}),
            )
            return [*findings[:i], extended, *findings[i + 1 :]]
    return [*findings, make_finding("refused", name, message, location, means={wrapper: "refused"})]


def _is_obstacle(finding: Finding) -> bool:
    """Whether a finding is of a kind that keeps branches from running in one pass."""
    return "slower" in KINDS[finding.kind].means.values()


def _actual_meanings(finding: Finding, trials: dict[str, WrapperTrial]) -> dict[str, str]:
    """The verdicts of a finding: the expected ones, corrected by what the trials showed."""
    means = dict(finding.means)
    for wrapper, trial in trials.items():
        if trial.settings:
            means[wrapper] = "needs settings"
            continue
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
    if trial.settings:
        return "needs settings"
    if not trial.ran:
        return "not run"
    meanings = {finding.means[wrapper] for finding in findings}
    return next((verdict for verdict in ("slower", "note") if verdict in meanings), "ok")
