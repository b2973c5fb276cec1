"""Split conformal prediction: intervals and sets that contain the truth with the requested probability, for any model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.calibration.answers import (
    RISKS,
    Answers,
    all_where_nan,
    check_known,
    check_labels,
    check_values,
    level,
    log_probabilities,
    risk_named,
)
from workbench.calibration.base import Calibrated
from workbench.calibration.models import distribution_of, output_of, quantiles_of
from workbench.calibration.shift import effective_rows, grouped_quantile, row_numbers, warn_infinite, warn_unlike
from workbench.calibration.support import buffer_of, clipped, outward
from workbench.errors import NotFittedError, check_flag
from workbench.metrics._inputs import numbers, tensor_of
from workbench.risk import Risk

VALUES = ("absolute", "normalized", "cqr")
CLASSES = ("lac", "aps", "raps")


def conformal_quantile(scores: Tensor, coverage: float = 0.9) -> Tensor:
    """Return the k-th smallest score, k = ceil((n + 1) coverage), an upper bound of a new score with at least this probability.

    If the scores of held-out and new rows are exchangeable: coverage <= P(new <= quantile), and also <= coverage + 1 / (n + 1) if no two
    scores are equal (Vovk et al. 2005; Lei et al. 2018).

    Args:
        scores: [n, ...].
        coverage: strictly between 0 and 1.

    Returns:
        [...].

    Raises:
        ValueError: n is so small that k > n, or a score is NaN or infinite.

    Example:
        >>> conformal_quantile(torch.arange(9.0), 0.9)
        tensor(8.)
    """
    numbers("scores", scores)
    scores = tensor_of(scores)
    if not scores.ndim:
        raise ValueError("scores must have shape [n, ...], found one number")
    return scores.sort(0).values[_rank(len(scores), coverage) - 1]


def _rank(n: int, coverage: float) -> int:
    probability = level("coverage", coverage)
    k = math.ceil((n + 1) * probability)
    if k > n:
        min_rows = math.ceil(probability / (1 - probability))
        most = math.floor(10_000 * n / (n + 1)) / 10_000  # rounded up it would be refused as well
        raise ValueError(
            f"coverage {coverage:g} needs at least {min_rows} held-out rows, there are {n}; hold out more, or ask for at most {most}"
        )
    return k


class SplitConformal(Calibrated):
    """Intervals or sets of classes with guaranteed coverage, from scores of held-out rows (Papadopoulos et al. 2002; Lei et al. 2018).

    The guarantee is P(y in set) >= coverage, on average over held-out and new rows, for any model, as long as the rows are exchangeable: drawn
    from one source, and used neither to train the model nor to calibrate it before. Several rows of one patient (or machine, or day) are not
    exchangeable with those of a new one: hold out one row of each patient. The guarantee does not hold for each input or group separately. The
    coverage is chosen when predicting. Predictions and risks are those of the wrapped model.

    Scores of values, with quantile Q of the held-out scores:

    - "absolute": |y - prediction|; prediction +- Q.
    - "normalized": |y - prediction| / risk; prediction +- Q * risk (Papadopoulos et al. 2008; Lei et al. 2018). Vacuitic risk, which can be
      negative, enters as softplus(risk).
    - "cqr": max(lower - y, y - upper); [lower - Q, upper + Q] (Romano et al. 2019). lower and upper are quantiles at the requested coverage,
      of quantile heads (`sculpt.Wrapper(Quantiles(levels))`; best if the levels match the coverage) or else of the predicted
      distribution; or the outputs of a model that returns [rows, 2] (lower, upper) for targets [rows, 1].

    Intervals are clipped to the support of the model's distribution, such as from 0 for counts, unless held-out targets lie outside.

    Scores of classes, with probabilities p:

    - "lac": 1 - p_y; the smallest sets on average (Sadinle et al. 2019).
    - "aps": the probability of all classes above y, plus u p_y; sets that adapt to difficult rows (Romano et al. 2020).
    - "raps": the same plus penalty * max(0, rank of y - k_reg), which keeps sets small (Angelopoulos et al. 2021).

    A yes or no, of one number per row (`Binary`), has two classes, no and yes; several labels are refused.

    With `groups` the guarantee holds within each group (Mondrian; Vovk et al. 2005), with `groups="class"` for each true class
    (label-conditional; Vovk 2012; Sadinle et al. 2019). With `weight` it holds for rows from another source, whose inputs have another density,
    if w is the ratio of the densities (Tibshirani et al. 2019). Rows of a group with too few held-out rows, or of an input too far from
    all held-out ones, get infinite intervals or all classes, with a warning. Without `groups` and `weight`, a warning is given if the model is
    less sure of the class of new rows, has higher epistemic risk for them (where "normalized" measures it), or higher vacuitic
    risk, than chance allows compared with the held-out rows: nothing is guaranteed for them then.

    Args:
        wrapped: a model wrapped by one of the wrappers, or a calibrated model.
        score: one of the scores above; None: "normalized" for values ("absolute" if the model measures no such risk), "lac" for classes.
        by: the risk that "normalized" divides by: "total", "aleatoric", "epistemic" or "vacuitic".
        joint: for several outputs: True: all outputs of a row lie inside with the coverage (the largest score of the row counts); False: each
            one separately.
        randomized: for "aps" and "raps": True: u is drawn between 0 and 1 for each row, as published, and sets can be empty; False: u = 1.
        penalty, k_reg: parameters of "raps".
        groups: function from a batch of inputs to integers [rows], the group of each row; or "class". Functions are not saved with the state.
        weight: function from a batch of inputs to numbers >= 0 [rows], the ratio of the densities of the new and the held-out inputs up to a
            factor, such as a `DensityRatio`. Not saved with the state.

    Raises:
        TypeError: groups or weight is not a function.
        ValueError: an option has an unknown value.

    Example:
        >>> from workbench import sculpt
        >>> wrapped = sculpt.Wrapper()(nn.Linear(2, 1))
        >>> calibrated = SplitConformal(wrapped).fit((torch.zeros(99, 2), torch.linspace(-9, 9, 99)[:, None]))
        >>> lower, upper = calibrated.interval(torch.zeros(4, 2), coverage=0.9)
        >>> lower.shape
        torch.Size([4, 1])
    """

    options = ("score", "by", "joint", "randomized", "penalty", "k_reg", "grouped", "weighted")
    of_functions = ("grouped", "weighted")
    new_buffers = ("strangeness", "doubt", "support")
    scores: Tensor
    held: Tensor
    strangeness: Tensor
    doubt: Tensor
    support: Tensor

    def __init__(
        self,
        wrapped: nn.Module,
        score: str | None = None,
        by: str = "total",
        joint: bool = False,
        randomized: bool = True,
        penalty: float = 0.01,
        k_reg: int = 5,
        groups: Callable[[Any], Any] | Literal["class"] | None = None,
        weight: Callable[[Any], Any] | None = None,
    ) -> None:
        if score is not None and score not in VALUES + CLASSES:
            raise ValueError(f"score must be one of {', '.join(VALUES + CLASSES)}; found {score!r}")
        if by not in RISKS:
            raise ValueError(f"by must be one of {', '.join(RISKS)}; found {by!r}")
        check_flag("joint", joint)
        check_flag("randomized", randomized)
        for name, number in (("penalty", penalty), ("k_reg", k_reg)):
            if isinstance(number, str) or not hasattr(number, "__float__") or not float(number) >= 0:
                raise ValueError(f"{name} must be a number of at least 0; found {number!r}")
        by_class = isinstance(groups, str) and groups == "class"
        for name, function in (("groups", None if by_class else groups), ("weight", weight)):
            if function is not None and not callable(function):
                also = ' or "class"' if name == "groups" else ""
                raise TypeError(f"{name} must be a function of a batch of inputs{also}; found {function!r:.100}")
        if by_class and score in VALUES:
            raise ValueError(
                f"groups='class' is for classes, and score={score!r} for values; give a function of the inputs"
            )
        super().__init__(wrapped)
        self.groups, self.weight = groups, weight
        # what a state records of these functions, which it can't hold
        self.grouped = None if groups is None else "class" if by_class else "inputs"
        self.weighted = None if weight is None else True
        self.score, self.by, self.joint, self.randomized = score, by, joint, randomized
        self.penalty, self.k_reg = penalty, k_reg
        self.needs_offsets = score == "cqr" and quantiles_of(wrapped) is not None
        self.needs_risk = output_of(wrapped) == "values" if score is None else score == "normalized"
        self.needs_risk |= score == "cqr" and not self.needs_offsets
        self.watches = weight is None and groups is None
        self.register_buffer("scores", torch.empty(0))  # [n, ...], in rising order
        # scores of "cqr" with a distribution depend on the coverage: prediction, risk (or offsets) and target [3 or more, n, ...]
        self.register_buffer("held", torch.empty(0))
        # of the held-out rows, in rising order: vacuitic risk [n], if the model has it, and uncertainty of the prediction [n]
        self.register_buffer("strangeness", torch.empty(0))
        self.register_buffer("doubt", torch.empty(0))
        # range of the targets, if the model's distribution has one
        self.register_buffer("support", torch.empty(0))
        # group and weight of each score
        self.register_buffer("score_groups", torch.empty(0, dtype=torch.int64) if groups is not None else None)
        self.register_buffer("score_weights", torch.empty(0, dtype=torch.float64) if weight is not None else None)

    def arguments(self) -> tuple[dict[str, Any], list[str]]:
        """See `Calibrated.arguments`."""
        arguments, _ = super().arguments()
        grouped, weighted = (arguments.pop(name) for name in self.of_functions)
        functions = [name for name, used in (("groups", grouped == "inputs"), ("weight", weighted)) if used]
        return arguments | ({"groups": "class"} if grouped == "class" else {}), functions

    @property
    def effective_rows(self) -> float:
        """Effective sample size of the held-out rows with `weight` (Kish 1965): the number of equally weighted rows that carry as much."""
        return float(len(self.scores)) if self.score_weights is None else effective_rows(self.score_weights)

    # ---- fitting
    def of_inputs(self) -> Mapping[str, Callable[[Any, int], Tensor]]:
        functions = {"groups": None if self.grouped == "class" else self.groups, "weight": self.weight}
        return {name: partial(row_numbers, name, f) for name, f in functions.items() if callable(f)}

    def _score_of(self, answers: Answers) -> str:
        """Return the score that was chosen, or else the one that suits the answers."""
        if self.score is not None:
            return self.score
        return "lac" if answers.labels else "normalized" if self.by in answers.risk.names() else "absolute"

    def _check(self, answers: Answers) -> None:
        score = self._score_of(answers)
        if score in CLASSES:
            check_labels(answers, f"score={score!r}")
            if answers.y.dim() != 2:
                raise ValueError(
                    f"score={score!r}: the targets are {list(answers.target.shape)}; rows are exchangeable, but not the pixels, tokens or "
                    "labels of a row: give a model of one class or label per row, or take method='temperature', whose sets have no guarantee"
                )
            return
        if score != "cqr" or not answers.is_interval:
            check_values(answers, f"score={score!r}")
            if score == "cqr" and not self.needs_offsets:
                risk_named(answers.risk, "total")
                distribution_of(self.wrapped)
            elif score == "normalized":
                risk_named(answers.risk, self.by)
        if self.grouped == "class":
            raise ValueError("groups='class' is for classes, but the targets are values; give a function of the inputs")

    def _fit(self, answers: Answers, seed: int) -> None:
        score = self._score_of(answers)
        scores, calibration_rows = self._held_out_scores(answers, score, seed)
        groups, weights = self._groups_and_weights(answers)
        self.support = torch.empty(0) if score in CLASSES else buffer_of(answers.support, answers.target)
        strangeness = answers.risk.vacuitic if self.watches else None
        self.strangeness = torch.empty(0) if strangeness is None or strangeness.dim() > 1 else strangeness.sort().values
        # a random pass may share its noise between all rows, so that their risks rise and fall together
        doubt = None if answers.drawn or not self.watches else self._doubt(answers.y, answers.risk, score)
        self.doubt = torch.empty(0) if doubt is None else doubt.sort().values
        has_own_order = self.groups is not None or self.weight is not None  # that of groups and weights
        self.score, self.held = score, calibration_rows.to(scores)
        self.scores = scores if has_own_order else scores.sort(0).values
        rows = answers.known if score in CLASSES else slice(None)
        if groups is not None:
            self.score_groups = groups.to(scores.device)[rows]
        if weights is not None:
            self.score_weights = weights.to(scores.device)[rows]

    def _groups_and_weights(self, answers: Answers) -> tuple[Tensor | None, Tensor | None]:
        """Return the group and the weight of each held-out row, None if there are none."""
        groups = answers.target if self.grouped == "class" else answers.of_inputs.get("groups")
        weights = answers.of_inputs.get("weight")
        if weights is not None and not bool((weights > 0).any()):
            raise ValueError("weight is 0 for every held-out row: none of them resembles the new rows")
        return groups, weights

    def _held_out_scores(self, answers: Answers, score: str, seed: int) -> tuple[Tensor, Tensor]:
        """Return the scores of the held-out rows [n, ...], and for "cqr" with a distribution what `held` keeps of them."""
        if score in CLASSES:
            return self._held_out_classes(answers, score, seed), torch.empty(0)
        if score == "cqr" and answers.is_interval:
            lower, upper = answers.y.sort(1).values.split(1, 1)
            return _outside(lower, upper, answers.target), torch.empty(0)
        if score == "cqr":
            spread = risk_named(answers.risk, "total")[None] if answers.offsets is None else answers.offsets
            calibration_rows = torch.cat([answers.y[None], spread, answers.target[None]])
            return self._cqr_scores(calibration_rows, 0.5), calibration_rows
        scores = (answers.target - answers.y).abs()
        if score == "normalized":
            width = self._score_unit(answers.y, answers.risk)
            if (zero := ~(width > 0)).any():
                raise ValueError(
                    f"the {self.by} risk is 0 in {int(zero.sum())} of {zero.numel()} held-out values, and scores can't be divided by it; "
                    "use score='absolute'"
                )
            scores = scores / width
        return self._joint_scores(scores), torch.empty(0)

    def _held_out_classes(self, answers: Answers, score: str, seed: int) -> Tensor:
        check_known(answers)
        draws = torch.rand(len(answers.y), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        known = answers.known
        scores = self._class_scores(answers.y[known], draws[known.cpu()], score)
        return scores.gather(1, answers.target[known, None])[:, 0]

    def _cqr_scores(self, calibration_rows: Tensor, coverage: float) -> Tensor:
        return self._joint_scores(
            _outside(*self._ends(calibration_rows[0], calibration_rows[1:-1], coverage), calibration_rows[-1])
        )

    def _ends(self, y: Tensor, spread: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
        """Return the central interval of the predicted distribution, by its risk [1, n, ...] or offsets of its quantiles [levels, n, ...]."""
        heads = quantiles_of(self.wrapped)
        family, risk = (distribution_of(self.wrapped), spread[0]) if heads is None else (heads, spread)
        return family.icdf((1 - coverage) / 2, y, risk), family.icdf((1 + coverage) / 2, y, risk)

    def _joint_scores(self, scores: Tensor) -> Tensor:
        return scores[:, None].flatten(1).amax(1) if self.joint else scores

    def _score_unit(self, y: Tensor, risk: Risk) -> Tensor:
        """Return the risk that one unit of score stands for, shaped like the prediction or broadcastable to it."""
        width = risk_named(risk, self.by)
        if self.by == "vacuitic":
            width = nn.functional.softplus(width)
        return width.reshape(*width.shape, *[1] * (y.dim() - width.dim()))

    def _class_scores(self, y: Tensor, draws: Tensor | None, score: str) -> Tensor:
        """Return the score [rows, classes] that each class would have if it were the true one; draws [rows, 1], or None for u = 1."""
        dtype = y.dtype
        p = log_probabilities(y if y.device.type == "mps" else y.double(), output_of(self.wrapped)).exp()
        if score == "lac":
            return -p.to(dtype)  # the same order as 1 - p, but exact for tiny p
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        u = draws.to(p) if draws is not None and self.randomized else 1.0
        scores = ordered.cumsum(-1) - (1 - u) * ordered
        if score == "raps":
            rank = torch.arange(1, p.shape[-1] + 1, device=p.device)
            scores = scores + self.penalty * (rank - self.k_reg).clamp_min(0)
        # in the dtype of the stored scores, so that equal scores stay equal
        return torch.empty_like(p).scatter(-1, order, scores).to(dtype)

    # ---- answers
    def _check_call(self, wanted: tuple[str, ...], instead: str, coverage: float) -> None:
        """Raise if the method does not answer this at this coverage, before the model is run."""
        if not self.scores.numel():
            raise NotFittedError("not fitted yet: call fit(data), or load a state")
        if self.score not in wanted:
            raise ValueError(f"score={self.score!r} does not support this; call {instead}")
        level("coverage", coverage)
        if self.score_groups is None and self.score_weights is None:
            _rank(len(self.scores), coverage)

    def _quantile(self, scores: Tensor, coverage: float, x: Any, y: Tensor, what: str) -> Tensor:
        """Return the largest score inside the interval or set: one for all rows, or for each row, broadcastable to its prediction y."""
        if self.score_groups is None and self.score_weights is None:
            return conformal_quantile(scores, coverage).to(y.device)
        n_rows, by_class = len(y), self.grouped == "class"
        values_of_inputs = {name: function(x, n_rows) for name, function in self.of_inputs().items()}
        no_groups = torch.zeros(len(scores), dtype=torch.int64)
        groups = no_groups if self.score_groups is None else self.score_groups.cpu()
        weights = torch.ones(len(scores)) if self.score_weights is None else self.score_weights.cpu()
        new_weights = values_of_inputs.get("weight", torch.ones(n_rows))
        new_groups = values_of_inputs.get("groups", torch.zeros(n_rows, dtype=torch.int64))
        if by_class:
            n_classes = y.shape[-1]
            # without weights, the quantiles of the classes are the same for all rows
            new_weights = new_weights if self.score_weights is not None else new_weights[:1]
            new_groups, new_weights = (
                torch.arange(n_classes).repeat(len(new_weights)),
                new_weights.repeat_interleave(n_classes),
            )
        q = grouped_quantile(scores.cpu(), groups, weights, new_groups, new_weights, coverage)
        q = q.reshape(-1, y.shape[-1]).expand(n_rows, -1) if by_class else q
        within = "" if self.grouped is None else " of their class" if by_class else " of their group"
        far = "" if self.score_weights is None else f" (effectively {self.effective_rows:.0f} of equal weight)"
        warn_infinite(q, what, f"{len(scores)} rows were held out{far}, too few{within} or too unlike these inputs")
        return q.reshape(*q.shape, *[1] * (y.dim() - q.dim())).to(y.device)

    def _doubt(self, y: Tensor, risk: Risk, score: str) -> Tensor | None:
        """Return the uncertainty of the prediction of each row [rows]: 1 - the largest probability, or the epistemic risk if it was measured.

        For several values, it is the mean of the logarithms, which does not depend on their units.
        """
        if score in CLASSES:
            return -log_probabilities(y, output_of(self.wrapped)).amax(-1).expm1()
        if risk.epistemic is None:
            return None
        return risk.epistemic[:, None].flatten(1).clamp_min(torch.finfo(y.dtype).tiny).log().mean(1)

    def _ask_and_warn(self, x: Any, risk: bool) -> tuple[Tensor, Risk]:
        """Return prediction and risks, and warn if the rows differ from the held-out ones, so that nothing is guaranteed for them."""
        y, risks = self._ask(x, risk or self.strangeness.numel() > 0)
        warned = False
        if self.strangeness.numel() and risks.vacuitic is not None:
            warned = warn_unlike(self.strangeness, risks.vacuitic, "stranger by vacuitic risk")
        if self.doubt.numel() and not warned and (doubt := self._doubt(y, risks, str(self.score))) is not None:
            words = "less clear to the model" if self.score in CLASSES else "of higher epistemic risk"
            warn_unlike(self.doubt, doubt, words)
        return y, risks

    def interval(self, x: Any, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return intervals that contain the target with at least this probability.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: strictly between 0 and 1.

        Returns:
            (lower, upper), each shaped like the target and in its units. With "cqr", lower can lie above upper: the interval is then empty.

        Raises:
            ValueError: there are too few held-out rows for this coverage, or the score is one for classes.
        """
        self._check_call(VALUES, "predict_set(x)", coverage)
        scores = self._cqr_scores(self.held, coverage) if self.held.numel() else self.scores
        heads = self.held.numel() > 0 and quantiles_of(self.wrapped) is not None
        y, risk = self._ask_and_warn(x, risk=self.score == "normalized" or (self.held.numel() > 0 and not heads))
        q = self._quantile(scores, coverage, x, y, "intervals without ends")
        q = q + 4 * torch.finfo(q.dtype).eps * q.abs()  # a target whose score is the quantile lies inside
        # in the precision of the scores: far from zero, a step of float32 may be wider than the interval
        wide = y.to(torch.promote_types(y.dtype, q.dtype))
        if self.score == "cqr" and not self.held.numel():
            lower, upper = wide.sort(1).values.split(1, 1)
        elif self.score == "cqr":
            spread = self._offsets(x, y) if heads else risk_named(risk, "total")[None]
            lower, upper = self._ends(wide, spread.to(wide), coverage)
        else:
            unit = self._score_unit(y, risk).to(wide) if self.score == "normalized" else torch.ones_like(wide)
            lower, upper, q = wide, wide, (q * unit).where(~q.isinf(), q)  # infinite also where the risk is 0
        return clipped(outward((lower - q, upper + q), y.dtype), self.support)

    def predict_set(
        self, x: Any, coverage: float = 0.9, *, generator: torch.Generator | None = None, allow_empty: bool = True
    ) -> Tensor:
        """Return sets of classes that contain the true one with at least this probability.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: strictly between 0 and 1.
            generator: source of u for "aps" and "raps", on the CPU; None: torch's global one.
            allow_empty: False adds the most probable class to every set.

        Returns:
            bool [rows, classes]; all classes, with a warning, in rows whose scores are NaN.

        Raises:
            ValueError: there are too few held-out rows for this coverage, or the score is one for values.
        """
        self._check_call(CLASSES, "interval(x)", coverage)
        y, _ = self._ask_and_warn(x, risk=False)
        q = self._quantile(self.scores, coverage, x, y, "all classes")
        draws = None
        if self.randomized and self.score != "lac":
            draws = torch.rand(len(y), 1, generator=generator, dtype=torch.float64)
        chosen = self._class_scores(y, draws, str(self.score)) <= q
        return all_where_nan(chosen if allow_empty else chosen.scatter(-1, y.argmax(-1, keepdim=True), True), y)


def _outside(lower: Tensor, upper: Tensor, target: Tensor) -> Tensor:
    """Return the distance of targets outside of an interval, negative inside."""
    return torch.maximum(lower - target, target - upper)
