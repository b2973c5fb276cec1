"""Calls of public functions with valid, nearly valid or nonsense arguments, drawn by hypothesis."""

from __future__ import annotations

import inspect
import math
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import nn

from helpers import plain_answers
from workbench import calibrate, data, distributions, metrics, neo, plots, sample, sculpt, vote
from workbench.calibration import selective, top_uncertain
from workbench.calibration.abstention import upper_bound
from workbench.calibration.conformal import conformal_quantile
from workbench.calibration.cross import cv_plus
from workbench.calibration.quantiles import fit_recalibration
from workbench.calibration.scaling import fit_temperature, fit_variance_scale
from workbench.risk import Risk

Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]

SHAPES = st.sampled_from(
    [(), (0,), (1,), (5,), (5, 1), (1, 5), (5, 3), (0, 3), (4, 5), (4, 5, 1), (5, 0), (2, 2, 2), (60, 1), (60,)]
)
SPECIAL = [0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, 0.5, 2.0]
NUMBERS = (True, False, 0, 1, -1, 3, 2**70, 0.5, 2.5, -0.0, math.nan, math.inf, 1j)
WORDS = (None, "", "mean", "auto", "x" * 300, b"x")
CONTAINERS = ([], [[]], [None], ["a"], [[1], [1, 2]], (), ((), ()), {}, {"a": 1}, set(), range(3))
ARRAYS = (
    *(
        np.float32(1),
        np.array(["a"]),
        np.array(None),
        np.zeros((5, 1), dtype=np.float16),
        np.array([1, 2], dtype=np.uint16),
    ),
    np.ma.masked_array([1.0, 2.0], [0, 1]),
)
TENSORS = (
    *(torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta")),
    *(torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.bool)),
)
OBJECTS = (object(), object, print, torch.nn.Linear(1, 1), slice(None), Ellipsis, NotImplemented)
RISKS = (Risk(), Risk(total=torch.ones(5, 1)), Risk(aleatoric=torch.ones(5, 1)))
JUNK: list[Any] = [*NUMBERS, *WORDS, *CONTAINERS, *ARRAYS, *TENSORS, *OBJECTS, *RISKS]
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.int8]
)

KINDS = ("normal", "positive", "probs", "labels", "special")


@st.composite
def tensors(draw: Any, shape: tuple[int, ...] | None = None, kinds: tuple[str, ...] = KINDS) -> torch.Tensor:
    dtype, seed = draw(DTYPES), draw(st.integers(0, 99))
    if shape is None:
        shape = draw(SHAPES)
    elif draw(st.integers(0, 3)):  # mostly the dtype that the function expects
        dtype = torch.float32
    generator = torch.Generator().manual_seed(seed)
    kind = draw(st.sampled_from(kinds))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "positive":
        values = values.abs() + 0.1
    elif kind == "probs" and shape:
        values = values.softmax(-1)
    elif kind == "labels":
        values = torch.randint(0, 3, shape, generator=generator).double()
    elif kind == "special" and values.numel():
        values.view(-1)[draw(st.integers(0, values.numel() - 1))] = draw(st.sampled_from(SPECIAL))
    if kind == "labels":
        dtype = draw(st.sampled_from([torch.int64, dtype]))
    return (
        values.nan_to_num(0, 1, 0).clamp(0, 1).to(dtype)
        if not dtype.is_floating_point and kind != "labels"
        else values.to(dtype)
    )


def junk() -> Any:
    return st.sampled_from(JUNK)


ANY = st.one_of(tensors(), tensors(), tensors(), junk())


@st.composite
def several(draw: Any, n: int) -> tuple[Any, ...]:
    """Draw arguments of one shape, with occasional exceptions."""
    shape = draw(SHAPES)
    return tuple(draw(tensors(shape) if draw(st.integers(0, 9)) else ANY) for _ in range(n))


