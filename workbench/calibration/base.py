"""Base class of calibrated models: a thin object around a wrapped model, fitted to rows that were held out."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from workbench.calibration.answers import Answers, precise
from workbench.calibration.one_output import one_meaning, one_name, pick, put
from workbench.core.batches.call_arguments import opened
from workbench.core.batches.labelled import paired
from workbench.core.batches.rows import (
    Batch,
    TensorRows,
    bad_rows,
    place,
    read,
    rows_loader,
    split_batch,
    with_class_numbers,
)
from workbench.core.method import evaluating
from workbench.core.outputs.options import form_of
from workbench.core.outputs.slips import warn_unsaid
from workbench.core.ownership import extra
from workbench.core.saving.save_pretrained import SavesPretrained
from workbench.core.wrapped import Wrapped, is_wrapped
from workbench.data import Data
from workbench.distributions import Distribution, Normal, Quantiles
from workbench.engine.clone import eager
from workbench.engine.effects.private_random import generator_of, own_random
from workbench.risk import Risk


class Calibrated(SavesPretrained, nn.Module, ABC):
    """A wrapped model with calibrated answers; it is called like the wrapped model, which itself stays as it is.

    The wrapped model is the sub-module `wrapped`, shared, not copied: training it further makes the calibration stale. It always answers as in
    evaluation mode. What was fitted lies in buffers, so that it is pickled, saved and moved along.

    Args:
        wrapped: what a wrapper made of a model, or a calibrated model to calibrate once more.
    """

    needs_risk = True  # whether fitting asks the wrapped model for its risk
    watches = False  # whether it asks for it where the model has a vacuitic one
    needs_offsets = False  # whether fitting asks for its quantile heads
    new_buffers: tuple[str, ...] = ()  # which states of earlier versions lack
    moves_prediction = False  # whether the calibrated prediction depends on the risk
    options: tuple[str, ...] = ()  # the arguments beside the model, which travel with the state
    of_functions: tuple[str, ...] = ()  # those of them that say which functions were given, which do not
    keeps_family = True  # whether the calibrated risk still is that of a distribution of the same family

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        check_model(wrapped)
        self.wrapped = wrapped
        self.training = wrapped.training

    def fit(self, data: Any, *, batch_size: int = 1024, seed: int = 0) -> Self:
        """Calibrate on rows that the model was not trained on.

        Args:
            data: a pair (x, y), a Split, a Dataset or a DataLoader, or dicts with labels, as `workbench.calibrate` takes them.
            batch_size: rows asked for at once; a DataLoader has its own.
            seed: of random draws on the way; the global random state is left alone.

        Returns:
            The object itself.
        """
        answers = collect(
            self.wrapped,
            data,
            risk=self.needs_risk or (self.watches and knows_strangeness(self.wrapped)),
            offsets=self.needs_offsets,
            batch_size=batch_size,
            seed=seed,
            of_inputs=self.of_inputs(),
        )
        with torch.no_grad():
            self._fit(answers, seed)
        return self

    def forward(self, *args: Any, return_risk: bool = False, **kwargs: Any) -> Any:
        """The prediction, and with `return_risk=True` the pair of prediction and risk, as the wrapped model gives them.

        Args:
            args, kwargs: as for the wrapped model.
            return_risk: whether to return (prediction, risk).
        """
        with evaluating(self.wrapped, whole=True):
            if not return_risk and not self.moves_prediction:
                return self._put_back(self.wrapped(*args, **kwargs), Risk())[0]
            y, uncalibrated = self.wrapped(*args, return_risk=True, **kwargs)
        y, risk = self._put_back(y, named(self.wrapped, uncalibrated))
        if not return_risk:
            return y
        return y, (risk if isinstance(uncalibrated, Risk) else risk[kind_of(self.wrapped)])

    def _put_back(self, y: Any, risks: Risk) -> tuple[Any, Risk]:
        """Calibrated prediction and risks in the structure of the model's."""
        name = output_name(self.wrapped, y)
        part, adjusted = self._adjusted(pick(y, name), risks_at(risks, name))
        like = next((risks[cause] for cause in risks if not isinstance(risks[cause], Tensor)), None)
        trees = {cause: risks[cause] if cause in risks.names() else like for cause in adjusted}  # one may be new
        return put(y, name, part), Risk(**{cause: put(trees[cause], name, adjusted[cause]) for cause in adjusted})

    def interval(self, x: Any, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end for every value, each shaped like the prediction and in its units, where the method gives them.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: share of targets that is wanted inside, strictly between 0 and 1.

        Raises:
            TypeError: the method gives no intervals.
        """
        raise TypeError(
            f"{type(self).__name__} gives no intervals; calibrate(wrapped, data, 'conformal') does for values"
        )

    def predict_set(self, x: Any, coverage: float = 0.9) -> Tensor:
        """Sets of classes, bool [rows, ..., classes], where the method gives them.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: probability that the set shall hold, strictly between 0 and 1.

        Raises:
            TypeError: the method gives no sets of classes.
        """
        raise TypeError(f"{type(self).__name__} gives no sets; calibrate(wrapped, data, 'conformal') does for classes")

    def of_inputs(self) -> Mapping[str, Callable[[Any, int], Tensor]]:
        """What fitting asks of a batch of inputs and its number of rows, by name: one number a row."""
        return {}

    def arguments(self) -> tuple[dict[str, Any], list[str]]:
        """The arguments beside the model, as JSON has them; and the names of those that are functions, which no file holds."""
        return {name: getattr(self, name) for name in self.options}, []

    @abstractmethod
    def _fit(self, answers: Answers, seed: int) -> None:
        """Check the answers, then set the buffers."""

    def _adjusted(self, y: Any, risk: Risk) -> tuple[Any, Risk]:
        """The calibrated prediction and risks of what the wrapped model says."""
        return y, risk

    def _ask(self, x: Any, risk: bool) -> tuple[Tensor, Risk]:
        """Raw prediction and risks of the wrapped model, at least float32, for a tensor or a tuple of positional inputs."""
        with evaluating(self.wrapped, whole=True):
            return ask(self.wrapped, x, risk)

    def _offsets(self, x: Any, y: Tensor) -> Tensor:
        """How far the quantile heads of the wrapped model see quantiles from its prediction y: [levels, n, ...]."""
        with evaluating(self.wrapped, whole=True):
            return offsets_of(self.wrapped, x, y)

    def get_extra_state(self) -> Tensor:
        """The options, uint8 [bytes]: tensors alone can be loaded with weights_only=True."""
        options = {name: getattr(self, name) for name in self.options}
        return torch.tensor(list(json.dumps([type(self).__name__, options]).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the options that a state was saved with."""
        for name, value in _decoded(state)[1].items():
            setattr(self, name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (stored := state_dict.get(f"{prefix}_extra_state")) is not None:
            (kind, theirs), ours = _decoded(stored), {name: getattr(self, name) for name in self.options}
            differing = [
                name
                for name, value in ours.items()
                if (value is not None or name in self.of_functions) and theirs.get(name) != value
            ]
            if kind != type(self).__name__ or differing:
                raise ValueError(
                    f"the state is of {kind}({theirs}), this object is {type(self).__name__}({ours}); make it alike before loading"
                )
        for name, buffer in self._buffers.items():  # their sizes depend on the rows that were held out
            saved = state_dict.get(prefix + name)
            if name in self.new_buffers and saved is None and buffer is not None:
                state_dict[prefix + name] = buffer.new_empty(0)
            if isinstance(saved, Tensor) and buffer is not None:
                self._buffers[name] = buffer.new_empty(saved.shape, dtype=saved.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _decoded(state: Tensor) -> tuple[str, dict[str, Any]]:
    kind, options = json.loads(bytes(state.cpu().tolist()).decode())
    return kind, options


# ---- models
def check_model(model: Any) -> None:
    """Raise unless a model says its risk."""
    if isinstance(model, Calibrated) or (isinstance(model, nn.Module) and is_wrapped(eager(model))):
        return
    if isinstance(model, nn.Module):
        raise TypeError(f"{type(model).__name__} is not wrapped; compose()(model) makes the plain baseline of it")
    raise TypeError(f"wrapped: found {type(model).__name__}; give what a wrapper made of a model")


def innermost(model: Any) -> Any:
    while isinstance(model, Calibrated):
        model = model.wrapped
    return cast(Any, eager(model))


def _record(model: Any) -> Any:
    return innermost(model)._workbench


def output_of(model: Any, default: Any = None) -> str:
    """What the model gives: "values", "logits" or "probs"; what is taken for that where its wrapper did not say, by default values.

    Raises:
        ValueError: if it gives something else.
    """
    output = _record(model).output
    return form_of(one_meaning(default if output is None else output))


def output_name(model: Any, y: Any) -> str:
    """The dotted name of the output that is calibrated in what the model gives, "" of a tensor."""
    return one_name(_record(model).output, y)


def class_dim(model: Any) -> int:
    """The dimension of the classes in what the model gives: 1 for maps, mostly; -1 of values."""
    output = _record(model).output
    dim = getattr(one_meaning(output) if isinstance(output, Mapping) else output, "dim", None)
    return -1 if dim is None else dim


def knows_strangeness(model: Any) -> bool:
    """Whether the model has a density of its training data by now, and so a vacuitic risk."""
    return getattr(extra(innermost(model), "density"), "fitted", False)


def kind_of(model: Any) -> str:
    """The name of the risk that a model with one method gives."""
    return _record(model).methods[0].kind


def distribution_of(model: Any) -> Distribution:
    """The family of predicted values, given by prediction and total risk: sculpt's if it is of that kind, else Normal."""
    while isinstance(model, Calibrated):
        if not model.keeps_family:
            raise ValueError(
                f"after {type(model).__name__} predictions follow no family of distributions any more; calibrate the wrapped model itself, or "
                "use method='conformal' with score='normalized'"
            )
        model = model.wrapped
    families = (method.distribution for method in _record(model).methods)
    return next((f for f in families if isinstance(f, Distribution) and f.by_risk), Normal())


def quantiles_of(model: Any) -> Quantiles | None:
    """The family of a wrapped model with quantile heads; None of any other and of a calibrated one, which does not pass them on."""
    methods = [] if isinstance(model, Calibrated) else _record(model).methods
    return next((m.distribution for m in methods if isinstance(m.distribution, Quantiles)), None)


def offsets_of(model: Any, x: Any, y: Tensor) -> Tensor:
    """How far the quantiles of a model with quantile heads lie from its prediction y [n, ...]: [levels, n, ...]."""
    args, kwargs = opened(model, x)
    quantiles = Wrapped.quantiles(cast(Any, eager(model)), *args, **kwargs)
    return precise(pick(quantiles, output_name(model, quantiles))) - y


def named(model: Any, risk: Any) -> Risk:
    """The risks by name: a model with one method gives its risk as it is, which then is the total as well."""
    if isinstance(risk, Risk):
        return risk
    kind = kind_of(model)
    return Risk(**{kind: risk, **({} if kind == "vacuitic" else {"total": risk})})


def risks_at(risks: Risk, name: str) -> Risk:
    """Those of the output of a dotted name."""
    return Risk(**{cause: pick(risks[cause], name) for cause in risks})


def ask(model: Any, x: Any, risk: bool) -> tuple[Tensor, Risk]:
    """Prediction, with classes last, and risks (none if not wanted) of a model, as tensors of at least float32."""
    args, kwargs = opened(model, x)
    y, risks = model(*args, **kwargs, return_risk=True) if risk else (model(*args, **kwargs), Risk())
    name = output_name(model, y)
    return precise(pick(y, name)).movedim(class_dim(model), -1), risks_at(named(model, risks), name).map(precise)


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
    """What a model says about rows, in their order.

    Args:
        model: a wrapped or calibrated model.
        data: a pair (x, y), a Split, a Dataset or a DataLoader of pairs; without targets also a tensor or batches of inputs.
        risk: whether to ask for risks.
        targets: whether targets are needed; without them `Answers.target` is empty.
        offsets: whether to ask for the quantiles of quantile heads.
        batch_size: rows asked for at once.
        seed: of random draws on the way; the global random state is left alone.
        of_inputs: by name what is asked of a batch of inputs and its number of rows: one number a row.

    Raises:
        TypeError: data is something else, or the model gives no tensor.
        ValueError: there is no row, the rows are the training rows of a Data, or predictions or targets are not finite.
    """
    check_model(model)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1; found {batch_size!r}")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    parts: list[tuple[Tensor, Risk, Tensor]] = []
    spreads: list[Tensor] = []
    asked: dict[str, list[Tensor]] = {name: [] for name in of_inputs or {}}
    with own_random(seed, like.device), torch.no_grad(), evaluating(model, whole=True):
        start = generator_of(like.device).get_state()
        for batch in batches_of_rows(paired(innermost(model), data, targets=targets), like, batch_size, targets):
            y, risks = ask(model, batch.x, risk)
            batch_targets = batch.y.to(y.device) if targets else y[:0]
            if targets:
                warn_unsaid(innermost(model), None, batch_targets, [y])
            if y.dim() == 0 or (targets and len(batch_targets) != len(y)):
                raise ValueError(
                    f"the model gives {list(y.shape)} for a batch of {len(batch_targets)} rows; one row for each is needed"
                )
            parts.append((y, risks, batch_targets))
            for name, numbers_of in asked.items():
                numbers_of.append((of_inputs or {})[name](batch.x, len(y)))
            if offsets:
                spreads.append(offsets_of(model, batch.x, y))
        drawn = not torch.equal(start, generator_of(like.device).get_state())
    if not parts or not sum(len(y) for y, _, _ in parts):
        raise ValueError("data: there is no row")
    if len(shapes := {tuple(part[0].shape[1:]) for part in parts}) > 1:
        one, other = (["rows", *shape] for shape in sorted(shapes)[:2])
        raise ValueError(
            f"data: the model gives {one} for one batch and {other} for another; pad all rows to one length, and leave the targets of the "
            "padding out by class number -100"
        )
    y = torch.cat([part[0] for part in parts])
    batch_targets = torch.cat([part[2] for part in parts])
    risks = Risk(**{name: torch.cat([part[1][name] for part in parts]) for name in parts[0][1].names()})
    # a score of minus infinity rules a class out, which is meant
    finite = y if batch_targets.is_floating_point() else y.where(~y.isneginf(), 0.0)
    for label, values in (
        ("the prediction", finite),
        *((f"the {name} risk", risks[name]) for name in risks),
        ("y", batch_targets),
    ):
        if len(bad := bad_rows(values)):
            raise ValueError(
                f"{label} is NaN or infinite in {len(bad)} of {len(values)} rows, first in row {int(bad[0])}"
            )
    return Answers(
        y,
        risks,
        precise(batch_targets) if batch_targets.is_floating_point() else batch_targets,
        torch.cat(spreads, 1) if spreads else None,
        {name: torch.cat(numbers_of) for name, numbers_of in asked.items()},
        drawn,
    )


def batches_of_rows(data: Any, like: Tensor, size: int, targets: bool) -> Iterator[Batch]:
    if isinstance(data, Data | str):
        raise ValueError(
            "data: a Data holds training rows, which say nothing about new ones; hold some out before training (train, held = "
            "data.validation(0.2)) and give these"
        )
    source = read(data, targets=targets, numbered=False)
    if isinstance(source, TensorRows):
        for numbers in torch.arange(len(source)).split(size):
            rows = source.take(numbers)
            yield Batch(numbers, place(rows.x, like.device, like.dtype), rows.y)
        return
    loader = source if isinstance(source, DataLoader) else rows_loader(source, batch_size=size)
    for item in loader:
        if targets and not (isinstance(item, tuple | list) and len(item) == 2):
            raise TypeError(f'data: found {type(item).__name__} in place of pairs (x, y), or of dicts with "labels"')
        x, y = split_batch(item)
        y = with_class_numbers(y)
        if targets and not isinstance(y, Tensor):
            raise TypeError(f"data: targets must be a tensor, found {type(y).__name__}")
        yield Batch(None, place(x, like.device, like.dtype), y)
