"""Find out when not to trust a PyTorch model: wrap it in one line, see aleatoric, epistemic and vacuitic risk apart.

>>> import torch
>>> from workbench import compose, sculpt, vote
>>> model = compose(vote.Wrapper(5), sculpt.Wrapper())(torch.nn.Linear(2, 1))
>>> y, risk = model(torch.zeros(4, 2), return_risk=True)
>>> risk.names()
('aleatoric', 'epistemic', 'total')
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.registry import name_outer
from .deprecation import answer_to_moved_modules
from .methods import BUILT_IN, WrapperModule
from .version import __version__

if TYPE_CHECKING:
    from . import (
        attributions,
        calibration,
        data,
        distributions,
        experiments,
        metrics,
        models,
        notebook,
        outputs,
        plots,
        text,
        widgets,
    )
    from .calibration import calibrate, selective, top_uncertain
    from .core.registry import register
    from .core.saving.files import load, save
    from .core.saving.from_pretrained import from_pretrained
    from .core.settings import setting
    from .core.wrapped import Wrapped, is_wrapped, unwrap
    from .core.wrapper import Wrapper, compose
    from .doctor import diagnose
    from .errors import NotFittedError, OptimizerMismatchError, PurityError, WorkbenchWarning
    from .methods import augment, laplace, neo, sample, sculpt, snapshot, swag, vote
    from .notebook.comparison import record_comparison
    from .notebook.record import read_records, record, record_check, record_figure, record_table
    from .notebook.run import run_notebook
    from .risk import Risk
    from .testing import check_wrapper
    from .training import History, Progress, fit

# public name -> submodule that defines it, or "" if the name is itself a submodule; everything is imported lazily, on first access
_EXPORTS = {
    **dict.fromkeys(
        (
            "attributions",
            "calibration",
            "data",
            "distributions",
            "experiments",
            "metrics",
            "models",
            "notebook",
            "outputs",
            "plots",
            "text",
            "widgets",
        ),
        "",
    ),
    **dict.fromkeys(BUILT_IN, "methods"),
    **dict.fromkeys(("NotFittedError", "OptimizerMismatchError", "PurityError", "WorkbenchWarning"), "errors"),
    **dict.fromkeys(
        (
            "read_records",
            "record",
            "record_check",
            "record_comparison",
            "record_figure",
            "record_table",
            "run_notebook",
        ),
        "notebook",
    ),
    **dict.fromkeys(("History", "Progress", "fit"), "training"),
    **dict.fromkeys(("Wrapped", "is_wrapped", "unwrap"), "core.wrapped"),
    **dict.fromkeys(("Wrapper", "compose"), "core.wrapper"),
    **dict.fromkeys(("calibrate", "selective", "top_uncertain"), "calibration"),
    **dict.fromkeys(("load", "save"), "core.saving.files"),
    "Risk": "risk",
    "from_pretrained": "core.saving.from_pretrained",
    "check_wrapper": "testing",
    "diagnose": "doctor",
    "register": "core.registry",
    "setting": "core.settings",
}
__all__ = [*sorted(_EXPORTS), "__version__"]
for _name, _file in {
    "CrossConformal": "cross",
    "QuantileRecalibration": "quantiles",
    "SelectivePredictor": "abstention",
    "SplitConformal": "conformal",
    "TemperatureScaling": "scaling",
    "VarianceScaling": "scaling",
}.items():
    name_outer(_name, f"{__name__}.calibration.{_file}:{_name}")
answer_to_moved_modules()


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    home = _EXPORTS[name]
    if home in ("", "methods"):
        value = importlib.import_module(f"workbench.{home}.{name}" if home else f"workbench.{name}")
        if home:
            value.__class__ = WrapperModule
    else:
        value = getattr(importlib.import_module(f"workbench.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
