"""Swag: epistemic risk from the spread of models drawn from a Gaussian fitted to the weights late in training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.additions import extra
from ..core.batches.labelled import batches_of
from ..core.method import Call, Method, evaluating
from ..core.outputs.class_scores import at_least_float32
from ..core.ownership import engine_of, table_of
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.plan import Bank, Plan
from ..engine.surroundings import Reverted
from ..engine.tree import map_tensors
from ..errors import WorkbenchWarning
from .weight_sets import Swap, WeightSets, collect_from

if TYPE_CHECKING:
    from ..core.ownership import Table


class Wrapper(_Wrapper):
    """Epistemic risk from models drawn from a Gaussian fitted to the weights late in training (Maddox et al. 2019, SWAG).

    From the weights w_1 ... w_n at the end of each late epoch, the Gaussian takes the mean, half the variance of each weight, and half the
    covariance of the last `rank` deviations d_i = w_i - (mean so far): w = mean + sqrt(variance / 2) z1 + D z2 / sqrt(2 (K - 1)), with the
    deviations as columns of D, and K of them.

    `workbench.fit` does all of this: from `start` on, the learning rate is constant and weights are collected after each epoch; at the end, the
    model gets their mean, and n_samples models are drawn once, so that predictions are reproducible. Running statistics of batch norm are
    recomputed from the training inputs, for the mean and for each drawn model. In a custom training loop, call `swag.collect(wrapped)` after
    each late epoch, and `wrapped.fit(loader)` with the training inputs at the end.

    Memory: n_samples + rank + 2 times the parameters.

    Example:
        >>> import torch
        >>> from workbench import fit
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> model = Wrapper(n_samples=5)(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
        >>> history = fit(model, (x, x**2), epochs=8)
        >>> y, risk = model(x, return_risk=True)
        >>> risk.shape
        torch.Size([64, 1])
    """

    n_samples: int = setting(default=20, least=2, saved=True, help="number of models to draw and keep, at least 2.")
    rank: int = setting(default=20, least=2, saved=True, help="number of deviations to keep, at least 2.")
    start: float = setting(
        default=0.75,
        least=0,
        below=1,
        trains=True,
        wording="must be a share of the training, at least 0 and below 1",
        help="share of the training after which `workbench.fit` starts to collect weights.",
    )
    rate: float = setting(
        default=0.5,
        above=0,
        trains=True,
        wording="must be above 0",
        help="learning rate from then on, as a share of the peak. Among 0.05, 0.15, 0.5 and 1, the default had the best or nearly the best "
        "likelihood on held-out training rows of concrete, energy, yacht and diabetes.",
    )

    def make(self) -> list[Method]:
        return [Swag(self)]


def collect(wrapped: Any) -> int:
    """Collect the current weights of a model wrapped by `swag.Wrapper`, to be called after each late epoch of its training.

    Args:
        wrapped: the wrapped model; call `wrapped.fit(loader)` once all sets of weights are collected.

    Returns:
        Number of sets of weights collected so far.

    Raises:
        TypeError: if the model is not wrapped by swag.
        ValueError: if a weight is NaN or infinite; what was collected before stays.

    Example:
        >>> import torch
        >>> model = Wrapper()(torch.nn.Linear(1, 1))
        >>> collect(model), collect(model)
        (1, 2)
    """
    return collect_from(wrapped, "swag")


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


class Swag(WeightSets):
    """Method behind `Wrapper`, for one model."""

    name, order, needs_fit = "swag", 15, True
    remedy = "call swag.collect(wrapped) and then wrapped.fit(loader) with the training inputs"
    statistics = ("swag_mean", "swag_variance")

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper, wrapper.n_samples)

    def repeats(self, training: bool) -> bool:
        return training  # predictions depend on whether weights were collected

    def register_statistics(self, table: Table, name: str, value: Tensor, buffer: bool) -> None:
        if not buffer:
            zeros = torch.zeros_like(_real(value))
            wide = at_least_float32(zeros)  # in half precision a mean no longer follows the weights after a few sets
            for part, start in (
                ("mean", wide),
                ("variance", wide),
                ("deviations", torch.stack([zeros] * self.wrapper.rank)),
            ):
                table.register(f"{name}@swag_{part}", start.clone(), buffer=True)

    def latest(self, table: Table, name: str) -> Tensor:
        mean = self.moments(table, name)[0]
        return torch.view_as_complex(mean) if table.get(name).is_complex() else mean

    def missing(self, count: int) -> str:
        return (
            f"swag has collected {count} sets of weights and drawn no models: train with workbench.fit, or call swag.collect(wrapped) after "
            "each late epoch, at least twice, and then wrapped.fit(loader) with the training inputs"
        )

    # ---- collecting
    @torch.no_grad()
    def gather(self, wrapped: Any) -> int:
        """Collect the current weights; see `swag.collect`."""
        table = table_of(wrapped)
        self.check_collecting(table)
        count = self.flag(table, "count")
        n = int(count)
        for name in self.names(table, self._parameters):
            mean, variance, deviations = self.moments(table, name)
            if n == 0:
                mean.zero_(), variance.zero_(), deviations.zero_()
            new = _real(table.get(name)).to(mean)
            deviation = new - mean
            mean.add_(deviation / (n + 1))
            # update the variance itself (Welford): mean of squares minus squared mean would cancel in float32
            variance.mul_(n / (n + 1)).add_(deviation * (new - mean) / (n + 1))
            deviations[n % self.wrapper.rank].copy_(new - mean)
        count.add_(1)
        self.flag(table, "ready").zero_()
        return n + 1

    def moments(self, table: Table, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and variance of a registered tensor, and its deviations [rank, ...]."""
        mean, variance, deviations = (table.get(f"{name}@swag_{part}") for part in ("mean", "variance", "deviations"))
        return mean, variance, deviations

    @torch.no_grad()
    def draw(self, table: Table) -> None:
        """Set the model to the mean weights, and draw weights for every branch."""
        used = min(int(self.flag(table, "count")), self.wrapper.rank)
        generator = torch.Generator().manual_seed(0)
        low_rank = torch.randn(self.wrapper.n_samples, used, generator=generator, dtype=torch.float64) / math.sqrt(
            2 * (used - 1)
        )
        for name in self.names(table, self._parameters):
            mean, variance, deviations = self.moments(table, name)
            noise = torch.randn(self.wrapper.n_samples, *mean.shape, generator=generator, dtype=torch.float64).to(mean)
            low_rank_noise = torch.tensordot(low_rank.to(mean), deviations[:used].to(mean), 1)
            drawn = mean + (variance / 2).sqrt() * noise + low_rank_noise
            current, rows = table.get(name), table.get(f"{name}@swag")
            _real(current).copy_(mean)
            _real(rows).copy_(drawn)

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Draw the models from the collected weights, and compute their batch norm statistics from the training inputs."""
        table = table_of(wrapped)
        if int(self.flag(table, "count")) < 2:
            warnings.warn(self.missing(int(self.flag(table, "count"))), WorkbenchWarning, stacklevel=4)
            return
        self.draw(table)
        with torch.no_grad():
            for name in self.names(table, self._buffers):
                table.get(f"{name}@swag").copy_(table.get(name).expand_as(table.get(f"{name}@swag")))
            self.flag(table, "ready").fill_(True)
            norms = [m for path, m in wrapped.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
            norms = [module for module in norms if module.track_running_stats and module.running_mean is not None]
            if norms:
                self._recompute_batch_norm(wrapped, table, inputs, norms)

    def _recompute_batch_norm(self, wrapped: Any, table: Table, inputs: Any, norms: list[Any]) -> None:
        """Set running statistics to their mean over the batches of the training inputs (Izmailov et al. 2018), for each set of weights."""
        statistics, counters = (self._norm_buffers(table, norms, start) for start in ("running_", "num_batches_"))
        saved = {name: table.get(name).clone() for name in self.names(table, self._buffers)}
        sums = [
            {name: at_least_float32(torch.zeros_like(saved[name])) for name in statistics} for _ in range(1 + self.size)
        ]
        rows = 0
        with evaluating(wrapped), _Averaging(norms):
            for batch, count in _batches(inputs, wrapped):
                rows += count
                for place, total in enumerate(sums, -1):
                    for name in statistics:
                        table.get(name).copy_(saved[name])  # those of a norm that does not run stay as they are
                    for name in counters:
                        table.get(name).zero_()
                    self._run(wrapped, table, batch, place)
                    for name in statistics:
                        total[name] += count * table.get(name)
            for name, value in saved.items():
                table.get(name).copy_(value)
            for place, total in enumerate(sums, -1) if rows else ():
                for name in statistics:
                    target = table.get(name) if place < 0 else table.get(f"{name}@swag")[place]
                    target.copy_(total[name] / rows)

    def _norm_buffers(self, table: Table, norms: list[Any], start: str) -> list[str]:
        """Return the names of the registered buffers of norms whose names start with `start`, including those of other heads."""
        slots = [
            name
            for name, slot in table.record.slots.items()
            if slot.buffer
            and slot.owners[0][1].startswith(start)
            and any(table.module(slot.owners[0][0]) is norm for norm in norms)
        ]
        return self.names(table, slots)

    def _run(self, wrapped: Any, table: Table, batch: Any, place: int) -> None:
        """Run all heads once with the weights of a branch, or with the mean for place -1."""
        heads = [
            axis for m in table.record.methods if (axis := m.axis(Call(False, True))) is not None and axis.own_first
        ]
        swap = () if place < 0 else (Swap(self, table, buffers=False),)
        fixed = {} if place < 0 else {self.name: place}
        plan = Plan(tuple(heads), table.record.rules, Bank(table.get), swap, fixed=fixed)
        copies = map_tensors(lambda t: t.clone(), batch)
        engine_of(wrapped).run(plan, *copies)

    # ---- within `workbench.fit`
    def pace(self, at: float, epochs: int) -> float:
        self._n_late_epochs(epochs)
        start, rate = self.wrapper.start, self.wrapper.rate
        progress, warmup = at / epochs, 0.05 * start
        if progress < warmup:
            return max(progress / warmup, 0.1)
        if progress >= start:
            return rate
        return rate + (1 - rate) * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (start - warmup)))

    def collect(self, wrapped: Any, epoch: int, epochs: int) -> None:
        if epoch == 1:
            self.forget(table_of(wrapped))
        if epoch > epochs - self._n_late_epochs(epochs):
            self.gather(wrapped)

    def _n_late_epochs(self, epochs: int) -> int:
        """Return the number of epochs whose weights are collected."""
        late = epochs - math.floor(self.wrapper.start * epochs)
        if late < 2:
            raise ValueError(
                f"swag: only {late} of {epochs} epochs are after start={self.wrapper.start}, and it needs the weights of at least 2; give more "
                "epochs"
            )
        return late


def _batches(inputs: Any, wrapped: Any) -> Iterator[tuple[Any, int]]:
    """Iterate over the inputs of each batch (args, kwargs), on the model's device and in its units, and its number of rows."""
    like = next(wrapped.parameters())
    for args, kwargs, _ in batches_of(inputs, wrapped):
        batch = map_tensors(lambda t: t.to(like.device), (args, kwargs))
        if (scaling := extra(wrapped, "scaling")) is not None:
            batch = scaling.inputs(*batch)
        yield batch, next((len(t) for t in (*batch[0], *batch[1].values()) if isinstance(t, Tensor) and t.dim()), 1)


class _Averaging(Reverted):
    """Context in which norms, in training mode, set their running statistics to the mean over their calls, and back at the end."""

    def __init__(self, norms: list[Any]) -> None:
        self._momenta = [(norm, norm.momentum) for norm in norms]

    def begin(self) -> None:
        for norm, _ in self._momenta:
            # instance norms, and norms without a counter, know no mean over calls: the last one counts
            counts = isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.num_batches_tracked is not None
            norm.training, norm.momentum = True, None if counts else 1.0

    def revert(self) -> None:
        for norm, momentum in self._momenta:
            norm.training, norm.momentum = False, momentum


__all__ = ["Swag", "Wrapper", "collect"]
