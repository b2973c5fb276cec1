"""LogitNormal, the distribution of class labels under normal noise on the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.distributions.base import Distribution, aleatoric_of, on_class_or_instance
from workbench.engine.tree import holds


@dataclass(frozen=True)
class LogitNormal(Distribution):
    """Class labels under normal noise on the logits; risk is the standard deviation of each logit (Kendall & Gal 2017).

    Labels y are integers [...], or soft labels, probabilities [..., classes], whose loss is the expectation over them; logits
    and risk are [..., classes]. The loss is the cross entropy of the expected probabilities, by default in the mean-field form
    softmax(loc / sqrt(1 + pi / 8 * risk^2)) (MacKay 1992; Lu, Ie & Sha 2020), or by Monte Carlo, the log of the mean over
    n_samples of softmax(loc + risk * noise). `sample` draws logits.

    The plain mean-field form uses the noise of single logits, but a probability depends on differences of logits, which have
    the noise of both. The pairwise form, p_k ~ 1 / sum_i exp((loc_i - loc_k) / sqrt(1 + pi / 8 (risk_i^2 + risk_k^2))),
    accounts for that, agrees with `sample` within 0.01 for two classes, and needs classes^2 numbers per row.

    Args:
        n_samples: Number of draws for the Monte Carlo form; None for a mean-field form.
        generator: Source of that noise; None for torch's global generator.
        pairwise: Whether to use the pairwise mean-field form.

    Example:
        >>> import torch
        >>> logits, label = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
        >>> LogitNormal.probs(logits, torch.tensor([[1e-6, 1e-6]]))
        tensor([[0.8808, 0.1192]])
        >>> LogitNormal.loss_function(label, logits, torch.tensor([[3.0, 3.0]]))
        tensor(0.3300)
    """

    n_samples: int | None = field(
        default=None, metadata={"help": "draws for the Monte Carlo form; None for a mean-field form"}
    )
    generator: torch.Generator | None = None
    pairwise: bool = field(default=False, metadata={"help": "whether the mean-field form is the pairwise one"})

    location_scale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.n_samples is not None and self.pairwise:
            raise ValueError("choose one form: n_samples (Monte Carlo) or pairwise (mean field)")
        if self.n_samples is not None and self.n_samples < 1:
            raise ValueError(f"n_samples must be at least 1 (or None for the mean-field form), found {self.n_samples}")

    @on_class_or_instance
    def probs(self, loc: Tensor, risk: Tensor) -> Tensor:
        """Return expected class probabilities [..., classes] for logits loc [..., classes] with risk [..., classes] >= 0."""
        return self._log_probs(*self._checked("", loc, aleatoric_of(risk), zero_risk=True)).exp()

    def _log_probs(self, loc: Tensor, risk: Tensor) -> Tensor:
        if self.pairwise:
            variance = 1 + math.pi / 8 * (risk.unsqueeze(-1) ** 2 + risk.unsqueeze(-2) ** 2)
            odds = (loc.unsqueeze(-2) - loc.unsqueeze(-1)) / variance.sqrt()  # [..., k, i]: of class i against k
            return torch.log_softmax(-torch.logsumexp(odds, -1), -1)
        if self.n_samples is None:
            return torch.log_softmax(loc / torch.sqrt(1 + math.pi / 8 * risk**2), -1)
        shape = (self.n_samples, *loc.shape)
        noise = torch.randn(shape, generator=self.generator, dtype=loc.dtype, device=loc.device)
        draws = torch.log_softmax(loc + risk * noise, -1)
        return torch.logsumexp(draws, 0) - math.log(self.n_samples)

    def _checked(self, where: str, loc: Any, risk: Any, *y: Any, zero_risk: bool = False) -> list[Tensor]:
        if isinstance(loc, Tensor) and (loc.ndim == 0 or loc.shape[-1] < 2):
            raise ValueError(
                f"LogitNormal needs logits [..., classes >= 2], found y_pred{where} of shape {tuple(loc.shape)}"
            )
        return super()._checked(where, loc, risk, *y, zero_risk=True)  # logits without noise are a plain softmax

    def _target(self, where: str, y: Tensor, loc: Tensor) -> Tensor:
        if y.is_floating_point() and y.shape == loc.shape:
            if not holds((y >= 0).all(-1) & ((y.sum(-1) - 1).abs() < max(1e-3, 4 * torch.finfo(y.dtype).eps))):
                raise ValueError(f"y{where}: soft labels must be probabilities that sum to one over the last dimension")
            return y.to(loc.dtype)
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise TypeError(f"LogitNormal needs integer class labels, found y{where} of {y.dtype}")
        if y.shape != loc.shape[:-1]:
            raise ValueError(
                f"y{where} has shape {tuple(y.shape)} but y_pred{where} has shape {tuple(loc.shape)}; labels must be "
                "shaped like the logits without their last dimension, classes (move it there with movedim(1, -1))"
            )
        if not holds((y >= 0) & (y < loc.shape[-1])):
            raise ValueError(f"labels must lie in [0, {loc.shape[-1]}), found y{where} from {y.min()} to {y.max()}")
        return y.long()

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        logs = self._log_probs(loc, risk)
        return (y * logs).sum(-1) if y.is_floating_point() else logs.gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def _draw(self, loc: Tensor, risk: Tensor, generator: torch.Generator | None) -> Tensor:
        return loc + risk * torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)

    def _cdf(self, *args: Tensor) -> Tensor:
        raise ValueError("LogitNormal has no cdf: classes have no order; use probs")

    def _icdf(self, *args: Tensor) -> Tensor:
        raise ValueError("LogitNormal has no icdf: classes have no order; use probs")

    def _crps(self, *args: Tensor) -> Tensor:
        raise ValueError("LogitNormal has no crps: classes have no order; use loss_function or workbench.metrics.brier")
