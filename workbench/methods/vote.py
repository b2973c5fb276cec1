"""Vote: several voters answer, and where they disagree the model does not know (epistemic risk)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.method import Call, Method
from ..core.ownership import extra
from ..core.prior import NAME as PRIOR
from ..core.prior import Prior, check_prior, install
from ..core.quantised import refuse_quantised
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.plan import Axis, RankOne, Shared, Split, Stacked
from ..errors import WorkbenchWarning
from .computed_weights import holder_of, refuse_signs
from .design import NAMES, Design
from .initialization import Draws, is_bias, untrained
from .settled_prior import settle

if TYPE_CHECKING:
    from ..core.ownership import Table
    from ..engine.plan import Rule

NAME = "vote"
LAPLACE = (
    "laplace knows the posterior of the last layer alone, and vote's prior is added behind it: use one of them "
    "(vote without prior composes)"
)


class Wrapper(_Wrapper):
    """Epistemic risk from the disagreement of voters (Lakshminarayanan et al. 2017, deep ensembles).

    Frozen parameters (requires_grad=False) stay as they are, shared by all voters, so that a pretrained layer or the base of an adapter keeps
    what it has learned. A weight that is zero on purpose (the second factor of a LoRA, a zero-initialised residual scale or convolution) is
    zero in every voter at the start, and so is the bias beside it.

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
        help='spread of what makes voters differ where a layer has no initialisation of its own: with share="rank1" the standard deviation of '
        "the factors around one; else a tenth of the parameter's size times alpha.",
    )
    use_bias: bool = setting(default=True, saved=True, help="whether each voter has biases of its own.")
    independent: bool = setting(
        default=True,
        help="in training mode `wrapped(x)` lets each row be answered by one voter, so that voters train on shares of their own at the cost of "
        "one pass; False answers with the mean of all.",
    )
    finetune: bool = setting(
        default=False,
        help="start every voter at the given weights instead of at a fresh initialisation. So that they come to differ, `workbench.fit` and "
        "`wrapped.loss` let each voter weigh the rows differently (Bayesian bootstrap).",
    )
    share: Literal["rank1"] | int | None = setting(
        default=None,
        least=1,
        saved=True,
        help='None, every voter has all parameters of its own; "rank1", one shared weight W and rank-one factors s and r for each voter, '
        'W * s r^T (Wen et al. 2020, BatchEnsemble); an int k, only the last k layers vote, on a shared trunk. With "rank1", linear and '
        "convolutional layers compute ((x * r) W^T) * s, without the product, wherever that is less work.",
    )
    evidence: Literal["design"] | None = setting(
        default=None,
        help='None, epistemic risk is the voters\' disagreement; "design", for class scores [rows, classes] and for values with sculpt, how few '
        "training rows speak for an input, told from inputs alone, so that noise of labels does not raise it: fitted by `wrapped.fit` or "
        "`workbench.fit`, which lets the voters shape it where it has validation rows. Aleatoric risk of classes is then what their entropy "
        "would be if nothing were left to learn, and total risk the sum of both. See docs/how_to/epistemic.md.",
    )
    prior: float | None = setting(
        default=None,
        least=0,
        help="add to each voter so many times the output of an untrained model of its own, a randomised prior function (Osband et al. 2018): "
        "voters agree where training rows tell them to, and elsewhere differ as their priors do. In the units that the model is trained in, "
        "standardised ones under `workbench.fit`, and large where layers start small: 300 for three linear layers, or what "
        "`training.prior_scale` finds. `workbench.fit` lets priors be near zero at the training rows. See docs/how_to/epistemic.md.",
    )

    def make(self) -> list[Method]:
        return [Vote(self)]


