"""One place of the chosen row, such as a pixel or a token, and the predictions of all models there."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from workbench.widgets.explorer.explored import Explored


class PlaceChoice(Explored):
    """The chosen place of the chosen row; mixed into `Exploration`."""

    _place: tuple[int, ...] | None = None

    @property
    def place_shape(self) -> tuple[int, ...]:
        """Shape of the places of a row: (rows, columns) of pictures; () for table rows."""
        shape = self.data.test.x.shape
        return tuple(shape[-2:]) if len(shape) > 2 else ()

    @property
    def place(self) -> tuple[int, ...] | None:
        """The chosen place: (row, column) of pictures and maps, (position,) of tokens and steps, or None; can be set.

        It stays when row or model change; `at_place()` gives the predictions of all models there.
        """
        return self._place

    @place.setter
    def place(self, place: Sequence[SupportsIndex] | SupportsIndex | None) -> None:
        self._place = None if place is None else self._checked_place(place)
        self._refresh("place")

    def _checked_place(self, place: Sequence[SupportsIndex] | SupportsIndex) -> tuple[int, ...]:
        if not (shape := self.place_shape):
            raise ValueError(
                f"place: rows of {self.data.name} have no places; only pictures, maps, tokens and steps do"
            )
        numbers = tuple(place) if isinstance(place, Sequence) else (place,)
        try:
            at = tuple(-1 if isinstance(number, bool) else operator.index(number) for number in numbers)
        except TypeError:
            at = ()
        if len(at) != len(shape) or not all(0 <= number < count for number, count in zip(at, shape, strict=True)):
            raise ValueError(
                f"place: expected {'(row, column), ' if len(shape) == 2 else ''}whole numbers from 0 to "
                f"{', '.join(str(count - 1) for count in shape)}; found {place!r}"
            )
        return at

    def _chosen_place(self) -> tuple[int, ...]:
        if self._place is None:
            shape = self.place_shape
            example = f"; set one, explorer.place = {tuple(count // 2 for count in shape)}" if shape else ""
            raise ValueError(f"place: none is chosen{example}")
        return self._place

    def at_place(self) -> dict[str, dict[str, Tensor]]:
        """Return the predictions of each model at the chosen place, by name of the model.

        Returns:
            For maps, tokens and steps: "prediction", a value [] or class probabilities [classes], and each risk []; a risk with one number per
            row is that of the row. For pictures with one target: by how much "prediction" and each risk [] fall when the place is covered, see
            `occlusion`.

        Raises:
            ValueError: if no place is chosen, or rows have none.
        """
        place = self._chosen_place()
        return {
            model: {name: change[0][place] for name, change in self._occlusion_of(model).change.items()}
            for model in self.models
        }

    def riskiest_place(self) -> tuple[int, ...]:
        """Return the place of the chosen row that carries most of the risk."""
        change = self._occlusion_of(self.model).change
        carried = change[self.by] if self.by in change else change["prediction"]
        return place_of(carried[0].abs())


def place_of(values: Tensor) -> tuple[int, ...]:
    """Return the index of the largest value."""
    return tuple(int(at) for at in torch.unravel_index(values.argmax(), values.shape))


__all__ = ["PlaceChoice", "place_of"]
