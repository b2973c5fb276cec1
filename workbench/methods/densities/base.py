"""What every density shares: checking rows, and a risk that is standardised on rows that it did not learn from."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workbench.errors import NotFittedError, WorkbenchWarning
from workbench.methods.densities.features import ENOUGH, Features, Head, Rows, check, deal
from workbench.methods.densities.moments import robust_moments
from workbench.methods.densities.reduce import Growing, Reduce

_DECAY = 0.95  # of the running centre and scale: about the last twenty batches count


class Density(Growing, ABC):
    """How unlike the training data a row is: a score of its features, standardised to mean 0 and standard deviation 1.

    A subclass says what it learns from rows (`_learn`) and how strange a row is (`_score`, the more the stranger). The
    risk is (score - centre) / scale.

    `fit(features)` learns in closed form. Centre and scale are what mean and standard deviation of the score are
    expected to be on new rows, from 20 % held-out rows (with fewer than 50 rows: of all rows, each held out once in
    five folds), for training rows look more usual than they are when features are many. Values further than ten robust
    standard deviations (1.4826 MAD) from the median are first clipped to there: a few wild rows would otherwise inflate
    the scale until the risk says nothing, and of normal data nearly nothing is clipped.
    """

    trainable: ClassVar[bool] = False  # whether `risk.mean()` is a sound loss
    needs_features: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = False  # whether it can do nothing without class scores
    needs_head: ClassVar[bool] = False  # whether it works with the weights of the last layer
    uses_head: ClassVar[bool] = False  # whether it makes use of them where there are any
    takes_outliers: ClassVar[bool] = False  # whether `fit` takes rows that are unlike the training data
    takes_probs: ClassVar[bool] = True  # whether class scores up to a constant a row, log-probabilities, are enough
    by_position: ClassVar[bool] = True  # whether it can judge the single positions of a map
    uses_labels: ClassVar[bool] = False  # whether `fit` makes use of class labels
    learned: ClassVar[tuple[str, ...]] = ()  # the buffers that `_learn` fills; empty before

    centre: Tensor
    scale: Tensor
    weight: Tensor
    reductions: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.reductions = nn.ModuleList()
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("weight", torch.zeros(()))  # of all batches in the running centre and scale
        for name in self.learned:
            self.register_buffer(name, torch.empty(0))

    # ---- what a subclass says
    @property
    def fitted(self) -> bool:
        """Whether training data were seen, by `fit` or by a batch in training mode."""
        return getattr(self, self.learned[0]).numel() > 0  # `get_buffer` takes as long as an operation

    @abstractmethod
    def _learn(self, rows: Rows) -> None:
        """Learn from finite, detached rows in closed form; all or nothing."""

    @abstractmethod
    def _score(self, rows: Rows) -> Tensor:
        """How strange each row is, float [m], NaN where it is not finite."""

    def _balance(self, held_out: Rows) -> None:
        """Weigh several scores against one another on rows that nothing was learned from."""

    def _check_sizes(self, rows: Rows) -> None:
        """Raise ValueError if the rows have other sizes than those it was fitted on."""

    @property
    def wants_logits(self) -> bool:
        """Whether the class scores of rows to judge are needed, now that it is fitted as it is."""
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
            features: Matrix [n, d], taken as it is, or a list with one matrix [n, d_l] per layer (see `pool`), each
                standardised and reduced. Rows with a value that is not finite are left out, with a warning. No
                gradient flows.
            logits: Class scores [n, classes] that the model gave, if it is a classifier.
            labels: Class numbers [n], for densities that make use of them; None: the predicted classes.
            head: Weight [classes, d] and bias [classes] of the last layer, for densities that work with it; see `find_head`.
            generator: Deals out the held-out rows; the global random state is never used.
            seed: Of a new generator, where none is given.

        Raises:
            TypeError: If features or logits are not floating-point tensors.
            ValueError: If fewer than 2 finite rows are left, the sizes differ from those fitted before, class scores
                or the last layer are needed and missing, or a covariance is singular because shrinkage is 0.
        """
        rows = self._training_rows(self._rows(features, logits, labels, head, learning=True))
        trials, held_out, optimism = [], [], []
        for kept, rest in deal(rows, generator or torch.Generator().manual_seed(seed)):
            trial = copy.deepcopy(self)  # an error leaves the density as it was
            trial._learn(kept)
            trial._balance(rest)
            held_out.append(trial._score(rest).detach())
            of_kept = trial._score(kept).detach()
            excess = robust_moments(held_out[-1])[0] - robust_moments(of_kept)[0]
            optimism.append(excess * len(kept) / len(rows))  # it shrinks as one over the number of rows
            trials.append(trial)
        self._learn(rows)
        self._take_balance(trials)
        # the densities of parts and of all rows differ in level where features are degenerate, so the level is that of
        # the training rows under the final density, corrected for how much more usual they look than held-out ones
        level, scale = robust_moments(torch.cat(held_out))
        if len(rows) >= ENOUGH:
            level = robust_moments(self._score(rows).detach())[0] + torch.stack(optimism).mean()
        self._standardise(level, scale)

    def _take_balance(self, trials: list[Any]) -> None:
        """Take over what `_balance` found."""

    def forget(self) -> None:
        """Become unfitted again; parameters stay the same objects."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None and tensor.dim():
                tensor.data = tensor.data.new_empty(0)
        self.reductions = nn.ModuleList().train(self.training)
        for value, start in ((self.centre, 0), (self.scale, 1), (self.weight, 0)):
            value.fill_(start)

    # ---- judging
    def forward(self, features: Features, logits: Tensor | None = None) -> Tensor:
        """Vacuitic risk of each row.

        Args:
            features: As in `fit`, with m rows.
            logits: As in `fit`, where class scores were given there.

        Returns:
            Tensor [m], differentiable, in standard deviations above the mean of the training data. Rows with a value
            that is not finite get NaN.

        Raises:
            NotFittedError: In eval mode, if no training data were seen; in both modes, if it cannot be trained.
            TypeError: If the features are not floating-point tensors.
            ValueError: If the sizes differ from those fitted.
        """
        rows = self._rows(features, logits)
        if not self.fitted:
            self._start(rows)
        score = self._score(rows)
        if self.training and self.trainable:
            self._follow(score.detach())
        # copies: the next batch updates the buffers in place, and this one may be waiting for its backward pass
        risk = (
            (score - self.centre.clone()) / self.scale.clone() if self.training else (score - self.centre) / self.scale
        )
        if self.training and not self.trainable and torch.is_grad_enabled() and not risk.requires_grad:
            risk = _Untrainable.apply(risk.requires_grad_(), type(self).__name__)
        return risk

    def score(self, features: Features, logits: Tensor | None = None) -> Tensor:
        """How strange each row is, in the density's own units; see the class.

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
        """Before the first batch in training mode."""
        name = type(self).__name__
        if not self.trainable:
            raise NotFittedError(
                f"{name} has seen no training data, so no risk is known: call wrapped.fit(loader). It cannot be trained by "
                "wrapped(x, return_risk=True)[1].mean(), for it has no likelihood; the default, gaussian and flow can"
            )
        if not self.training:
            raise NotFittedError(
                f"{name} has seen no training data, so no risk is known: call wrapped.fit(loader), "
                "or train in training mode with wrapped(x, return_risk=True)[1].mean() as the loss"
            )

    @torch.no_grad()
    def _follow(self, score: Tensor) -> None:
        """Move centre and scale to the score of a training batch, as a bias-corrected moving average of its moments."""
        if not len(score):
            return
        finite = score.isfinite()
        mean, sd = robust_moments(score.where(finite, torch.nan))
        weight = _DECAY * self.weight + 1
        step = 1 / weight
        shift = mean - self.centre
        variance = (1 - step) * (self.scale.square() + step * shift.square()) + step * sd.square()
        # decided where the numbers are: on a GPU a branch would wait for them
        counts = finite.any() & self.weight.isfinite()
        for buffer, new in (
            (self.weight, weight),
            (self.centre, self.centre + step * shift),
            (self.scale, variance.sqrt()),
        ):
            buffer.copy_(torch.where(counts, new, buffer))

    def _standardise(self, centre: Tensor, scale: Tensor) -> None:
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.weight.fill_(torch.inf)  # no batch counts against them

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
        asked = self.needs_logits if learning or not fitted else self.wants_logits
        if asked and rows.groups is None:
            raise ValueError(
                f"{type(self).__name__} works on class scores, and there are none here: wrap the classifier with "
                'output="logits" or "probs", or give logits='
            )
        if learning and self.needs_head and rows.head is None:
            raise ValueError(
                f"{type(self).__name__} works with the weights of the last layer, and there are none here: give head=(weight, bias)"
            )
        if fitted:
            self._check_sizes(rows)
        return rows

    def _finite(self, rows: Rows) -> Rows:
        """Finite rows only, at least two of them."""
        finite = rows.finite
        kept = int(finite.sum())
        if kept < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least 2 rows of finite features to start from, got {kept} of "
                f"{len(finite)}: use more data or larger batches"
            )
        return rows if kept == len(finite) else rows.take(finite)

    def _training_rows(self, rows: Rows) -> Rows:
        """Finite rows for `fit`, detached and where the density is."""
        finite = self._finite(rows)
        if left_out := len(rows) - len(finite):
            warnings.warn(
                f"{left_out} of {len(rows)} rows have features that are NaN or infinite; fitted without them. Find out which "
                "inputs give them",
                WorkbenchWarning,
                stacklevel=3,
            )
        return finite.detached(self.centre.device if self.fitted else rows.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}reductions."
        count = len({key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start)})
        if not self.fitted:  # children are loaded after their parent, so they only have to exist by then
            self.reductions = nn.ModuleList(Reduce().to(self.centre) for _ in range(count)).train(self.training)
        super()._load_from_state_dict(state_dict, prefix, *args)


def refuse_size(density: Density, size: Any, expected: Any, what: str = "features") -> None:
    """Raise if a size is not the one fitted on."""
    if size != expected:
        raise ValueError(
            f"{what} of size {size}, but {type(density).__name__} was fitted on size {expected} (a list: one per layer): "
            "give the same layers of the same model, or build a new density"
        )


class _Untrainable(torch.autograd.Function):
    """Passes on the risk, and says why there is nothing to train when a loss is made of it."""

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
