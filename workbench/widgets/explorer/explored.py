"""The base class of the parts of an exploration: what they know of each other, said once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from workbench.attributions import Occlusion
from workbench.data import Data
from workbench.widgets.common.predictions import Predictions


class Explored(ABC):
    """The model and rows that are explored, and what one part of `Exploration` has for the others.

    Attributes:
        wrapped: the model that is looked at.
        data: whose test rows are explored.
        rows: numbers of those rows, int64.
    """

    wrapped: nn.Module
    data: Data
    rows: Tensor
    _answers: Predictions

    @property
    @abstractmethod
    def x(self) -> Tensor:
        """The chosen row as it was edited."""

    @property
    @abstractmethod
    def row(self) -> int:
        """The number of the chosen row."""

    @property
    @abstractmethod
    def edits(self) -> dict[str, float]:
        """What was edited in it."""

    @property
    @abstractmethod
    def model(self) -> str:
        """The name of the model that is looked at."""

    @property
    @abstractmethod
    def models(self) -> dict[str, nn.Module]:
        """All models by name."""

    @property
    @abstractmethod
    def by(self) -> str:
        """What ranks the rows."""

    @abstractmethod
    def _covered(self, model: str) -> Occlusion:
        """What covering the places of the chosen picture does to what a model says."""

    @property
    @abstractmethod
    def filters(self) -> dict[str, Any]:
        """What rows must have to be listed."""

    @property
    @abstractmethod
    def rankings(self) -> tuple[str, ...]:
        """What rows can be ranked by."""

    @property
    @abstractmethod
    def _targets(self) -> Tensor:
        """Of the rows, in their order."""

    @abstractmethod
    def _value(self, by: str) -> Tensor:
        """The number of each row by which it is ranked."""

    @abstractmethod
    def _check_by(self, by: str) -> None:
        """Raise ValueError unless rows can be ranked by this."""

    @abstractmethod
    def _changed_model(self) -> None:
        """Look at the rows anew, as the model that was chosen answers them."""

    @abstractmethod
    def _refresh(self, what: str) -> None:
        """Show what has changed."""


__all__ = ["Explored"]
