"""Energy guided by neighbours among the training features."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core.outputs.class_scores import at_least_float32
from workbench.methods.densities.classes import MAX_NEIGHBOURS, Bank
from workbench.methods.densities.features import Rows
from workbench.methods.densities.moments import full_precision


class GuidedEnergy(Bank):
    """Energy times the confidence and similarity of the nearest training rows (NNGuide: Park et al. 2023).

    With the confidence s(x) = log sum_c exp(logit_c) and the features u = x / |x| before the last layer, score = -s(x) times the mean of the
    k largest s(x_i) u_i' u over the training rows x_i, of which at most 10,000, evenly spread, are stored.

    Args:
        k: Number of neighbours; at most the number of stored rows is used.

    Example:
        >>> x = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([8.0, 0.0])
        >>> density = GuidedEnergy()
        >>> density.fit(x, x)
        >>> usual, strange = density(torch.tensor([[8.5, 0.5], [0.0, 8.5]]), torch.tensor([[8.5, 0.5], [0.0, 8.5]]))
        >>> bool(usual < 2 < strange)
        True
    """

    needs_logits: ClassVar[bool] = True
    takes_probs: ClassVar[bool] = False
    by_position: ClassVar[bool] = False

    def __init__(self, *, k: int = 10) -> None:
        super().__init__(k=k)

    @torch.no_grad()
    def _learn(self, rows: Rows) -> None:
        assert rows.logits is not None  # `needs_logits`
        step = -(-len(rows) // MAX_NEIGHBOURS)
        x, logits = at_least_float32(rows.layers[-1][::step]), at_least_float32(rows.logits[::step])
        with full_precision(x):
            self.bank = (F.normalize(x) * logits.logsumexp(1, keepdim=True)).to(self.bank.dtype)
        self.to(rows.device)

    def _score(self, rows: Rows) -> Tensor:
        assert rows.logits is not None
        dtype = torch.promote_types(self.bank.dtype, torch.float32)
        x, logits, bank = rows.layers[-1].to(dtype), rows.logits.to(dtype), self.bank.to(dtype)
        k = min(self.k, len(bank))
        with full_precision(x):
            guides = torch.cat([(F.normalize(part) @ bank.mT).topk(k, 1).values.mean(1) for part in x.split(1024)])
            score = -logits.logsumexp(1) * guides
        return score.where(x.isfinite().all(1) & logits.isfinite().all(1), torch.nan)


__all__ = ["GuidedEnergy"]