FAMILIES: list[Any] = [
    *(
        distributions.Normal,
        distributions.Laplace,
        distributions.StudentT,
        distributions.Cauchy,
        distributions.LogNormal,
        distributions.LogitNormal,
    ),
    *(distributions.Normal(beta=0.5), distributions.StudentT(df=4.0)),
]
OPTIONS: dict[str, list[Any]] = {
    "distribution": FAMILIES,
    "reduction": ["mean", "none", "sum"],
    "n_bins": [1, 2, 15, 0, -1, 10**12],
    "level": [0.5, 0.9, 0, 1, 2],
    "levels": [[0.1, 0.9], [0], [], None],
    "coverage": [0.5, 0.9, 0, 1, 1.5],
    "confidence": [0.95, 0, 1],
    "weights": [None, [0.5, 0.5], [0.25] * 4],
    "fair": [True, False],
    "per_output": [True, False],
    "max_error": [1.0, 0, -1, 5],
    "void": [None, 0, 1, -100, 255, math.nan],
    "mask": [
        None,
        torch.tensor([True, False, True, True, False]),
        torch.ones(5, 3, dtype=torch.bool),
        torch.zeros(5, 1),
    ],
    "dim": [None, 0, 1, -1, 2, 7],
    "normalize": ["mean", "random"],
    "iou": [0.5, 1, 0, [0.5, 0.75]],
    "by": [(), ("x",), ("z",)],
    "sizes": [(4, 5), None],
}
TWO = (
    "rmse mae mpiw auroc aupr fpr95 aurc augrc aurg error_auroc ause accuracy mean_iou categorical_nll brier ece adaptive_ece max_ece "
    "classwise_ece reliability_curve risk_coverage_curve sparsification_curve pit_samples crps_samples energy_score path_coverage "
    "average_precision mean_average_precision detection_ece"
)
N_TENSORS = {"sharpness": 1, **dict.fromkeys(TWO.split(), 2)}  # other metrics take three
SAMPLED = ("crps_samples", "pit_samples", "energy_score", "path_coverage")
BOXES: list[Any] = [
    [{"boxes": torch.tensor([[0.0, 0, 4, 4]]), "scores": torch.tensor([0.5]), "labels": torch.tensor([1])}],
    *(
        [{"boxes": [], "scores": [], "labels": []}],
        {"boxes": [[0, 0, 1, 1]]},
        [{}],
        [{"boxes": "x", "scores": None}],
        [1, 2],
    ),
]


@st.composite
def options(draw: Any, names: tuple[str, ...]) -> dict[str, Any]:
    chosen = {
        name: draw(st.one_of(st.sampled_from(OPTIONS[name]), st.sampled_from(OPTIONS[name]), junk()))
        for name in names
        if draw(st.booleans())
    }
    return chosen


def _options_of(function: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name in OPTIONS)


MEANT = {
    **dict.fromkeys(("sharpness", "upper_bound"), ("positive",)),
    **{
        "distribution": ("normal", "normal", "positive"),
        "mpiw": ("normal", "positive"),
        "conformal_quantile": ("normal",),
        "fit_temperature": ("normal", "labels"),
    },
    **dict.fromkeys(("rmse", "mae", "auroc", "aupr", "fpr95", *SAMPLED), ("normal", "normal")),
    **dict.fromkeys(("aurc", "augrc", "aurg", "ause", "error_auroc"), ("normal", "positive")),
    **dict.fromkeys(("risk_coverage_curve", "sparsification_curve"), ("normal", "positive")),
    **dict.fromkeys(("accuracy", "mean_iou", "categorical_nll", "brier", "reliability_curve"), ("probs", "labels")),
    **dict.fromkeys(("ece", "adaptive_ece", "max_ece", "classwise_ece"), ("probs", "labels")),
}


@st.composite
def meant(draw: Any, name: str) -> tuple[Any, ...]:
    """Draw arguments of the kinds that a function expects, now and then with values of another kind."""
    kinds = MEANT.get(name, ("normal", "positive", "normal"))
    shape = draw(
        st.sampled_from(
            [(5, 3), (4, 5), (60, 3), (2, 3, 4)] if "labels" in kinds or name in SAMPLED else [(5,), (5, 1), (60, 1)]
        )
    )
    arguments = []
    for i, kind in enumerate(kinds):
        size = shape[:-1] if kind == "labels" else shape[1:] if i and name in SAMPLED else shape
        arguments.append(draw(tensors(size, (kind,) if draw(st.integers(0, 5)) else KINDS)))
    return tuple(arguments)


