"""Base class of the mixins of an exploration: the members they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from workbench.attributions import Occlusion
from workbench.data import Data
from workbench.widgets.common.predictions import Predictions


class Explored(ABC):
    """The explored model and rows, and the members that mixins of `Exploration` use of each other.

    Attributes:
        wrapped: the current model.
        data: data set whose test rows are explored.
        rows: numbers of the explored rows, int64.
    """

    wrapped: nn.Module
    data: Data
    rows: Tensor
    _answers: Predictions

    @property
    @abstractmethod
    def x(self) -> Tensor:
        """The chosen row with all edits."""

    @property
    @abstractmethod
    def row(self) -> int:
        """The number of the chosen row."""

    @property
    @abstractmethod
    def edits(self) -> dict[str, float]:
        """The edited values, by name."""

    @property
    @abstractmethod
    def model(self) -> str:
        """The name of the current model."""

    @property
    @abstractmethod
    def models(self) -> dict[str, nn.Module]:
        """All models by name."""

    @property
    @abstractmethod
    def by(self) -> str:
        """Name of the ranking."""

    @abstractmethod
    def _occlusion_of(self, model: str) -> Occlusion:
        """Return the occlusion of the chosen picture by a model."""

    @property
    @abstractmethod
    def filters(self) -> dict[str, Any]:
        """The conditions that listed rows meet."""

    @property
    @abstractmethod
    def rankings(self) -> tuple[str, ...]:
        """Names of the available rankings."""

    @property
    @abstractmethod
    def _targets(self) -> Tensor:
        """Targets of `rows`."""

    @abstractmethod
    def _value(self, by: str) -> Tensor:
        """Return the ranking numbers of `rows` [n]."""

    @abstractmethod
    def _check_by(self, by: str) -> None:
        """Raise ValueError unless there is such a ranking."""

    @abstractmethod
    def _changed_model(self) -> None:
        """Update the exploration after the current model has changed."""

    @abstractmethod
    def _refresh(self, what: str) -> None:
        """Update the display after a change."""


__all__ = ["Explored"]
