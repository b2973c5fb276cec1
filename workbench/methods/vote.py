"""Vote: epistemic risk from the disagreement of several voters, members of a deep ensemble."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.additions import extra
from ..core.method import Call, Method
from ..core.prior import NAME as PRIOR
from ..core.prior import Prior, check_prior, install, limited_outputs
from ..core.quantized import refuse_quantized, refuse_unfrozen
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.plan import Axis, RankOne, Shared, Split, Stacked
from ..errors import WorkbenchWarning
from ..introspect.source_lines import some_of
from .computed_weights import holder_of, refuse_signs
from .design import Design, TakesDesign
from .initialization import Draws, is_bias, untrained
from .settled_prior import settle

if TYPE_CHECKING:
    from ..core.ownership import Table
    from ..engine.plan import Rule

NAME = "vote"
LAPLACE = (
    "laplace models the posterior of the last layer only, and vote's prior is added after that layer: use one of them "
    "(vote without prior composes)"
)


class Wrapper(_Wrapper):
    """Epistemic risk from the disagreement of voters (Lakshminarayanan et al. 2017, deep ensembles).

    Voters are drawn anew, by the initialization of each layer (`reset_parameters`) or of the model (`_init_weights`). If the weights come from
    another one in the model's constructor (He et al. 2015, or that of a SIREN), voters get its scale, its zero biases and other constants of
    biases. Nothing is taken from weights that do not look drawn, as after training, unless `finetune=True`.

    Frozen parameters (requires_grad=False) are shared by all voters and keep their values, so that a pretrained layer or the base of an adapter
    keeps what it has learned. A weight that is zero on purpose (the second factor of a LoRA, a zero-initialized residual scale or convolution)
    starts at zero in every voter, and so does the bias of its layer.

    Example:
        >>> import torch
        >>> model = Wrapper(n_voters=5)(torch.nn.Linear(2, 1))
        >>> y, risk = model(torch.zeros(4, 2), return_risk=True)
        >>> y.shape, risk.shape
        (torch.Size([4, 1]), torch.Size([4, 1]))
    """

    n_voters: int = setting(default=3, least=1, saved=True, help="number of voters, at least 1.")
    alpha: float = setting(
        default=1.0,
        least=0,
        wording="must not be negative",
        help='spread between the voters at the start, where a layer has no initialization of its own: with share="rank1" the standard deviation '
        "of the factors relative to their mean, with a mean square of one; otherwise noise of alpha times a tenth of the parameter's root mean "
        "square is added.",
    )
    use_bias: bool = setting(default=True, saved=True, help="whether each voter has its own biases.")
    independent: bool = setting(
        default=True,
        help="in training mode, `wrapped(x)` assigns each row to one voter, so that every voter trains on its own share of the rows at the cost "
        "of one pass; False returns the mean over all voters.",
    )
    finetune: bool = setting(
        default=False,
        trains=True,
        help="start every voter at the given weights instead of a fresh initialization. To make the voters diverge, `workbench.fit` and "
        "`wrapped.loss` weight the rows differently for each voter (Bayesian bootstrap).",
    )
    share: Literal["rank1"] | int | None = setting(
        default=None,
        least=1,
        saved=True,
        help='None: every voter has its own copy of all parameters; "rank1": one shared weight W, and rank-one factors s and r for each voter, '
        'W * s r^T (Wen et al. 2020, BatchEnsemble); an int k: only the last k layers vote, on a shared trunk. With "rank1", linear and '
        "convolutional layers compute ((x * r) W^T) * s, without forming the product, wherever that is cheaper.",
    )
    evidence: Literal["design"] | None = setting(
        default=None,
        help='None: epistemic risk is the voters\' disagreement; "design", for class scores [rows, classes] and for values with sculpt: it '
        "measures how few training rows support an input, from the inputs alone, so that label noise does not raise it. It is fitted by "
        "`wrapped.fit` or `workbench.fit`; the latter combines it with the voters' disagreement if it has validation rows. The aleatoric risk "
        "of classes is then the entropy expected if nothing were left to learn, and total risk the sum of both. See docs/how_to/epistemic.md.",
    )
    prior: float | None = setting(
        default=None,
        least=0,
        help="factor of a randomized prior function (Osband et al. 2018): each voter adds this multiple of the output of its own untrained "
        "model, so that voters agree where training rows make them, and elsewhere differ as their priors do. In the units that the model is "
        "trained in, standardized ones under `workbench.fit`; large where initial outputs are small: 300 for three linear layers, or the value "
        "that `training.prior_scale` finds. `workbench.fit` makes the priors near zero at the training rows. See docs/how_to/epistemic.md.",
    )

    def make(self) -> list[Method]:
        return [Vote(self)]


class Vote(TakesDesign):
    """Method behind `Wrapper`, for one model."""

    name, kind, order, members = NAME, "epistemic", 10, True
    member_marks = (NAME, f"{NAME}_out")
    settled = False  # whether the priors are near zero at training rows, see `settle_prior`
    _zeros: frozenset[str] = frozenset()  # weights that start at zero in every voter

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self._slots: list[str] = []
        self.design = None if self.wrapper.evidence is None else Design(pretrained=self.wrapper.finetune)
        self.needs_fit = self.refines = self.design is not None

    def settings(self) -> dict[str, Any]:
        # states saved before these settings existed lack them, so they are listed only where they are used
        optional = {"evidence": self.wrapper.evidence, PRIOR: self.wrapper.prior or None}
        return {**super().settings(), **{name: value for name, value in optional.items() if value is not None}}

    def axis(self, call: Call) -> Axis | None:
        return Axis(self.name, self.wrapper.n_voters)

    def repeats(self, training: bool) -> bool:
        return training or self.design is None

    def deals(self, training: bool, requested: bool = False) -> int:
        return self.wrapper.n_voters if requested or (training and self.wrapper.independent) else 0

    def attach(self, table: Table) -> None:
        if isinstance(self.wrapper.share, int):
            slots = table.tail(self.wrapper.share, "share")
        else:
            slots = [*table.parameters(), *(name for name, slot in table.record.slots.items() if slot.buffer)]
        parameters = self._own_parameters(table, slots)
        self._check(table, parameters)
        if self.wrapper.prior:
            self._check_prior(table)
        self._slots = parameters + self._own_buffers(table, slots, parameters)
        if self.design is not None:
            self.design.check(table)
            self.design.attach(table)
        self._zeros = self._zero_weights(table, parameters)
        draws = self._draws(table)
        self.alike = True if self.wrapper.finetune and self.wrapper.n_voters > 1 else None
        rules = {
            name: self._per_voter(table, name, table.record.rules.get(name, Shared(name)), draws)
            for name in self._slots
        }
        prior = self._prior(table) if self.wrapper.prior else None
        table.record.rules.update(rules)
        if prior is not None:
            install(table.root, prior)
        for name in self._slots:
            if not self._factored(table, name):
                table.release(name)

    def _own_parameters(self, table: Table, slots: list[str]) -> list[str]:
        """Return the parameters among these slots that each voter has its own of: those that are not frozen."""
        floating = set(table.parameters())
        candidates = [name for name in slots if name in floating and (self.wrapper.use_bias or not is_bias(name))]
        parameters = [name for name in candidates if table.value(name).requires_grad]
        if candidates and not parameters:
            raise ValueError(self._all_frozen(table, candidates))
        return parameters

    def _own_buffers(self, table: Table, slots: list[str], parameters: list[str]) -> list[str]:
        """Return the buffers among these slots that each voter has its own of, beside these parameters."""
        owners = {path for name in parameters for path, _ in table.record.slots[name].owners}
        return [name for name in slots if table.record.slots[name].buffer and self._has_own_buffer(table, name, owners)]

    @property
    def movable(self) -> bool:
        return self.design is None and not self.wrapper.prior

    def move(self, names: dict[str, str], added: list[str]) -> None:
        self._slots = [*(names[name] for name in self._slots if name in names), *added]
        self._zeros = frozenset(names[name] for name in self._zeros if name in names)

    def _all_frozen(self, table: Table, names: list[str]) -> str:
        """Return the error message for a model in which every parameter that would vote is frozen."""
        layers = table.layers()
        trainable_shares = (
            k for k in range(1, len(layers) + 1) if any(map(_is_trainable(table), table.tail(k, "share")))
        )
        k = next(trainable_shares, None) if isinstance(self.wrapper.share, int) else None
        path, attribute = table.record.slots[names[0]].owners[0]
        return (
            f"vote: all parameters that would vote are frozen ({some_of(names)}); frozen parameters "
            f"keep their values, so all voters would be equal. Unfreeze them before wrapping, "
            f"model.{f'{path}.' if path else ''}{attribute}.requires_grad_(True)"
            + (f"; or give share={k}, which includes the last trainable layer" if k else "")
            + (
                "; adapters of peft are trainable after PeftModel.from_pretrained(base, folder, is_trainable=True)"
                if hasattr(table.root, "peft_config")
                else ""
            )
            + "; or use sample, which needs no training, or laplace on a trained last layer"
        )

    def _zero_weights(self, table: Table, parameters: list[str]) -> frozenset[str]:
        """Return the zero weights among these parameters; freshly drawn voters keep those at zero that are zero on purpose (see `Draws`)."""
        weights = [name for name in parameters if not is_bias(name)]
        # voters with given weights, or with factors of them, keep zeros anyway
        if self.wrapper.finetune or self.wrapper.share == "rank1":
            return frozenset()
        zeros = [name for name in weights if not table.value(name).is_meta and not bool(table.value(name).any())]
        if len(zeros) < len(weights):
            return frozenset(zeros)
        if zeros and not all(map(_is_trainable(table), table.parameters())):
            warnings.warn(
                f"vote: all weights that vote are zero ({', '.join(zeros[:3])}) and the others are frozen. They are initialized randomly, "
                "because voters that start equal stay equal, so the initial predictions differ from the given model's. To keep those, let "
                "layers with other weights vote as well, by a larger share= or share=None",
                WorkbenchWarning,
                stacklevel=6,
            )
        return frozenset()

    def _draws(self, table: Table) -> Draws:
        return Draws(table, self.wrapper.n_voters, fresh=not self.wrapper.finetune, zeros=self._zeros)

    def notes(self) -> dict[str, Any]:
        return {name: True for name, value in (("alike", self.alike), ("settled", self.settled)) if value}

    def recall(self, wrapped: Any, notes: dict[str, Any], stored: dict[str, Tensor], moved: Callable[[], bool]) -> None:
        self.alike = notes.get("alike")
        if any(key.startswith(f"{PRIOR}.") for key in stored):
            self.settled = notes.get("settled", False)

    # ---- with prior=
    def _check_prior(self, table: Table) -> None:
        check_prior(table.root, table.record)
        if extra(table.root, PRIOR) is not None:
            raise ValueError(
                "prior: this model has one already, since it is a voter itself; leave prior out, or wrap the plain model"
            )
        if self.wrapper.finetune:
            raise ValueError(
                "prior with finetune=True: voters that start at the given weights predict what that model predicts, and a prior would be added "
                "to that; leave finetune out and train the voters, or leave prior out"
            )
        if any(method.name == "laplace" for method in table.record.methods):
            raise ValueError(LAPLACE)

    def _prior(self, table: Table) -> Prior:
        drawn, shared = untrained(table, self.wrapper.n_voters)
        if not drawn:
            raise ValueError(
                f"prior: nothing in {type(table.root).__name__} would differ between untrained models (its parameters are constant, and their "
                "initialization is not random); leave prior out"
            )
        assert self.wrapper.prior is not None  # the caller has checked
        return Prior(self.wrapper.prior, self.name, drawn, shared, limited_outputs(table.root, table.record))

    def settle_prior(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Make the priors near zero at these training rows, only once: trained voters have learned with the priors as they are.

        Args:
            wrapped: the wrapped model.
            args, kwargs: inputs of the model, in the units that it is trained in.
        """
        if self.wrapper.prior and not self.settled:
            self.settled = settle(wrapped, args, kwargs)

    # ---- tensors of the voters
    def _check(self, table: Table, parameters: list[str]) -> None:
        """Refuse parameters that voters cannot have copies of, and warn about gradient hooks that the copies lack."""
        if self.wrapper.share == "rank1":
            refuse_signs(table, parameters, "factors of each voter", "share=None")
        for name in parameters:
            path, _ = table.record.slots[name].owners[0]
            if self.wrapper.share == "rank1" and getattr(table.module(path), "sparse", False):
                raise ValueError(
                    f"{name} belongs to a {type(table.module(path)).__name__} with sparse=True, and rank-one factors do not support sparse "
                    "gradients; set sparse=False, or use share=None"
                )
            parameter = table.value(name)
            if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
                warnings.warn(
                    f"{name} has gradient hooks, which the voters' own copies do not get; put them on wrapped.risk_parameters()",
                    WorkbenchWarning,
                    stacklevel=6,
                )
        refuse_quantized(
            table,
            [name for name in parameters if not self._factored(table, name)],
            "each voter would need a new copy in floating point",
            "layer.weight.requires_grad_(False) on the quantized layers makes all voters share them",
        )
        if self.wrapper.share != "rank1":
            refuse_unfrozen(table, parameters)

    def extend(self, table: Table, slots: list[str]) -> None:
        draws = self._draws(table)
        for name in slots:
            rule = table.record.rules[name]
            if name in self._slots and isinstance(rule, Split):
                options = tuple(
                    self._per_voter(table, name, o, draws) if isinstance(o, Shared) else o for o in rule.options
                )
                table.record.rules[name] = Split(rule.axis, options)

    def _has_own_buffer(self, table: Table, name: str, owners: set[str]) -> bool:
        """Whether each voter has its own copy of a buffer: of statistics that training updates, not of constants (masks, positions)."""
        path, attribute = table.record.slots[name].owners[0]
        return not table.is_cache(name) and (
            self.wrapper.share is None
            or path in owners
            or holder_of(table, path) in owners
            or attribute.startswith("running_")
            or attribute == "num_batches_tracked"
        )

    def _factored(self, table: Table, name: str) -> bool:
        """Whether voters have rank-one factors of a slot instead of copies."""
        return self.wrapper.share == "rank1" and not table.record.slots[name].buffer and not is_bias(name)

    def _per_voter(self, table: Table, slot: str, rule: Rule, draws: Draws) -> Rule:
        """Return the rule with each of its shared tensors replaced by one per voter."""
        if isinstance(rule, Split):
            return Split(rule.axis, tuple(self._per_voter(table, slot, option, draws) for option in rule.options))
        if not isinstance(rule, Shared):
            return rule
        current = table.get(rule.name)
        buffer = table.record.slots[slot].buffer
        if self._factored(table, slot):
            left = table.register(
                f"{rule.name}@vote_out",
                self._factor(current, current.shape[:1] if current.dim() > 1 else current.shape),
            )
            right = None
            if current.dim() > 1:
                right = table.register(f"{rule.name}@vote_in", self._factor(current, current.shape[1:2]))
            return RankOne(self.name, rule.name, left, right)
        stacked = (
            torch.stack([current.detach().clone()] * self.wrapper.n_voters)
            if buffer and self.wrapper.share == "rank1"  # it belongs to the shared weights, which are not drawn anew
            else draws.stacked(slot, current, self.wrapper.alpha)
        )
        raised = (table.record.raised or {}).get(rule.name)
        if raised is not None and not self.wrapper.finetune:  # otherwise they are copies
            stacked = stacked + raised
        name = table.register(f"{rule.name}@vote", stacked, like=current, buffer=buffer)
        if rule.name != slot:
            table.drop(rule.name)
        return Stacked(self.name, name)

    def _factor(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        ones = torch.ones(self.wrapper.n_voters, *shape, dtype=like.dtype, device=like.device)
        if self.wrapper.finetune:
            return ones
        # of mean square 1, so that outputs of deep models have the size that the initialization of their layers gives them (He et al. 2015)
        return (ones + self.wrapper.alpha * torch.randn_like(ones)) / math.hypot(1, self.wrapper.alpha)


def _is_trainable(table: Table) -> Callable[[str], bool]:
    """Return a predicate of slots: whether a slot is a parameter that is not frozen."""
    return lambda name: not table.record.slots[name].buffer and table.value(name).requires_grad


__all__ = ["Vote", "Wrapper"]
