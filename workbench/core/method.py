"""The protocol of a method: what one wrapper does to a model, in one small class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.plan import Axis, Intervention, RankOne, Rule, Shared, Split, Stacked
from ..engine.surroundings import Reverted
from .calls.call import Call
from .outputs.class_scores import Classes
from .outputs.meanings import Meaning
from .settings import settings_of

if TYPE_CHECKING:
    from .ownership import Table

PIECE = 2**17  # numbers of a branch, of which the variance is computed at a time
LARGE = 2**20  # numbers of all branches, from which on their variance is summed branch by branch


class Method:
    """One method on one wrapped object: settings only, since all tensors are registered in the wrapped modules.

    A subclass names itself, says what it registers (`attach`), along which axis its branches lie (`axis`), what happens inside a branch
    (`intervention`), and how its axis is reduced to a prediction and variances (`reduce`).

    Args:
        wrapper: the wrapper that puts it on the model: its settings.
    """

    name: str  # also the name of its axis, and the mark of its tensors
    kind: str  # the risk it measures: aleatoric, epistemic or vacuitic
    order: int  # methods are sorted by it, outermost axis first, whatever the order of wrapping
    distribution: Any = None
    needs_fit = False  # whether `fit` must see the training inputs before there is a risk
    # whether its risk comes from a pass of its own (`measure`): one number a row, never part of the total
    own_pass = False
    refines = False  # whether it makes other risks of those of the branches (`refine`)
    collects = False  # whether training gathers weights along its way, so that its end counts and not its best epoch
    # the marks of buffers that stay in float32 at least where the model is cast to half precision
    statistics: tuple[str, ...] = ()
    detections: str = ""  # why boxes cannot be matched over its branches, "" if they can
    channels_first = False  # whether it takes inputs for images [rows, channels, height, width]
    beside_layers: tuple[str, ...] = ()  # names of what it holds beside the layers and computes with where it `repeats`
    members = False  # whether its branches are whole models, which `voters()` gives one by one
    # the marks of tensors by which members replace or factor the model's parameters; those of the first are [members, ...]
    member_marks: tuple[str, ...] = ()
    # with member_marks: whether the members were equal when their training began; None if nobody has looked yet
    alike: bool | None = None

    wrapper: Any = None

    def __init__(self, wrapper: Any = None) -> None:
        self.wrapper = None if wrapper is None else wrapper.alone()

    def settings(self) -> dict[str, Any]:
        """The settings that must be equal for a state_dict to fit: by default those that the wrapper says are `saved`."""
        return {
            described.name: getattr(self.wrapper, described.name)
            for described in settings_of(type(self.wrapper))
            if described.saved
        }

    def arguments(self, wrapped: Any) -> dict[str, Any]:
        """What the wrapper would have to be made with to give this method, as it is now."""
        return self.wrapper.own()

    def notes(self) -> dict[str, Any]:
        """What it has found out and holds in no tensor, as JSON takes it: kept in a state beside the settings."""
        return {}

    def recall(self, wrapped: Any, notes: dict[str, Any], stored: dict[str, Tensor], moved: Callable[[], bool]) -> None:
        """A state is about to be loaded.

        Args:
            wrapped: the object.
            notes: what `notes` said when it was saved, empty if the state knows nothing of this method.
            stored: what the state holds that belongs to no single layer, by name below `extras`.
            moved: tells whether the state changes weights.
        """

    def adapt(self, table: Table, names: set[str]) -> None:
        """A state with tensors of these names is about to be loaded: register what it has of this method, and drop what it has not."""

    def untie(self, table: Table) -> None:
        """For an axis with `own_first`: its heads have got a trunk of their own."""

    def attach(self, table: Table) -> None:
        """Check everything, then register tensors and set rules."""

    def extend(self, table: Table, slots: list[str]) -> None:
        """Another method has registered tensors of its own in these slots after this one was attached."""

    def axis(self, call: Call) -> Axis | None:
        """The axis along which branches differ in this call, or None."""
        return None

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        """What happens inside every branch of this call beside replaced tensors, or None."""
        return None

    def deals(self, training: bool, asked: bool = False) -> int:
        """To how many branches the rows of a batch are dealt out, each row to one; 0 for none.

        Args:
            training: whether the object is in training mode.
            asked: whether the caller wants it (`tile_and_reduce=False`).
        """
        return 0

    def repeats(self, training: bool) -> bool:
        """Whether each training step, or each prediction, does the same operations on tensors, and nothing else: a graph may stand for it.

        It is asked of classes that say so themselves; a subclass of theirs says so again.
        """
        return False

    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        """Remove the method's axis; its branches are taken for equally likely models, see `spread`.

        Args:
            parts: "y" and the variances so far ("aleatoric", "epistemic"), each with the axis at `dim`.
            dim: where the axis stands.

        Returns:
            The same without the axis, with the method's own variance added.
        """
        return spread(parts, dim)

    def average(self, y: Tensor, dim: int) -> Tensor:
        """Remove the method's axis from a prediction of which no risk is wanted: what `reduce` would make of "y"."""
        return y.mean(dim) if type(self).reduce is Method.reduce else self.reduce({"y": y}, dim)["y"]

    @property
    def likelihood_of_rows(self) -> bool:
        """Whether `likelihood` is a mean over rows that have nothing to do with each other, and draws nothing."""
        return False

    def likelihood(self, target: Any, prediction: Any, auxiliary: Any, meaning: Meaning | None = None) -> Tensor:
        """For an axis with `own_first`: what training adds to the loss, given what the branch beside the model's own gave.

        Of several branches beside it, what they gave is stacked in front: each leaf is [branches, ...]. With a meaning, it is that of one
        output and not of a tree.
        """
        raise NotImplementedError(f"{self.name} has an axis with own_first and says no likelihood")

    def probs(self, scores: Tensor, auxiliary: Tensor, meaning: Classes) -> Tensor:
        """For an axis with `own_first`: class probabilities [..., classes], given the model's scores and what the branch beside it gave."""
        raise ValueError(f'{self.name} cannot be asked for class outputs; use output="values"')

    def prediction(self, primary: Tensor, auxiliary: Tensor) -> Tensor:
        """For an axis with `own_first`: the prediction that training judges, of the model's own output and what the branch beside it gave."""
        return primary

    def quantiles(self, prediction: Tensor, auxiliary: Tensor) -> Tensor | None:
        """For an axis with `own_first`: the quantiles [levels, ...] that the branches beside the model's own say, if they do."""
        return None

    def check_ready(self, wrapped: Any) -> None:
        """Raise if there is no risk to ask for yet."""

    def measure(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """With `own_pass`: the prediction, and one risk [rows]."""
        raise NotImplementedError(f"{self.name} has a pass of its own and measures nothing in it")

    def refine(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], y: Any, risks: dict[str, Any]
    ) -> dict[str, Any]:
        """With `refines`: the risks by name, given those of all axes; in evaluation mode only, of inputs as the model takes them."""
        return risks

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """With `needs_fit`: learn what is learned in closed form from the training inputs, as `Wrapped.fit` takes them."""

    def check(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise where a call with these inputs shows that `fit` would refuse the model: asked before a training, and of an example."""

    def tune(self, wrapped: Any, held_out: Any) -> None:
        """With `needs_fit`: what `workbench.fit` lets be chosen by its validation rows, pairs (input, target), after `fit`."""

    def pace(self, at: float, epochs: int) -> float:
        """With `collects`: the learning rate of `workbench.fit` as a share of its peak, after `at` of so many epochs."""
        raise NotImplementedError(f"{self.name} collects weights and says no learning rate")

    def collect(self, wrapped: Any, epoch: int, epochs: int) -> None:
        """With `collects`: what `workbench.fit` does after each epoch, counted from 1."""

    def forget(self, table: Table) -> None:
        """The weights are others now, read from a state that knows nothing of this method: what was learned about the old ones is void."""

    def regularizer(self, table: Table, rows: int | None) -> Tensor | None:
        """A term that training adds to the loss, or None."""
        return None

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value}" for key, value in self.settings().items() if value is not None)
        return f"{self.name}({inside})"


def spread(parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    """The mean over an axis of equally likely models, and their variance as epistemic (law of total variance).

    Var[y] = E[Var[y | model]] + Var[E[y | model]]: variances that are there already take their mean, the variance of the predictions (of the
    population, not the unbiased estimate: one model alone has none) is added to the epistemic one.
    """
    y = parts["y"]
    out = {name: value.mean(dim) for name, value in parts.items()}
    variance = _variance(y, out["y"], dim)
    out["epistemic"] = out["epistemic"] + variance if "epistemic" in out else variance
    return out


def _variance(y: Tensor, mean: Tensor, dim: int) -> Tensor:
    """Of the population; about the mean that is known."""
    if not y.numel():
        return mean.real  # torch warns about an empty batch
    # torch.export would take the comparison for a promise about rows
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return torch.var(y, dim, correction=0)
    if y.device.type != "cpu" or y.dtype not in (torch.float32, torch.float64) or y.numel() <= LARGE:
        return torch.var(y, dim, correction=0)
    # branch by branch, since torch.var over an outer dimension takes some twenty times as long on a CPU; in pieces that stay in its cache
    variance = torch.empty_like(mean, memory_format=torch.contiguous_format)
    parts = [mean.contiguous(), variance, *y.unbind(dim)]
    for means, squares, *branches in zip(*(part.reshape(-1).split(PIECE) for part in parts), strict=True):
        squares.zero_()
        for branch in branches:
            difference = branch - means
            squares.addcmul_(difference, difference)
        squares.div_(len(branches))
    return variance


def split_heads(answers: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of an axis with `own_first`: the model's own answer, and that of the branch beside it; of several, theirs stacked in front."""
    primary, *auxiliary = answers.unbind(dim)
    if not auxiliary:  # a family without a number beside the model's own
        return primary, answers.narrow(dim, 0, 0).movedim(dim, 0)
    return primary, auxiliary[0] if len(auxiliary) == 1 else torch.stack(auxiliary)


class evaluating(Reverted):  # called as a function is
    """The model in evaluation mode, whatever mode it is in; what wrapping added keeps its own, unless the whole is meant."""

    def __init__(self, model: Any, whole: bool = False) -> None:
        seen, waiting = {model}, [model]  # `named_modules` writes every path
        self._modules = []
        while waiting:
            module = waiting.pop()
            if module.training:
                self._modules.append(module)
            below = {part for name, part in module._modules.items() if part is not None and (whole or "@" not in name)}
            waiting += below - seen
            seen |= below

    def begin(self) -> None:
        for module in self._modules:
            module.training = False

    def revert(self) -> None:
        for module in self._modules:
            module.training = True


def sqrt(variance: Tensor) -> Tensor:
    """The square root with a gradient of zero, not NaN, where the variance is zero."""
    if not torch.is_grad_enabled():  # under vmap no tensor says that it requires gradients
        clamped = variance.clamp_min(0)
        return clamped.sqrt_() if clamped.is_floating_point() else clamped.sqrt()
    positive = variance > 0
    return torch.where(
        positive, torch.where(positive, variance, 1.0).sqrt(), torch.where(variance.isnan(), variance, 0.0)
    )


__all__ = ["Axis", "Call", "Intervention", "Method", "RankOne", "Rule", "Shared", "Split", "Stacked", "spread", "sqrt"]