class Vote(Method):
    """The method on one model; see `Wrapper`."""

    name, kind, order, members = NAME, "epistemic", 10, True
    statistics = tuple(f"design_{part}" for part in NAMES)
    member_marks = (NAME, f"{NAME}_out")
    settled = False  # whether the priors are near zero at training rows, see `settle_prior`
    _zeros: frozenset[str] = frozenset()  # weights that start at zero in every voter

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self._slots: list[str] = []
        self.design = None if self.wrapper.evidence is None else Design(pretrained=self.wrapper.finetune)
        self.needs_fit = self.refines = self.design is not None

    def settings(self) -> dict[str, Any]:
        # states of before know nothing of them
        later = {"evidence": self.wrapper.evidence, PRIOR: self.wrapper.prior or None}
        return {**super().settings(), **{name: value for name, value in later.items() if value is not None}}

    def axis(self, call: Call) -> Axis | None:
        return Axis(self.name, self.wrapper.n_voters)

    def repeats(self, training: bool) -> bool:
        return training or self.design is None

    def deals(self, training: bool, asked: bool = False) -> int:
        return self.wrapper.n_voters if asked or (training and self.wrapper.independent) else 0

    def attach(self, table: Table) -> None:
        if isinstance(self.wrapper.share, int):
            slots = table.tail(self.wrapper.share, "share")
        else:
            slots = [*table.parameters(), *(name for name, slot in table.record.slots.items() if slot.buffer)]
        floating = set(table.parameters())
        candidates = [name for name in slots if name in floating and (self.wrapper.use_bias or not is_bias(name))]
        parameters = [name for name in candidates if table.value(name).requires_grad]
        if candidates and not parameters:
            raise ValueError(self._all_frozen(table, candidates))
        self._check(table, parameters)
        refuse_quantised(
            table,
            [name for name in parameters if not (isinstance(self.wrapper.share, str) and self._factored(table, name))],
            "each voter would have it anew, in floating point",
            "layer.weight.requires_grad_(False) on the quantised layers lets all voters share them",
        )
        if self.wrapper.prior:
            self._check_prior(table)
        owners = {path for name in parameters for path, _ in table.record.slots[name].owners}
        buffers = [name for name in slots if table.record.slots[name].buffer and self._own_buffer(table, name, owners)]
        if self.design is not None:
            self.design.check(table)
            self.design.attach(table)
        self._slots = parameters + buffers
        self._zeros = self._zero_weights(table, parameters)
        draws = self._draws(table)
        self.alike = True if self.wrapper.finetune and self.wrapper.n_voters > 1 else None
        rules = {
            name: self._over(table, name, table.record.rules.get(name, Shared(name)), draws) for name in self._slots
        }
        prior = self._prior(table) if self.wrapper.prior else None
        table.record.rules.update(rules)
        if prior is not None:
            install(table.root, prior)
        for name in self._slots:
            if name in rules and not (isinstance(self.wrapper.share, str) and self._factored(table, name)):
                table.release(name)

    def _all_frozen(self, table: Table, names: list[str]) -> str:
        """What to do where all that would vote is frozen."""
        layers = table.layers()
        more = (k for k in range(1, len(layers) + 1) if any(map(_learns(table), table.tail(k, "share"))))
        k = next(more, None) if isinstance(self.wrapper.share, int) else None
        path, attribute = table.record.slots[names[0]].owners[0]
        return (
            f"vote: all that would vote is frozen ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}), and frozen parameters stay as "
            f"they are, so that all voters would be equal. Unfreeze it before wrapping, "
            f"model.{f'{path}.' if path else ''}{attribute}.requires_grad_(True)"
            + (f"; or give share={k}, which takes in the last layer that learns" if k else "")
            + "; or use sample, which needs no training, or laplace on a trained last layer"
        )

    def _zero_weights(self, table: Table, parameters: list[str]) -> frozenset[str]:
        """The weights among these that are zero, of which voters drawn afresh start at zero again where that is on purpose (see `Draws`)."""
        weights = [name for name in parameters if not is_bias(name)]
        if self.wrapper.finetune or self.wrapper.share == "rank1":  # at the given values, or multiples of them
            return frozenset()
        zeros = [name for name in weights if not table.value(name).is_meta and not bool(table.value(name).any())]
        if len(zeros) < len(weights):
            return frozenset(zeros)
        if zeros and not all(map(_learns(table), table.parameters())):
            warnings.warn(
                f"vote: all weights that vote are zero ({', '.join(zeros[:3])}) beside frozen ones, so they are drawn anew, as voters that "
                "start alike stay alike: their predictions differ from the given model's from the start. To keep that, let layers with other "
                "weights vote as well, by a larger share= or share=None",
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
                "prior with finetune=True: voters that start at the given weights answer as that model does, and a prior would be added to it; "
                "leave finetune out and train the voters, or leave prior out"
            )
        if any(method.name == "laplace" for method in table.record.methods):
            raise ValueError(LAPLACE)

    def _prior(self, table: Table) -> Prior:
        drawn, shared = untrained(table, self.wrapper.n_voters)
        if not drawn:
            raise ValueError(
                f"prior: nothing in {type(table.root).__name__} would differ between untrained models (its parameters are constant, without an "
                "initialisation that draws numbers); leave prior out"
            )
        assert self.wrapper.prior is not None  # who asks has looked
        return Prior(self.wrapper.prior, self.name, drawn, shared)

    def settle_prior(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Let priors be near zero at these training rows, once: what voters have learned is learned beside them.

        Args:
            wrapped: the object.
            args, kwargs: rows as the model takes them, in the units that it is trained in.
        """
        if self.wrapper.prior and not self.settled:
            self.settled = settle(wrapped, args, kwargs)

    # ---- with evidence="design"
    def check_ready(self, wrapped: Any) -> None:
        if self.design is not None:
            self.design.check_ready(wrapped)

    def check(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.design is not None:
            self.design.try_inputs(wrapped, args, kwargs)

    def fit(self, wrapped: Any, inputs: Any) -> None:
        if self.design is not None:
            self.design.fit(wrapped, inputs)

    def tune(self, wrapped: Any, held_out: Any) -> None:
        if self.design is not None:
            self.design.tune(wrapped, held_out)

    def refine(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], y: Any, risks: dict[str, Any]
    ) -> dict[str, Any]:
        return risks if self.design is None else self.design.refine(wrapped, args, kwargs, y, risks)

    def adapt(self, table: Table, names: set[str]) -> None:
        if self.design is not None:
            self.design.adapt(table, names)

    def forget(self, table: Table) -> None:
        if self.design is not None:
            self.design.forget(table)

    def _check(self, table: Table, parameters: list[str]) -> None:
        """What cannot be taken over, or not whole."""
        if self.wrapper.share == "rank1":
            refuse_signs(table, parameters, "factors of each voter", "share=None")
        for name in parameters:
            path, _ = table.record.slots[name].owners[0]
            if self.wrapper.share == "rank1" and getattr(table.module(path), "sparse", False):
                raise ValueError(
                    f"{name} belongs to a {type(table.module(path)).__name__} with sparse=True, whose gradients cannot pass rank-one factors; "
                    "set sparse=False, or use share=None"
                )
            parameter = table.value(name)
            if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
                warnings.warn(
                    f"{name} has gradient hooks, which the voters' own copies do not get; put them on wrapped.risk_parameters()",
                    WorkbenchWarning,
                    stacklevel=6,
                )

    def extend(self, table: Table, slots: list[str]) -> None:
        draws = self._draws(table)
        for name in slots:
            rule = table.record.rules[name]
            if name in self._slots and isinstance(rule, Split):
                options = tuple(self._over(table, name, o, draws) if isinstance(o, Shared) else o for o in rule.options)
                table.record.rules[name] = Split(rule.axis, options)

    def _own_buffer(self, table: Table, name: str, owners: set[str]) -> bool:
        """Statistics that training moves; constants (masks, positions) are shared."""
        path, attribute = table.record.slots[name].owners[0]
        module = table.module(path)
        return attribute not in module._non_persistent_buffers_set and (
            self.wrapper.share is None
            or path in owners
            or holder_of(table, path) in owners
            or attribute.startswith("running_")
            or attribute == "num_batches_tracked"
        )

    def _factored(self, table: Table, name: str) -> bool:
        slot = table.record.slots[name]
        return not slot.buffer and not is_bias(name)

    def _over(self, table: Table, slot: str, rule: Rule, draws: Draws) -> Rule:
        """The rule with every shared tensor of it given to the voters."""
        if isinstance(rule, Split):
            return Split(rule.axis, tuple(self._over(table, slot, option, draws) for option in rule.options))
        if not isinstance(rule, Shared):
            return rule
        current = table.get(rule.name)
        buffer = table.record.slots[slot].buffer
        if self.wrapper.share == "rank1" and self._factored(table, slot):
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
            if buffer and self.wrapper.share == "rank1"  # it goes with the weights, which are not drawn
            else draws.stacked(slot, current, self.wrapper.alpha)
        )
        name = table.register(f"{rule.name}@vote", stacked, like=current, buffer=buffer)
        if rule.name != slot:
            table.drop(rule.name)
        return Stacked(self.name, name)

    def _factor(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        ones = torch.ones(self.wrapper.n_voters, *shape, dtype=like.dtype, device=like.device)
        return ones if self.wrapper.finetune else ones + self.wrapper.alpha * torch.randn_like(ones)


def _learns(table: Table) -> Callable[[str], bool]:
    """Whether a slot is a parameter that is not frozen."""
    return lambda name: not table.record.slots[name].buffer and table.value(name).requires_grad


__all__ = ["Vote", "Wrapper"]
