"""What calibrations know of the model that they are around: its answers, their form, and its risks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from workbench.calibration.answers import Answers
from workbench.calibration.binary import no_and_yes, one_number, one_per_row
from workbench.calibration.one_output import one_meaning, one_name, pick
from workbench.calibration.staleness import FitsWeights
from workbench.calibration.support import refuse_censored
from workbench.core.additions import extra
from workbench.core.batches.call_arguments import answering, as_arguments, check_arguments
from workbench.core.calls.risks import noise_moves_classes
from workbench.core.outputs.class_scores import Binary, at_least_float32
from workbench.core.outputs.options import form_of, meaning_of
from workbench.core.refusals import words_of_plain
from workbench.core.wrapped import Wrapped, is_wrapped
from workbench.distributions import Distribution, Normal, Quantiles
from workbench.engine.clone import eager
from workbench.risk import Risk


class Calibration(FitsWeights):
    """A module around a wrapped model or around another calibration; the base of `Calibrated`.

    Attributes:
        keeps_family: whether prediction and calibrated risk still define a distribution of the same family.
    """

    keeps_family = True


def check_model(model: Any) -> None:
    """Raise unless a model returns a risk."""
    if isinstance(model, Calibration) or (isinstance(model, nn.Module) and is_wrapped(eager(model))):
        return
    if isinstance(model, nn.Module):
        raise TypeError(words_of_plain(model))
    raise TypeError(f"wrapped: found {type(model).__name__}; give a model wrapped by one of the wrappers")


def innermost(model: Any) -> Any:
    """Return the wrapped model inside all calibrations."""
    while isinstance(model, Calibration):
        model = model.wrapped
    return cast(Any, eager(model))


def record_of(model: Any) -> Any:
    """Return what wrapping recorded of the model: its methods, its output."""
    return innermost(model)._workbench


def output_of(model: Any, default: Any = None) -> str:
    """Return the form of the answers: "values", "logits" or "probs"; `default`, or else values, if the wrapper was not told.

    A yes or no is answered by the scores of both, see `class_scores`.

    Raises:
        ValueError: the model returns something else.
    """
    if (binary := binary_of(model)) is not None:
        return "logits" if binary.logits else "probs"
    output = record_of(model).output
    return form_of(one_meaning(default if output is None else output))


def binary_of(model: Any) -> Binary | None:
    """Return the meaning of an output of yes or no; None for other outputs."""
    output = record_of(model).output
    meaning = meaning_of(one_meaning(output) if isinstance(output, Mapping) else output)
    return meaning if isinstance(meaning, Binary) else None


def class_scores(model: Any, part: Tensor) -> Tensor:
    """Return the calibrated output as the answers have it: at least float32, with the classes last.

    Each number of `Binary` becomes the scores of no and yes; see `no_and_yes`.
    """
    part, binary = at_least_float32(part), binary_of(model)
    return part.movedim(class_dim(model), -1) if binary is None else no_and_yes(part, binary.logits)


def as_given(model: Any, scores: Tensor, like: Tensor) -> Tensor:
    """Return scores as of `class_scores` in form, shape and dtype of the output `like` of the model."""
    binary = binary_of(model)
    scores = scores.movedim(-1, class_dim(model)) if binary is None else one_number(scores, binary.logits)
    return scores.reshape(like.shape).to(like.dtype)


def output_name(model: Any, y: Any) -> str:
    """Return the dotted name of the calibrated output in what the model returns; "" for a tensor."""
    return one_name(record_of(model).output, y)


def class_dim(model: Any) -> int:
    """Return the dimension of the classes in the model's output: usually 1 for maps; -1 for values."""
    output = record_of(model).output
    dim = getattr(one_meaning(output) if isinstance(output, Mapping) else output, "dim", None)
    return -1 if dim is None else dim


