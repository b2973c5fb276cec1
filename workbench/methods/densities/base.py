"""Base class of densities: checks rows, and standardizes the risk on held-out rows."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workbench.errors import NotFittedError, WorkbenchWarning
from workbench.methods.densities.features import MIN_ROWS, Features, Head, Rows, check, split_held_out
from workbench.methods.densities.moments import robust_moments
from workbench.methods.densities.reduce import Growing, Reduce

_DECAY = 0.95  # of the running centre and scale, which average over about twenty batches


class Density(Growing, ABC):
    """Score of how unlike the training data a row is, standardized to mean 0 and standard deviation 1.

    A subclass implements what it learns from rows (`_learn`) and the score of a row (`_score`, higher for stranger rows).
    The risk is (score - centre) / scale.

    `fit(features)` learns in closed form. Centre and scale are the mean and standard deviation of the score expected on
    new rows, estimated from 20 % held-out rows (with fewer than 50 rows: from all rows, each held out once in five folds),
    because training rows score too low when there are many features. Values more than ten robust standard deviations
    (1.4826 MAD) from the median are clipped first: otherwise a few extreme rows would inflate the scale until the risk is
    meaningless; of normally distributed data almost nothing is clipped.
    """

    trainable: ClassVar[bool] = False  # whether `risk.mean()` is a proper loss
    needs_features: ClassVar[bool] = True
    last_only: ClassVar[bool] = False  # whether it uses the features of the last layer alone
    needs_logits: ClassVar[bool] = False  # whether it requires class scores
    needs_head: ClassVar[bool] = False  # whether it requires the weights of the last layer
    uses_head: ClassVar[bool] = False  # whether it uses these weights if there are any
    takes_outliers: ClassVar[bool] = False  # whether `fit` takes rows that are unlike the training data
    takes_probs: ClassVar[bool] = True  # whether log-probabilities, class scores up to a constant per row, are enough
    by_position: ClassVar[bool] = True  # whether it can score single positions of a map
    uses_labels: ClassVar[bool] = False  # whether `fit` uses class labels
    learned: ClassVar[tuple[str, ...]] = ()  # names of the buffers that `_learn` fills; empty before

    centre: Tensor
    scale: Tensor
    weight: Tensor
    reductions: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.reductions = nn.ModuleList()
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("weight", torch.zeros(()))  # total weight of the batches in the running centre and scale
        for name in self.learned:
            self.register_buffer(name, torch.empty(0))

    # ---- implemented by subclasses
    @property
    def fitted(self) -> bool:
        """Whether training data were seen, by `fit` or by a batch in training mode."""
        return getattr(self, self.learned[0]).numel() > 0  # `get_buffer` would take as long as a tensor operation

    @abstractmethod
    def _learn(self, rows: Rows) -> None:
        """Learn from finite, detached rows in closed form; an error must leave the density unchanged."""

    @abstractmethod
    def _score(self, rows: Rows) -> Tensor:
        """Return the score of each row, float [m], higher for stranger rows, NaN for rows that are not finite."""

    def _balance(self, held_out: Rows) -> None:
        """Weight several scores relative to each other, on held-out rows."""

    def check_features(self, x: Tensor) -> None:
        """Raise ValueError if features [m, d] before the last layer are unsuitable."""

    def _check_sizes(self, rows: Rows) -> None:
        """Raise ValueError if the rows have other sizes than those it was fitted on."""

    @property
    def wants_logits(self) -> bool:
        """Whether the fitted density needs class scores of the rows it scores."""
        return self.needs_logits

    # ---- learning
    def fit(
        self,
        features: Features,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head: Head | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> None:
        """Learn from all rows in closed form, with centre and scale from held-out rows.

        Args:
            features: Matrix [n, d], used as it is, or a list with one matrix [n, d_l] per layer (see `pool`), each
                standardized and reduced. Rows with a value that is not finite are left out, with a warning. No
                gradient flows.
            logits: Class scores [n, classes] of the model, if it is a classifier.
            labels: Class numbers [n], for densities that use them; None: the predicted classes.
            head: Weight [classes, d] and bias [classes] of the last layer, for densities that use it; see `find_head`.
            generator: Draws the held-out rows; the global random state is never used.
            seed: Seed of a new generator, if none is given.

        Raises:
            TypeError: If features or logits are not floating-point tensors.
            ValueError: If fewer than 2 finite rows remain, the sizes differ from those fitted before, class scores
                or the last layer are needed and missing, or a covariance is singular because shrinkage is 0.
        """
        rows = self._training_rows(self._rows(features, logits, labels, head, learning=True))
        trials, held_out, optimism = [], [], []
        for kept, held_out_rows in split_held_out(rows, generator or torch.Generator().manual_seed(seed)):
            trial = copy.deepcopy(self)  # so that an error leaves this density unchanged
            trial._learn(kept)
            trial._balance(held_out_rows)
            held_out.append(trial._score(held_out_rows).detach())
            kept_scores = trial._score(kept).detach()
            excess = robust_moments(held_out[-1])[0] - robust_moments(kept_scores)[0]
            optimism.append(excess * len(kept) / len(rows))  # the excess is proportional to 1 / number of rows
            trials.append(trial)
        self._learn(rows)
        self._take_balance(trials)
        # densities fitted on a part and on all rows differ in level if features are degenerate, so the level is that of the
        # training rows under the final density, corrected by how much lower they score than held-out rows
        level, scale = robust_moments(torch.cat(held_out))
        if len(rows) >= MIN_ROWS:
            level = robust_moments(self._score(rows).detach())[0] + torch.stack(optimism).mean()
        self._standardize(level, scale)

    def _take_balance(self, trials: list[Any]) -> None:
        """Adopt the weights that `_balance` found for the trials."""

    def forget(self) -> None:
        """Reset to the unfitted state; parameters stay the same objects."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None and tensor.dim():
                tensor.data = tensor.data.new_empty(0)
        self.reductions = nn.ModuleList().train(self.training)
        for value, start in ((self.centre, 0), (self.scale, 1), (self.weight, 0)):
            value.fill_(start)

    # ---- scoring
    def forward(self, features: Features, logits: Tensor | None = None) -> Tensor:
        """Return the vacuitic risk of each row.

        Args:
            features: As in `fit`, with m rows.
            logits: As in `fit`, if class scores were given there.

        Returns:
            Tensor [m], differentiable, in standard deviations above the mean of the training data. Rows with a value
            that is not finite get NaN.

        Raises:
            NotFittedError: If no training data were seen, in eval mode or for a density that cannot be trained by gradient.
            TypeError: If the features are not floating-point tensors.
            ValueError: If the sizes differ from those fitted.
        """
        rows = self._rows(features, logits)
        if not self.fitted:
            self._start(rows)
        score = self._score(rows)
        if self.training and self.trainable:
            self._update_moments(score.detach())
        # cloned in training, as the next batch updates the buffers in place, perhaps before this one's backward pass
        risk = (
            (score - self.centre.clone()) / self.scale.clone() if self.training else (score - self.centre) / self.scale
        )
        if self.training and not self.trainable and torch.is_grad_enabled() and not risk.requires_grad:
            risk = _Untrainable.apply(risk.requires_grad_(), type(self).__name__)
        return risk

    def score(self, features: Features, logits: Tensor | None = None) -> Tensor:
        """Return the score of each row, higher for stranger rows, in the density's own units; see the class.

        Args:
            features, logits: As in `forward`.

        Returns:
            Tensor [m], differentiable, at least float32 (also under autocast).

        Raises:
            NotFittedError: If no training data were seen.
            ValueError: If the sizes differ from those fitted.
        """
        rows = self._rows(features, logits)
        if not self.fitted:
            raise NotFittedError(f"{type(self).__name__} has seen no training data: call fit(features)")
        return self._score(rows)

    def _start(self, rows: Rows) -> None:
        """Prepare for the first batch in training mode."""
        name = type(self).__name__
        if not self.trainable:
            raise NotFittedError(
                f"{name} has seen no training data, so no risk is known: call wrapped.fit(loader). It cannot be trained by "
                "wrapped(x, return_risk=True)[1].mean(), because it has no likelihood; the default, gaussian and flow can"
            )
        if not self.training:
            raise NotFittedError(
                f"{name} has seen no training data, so no risk is known: call wrapped.fit(loader), "
                "or train in training mode with wrapped(x, return_risk=True)[1].mean() as the loss"
            )

    @torch.no_grad()
    def _update_moments(self, score: Tensor) -> None:
        """Update centre and scale with the scores of a training batch, as bias-corrected moving averages of their moments."""
        if not len(score):
            return
        finite = score.isfinite()
        mean, sd = robust_moments(score.where(finite, torch.nan))
        weight = _DECAY * self.weight + 1
        step = 1 / weight
        shift = mean - self.centre
        variance = (1 - step) * (self.scale.square() + step * shift.square()) + step * sd.square()
        # by `where` rather than a branch, which would synchronize with a GPU
        counts = finite.any() & self.weight.isfinite()
        for buffer, new in (
            (self.weight, weight),
            (self.centre, self.centre + step * shift),
            (self.scale, variance.sqrt()),
        ):
            buffer.copy_(torch.where(counts, new, buffer))

    def _standardize(self, centre: Tensor, scale: Tensor) -> None:
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.weight.fill_(torch.inf)  # so that training batches no longer change them

    # ---- rows
    def _rows(
        self,
        features: Features,
        logits: Tensor | None,
        labels: Tensor | None = None,
        head: Head | None = None,
        learning: bool = False,
    ) -> Rows:
        rows = check(features, logits, labels, head)
        fitted = self.fitted
        needs_logits = self.needs_logits if learning or not fitted else self.wants_logits
        if needs_logits and rows.groups is None:
            raise ValueError(
                f"{type(self).__name__} works on class scores, and none were given: wrap the classifier with "
                'output="logits" or "probs", or give logits='
            )
        if learning and self.needs_head and rows.head is None:
            raise ValueError(
                f"{type(self).__name__} works with the weights of the last layer, and none were given: give head=(weight, bias)"
            )
        if fitted:
            self._check_sizes(rows)
        return rows

    def _finite(self, rows: Rows) -> Rows:
        """Return the finite rows; raises ValueError if there are fewer than two."""
        finite = rows.finite
        kept = int(finite.sum())
        if kept < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least 2 rows of finite features to start from, got {kept} of "
                f"{len(finite)}: use more data or larger batches"
            )
        return rows if kept == len(finite) else rows.take(finite)

    def _training_rows(self, rows: Rows) -> Rows:
        """Return the finite rows for `fit`, detached and on the density's device."""
        finite = self._finite(rows)
        if left_out := len(rows) - len(finite):
            warnings.warn(
                f"{left_out} of {len(rows)} rows have features that are NaN or infinite, and were left out of the fit. Find the "
                "inputs that cause this",
                WorkbenchWarning,
                stacklevel=3,
            )
        return finite.detached(self.centre.device if self.fitted else rows.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}reductions."
        count = len({key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start)})
        if not self.fitted:  # children are loaded after their parent, so it is enough to create them here
            self.reductions = nn.ModuleList(Reduce().to(self.centre) for _ in range(count)).train(self.training)
        super()._load_from_state_dict(state_dict, prefix, *args)


def refuse_size(density: Density, size: Any, expected: Any, what: str = "features") -> None:
    """Raise ValueError if a size differs from the fitted one."""
    if size != expected:
        raise ValueError(
            f"{what} of size {size}, but {type(density).__name__} was fitted on size {expected} (a list: one per layer): "
            "give the same layers of the same model, or build a new density"
        )


class _Untrainable(torch.autograd.Function):
    """Identity on the risk, whose backward pass explains that the density cannot be trained by gradient."""

    @staticmethod
    def forward(ctx: Any, risk: Tensor, name: str) -> Tensor:
        ctx.density = name
        return risk.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.density} is learned by wrapped.fit(loader) and has nothing to train by gradient: leave its risk out of the "
            "loss, or choose the default density, gaussian or flow"
        )


__all__ = ["Density"]
