"""What carries the risk of the explored model, that is, what its risk depends on: columns of a table, or places of the chosen picture."""

from __future__ import annotations

from typing import Any

from workbench.attributions import Occlusion, PermutationImportance, occlusion, permutation_importance
from workbench.widgets.explorer.explored import Explored

MAX_SHUFFLED, REPEATS = 500, 5  # rows and permutations; standard errors show the remaining uncertainty


class Carriers(Explored):
    """Which columns or places prediction and risks depend on; mixed into `Exploration`."""

    _importance: PermutationImportance | None = None
    _occlusions: tuple[Any, dict[str, Occlusion]] = (None, {})  # key of the picture, and its occlusion by model

    @property
    def importance(self) -> PermutationImportance:
        """Importance of the columns for prediction, risks and error, over test rows; computed on first access.

        Raises:
            ValueError: if rows are pictures; use `occlusion` for these.
        """
        if self._importance is None:
            if self.data.test.x.ndim != 2:
                raise ValueError(
                    f"importance: rows of {self.data.name} are no table; use occlusion() for the chosen row"
                )
            self._importance = permutation_importance(
                self.wrapped, self.data, n_repeats=REPEATS, max_rows=MAX_SHUFFLED, progress=False
            )
        return self._importance

    def occlusion(self, **options: Any) -> Occlusion:
        """Return which places of the chosen picture, with all edits, carry prediction and risks; places are covered by the mean training pixel.

        Args:
            options: options of `workbench.attributions.occlusion`.

        Raises:
            ValueError: if rows are a table; use `importance` for these.
        """
        return self._occluded(self.model, options)

    def _occluded(self, model: str, options: dict[str, Any]) -> Occlusion:
        train = self.data.train.x
        if train.ndim == 2:
            raise ValueError(f"occlusion: rows of {self.data.name} are no pictures; use `importance`, over all rows")
        baseline = train.double().mean((0, -2, -1), keepdim=True)[0]
        return occlusion(self.models[model], self.x[None], **{"baseline": baseline, "progress": False, **options})

    def _occlusion_of(self, model: str) -> Occlusion:
        """Return the occlusion by any of the models, cached until the picture changes."""
        key = self.row, tuple(self.edits.items())
        if self._occlusions[0] != key:
            self._occlusions = key, {}
        by_model = self._occlusions[1]
        if model not in by_model:
            by_model[model] = self._occluded(model, {})
        return by_model[model]


__all__ = ["REPEATS", "Carriers"]