def check_targets(model: Any, answers: Answers) -> None:
    """Raise if a model gives scores of classes and the targets are no class numbers, or if times are censored."""
    refuse_censored(innermost(model), answers.y, answers.target)
    if binary_of(model) is not None and not answers.labels:
        raise ValueError(
            f"y: the model gives a yes or no, and the targets are fractions {list(answers.target.shape)}: calibration needs 0 or 1"
        )
    if output_of(model) != "values" and not answers.labels:
        raise ValueError(
            f"y: the model gives scores of classes, and the targets are floats {list(answers.target.shape)}: calibration needs class "
            "numbers [rows], y.argmax(-1) of soft labels or y.long() of whole numbers"
        )


def has_density(model: Any) -> bool:
    """Return whether the model has a fitted density of its training data, and so a vacuitic risk."""
    return getattr(extra(innermost(model), "density"), "fitted", False)


def kind_of(model: Any) -> str:
    """Return the name of the risk of a model with only one method."""
    return record_of(model).methods[0].kind


def distribution_of(model: Any) -> Distribution:
    """Return the family of distributions defined by prediction and total risk: sculpt's if it is of that kind, else Normal."""
    while isinstance(model, Calibration):
        if not model.keeps_family:
            raise ValueError(
                f"after {type(model).__name__}, predictions no longer follow a family of distributions; calibrate the wrapped model itself, or "
                "use method='conformal' with score='normalized'"
            )
        model = model.wrapped
    families = (method.distribution for method in record_of(model).methods)
    return next((f for f in families if isinstance(f, Distribution) and f.by_risk), Normal())


def quantiles_of(model: Any) -> Quantiles | None:
    """Return the family of a wrapped model with quantile heads; None for other models and calibrated ones, which do not pass them on."""
    methods = [] if isinstance(model, Calibration) else record_of(model).methods
    return next((m.distribution for m in methods if isinstance(m.distribution, Quantiles)), None)


def offsets_of(model: Any, x: Any, y: Tensor) -> Tensor:
    """Return the differences between the quantiles of a model with quantile heads and its prediction y [n, ...]: [levels, n, ...]."""
    args, kwargs = as_arguments(model, x)
    quantiles = Wrapped.quantiles(cast(Any, eager(model)), *args, **kwargs)
    return at_least_float32(pick(quantiles, output_name(model, quantiles))) - y


def named_risks(model: Any, risk: Any) -> Risk:
    """Return the risks by name; a model with only one method returns a bare risk, which is then the total as well."""
    if isinstance(risk, Risk):
        return risk
    kind = kind_of(model)
    return Risk(**{kind: risk, **({} if kind == "vacuitic" else {"total": risk})})


def risks_at(risks: Risk, name: str) -> Risk:
    """Return the risks of the output with a dotted name."""
    return Risk(**{cause: pick(risks[cause], name) for cause in risks})


def ask(model: Any, x: Any, risk: bool) -> tuple[Tensor, Risk]:
    """Return prediction, as `class_scores`, and risks (none if `risk` is False) of a model, as tensors of at least float32."""
    part, risks = ask_as_given(model, x, risk)
    if (binary := binary_of(model)) is None:
        return part, risks
    return no_and_yes(part, binary.logits), risks.map(one_per_row)


def ask_as_given(model: Any, x: Any, risk: bool) -> tuple[Tensor, Risk]:
    """Return the same, but one number for a yes or no."""
    check_arguments(model, x)
    risk = risk or noise_moves_classes(record_of(model))
    args, kwargs = as_arguments(model, x)
    answer = answering(model)
    y, risks = answer(*args, **kwargs, return_risk=True) if risk else (answer(*args, **kwargs), Risk())
    name = output_name(model, y)
    part = pick(y, name)
    if part.is_complex():
        raise TypeError(
            f"the model returns complex numbers ({part.dtype}), which have no order: wrap a model that returns real ones, such as "
            "torch.view_as_real of them or their absolute values"
        )
    scores = at_least_float32(part).movedim(class_dim(model), -1)
    return scores, risks_at(named_risks(model, risks), name).map(at_least_float32)
