"""Several models of the same data in one `Explorer`: the current model, and the predictions of each for the chosen row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from workbench.calibration.models import check_model, output_of
from workbench.data import Data
from workbench.errors import NotFittedError
from workbench.widgets.common.predictions import Predictions, predict_cases, rankings
from workbench.widgets.explorer.explored import Explored

ONLY = "model"  # name of a single model given without a name


def named_models(wrapped: Any, data: Data, ask: Callable[[nn.Module], Any]) -> dict[str, nn.Module]:
    """Return the models by name, after checking that each can predict rows of the data.

    Args:
        wrapped: one model, or several by name.
        data: data set to explore.
        ask: predicts a few rows by a model, and raises an error if the output does not fit the data.

    Raises:
        TypeError, ValueError, NotFittedError: if a model is not wrapped or not fitted, or its output does not fit the data; the message
            names the model.
    """
    if not isinstance(wrapped, Mapping):
        check_model(wrapped)
        return {ONLY: wrapped}
    if not wrapped:
        raise ValueError("wrapped: there is no model; give one, or a dict of names and models")
    for name, model in wrapped.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"wrapped: expected a dict of models by name; found the name {name!r}")
        with naming(name, data):
            check_model(model)
            ask(model)
    return dict(wrapped)


@contextmanager
def naming(name: str, data: Data) -> Iterator[None]:
    """Add the names of model and data to errors; name is "" for the only model, whose errors of ours stay as they are."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError for inputs of another shape
        if not name and isinstance(error, NotFittedError | TypeError | ValueError):
            raise
        kind = next((kind for kind in (NotFittedError, TypeError) if isinstance(error, kind)), ValueError)
        raise kind(f"wrapped: the model{name and f' {name!r}'} can't be explored with {data.name}: {error}") from error


def versions_of(models: Mapping[str, nn.Module]) -> tuple[Any, ...]:
    """Return the identity and in-place version of all parameters of the models, which change with any training."""
    parameters = (parameter for model in models.values() for parameter in model.parameters())
    return tuple((id(p), 0 if p.is_inference() else p._version) for p in parameters)


class ModelChoice(Explored):
    """The current one of several models; mixed into `Exploration`."""

    output: str
    _models: dict[str, nn.Module]
    _model_versions: tuple[Any, ...]
    _area_texts: dict[tuple[str, ...], str]
    _occlusions: tuple[Any, dict[str, Any]]
    _model: str
    _row: int
    _answers_by_model: dict[str, Predictions]
    _original: Predictions
    _current: Predictions

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; a single one given without a name is called "model"."""
        return dict(self._models)

    @property
    def model(self) -> str:
        """The name of the current model; can be set. Row, edits, selections and filter stay, and so does the ranking if the new model measures
        that risk."""
        return self._model

    @model.setter
    def model(self, name: str) -> None:
        if name not in self._models:
            raise ValueError(f"model={name!r}: there are {', '.join(map(repr, self._models))}")
        self._refresh_if_trained()
        if name != self._model:
            self._switch_to(name)
            self._changed_model()

    def _refresh_if_trained(self) -> None:
        """Predict again by all models if any was trained since, so that old and new predictions are never mixed."""
        if (now := versions_of(self._models)) != self._model_versions:
            self._predict_all_again()
            self._model_versions, self._area_texts, self._occlusions = now, {}, (None, {})
            self._changed_model()

    def _predict_all_again(self) -> None:
        """Predict all rows and the chosen one again; keep the previous state if that fails."""
        before, self._answers_by_model = self._answers_by_model, {}
        try:
            self._switch_to(self._model)
        except Exception:
            self._answers_by_model = before
            raise

    def _switch_to(self, name: str) -> None:
        """Make a model the current one, with its predictions for all rows and the chosen one; nothing is changed if it raises."""
        wrapped = self._models[name]
        if name not in self._answers_by_model:
            self._answers_by_model[name] = predict_cases(wrapped, self.data, self.data.test.x[self.rows])
        answers = self._answers_by_model[name]
        self._check_filtered(name, rankings(answers))
        original = predict_cases(wrapped, self.data, self.data.test.x[self._row : self._row + 1])
        current = predict_cases(wrapped, self.data, self.x[None]) if self.edits else original
        self._model, self.wrapped, self.output = name, wrapped, output_of(wrapped)
        self._answers, self._original, self._current = answers, original, current

    def _check_filtered(self, name: str, known: tuple[str, ...]) -> None:
        """Raise an error if the filter needs a risk that this model does not measure."""
        if "confident_unseen" in self.filters and "vacuitic" not in known:
            raise ValueError(
                f"model={name!r}: it measures no vacuitic risk, which the filter needs; clear the filter first, explorer.filter()"
            )

    def each_model(self) -> dict[str, Predictions]:
        """Return the predictions of each model for the chosen row, with all edits, by name."""
        return {
            name: self._current if name == self._model else predict_cases(model, self.data, self.x[None])
            for name, model in self._models.items()
        }


__all__ = ["ModelChoice", "named_models", "naming", "versions_of"]
