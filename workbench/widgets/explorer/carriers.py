"""What carries the risk of the explored model: columns of its table, or places of the chosen picture."""

from __future__ import annotations

from typing import Any

from workbench.attributions import Occlusion, PermutationImportance, occlusion, permutation_importance
from workbench.widgets.explorer.explored import Explored

MAX_SHUFFLED, REPEATS = 500, 5  # rows and permutations: standard errors say what that leaves open


class Carriers(Explored):
    """Which columns or places carry prediction and risks; mixed into `Exploration`."""

    _importance: PermutationImportance | None = None
    _coverings: tuple[Any, dict[str, Occlusion]] = (None, {})  # what picture they are of, and by model

    @property
    def importance(self) -> PermutationImportance:
        """Which columns of the table carry prediction, risks and error, over test rows; computed when it is first asked for.

        Raises:
            ValueError: rows are pictures, of which `occlusion` says more.
        """
        if self._importance is None:
            if self.data.test.x.ndim != 2:
                raise ValueError(
                    f"importance: rows of {self.data.name} are no table; occlusion() says it of the chosen row"
                )
            self._importance = permutation_importance(
                self.wrapped, self.data, n_repeats=REPEATS, max_rows=MAX_SHUFFLED, progress=False
            )
        return self._importance

    def occlusion(self, **options: Any) -> Occlusion:
        """Which places of the chosen picture, with all edits, carry prediction and risks: covered by the mean of the training rows.

        Args:
            options: those of `workbench.attributions.occlusion`.

        Raises:
            ValueError: rows are a table, of which `importance` says more.
        """
        return self._occluded(self.model, options)

    def _occluded(self, model: str, options: dict[str, Any]) -> Occlusion:
        train = self.data.train.x
        if train.ndim == 2:
            raise ValueError(f"occlusion: rows of {self.data.name} are no pictures; `importance` says it of all rows")
        baseline = train.double().mean((0, -2, -1), keepdim=True)[0]
        return occlusion(self.models[model], self.x[None], **{"baseline": baseline, "progress": False, **options})

    def _covered(self, model: str) -> Occlusion:
        """The same by any of the models, kept until the picture changes."""
        of = self.row, tuple(self.edits.items())
        if self._coverings[0] != of:
            self._coverings = of, {}
        coverings = self._coverings[1]
        if model not in coverings:
            coverings[model] = self._occluded(model, {})
        return coverings[model]


__all__ = ["REPEATS", "Carriers"]
