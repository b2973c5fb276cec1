"""Check a wrapper on every model of the zoo."""

from __future__ import annotations

import contextlib
import copy
import dis
import io
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ..console import progress_bar
from ..core.wrapper import Wrapper
from ..engine.threads import torch_threads
from ..errors import WorkbenchWarning
from ..methods import neo, sample, sculpt, vote
from .checks import CHECKS, COMPOSED_ON, check_composition
from .models import seeded
from .reference import BranchTensors
from .report import Outcome, Report
from .trial import Trial
from .zoo import CASES, Case

OTHERS: dict[str, Callable[[], Wrapper]] = {
    "vote": lambda: vote.Wrapper(2),
    "sample": lambda: sample.Wrapper(2),
    "sculpt": sculpt.Wrapper,
    "neo": neo.Wrapper,
}


def check_wrapper(
    wrapper: Any,
    models: Iterable[str | Case] | None = None,
    verbose: bool = False,
    on_fail: str = "raise",
    tensors: BranchTensors | None = None,
) -> Report:
    """Check that a wrapper gives the numbers of plain models with its tensors on awkward models, or refuses them with an error message.

    The expected numbers never come from a run of the wrapped model: for every branch a plain model is built anew, given the branch's
    tensors, and run on its own. Those tensors are found in the `state_dict` by the names of their keys: `fc.weight@mine` has one row for each
    branch along the axis `mine`; without such a key, all branches share `fc.weight` and an intervention does the rest. If a wrapper
    names its keys in another way, its own rules are trusted, unless you provide the tensors. The number of branches and the noise that
    they see always come from the wrapper.

    Args:
        wrapper: a wrapper, a class of wrappers, or a function that returns one.
        models: names of models in the zoo, or your own cases (`workbench.testing.Case`); None checks the whole zoo.
        verbose: print a line for each model.
        on_fail: "raise" raises if a check failed, "report" only reports it.
        tensors: `tensors(state, place)` returns the tensors of a branch by their names in the plain model, computed from the state of the
            wrapped one (missing ones are found as above); `place` is the branch's position by axis. With it, the check does not
            depend on the rules that it checks.

    Returns:
        A table of model by check: passed, refused (with an error of this package or of the wrapper) or FAILED.

    Raises:
        AssertionError: if a check failed; lists every failing model and check, with its message.
        TypeError: if `wrapper` is no wrapper.
        RuntimeError: under `python -O`, which leaves out the checks.

    Example:
        >>> from workbench import vote
        >>> from workbench.testing import check_wrapper
        >>> report = check_wrapper(vote.Wrapper(2), models=["mlp", "scripted"])
        >>> report.failures
        []
        >>> report.refusals[0][:2]
        ('scripted', 'untouched')
    """
    if on_fail not in ("raise", "report"):
        raise ValueError(f'on_fail must be "raise" or "report", not {on_fail!r}')
    if not __debug__:
        raise RuntimeError(
            "check_wrapper checks by assert statements, which python -O leaves out, so that every wrapper would pass: run it without -O and "
            "PYTHONOPTIMIZE"
        )
    make = maker(wrapper)
    chosen = _cases(models)
    report = Report(repr(make()))
    for case in progress_bar(chosen, desc="models", delay=2, leave=False):
        trial = Trial(case, make, tensors)
        with _quiet():
            for name, check in checks_of(trial).items():
                report.outcomes[case.name, name] = outcome(check, trial)
        if verbose:
            statuses = [o.status for (model, _), o in report.outcomes.items() if model == case.name]
            print(f"{case.name}: {', '.join(f'{statuses.count(s)} {s}' for s in dict.fromkeys(statuses))}")
    if on_fail == "raise":
        report.raise_for_failures()
    return report


def maker(wrapper: Any) -> Callable[[], Wrapper]:
    """Return a function that makes the wrapper.

    Raises:
        TypeError: if it makes something else.
    """
    make = (lambda: copy.copy(wrapper)) if isinstance(wrapper, Wrapper) else wrapper
    if isinstance(wrapper, types.ModuleType) or not callable(make):
        raise TypeError(f"check_wrapper takes a Wrapper, such as vote.Wrapper(5), or a class of them, not {wrapper!r}")
    candidate = make()
    if not isinstance(candidate, Wrapper):
        raise TypeError(f"{wrapper!r} returns {candidate!r}, which is no workbench.Wrapper")
    return make


def _cases(models: Iterable[str | Case] | None) -> list[Case]:
    if models is None:
        return list(CASES.values())
    chosen = [models] if isinstance(models, str | Case) else list(models)
    unknown = [model for model in chosen if not isinstance(model, Case) and model not in CASES]
    if unknown:
        import difflib

        similar = difflib.get_close_matches(str(unknown[0]), CASES, 3)
        raise ValueError(f"{unknown[0]!r} is no model of the zoo; nearest: {', '.join(similar) or 'none'}")
    return [model if isinstance(model, Case) else CASES[model] for model in chosen]


def checks_of(trial: Trial) -> dict[str, Callable[[Trial], None]]:
    """Return the checks that apply to a model and a wrapper, by name."""
    checks, case = dict(CHECKS), trial.case
    if case.name in COMPOSED_ON or CASES.get(case.name) is not case:
        present = {method.name for method in trial.make().make()}
        for name, other in OTHERS.items():
            if name not in present:
                checks[f"with {name}"] = partial(check_composition, other=other())
    return checks


def outcome(check: Callable[[Trial], None], trial: Trial) -> Outcome:
    """Run one check."""
    try:
        with seeded():
            check(trial)
    except Exception as error:
        message = f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
        return Outcome("refused" if is_refusal(error, trial.make()) else "FAILED", message)
    return Outcome("passed")


def is_refusal(error: Exception, wrapper: Wrapper) -> bool:
    """Return whether an error was raised deliberately and with a message, by this package or in the module of the wrapper."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, TypeError | ValueError | RuntimeError) or not str(error):
        return False
    module = trace.tb_frame.f_globals.get("__name__", "")
    in_package = module.startswith("workbench.") and not module.startswith("workbench.testing")
    is_raise = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and (in_package or module == type(wrapper).__module__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run with one thread, since the tensors are tiny, and without this package's warnings and the models' output."""
    with torch_threads(1), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.filterwarnings("ignore", category=WorkbenchWarning)
        yield
