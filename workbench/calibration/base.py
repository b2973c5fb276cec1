"""Base class of calibrated models: a thin module around a wrapped model, fitted to held-out rows."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from workbench.calibration.answers import Answers
from workbench.calibration.collection import collect
from workbench.calibration.models import (
    Calibration,
    ask,
    check_model,
    check_targets,
    has_density,
    kind_of,
    named_risks,
    offsets_of,
    output_name,
    record_of,
    risks_at,
)
from workbench.calibration.one_output import pick, put
from workbench.core.batches.call_arguments import answering
from workbench.core.calls.risks import noise_moves_classes
from workbench.core.fitted_weights import FittedWeights
from workbench.core.method import evaluating
from workbench.core.saving.save_pretrained import SavesPretrained
from workbench.core.saving.training_data import Facts
from workbench.risk import Risk


class Calibrated(SavesPretrained, Calibration, ABC):
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
            check=self.check,
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
        self.check(answers)
        with torch.no_grad():
            self._fit(answers, seed)
        self.fitted_on, self.weights = answers.facts, FittedWeights(self.wrapped)
        return self

    def check(self, answers: Answers) -> None:
        """Raise if the method can't be fitted to such answers; those for a few of the rows show it already."""
        check_targets(self.wrapped, answers)
        self._check(answers)

    def forward(self, *args: Any, return_risk: bool = False, **kwargs: Any) -> Any:
        """Return the prediction, or with `return_risk=True` the pair of prediction and risk, in the form of the wrapped model.

        Args:
            args, kwargs: as for the wrapped model.
            return_risk: whether to return (prediction, risk).
        """
        self.warn_if_trained()
        with evaluating(self.wrapped, whole=True):
            if not (return_risk or self.moves_prediction or noise_moves_classes(record_of(self.wrapped))):
                return self._put_back(answering(self.wrapped)(*args, **kwargs), Risk())[0]
            y, uncalibrated = answering(self.wrapped)(*args, return_risk=True, **kwargs)
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

    def _check(self, answers: Answers) -> None:
        """Raise if targets or risks of some of the rows are none that the method can be fitted to."""

    @abstractmethod
    def _fit(self, answers: Answers, seed: int) -> None:
        """Check what takes all rows, then set the buffers."""

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
