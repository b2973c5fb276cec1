"""Base class of calibrated models: a thin module around a wrapped model, fitted to held-out rows."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from workbench.calibration.answers import Answers, check_finite
from workbench.calibration.binary import class_numbers, no_and_yes, one_number, one_per_row
from workbench.calibration.one_output import one_meaning, one_name, pick, put
from workbench.calibration.rows import batches_of_rows
from workbench.calibration.staleness import FitsWeights
from workbench.calibration.support import REAL, refuse_censored, support_of
from workbench.core.additions import extra
from workbench.core.batches.call_arguments import check_arguments, opened
from workbench.core.batches.labelled import paired
from workbench.core.batches.rows import first_weight
from workbench.core.calls.risks import noise_moves_classes
from workbench.core.fitted_weights import FittedWeights
from workbench.core.method import evaluating
from workbench.core.outputs.class_scores import Binary, at_least_float32
from workbench.core.outputs.options import form_of, meaning_of
from workbench.core.outputs.slips import warn_unsaid
from workbench.core.refusals import words_of_plain
from workbench.core.saving.save_pretrained import SavesPretrained
from workbench.core.saving.training_data import Facts, facts_of, today
from workbench.core.wrapped import Wrapped, is_wrapped
from workbench.distributions import Distribution, Normal, Quantiles
from workbench.engine.clone import eager
from workbench.engine.effects.private_random import generator_of, own_random
from workbench.errors import as_count
from workbench.risk import Risk


class Calibrated(SavesPretrained, FitsWeights, ABC):
    """A wrapped model with calibrated outputs; it is called like the wrapped model, which itself is not changed.

    The wrapped model is the sub-module `wrapped`, shared, not copied: if it is trained further, calls warn. It is always evaluated in
    eval mode. The fitted state is held in buffers, so that it is pickled, saved and moved with the module.

    Args:
        wrapped: a model wrapped by one of the wrappers, or a calibrated model to calibrate once more.
    """

    needs_risk = True  # whether fitting needs the risk of the wrapped model
    watches = False  # whether fitting also takes the risk if the model has a vacuitic one, to detect shifts
    needs_offsets = False  # whether fitting needs the quantile heads of the wrapped model
    new_buffers: tuple[str, ...] = ()  # buffers that states of earlier versions lack
    moves_prediction = False  # whether the calibrated prediction depends on the risk
    options: tuple[str, ...] = ()  # arguments besides the model, which are saved with the state
    of_functions: tuple[str, ...] = ()  # options that record which functions were given; functions can't be saved
    # facts about the rows that it was fitted to; None before, or if an earlier version fitted it
    fitted_on: Facts | None = None
    keeps_family = True  # whether prediction and calibrated risk still define a distribution of the same family

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        check_model(wrapped)
        self.wrapped = wrapped
        self.training = wrapped.training

    def extra_repr(self) -> str:
        numbers = ((name, value) for name, value in self.named_buffers(recurse=False) if value.numel() == 1)
        return ", ".join(f"{name}={value.item():.4g}" for name, value in numbers)

    def fit(self, data: Any, *, batch_size: int = 1024, seed: int = 0) -> Self:
        """Calibrate on rows that the model was not trained on.

        Args:
            data: a pair (x, y), a Split, a Dataset or a DataLoader, or dicts with labels, as for `workbench.calibrate`.
            batch_size: rows per call of the model; a DataLoader has its own batch size.
            seed: seed of the model's random draws; the global random state is not touched.

        Returns:
            The object itself.
        """
        answers = collect(
            self.wrapped,
            data,
            risk=self.needs_risk or (self.watches and has_density(self.wrapped)),
            offsets=self.needs_offsets,
            batch_size=batch_size,
            seed=seed,
            of_inputs=self.of_inputs(),
        )
        return self.fit_to(answers, seed)

    def fit_to(self, answers: Answers, seed: int) -> Self:
        """Calibrate on collected outputs of the model.

        Args:
            answers: outputs for held-out rows, from `collect`.
            seed: of random draws on the way.

        Raises:
            ValueError: the model gives scores of classes, and the targets are no class numbers.
        """
        check_targets(self.wrapped, answers)
        with torch.no_grad():
            self._fit(answers, seed)
        self.fitted_on, self.weights = answers.facts, FittedWeights(self.wrapped)
        return self

    def forward(self, *args: Any, return_risk: bool = False, **kwargs: Any) -> Any:
        """Return the prediction, or with `return_risk=True` the pair of prediction and risk, in the form of the wrapped model.

        Args:
            args, kwargs: as for the wrapped model.
            return_risk: whether to return (prediction, risk).
        """
        self.warn_if_trained()
        with evaluating(self.wrapped, whole=True):
            if not (return_risk or self.moves_prediction or noise_moves_classes(_record(self.wrapped))):
                return self._put_back(self.wrapped(*args, **kwargs), Risk())[0]
            y, uncalibrated = self.wrapped(*args, return_risk=True, **kwargs)
        y, risk = self._put_back(y, named_risks(self.wrapped, uncalibrated))
        if not return_risk:
            return y
        return y, (risk if isinstance(uncalibrated, Risk) else risk[kind_of(self.wrapped)])

    def _put_back(self, y: Any, risks: Risk) -> tuple[Any, Risk]:
        """Return calibrated prediction and risks in the structure of the model's output."""
        name = output_name(self.wrapped, y)
        part, adjusted = self._adjusted(pick(y, name), risks_at(risks, name))
        template = next((risks[cause] for cause in risks if not isinstance(risks[cause], Tensor)), None)
        # `adjusted` may have a new risk
        trees = {cause: risks[cause] if cause in risks.names() else template for cause in adjusted}
        return put(y, name, part), Risk(**{cause: put(trees[cause], name, adjusted[cause]) for cause in adjusted})

    def interval(self, x: Any, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return lower and upper ends for each value, each shaped like the prediction and in its units, if the method has intervals.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: desired share of targets inside, strictly between 0 and 1.

        Raises:
            TypeError: the method has no intervals.
        """
        raise TypeError(
            f"{type(self).__name__} gives no intervals; for values, calibrate(wrapped, data, 'conformal') does"
        )

    def predict_set(self, x: Any, coverage: float = 0.9) -> Tensor:
        """Return sets of classes, bool [rows, ..., classes], if the method has them.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: desired probability that the set contains the true class, strictly between 0 and 1.

        Raises:
            TypeError: the method has no sets of classes.
        """
        raise TypeError(f"{type(self).__name__} gives no sets; for classes, calibrate(wrapped, data, 'conformal') does")

    def of_inputs(self) -> Mapping[str, Callable[[Any, int], Tensor]]:
        """Return the functions, by name, that fitting evaluates on a batch of inputs and its number of rows; each returns one number per row."""
        return {}

    def arguments(self) -> tuple[dict[str, Any], list[str]]:
        """Return the JSON-serializable arguments besides the model, and the names of those that are functions, which can't be saved."""
        return {name: getattr(self, name) for name in self.options}, []

    @abstractmethod
    def _fit(self, answers: Answers, seed: int) -> None:
        """Check the answers, then set the buffers."""

    def _adjusted(self, y: Any, risk: Risk) -> tuple[Any, Risk]:
        """Return the calibrated prediction and risks for those of the wrapped model."""
        return y, risk

    def _ask(self, x: Any, risk: bool) -> tuple[Tensor, Risk]:
        """Return raw prediction and risks of the wrapped model, at least float32, for a tensor or a tuple of positional inputs."""
        self.warn_if_trained()
        with evaluating(self.wrapped, whole=True):
            return ask(self.wrapped, x, risk)

    def _offsets(self, x: Any, y: Tensor) -> Tensor:
        """Return the differences between the wrapped model's quantiles and its prediction y: [levels, n, ...]."""
        with evaluating(self.wrapped, whole=True):
            return offsets_of(self.wrapped, x, y)

    def get_extra_state(self) -> Tensor:
        """Return the options as a tensor, uint8 [bytes], since tensors can be loaded with weights_only=True."""
        options = {name: getattr(self, name) for name in self.options}
        return torch.tensor(list(json.dumps([type(self).__name__, options]).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Set the options that were saved with a state."""
        for name, value in _decoded(state)[1].items():
            setattr(self, name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (stored := state_dict.get(f"{prefix}_extra_state")) is not None:
            (kind, saved_options), own_options = _decoded(stored), {name: getattr(self, name) for name in self.options}
            differing = [
                name
                for name, value in own_options.items()
                if (value is not None or name in self.of_functions) and saved_options.get(name) != value
            ]
            if kind != type(self).__name__ or differing:
                raise ValueError(
                    f"the state is of {kind}({saved_options}), this object is {type(self).__name__}({own_options}); construct it with the "
                    "same options before loading"
                )
        for name, buffer in self._buffers.items():  # their sizes depend on the held-out rows
            saved = state_dict.get(prefix + name)
            if name in self.new_buffers and saved is None and buffer is not None:
                saved = state_dict[prefix + name] = buffer.new_empty(0)
            if isinstance(saved, Tensor) and buffer is not None:
                self._buffers[name] = buffer.new_empty(saved.shape, dtype=saved.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _decoded(state: Tensor) -> tuple[str, dict[str, Any]]:
    kind, options = json.loads(bytes(state.cpu().tolist()).decode())
    return kind, options


# ---- models
def check_model(model: Any) -> None:
    """Raise unless a model returns a risk."""
    if isinstance(model, Calibrated) or (isinstance(model, nn.Module) and is_wrapped(eager(model))):
        return
    if isinstance(model, nn.Module):
        raise TypeError(words_of_plain(model))
    raise TypeError(f"wrapped: found {type(model).__name__}; give a model wrapped by one of the wrappers")


def innermost(model: Any) -> Any:
    while isinstance(model, Calibrated):
        model = model.wrapped
    return cast(Any, eager(model))


def _record(model: Any) -> Any:
    return innermost(model)._workbench


def output_of(model: Any, default: Any = None) -> str:
    """Return the form of the answers: "values", "logits" or "probs"; `default`, or else values, if the wrapper was not told.

    A yes or no is answered by the scores of both, see `class_scores`.

    Raises:
        ValueError: the model returns something else.
    """
    if (binary := _binary(model)) is not None:
        return "logits" if binary.logits else "probs"
    output = _record(model).output
    return form_of(one_meaning(default if output is None else output))


def _binary(model: Any) -> Binary | None:
    output = _record(model).output
    meaning = meaning_of(one_meaning(output) if isinstance(output, Mapping) else output)
    return meaning if isinstance(meaning, Binary) else None


def class_scores(model: Any, part: Tensor) -> Tensor:
    """Return the calibrated output as the answers have it: at least float32, with the classes last.

    Each number of `Binary` becomes the scores of no and yes; see `no_and_yes`.
    """
    part, binary = at_least_float32(part), _binary(model)
    return part.movedim(class_dim(model), -1) if binary is None else no_and_yes(part, binary.logits)


def as_given(model: Any, scores: Tensor, like: Tensor) -> Tensor:
    """Return scores as of `class_scores` in form, shape and dtype of the output `like` of the model."""
    binary = _binary(model)
    scores = scores.movedim(-1, class_dim(model)) if binary is None else one_number(scores, binary.logits)
    return scores.reshape(like.shape).to(like.dtype)


def output_name(model: Any, y: Any) -> str:
    """Return the dotted name of the calibrated output in what the model returns; "" for a tensor."""
    return one_name(_record(model).output, y)


def class_dim(model: Any) -> int:
    """Return the dimension of the classes in the model's output: usually 1 for maps; -1 for values."""
    output = _record(model).output
    dim = getattr(one_meaning(output) if isinstance(output, Mapping) else output, "dim", None)
    return -1 if dim is None else dim


def check_targets(model: Any, answers: Answers) -> None:
    """Raise if a model gives scores of classes and the targets are no class numbers, or if times are censored."""
    refuse_censored(innermost(model), answers.y, answers.target)
    if _binary(model) is not None and not answers.labels:
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
    return _record(model).methods[0].kind


def distribution_of(model: Any) -> Distribution:
    """Return the family of distributions defined by prediction and total risk: sculpt's if it is of that kind, else Normal."""
    while isinstance(model, Calibrated):
        if not model.keeps_family:
            raise ValueError(
                f"after {type(model).__name__}, predictions no longer follow a family of distributions; calibrate the wrapped model itself, or "
                "use method='conformal' with score='normalized'"
            )
        model = model.wrapped
    families = (method.distribution for method in _record(model).methods)
    return next((f for f in families if isinstance(f, Distribution) and f.by_risk), Normal())


def quantiles_of(model: Any) -> Quantiles | None:
    """Return the family of a wrapped model with quantile heads; None for other models and calibrated ones, which do not pass them on."""
    methods = [] if isinstance(model, Calibrated) else _record(model).methods
    return next((m.distribution for m in methods if isinstance(m.distribution, Quantiles)), None)


def offsets_of(model: Any, x: Any, y: Tensor) -> Tensor:
    """Return the differences between the quantiles of a model with quantile heads and its prediction y [n, ...]: [levels, n, ...]."""
    args, kwargs = opened(model, x)
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
    if (binary := _binary(model)) is None:
        return part, risks
    return no_and_yes(part, binary.logits), risks.map(one_per_row)


def ask_as_given(model: Any, x: Any, risk: bool) -> tuple[Tensor, Risk]:
    """Return the same, but one number for a yes or no."""
    check_arguments(model, x)
    risk = risk or noise_moves_classes(_record(model))
    args, kwargs = opened(model, x)
    y, risks = model(*args, **kwargs, return_risk=True) if risk else (model(*args, **kwargs), Risk())
    name = output_name(model, y)
    scores = at_least_float32(pick(y, name)).movedim(class_dim(model), -1)
    return scores, risks_at(named_risks(model, risks), name).map(at_least_float32)


# ---- rows
def collect(
    model: Any,
    data: Any,
    *,
    risk: bool = True,
    targets: bool = True,
    offsets: bool = False,
    batch_size: int = 1024,
    seed: int = 0,
    of_inputs: Mapping[str, Callable[[Any, int], Tensor]] | None = None,
) -> Answers:
    """Return the answers of a model for rows, in their order.

    Args:
        model: a wrapped or calibrated model.
        data: a pair (x, y), a Split, a Dataset or a DataLoader of pairs; without targets also a tensor or batches of inputs.
        risk: whether to compute risks.
        targets: whether targets are needed; without them `Answers.target` is empty.
        offsets: whether to compute the quantiles of quantile heads.
        batch_size: rows per call of the model.
        seed: seed of the model's random draws; the global random state is not touched.
        of_inputs: functions by name of a batch of inputs and its number of rows, which return one number per row.

    Raises:
        TypeError: data is something else, or the model does not return a tensor.
        ValueError: there are no rows, they are the training rows of a Data, or predictions or targets are not finite.
    """
    check_model(model)
    batch_size = as_count("batch_size", batch_size)
    parameter = first_weight(model)
    parts: list[tuple[Tensor, Risk, Tensor]] = []
    offset_parts: list[Tensor] = []
    values_of_inputs: dict[str, list[Tensor]] = {name: [] for name in of_inputs or {}}
    with own_random(seed, parameter.device), torch.no_grad(), evaluating(model, whole=True):
        generator_state = generator_of(parameter.device).get_state()
        for batch in batches_of_rows(paired(innermost(model), data, targets=targets), parameter, batch_size, targets):
            y, risks = ask(model, batch.x, risk)
            if y.dim() == 0 or (targets and len(batch.y) != len(y)):
                rows = f"a batch of {len(batch.y)} rows" if targets else "a batch"
                raise ValueError(f"the model gives {list(y.shape)} for {rows}; it must give one row for each")
            batch_targets = batch.y.to(y.device) if targets else y[:0]
            if targets and _binary(model) is not None:
                batch_targets = class_numbers(batch_targets, y)
            elif targets:
                warn_unsaid(innermost(model), None, batch_targets, [y])
            parts.append((y, risks, batch_targets))
            for name, row_values in values_of_inputs.items():
                row_values.append((of_inputs or {})[name](batch.x, len(y)))
            if offsets:
                offset_parts.append(offsets_of(model, batch.x, y))
        draws_randomly = not torch.equal(generator_state, generator_of(parameter.device).get_state())
        support = support_of(innermost(model), *opened(model, batch.x)) if parts and targets else REAL
    if not parts or not sum(len(y) for y, _, _ in parts):
        raise ValueError("data: there are no rows")
    if len(shapes := {tuple(part[0].shape[1:]) for part in parts}) > 1:
        first, other = (["rows", *shape] for shape in sorted(shapes)[:2])
        raise ValueError(
            f"data: the model gives {first} for one batch and {other} for another; pad all rows to one length, and mark the padding in the "
            "targets by class number -100"
        )
    y = torch.cat([part[0] for part in parts])
    batch_targets = torch.cat([part[2] for part in parts])
    risks = Risk(**{name: torch.cat([part[1][name] for part in parts]) for name in parts[0][1].names()})
    check_finite(y, risks, batch_targets)
    return Answers(
        y,
        risks,
        at_least_float32(batch_targets) if batch_targets.is_floating_point() else batch_targets,
        torch.cat(offset_parts, 1) if offset_parts else None,
        {name: torch.cat(row_values) for name, row_values in values_of_inputs.items()},
        draws_randomly,
        {**facts_of(data), "rows": len(y), "date": today()},
        support,
    )
