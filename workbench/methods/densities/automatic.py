"""Combined density of class scores, features and synthetic outliers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.methods.densities.base import Density
from workbench.methods.densities.classes import Neighbours
from workbench.methods.densities.discriminator import Discriminator
from workbench.methods.densities.distances import RelativeMahalanobis
from workbench.methods.densities.features import Features, Head, Rows
from workbench.methods.densities.head import BoundaryDistance, VirtualLogit
from workbench.methods.densities.moments import full_precision
from workbench.methods.densities.scores import Energy
from workbench.methods.densities.shaping import ClippedEnergy, ScaledEnergy
from workbench.methods.densities.signature import Signature

PARTS: dict[str, type[Density]] = {"energy": Energy, "react": ClippedEnergy, "signature": Signature}
PARTS_WITHOUT_OUTLIERS: dict[str, type[Density]] = {  # if no outliers can be made
    **PARTS,
    "knn": Neighbours,
    "relative": RelativeMahalanobis,
    "vim": VirtualLogit,
    "fdbd": BoundaryDistance,
    "scale": ScaledEnergy,
}
_LINEAR_RANGE = 10.0  # standard deviations up to which a risk counts about linearly, beyond logarithmically
_SIGNATURE_THRESHOLD = 2.5  # standard deviations of the signature from which it contributes
_QUANTILE = 0.9  # of the discriminator's log odds on held-out rows, from which it contributes


class Automatic(Density):
    """Sum of energy, ReAct, the signature and a discriminator between training rows and synthetic outliers, for classifiers.

    score = mean of g(r) over energy and, if the model ends in a linear layer, ReAct, which rank rows near the training data,
    + softplus(2 (g(r) - 2.5)) / 2 of the signature + softplus(t - q) / 2 of the discriminator (`Discriminator`), two terms that are near zero on
    most rows and dominate where they are certain; g(r) = 10 asinh(r / 10) of a risk r in standard deviations, t the log odds that a row is
    synthetic, from the reduced features of all layers, and q their 90 % quantile on held-out rows. The outliers are made of training inputs
    (`made_outliers`): means of two rows, noise, values of other rows and, for pictures, shuffled pieces, smoothing, fading, rotation and other
    changes. If none can be made, as for token numbers, score is the mean of g(r) over these three, neighbours, relative Mahalanobis distance,
    ViM, fDBD and, after a ReLU, SCALE.

    To fit it, the model also runs on some 10,000 synthetic rows, and the discriminator is trained twice, for 300 steps each.

    The scores and constants were chosen on two networks and all kinds of outliers of `workbench bench ood_pairs`; its page reports others.

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

    learned: ClassVar[tuple[str, ...]] = ("quiet",)

    quiet: Tensor  # the log odds q

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self.discriminator = Discriminator()
        self._outliers: list[Rows] = []  # only during a fit

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
        """Learn every part from all rows, and its threshold from held-out rows.

        Args:
            features, logits, labels, head, generator, seed: As in `Density.fit`.
            outliers: Features and class scores of rows that are unlike the training data, one pair per kind.

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

    def _named(self) -> list[tuple[str, Density]]:
        return cast(list[tuple[str, Density]], list(self.parts.items()))

    def _check_sizes(self, rows: Rows) -> None:
        for _, part in self._named():
            part._check_sizes(rows)

    def _learn(self, rows: Rows) -> None:
        parts = nn.ModuleDict()
        for name, kind in (PARTS if self._outliers else PARTS_WITHOUT_OUTLIERS).items():
            negative = kind is ScaledEnergy and bool((rows.layers[-1] < 0).any())
            if (kind.needs_head and rows.head is None) or negative:
                continue
            part: Density = kind().to(self.centre)
            features = rows.layers if rows.reduced else rows.layers[0]
            with torch.enable_grad():
                part.fit(
                    features if kind.needs_features else [],
                    rows.logits,
                    rows.labels if kind.uses_labels else None,
                    head=rows.head if kind.needs_head else None,
                )
            parts[name] = part.requires_grad_(False).eval()
        self.parts, self.discriminator = parts, Discriminator().to(self.centre).train(self.training)
        if self._outliers:
            with full_precision(rows.layers[-1]):
                self.discriminator.fit(self._reduced(rows), [self._reduced(kind) for kind in self._outliers])
        self.quiet = self.centre.new_zeros(1)

    def _score(self, rows: Rows) -> Tensor:
        with full_precision(rows.layers[-1]):
            risks = {name: _compress((part._score(rows) - part.centre) / part.scale) for name, part in self._named()}
            if not self.discriminator.fitted:
                return torch.stack(list(risks.values())).mean(0)
            far = F.softplus(2 * (risks.pop("signature") - _SIGNATURE_THRESHOLD)) / 2
            made_up = F.softplus(self.discriminator(self._reduced(rows)) - self.quiet) / 2
            return torch.stack(list(risks.values())).mean(0) + far + made_up

    def _reduced(self, rows: Rows) -> Tensor:
        """Return the features [m, d] of all layers, reduced as by the signature."""
        return cast(Signature, self.parts["signature"])._reduced(rows)

    @torch.no_grad()
    def _balance(self, held_out: Rows) -> None:
        if self.discriminator.fitted:
            with full_precision(held_out.layers[-1]):
                self.quiet = self.discriminator(self._reduced(held_out)).quantile(_QUANTILE)[None].to(self.quiet)

    def _take_balance(self, trials: list[Any]) -> None:
        self.quiet = torch.stack([trial.quiet for trial in trials]).mean(0)

    def forget(self) -> None:
        super().forget()
        self.parts = nn.ModuleDict().train(self.training)
        self.discriminator = Discriminator().to(self.centre).train(self.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}parts."
        names = {key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start)}
        if not self.fitted:  # children are loaded after their parent, so it is enough to create them here
            self.parts = nn.ModuleDict(
                {
                    name: kind().to(self.centre).requires_grad_(False)
                    for name, kind in PARTS_WITHOUT_OUTLIERS.items()
                    if name in names
                }
            ).train(self.training)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _compress(risk: Tensor) -> Tensor:
    return _LINEAR_RANGE * (risk / _LINEAR_RANGE).asinh()


__all__ = ["Automatic"]
