"""Normalizing flow on all features."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchWarning
from workbench.methods.densities.features import MIN_ROWS, Features, Head, split_held_out
from workbench.methods.densities.likelihood import Likelihood
from workbench.methods.densities.moments import full_precision, robust_moments

_CLAMP = 30.0
_PATIENCE = 10


class Flow(Likelihood):
    """RealNVP on whitened features, which starts exactly as the Gaussian and learns how the features deviate from it.

    Affine couplings z -> z exp(s) + t on one half of the features, where s and t are computed by a network from the other
    half (Dinh, Sohl-Dickstein & Bengio, "Density estimation using Real NVP", 2017). The last layer of each network starts
    at zero; s = 2 tanh(l / 2) is bounded and the inputs of the networks are clamped to +-30, so that neither a constant
    feature nor a far outlier breaks the training, while the distance of an outlier itself still counts in full.

    Args:
        d: Number of features after reduction; None: known from the first features.
        n_layers: Number of couplings.
        hidden: Units of the hidden layer of each network.
        n_components: Largest number of principal scores for each layer, where a list of layers is given.
        shrinkage: Share in [0, 1] of the identity in the covariance of the standardized features; None: the optimal
            one of Ledoit & Wolf (2004), at least 1e-4.

    Example:
        >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
        >>> x[:, 1] += x[:, 0] ** 2
        >>> flow = Flow()
        >>> flow.fit(x, epochs=0)
        >>> gaussian = flow.nll(x).mean()
        >>> flow.fit(x, epochs=20)
        >>> bool(flow.nll(x).mean() < gaussian - 0.1)
        True
    """

    weight_in: Tensor
    bias_in: Tensor
    weight_out: Tensor
    bias_out: Tensor

    def __init__(
        self,
        d: int | None = None,
        *,
        n_layers: int = 4,
        hidden: int = 64,
        n_components: int = 64,
        shrinkage: float | None = None,
    ) -> None:
        if n_layers < 1 or hidden < 1:
            raise ValueError(f"n_layers and hidden must be at least 1, got n_layers={n_layers} and hidden={hidden}")
        self.n_layers = n_layers
        self.hidden = hidden
        super().__init__(d, n_components=n_components, shrinkage=shrinkage)

    def fit(
        self,
        features: Features,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head: Head | None = None,
        epochs: int = 100,
        batch_size: int = 256,
        lr: float = 3e-3,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> None:
        """Whiten in closed form, train with Adam, keep the weights that are best on held-out rows, and standardize on these rows.

        Unlike the Gaussian, the flow is not refitted on all rows, because it depends on the whitening it was trained with.
        With fewer than 50 rows it stays the Gaussian, since over-fitting could not be detected.

        Args:
            features: Matrix [n, d] or list of matrices, as in `Density.fit`.
            logits, labels, head: Not used.
            epochs: Maximal number of passes over the kept rows; training stops after ten without an improvement.
            batch_size: Rows per step.
            lr: Learning rate of Adam; gradients are clipped to norm 10.
            generator: Draws held-out rows and batches; the global random state is never used.
            seed: Seed of a new generator, if none is given.

        Raises:
            TypeError: If the features are not floating-point tensors.
            ValueError: As in `Density.fit`, or if epochs is negative or batch_size not positive.
        """
        if epochs < 0 or batch_size < 1:
            raise ValueError(f"epochs must be >= 0 and batch_size >= 1, got epochs={epochs}, batch_size={batch_size}")
        generator = generator or torch.Generator().manual_seed(seed)
        rows = self._training_rows(self._rows(features, None))
        if len(rows) < MIN_ROWS:
            super().fit(rows.layers if rows.reduced else rows.layers[0], generator=generator)
            warnings.warn(
                f"{len(rows)} rows are too few to train a flow ({MIN_ROWS} are needed), so it stays the Gaussian "
                "it starts as; use Gaussian(), or more data",
                WorkbenchWarning,
                stacklevel=2,
            )
            return
        kept, held_out = next(split_held_out(rows, generator))
        self._learn(kept)
        self._grow(self._identity(len(self.location), torch.Generator().manual_seed(0)), kept.device)
        with full_precision(kept.layers[0]), torch.no_grad():
            z, z_held = ((self._reduced(part) - self.location) @ self.whitening.T for part in (kept, held_out))
            self._train(z, z_held, epochs, batch_size, lr, generator)
        self._standardize(*robust_moments(self._score(held_out).detach()))

    @torch.enable_grad()
    def _train(
        self, z: Tensor, z_held: Tensor, epochs: int, batch_size: int, lr: float, generator: torch.Generator
    ) -> None:
        # train copies, so that gradients and requires_grad of the parameters stay as the user has set them
        weights = [p.detach().to(z.dtype, copy=True).requires_grad_() for p in self.parameters()]
        optimizer = torch.optim.Adam(weights, lr=lr)
        best = [w.detach().clone() for w in weights]
        best_loss, best_epoch = _loss(z_held, weights).item(), 0
        for epoch in range(1, epochs + 1):
            order = torch.randperm(len(z), generator=generator, device=generator.device).to(z.device)
            for rows in order.split(batch_size):
                optimizer.zero_grad()
                _loss(z[rows], weights).backward()
                nn.utils.clip_grad_norm_(weights, 10.0)
                optimizer.step()
            loss = _loss(z_held, weights).item()
            if loss < best_loss:
                best_loss, best_epoch, best = loss, epoch, [w.detach().clone() for w in weights]
            if epoch - best_epoch >= _PATIENCE:
                break
        for parameter, value in zip(self.parameters(), best, strict=True):
            parameter.data.copy_(value)

    def _identity(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        k, h = self.n_layers, self.hidden

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(shape, generator=generator, device=generator.device) - 1) / math.sqrt(d)

        return {
            "weight_in": uniform(k, d, h),
            "bias_in": uniform(k, h),
            "weight_out": torch.zeros(k, h, 2 * d),
            "bias_out": torch.zeros(k, 2 * d),
        }

    def _transport(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return couplings(z, *(p.to(z.dtype) for p in self.parameters()))


def couplings(
    z: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply affine couplings in turn, each to one half of the features given the other half.

    Args:
        z: Tensor [m, d].
        weight_in: First layers [k, d, hidden].
        bias_in: Their biases [k, hidden].
        weight_out: Second layers [k, hidden, 2 d], log-scales first and then shifts.
        bias_out: Their biases [k, 2 d].

    Returns:
        Transported features [m, d] and the log determinant [m].
    """
    d = z.shape[1]
    log_det = z.new_zeros(len(z))
    for k in range(len(weight_in)):
        # two couplings with alternating features, then two with contiguous halves
        block = (d + 1) // 2 if k % 4 > 1 else 1
        conditioning = (torch.arange(d, device=z.device) // block + k) % 2
        hidden = torch.tanh((z * conditioning).clamp(-_CLAMP, _CLAMP) @ weight_in[k] + bias_in[k])
        log_scale, shift = (hidden @ weight_out[k] + bias_out[k]).chunk(2, dim=1)
        log_scale = 2 * torch.tanh(log_scale / 2) * (1 - conditioning)
        z = z * log_scale.exp() + shift * (1 - conditioning)
        log_det = log_det + log_scale.sum(1)
    return z, log_det


def _loss(z: Tensor, weights: list[Tensor]) -> Tensor:
    u, log_det = couplings(z, *weights)
    return (0.5 * u.square().sum(1) - log_det).mean()