@st.composite
def metric_calls(draw: Any) -> Call:
    # metrics of series also take a past, levels or a window, and that of disentanglement takes curves; their own tests cover bad input
    others = {"metric", "mase", "pinball", "coverage_over_time", "disentanglement_error"}
    name = draw(st.sampled_from(sorted({name for name in metrics.__all__ if name.islower()} - others)))
    function = getattr(metrics, name)
    if draw(st.booleans()) and not function.__module__.endswith(".boxes"):
        return name, function, draw(meant(name)), draw(options(_options_of(function)))
    arguments = draw(several(N_TENSORS.get(name, 3)))
    if function.__module__.endswith(".boxes") and draw(st.integers(0, 4)):
        arguments = tuple(draw(st.one_of(st.sampled_from(BOXES), ANY)) for _ in arguments)
        return name, function, arguments, draw(options(_options_of(function)))
    if N_TENSORS.get(name) == 2 and isinstance(arguments[0], torch.Tensor) and draw(st.booleans()):
        rows = arguments[0].shape[1:] if name in SAMPLED else arguments[0].shape[:-1]
        arguments = (arguments[0], draw(tensors(tuple(rows))))
    return name, function, arguments, draw(options(_options_of(function)))


CALIBRATORS: dict[str, tuple[Callable[..., Any], int]] = {
    "fit_temperature": (fit_temperature, 2),
    "fit_variance_scale": (fit_variance_scale, 3),
    "conformal_quantile": (conformal_quantile, 1),
    "upper_bound": (upper_bound, 1),
    "fit_recalibration": (fit_recalibration, 1),
    "cv_plus": (cv_plus, 4),
}


@st.composite
def calibration_calls(draw: Any) -> Call:
    name = draw(st.sampled_from(sorted(CALIBRATORS)))
    function, n = CALIBRATORS[name]
    arguments = draw(meant(name)) if name in MEANT and draw(st.booleans()) else draw(several(n))
    if name == "fit_temperature" and isinstance(arguments[0], torch.Tensor):
        arguments = (arguments[0], draw(tensors(tuple(arguments[0].shape[:-1]))))
    chosen = draw(options(_options_of(function)))
    if name == "cv_plus":
        chosen.setdefault("coverage", 0.9)
    return name, function, arguments, chosen


@st.composite
def distribution_calls(draw: Any) -> Call:
    family = draw(st.sampled_from(FAMILIES))
    name = draw(
        st.sampled_from(["log_prob", "cdf", "icdf", "crps", "mean", "stddev", "loss_function", "sample", "to_risk"])
    )
    function = getattr(family, name)
    n = {"mean": 2, "stddev": 2, "sample": 2, "to_risk": 1}.get(name, 3)
    arguments = draw(meant("distribution"))[-n:] if n > 1 and draw(st.booleans()) else draw(several(n))
    if name == "sample":
        arguments = (draw(st.one_of(st.just(arguments), junk())),)
    return f"{getattr(family, '__name__', repr(family))}.{name}", function, arguments, {}


PLOTS = sorted(name for name in plots.__all__ if name != "COLOURS")


@st.composite
def plot_calls(draw: Any) -> Call:
    name = draw(st.sampled_from(PLOTS))
    function = getattr(plots, name)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    needed = sum(p.default is p.empty for p in parameters)
    n = draw(st.integers(needed, needed + 1)) if draw(st.booleans()) else needed
    return name, function, draw(several(min(n, len(parameters)))), {}


WRAPPERS: dict[str, Callable[..., Any]] = {
    "vote": vote.Wrapper,
    "sample": sample.Wrapper,
    "sculpt": sculpt.Wrapper,
    "neo": neo.Wrapper,
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "vote": ("n_voters", "alpha", "use_bias", "independent", "finetune", "share", "strategy"),
    "sample": ("n_samples", "distribution", "where", "trainable", "randomness", "strategy"),
    "sculpt": ("distribution", "n_layers", "strategy"),
    "neo": ("layers", "density", "strategy"),
}


@st.composite
def wrapper_calls(draw: Any) -> Call:
    name = draw(st.sampled_from(sorted(WRAPPERS)))
    chosen = {setting: draw(junk()) for setting in SETTINGS[name] if draw(st.integers(0, 3)) == 0}
    model = draw(st.one_of(st.just("model"), junk()))

    def wrap(**settings: Any) -> Any:
        return WRAPPERS[name](**settings)(
            nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
            if isinstance(model, str) and model == "model"
            else model
        )

    return f"{name}.Wrapper", wrap, (), chosen


