"""Several models of the same data in one `Explorer`: which one is looked at, and what each says about the chosen row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from workbench.calibration.base import check_model, output_of
from workbench.data import Data
from workbench.errors import NotFittedError
from workbench.widgets.common.predictions import Predictions, predict_cases, rankings
from workbench.widgets.explorer.explored import Explored

ONLY = "model"  # the name of a model that was given without one


def named_models(wrapped: Any, data: Data, ask: Callable[[nn.Module], Any]) -> dict[str, nn.Module]:
    """The models by name, each of which can answer rows of the data.

    Args:
        wrapped: one model, or several by name.
        data: what they are asked about.
        ask: asks a model about a few rows, and raises where what it says does not fit.

    Raises:
        TypeError, ValueError, NotFittedError: one is not wrapped or not fitted, or gives something else than the data need; the message says
            which.
    """
    if not isinstance(wrapped, Mapping):
        check_model(wrapped)
        return {ONLY: wrapped}
    if not wrapped:
        raise ValueError("wrapped: there is no model; give one, or a dict of names and models")
    for name, model in wrapped.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"wrapped: models have names; found {name!r}")
        with naming(name, data):
            check_model(model)
            ask(model)
    return dict(wrapped)


@contextmanager
def naming(name: str, data: Data) -> Iterator[None]:
    """Let errors say which of several models they are about."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last for inputs of another shape
        kind = next((kind for kind in (NotFittedError, TypeError) if isinstance(error, kind)), ValueError)
        raise kind(f"wrapped: the model {name!r} can't be explored with {data.name}: {error}") from error


def versions_of(models: Mapping[str, nn.Module]) -> tuple[Any, ...]:
    """Which parameters models have, and how often each was changed in place: an optimizer's step makes others of these."""
    parameters = (parameter for model in models.values() for parameter in model.parameters())
    return tuple((id(p), 0 if p.is_inference() else p._version) for p in parameters)


class ModelChoice(Explored):
    """Which of several models an exploration is about; mixed into `Exploration`."""

    output: str
    _models: dict[str, nn.Module]
    _asked_of: tuple[Any, ...]
    _areas_said: dict[tuple[str, ...], str]
    _coverings: tuple[Any, dict[str, Any]]
    _model: str
    _row: int
    _answers_of: dict[str, Predictions]
    _original: Predictions
    _current: Predictions

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; one that was given without a name is called "model"."""
        return dict(self._models)

    @property
    def model(self) -> str:
        """The name of the model that is looked at; it can be set. Row, edits, selections and filter stay, as does the ranking where the other
        model measures that risk as well."""
        return self._model

    @model.setter
    def model(self, name: str) -> None:
        if name not in self._models:
            raise ValueError(f"model={name!r}: there are {', '.join(map(repr, self._models))}")
        self._notice_training()
        if name != self._model:
            self._look_at(name)
            self._changed_model()

    def _notice_training(self) -> None:
        """Ask all models again if one was trained since: nothing that is shown mixes what a model said before and after."""
        if (now := versions_of(self._models)) != self._asked_of:
            self._ask_again()
            self._asked_of, self._areas_said, self._coverings = now, {}, (None, {})
            self._changed_model()

    def _ask_again(self) -> None:
        """Ask about all rows and the chosen one, whatever was said before."""
        before, self._answers_of = self._answers_of, {}
        try:
            self._look_at(self._model)
        except Exception:
            self._answers_of = before
            raise

    def _look_at(self, name: str) -> None:
        """Take what this model says about all rows and the chosen one; nothing has changed if it raises."""
        wrapped = self._models[name]
        if name not in self._answers_of:
            self._answers_of[name] = predict_cases(wrapped, self.data, self.data.test.x[self.rows])
        answers = self._answers_of[name]
        self._check_filtered(name, rankings(answers))
        original = predict_cases(wrapped, self.data, self.data.test.x[self._row : self._row + 1])
        current = predict_cases(wrapped, self.data, self.x[None]) if self.edits else original
        self._model, self.wrapped, self.output = name, wrapped, output_of(wrapped)
        self._answers, self._original, self._current = answers, original, current

    def _check_filtered(self, name: str, known: tuple[str, ...]) -> None:
        """Raise where the filter needs what this model does not measure."""
        if "confident_unseen" in self.filters and "vacuitic" not in known:
            raise ValueError(
                f"model={name!r}: it measures no vacuitic risk, and the filter asks for it; drop it first, explorer.filter()"
            )

    def each_model(self) -> dict[str, Predictions]:
        """What each model says about the chosen row, with all edits, by name."""
        return {
            name: self._current if name == self._model else predict_cases(model, self.data, self.x[None])
            for name, model in self._models.items()
        }


__all__ = ["ModelChoice", "named_models", "naming", "versions_of"]
