"""Several scores at once, weighed by how well they tell made-up outliers from held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.methods.densities.base import Density
from workbench.methods.densities.classes import Neighbours
from workbench.methods.densities.distances import RelativeMahalanobis
from workbench.methods.densities.features import Features, Head, Rows
from workbench.methods.densities.head import BoundaryDistance, VirtualLogit
from workbench.methods.densities.moments import full_precision
from workbench.methods.densities.scores import Energy
from workbench.methods.densities.shaping import ClippedEnergy, ScaledEnergy
from workbench.methods.densities.signature import Signature

PARTS: dict[str, type[Density]] = {
    "signature": Signature,
    "knn": Neighbours,
    "energy": Energy,
    "relative": RelativeMahalanobis,
    "vim": VirtualLogit,
    "fdbd": BoundaryDistance,
    "react": ClippedEnergy,
    "scale": ScaledEnergy,
}
_REACH = 10.0  # standard deviations up to which a risk counts as it is; beyond, by its logarithm
_PENALTY = 1e-2
_MOST_HELD = 4000  # held-out rows that the weights are found on


class Automatic(Density):
    """Weighted sum of several scores' risks, for classifiers; the weights are found on training data alone.

    score = sum_i w_i 10 asinh(r_i / 10) over the risks r_i of the signature, neighbours, energy and relative Mahalanobis distance and, where
    the model ends in a linear layer, ViM, fDBD, ReAct and, after a ReLU, SCALE. The weights, none negative, are those of a logistic regression
    (mean log loss of each kind, and 0.01 sum_i w_i) between held-out training rows and outliers made of the inputs: the mean of two rows, and
    rows whose every value is that of a row drawn anew. Where none are made all scores weigh the same.

    For a single pair, and on average over kinds of outliers, another score may be better: `workbench bench ood_pairs` has the numbers.

    Example:
        >>> x = torch.rand(1000, 4, generator=torch.Generator().manual_seed(0))
        >>> density = Automatic()
        >>> density.fit(x, 9 * x[:, :2], outliers=[(x + 2, 9 * x[:, :2] + 2)])
        >>> usual, strange = density(torch.stack([x[0], x[0] + 2]), 9 * torch.stack([x[0], x[0] + 2])[:, :2])
        >>> bool(usual < 2 < strange)
        True
    """

    needs_logits: ClassVar[bool] = True
    uses_labels: ClassVar[bool] = True
    uses_head: ClassVar[bool] = True
    takes_probs: ClassVar[bool] = False
    by_position: ClassVar[bool] = False
    takes_outliers: ClassVar[bool] = True

    learned: ClassVar[tuple[str, ...]] = ("weights",)

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self._outliers: list[Rows] = []  # while it is fitted

    @property
    def shares(self) -> dict[str, float]:
        """The weight of each score."""
        return dict(zip(self.parts, self.weights.tolist(), strict=True))

    def fit(
        self,
        features: Features,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head: Head | None = None,
        outliers: Sequence[tuple[Features, Tensor | None]] = (),
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> None:
        """Learn every score from all rows, and their weights on held-out ones.

        Args:
            features, logits, labels, head, generator, seed: As in `Density.fit`.
            outliers: Features and class scores of rows that are unlike the training data, by kind; kinds weigh the same.

        Raises:
            TypeError, ValueError: As in `Density.fit`.
        """
        made = [self._rows(*kind, learning=True) for kind in outliers]
        made = [rows.take(rows.finite).detached(rows.device) for rows in made]
        self._outliers = [rows for rows in made if len(rows)]
        try:
            super().fit(features, logits, labels, head=head, generator=generator, seed=seed)
        finally:
            self._outliers = []

    def _densities(self) -> list[Density]:
        return cast(list[Density], list(self.parts.values()))

    def _check_sizes(self, rows: Rows) -> None:
        for part in self._densities():
            part._check_sizes(rows)

    def _learn(self, rows: Rows) -> None:
        parts = nn.ModuleDict()
        for name, kind in PARTS.items():
            negative = kind is ScaledEnergy and bool((rows.layers[-1] < 0).any())
            if (kind.needs_head and rows.head is None) or negative:
                continue
            part: Density = kind().to(self.weights)
            features = rows.layers if rows.reduced else rows.layers[0]
            with torch.enable_grad():
                part.fit(
                    features if kind.needs_features else [],
                    rows.logits,
                    rows.labels if kind.uses_labels else None,
                    head=rows.head if kind.needs_head else None,
                )
            parts[name] = part.requires_grad_(False).eval()
        self.parts = parts
        self.weights = self.centre.new_ones(len(parts))

    def _score(self, rows: Rows) -> Tensor:
        risks = self._risks(rows)
        return risks @ self.weights.to(risks.dtype)

    def _risks(self, rows: Rows) -> Tensor:
        """What each part says [m, parts]."""
        with full_precision(rows.layers[-1]):
            risks = [(part._score(rows) - part.centre) / part.scale for part in self._densities()]
            return _REACH * (torch.stack(risks, 1) / _REACH).asinh()

    @torch.no_grad()
    def _balance(self, held_out: Rows) -> None:
        if self._outliers:
            usual = self._risks(held_out.take(torch.arange(min(len(held_out), _MOST_HELD), device=held_out.device)))
            self.weights = _regressed(usual, [self._risks(rows) for rows in self._outliers]).to(self.weights)

    def _take_balance(self, trials: list[Any]) -> None:
        weights = [trial.weights for trial in trials if list(trial.parts) == list(self.parts)]
        if weights:
            self.weights = torch.stack(weights).mean(0)

    def forget(self) -> None:
        super().forget()
        self.parts = nn.ModuleDict().train(self.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}parts."
        names = {key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start)}
        if not self.fitted:  # children are loaded after their parent, so they only have to exist by then
            self.parts = nn.ModuleDict(
                {name: PARTS[name]().to(self.weights).requires_grad_(False) for name in PARTS if name in names}
            ).train(self.training)
        super()._load_from_state_dict(state_dict, prefix, *args)


@torch.enable_grad()
def _regressed(usual: Tensor, outliers: Sequence[Tensor]) -> Tensor:
    """Weights >= 0 of a logistic regression between usual rows [n, k] and kinds of outliers, each [m, k]."""
    usual = usual.detach().double()
    strange = [risks.detach().double() for risks in outliers]
    unit = usual.std(0).clamp_min(1e-3)
    free = torch.zeros(usual.shape[1] + 1, dtype=usual.dtype, device=usual.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights, bias = F.softplus(free[:-1]), free[-1]
        loss = F.softplus(usual / unit @ weights + bias).mean() + _PENALTY * weights.sum()
        for risks in strange:
            loss = loss + F.softplus(-(risks / unit @ weights) - bias).mean() / len(strange)
        loss.backward()
        return loss

    optimizer.step(closure)
    return (F.softplus(free[:-1]) / unit).detach()


__all__ = ["Automatic"]