MODELS: list[Any] = []


def _model(kind: int) -> Any:
    if not MODELS:
        torch.manual_seed(0)
        MODELS.append(sculpt.Wrapper(n_layers=1)(nn.Linear(1, 1)))
        MODELS.append(vote.Wrapper(2, output="logits")(nn.Linear(1, 3)))
    return MODELS[kind]


@st.composite
def data_calls(draw: Any) -> Call:
    model = _model(draw(st.integers(0, 1)))
    good = torch.linspace(-1, 1, 60)[:, None], torch.linspace(1, 2, 60)[:, None]
    rows = draw(st.one_of(st.just(good), several(2), several(2), ANY))
    name = draw(st.sampled_from(["calibrate", "selective", "top_uncertain", "load", "data_of"]))
    if name == "calibrate":
        method = draw(st.one_of(st.sampled_from(["auto", "variance", "temperature", "conformal", "isotonic"]), junk()))
        return name, calibrate, (model, rows, method), {}
    if name == "selective":
        return name, selective, (model, rows, draw(st.one_of(st.sampled_from(["total", "confidence"]), junk()))), {}
    if name == "top_uncertain":
        return (
            name,
            top_uncertain,
            (model, rows, draw(st.one_of(st.just(2), junk()))),
            {"by": draw(st.sampled_from(["total", "epistemic"]))},
        )
    if name == "load":
        return name, data.load, (draw(st.one_of(st.just("cubic"), junk())), draw(junk())), {}
    from workbench.data.reader import data_of

    return name, data_of, (rows,), {"split": draw(st.one_of(st.just(0), junk()))}


GROUPS: dict[str, Any] = {
    "metrics": metric_calls(),
    "calibration": calibration_calls(),
    "distributions": distribution_calls(),
    "plots": plot_calls(),
    "wrappers": wrapper_calls(),
    "data": data_calls(),
}


def is_raw(error: BaseException) -> bool:
    """Return whether an error is not one of this package: of another type, or raised by Python or torch for their arguments.

    Errors that the user's own model raises for unsuitable inputs do not count.
    """
    if any(
        frame.filename.endswith("torch/nn/modules/linear.py") for frame in traceback.extract_tb(error.__traceback__)
    ):
        return False
    if not isinstance(error, ValueError | TypeError | KeyError | FileNotFoundError | ModuleNotFoundError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return "/workbench/" not in last.filename.replace("\\", "/") or not (last.line or "").lstrip().startswith(
        ("raise", ")", 'f"', '"')
    )


def _facts(arguments: tuple[Any, ...]) -> list[Any]:
    """Return what no call may change: its arguments, the random state and the default dtype."""
    tensors_given = [a for a in arguments if isinstance(a, torch.Tensor) and not a.is_meta and not a.is_sparse]
    return [[str(tensor) for tensor in tensors_given], torch.get_rng_state().sum().item(), torch.get_default_dtype()]


def outcome(call: Call) -> tuple[str, str]:
    """Return how a call ended ("ok", "wrong", "refused" or "raw"), with the error or difference as one line."""
    import warnings

    name, function, arguments, chosen = call
    before = _facts(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = function(*arguments, **chosen)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        package_frames = [frame for frame in frames if "/workbench/" in frame.filename]
        where = (
            f"{package_frames[-1].filename.rsplit('/workbench/')[-1]}:{package_frames[-1].lineno}"
            if package_frames
            else "nowhere"
        )
        return (
            "raw" if is_raw(error) else "refused"
        ), f"{name} at {where}: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    finally:
        if (pyplot := __import__("sys").modules.get("matplotlib.pyplot")) is not None:
            pyplot.close("all")
    differs = plain_answers.difference(name, arguments, chosen, answer)
    if _facts(arguments) != before and not name.endswith((".sample", "Wrapper")):  # these draw random numbers
        differs = "changed its arguments or torch's state"
    return ("wrong", f"{name}{tuple(arguments)} {chosen}: {differs}"[:400]) if differs else ("ok", name)


def counted(outcomes: list[tuple[str, str]]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls by status, and each raw error and wrong answer."""
    return Counter(status for status, _ in outcomes), Counter(
        text for status, text in outcomes if status in ("raw", "wrong")
    )
