"""The protocol of a method: one class that defines what a wrapper does to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

FEW = 64  # number of variances below which torch.var is faster on a CPU than separate operations
PIECE = 2**17  # number of elements per branch of which the variance is computed at a time
LARGE = 2**20  # number of elements over all branches above which the variance on a CPU is summed branch by branch


class Method:
    """Base class of methods. A method attached to a wrapped object holds only settings: its tensors are registered in the wrapped modules.

    A subclass defines its name, the tensors that it registers (`attach`), the axis of its branches (`axis`), what happens inside a branch
    (`intervention`), and how its axis is reduced to a prediction and variances (`reduce`).

    Args:
        wrapper: the wrapper that attaches the method, with its settings.
    """

    name: str  # also the name of its axis and the mark of its tensors
    kind: str  # the risk that it measures: aleatoric, epistemic or vacuitic
    order: int  # sort key of methods: outermost axis first, independent of the order of wrapping
    distribution: Any = None
    needs_fit = False  # whether `fit` must see the training inputs before risk can be computed
    # whether its risk comes from a separate pass (`measure`): one number per row, never part of the total
    own_pass = False
    refines = False  # whether it replaces the risks computed from the branches (`refine`)
    # whether it collects weights during training, so that the final state is kept instead of the best epoch
    collects = False
    unnamed: tuple[str, ...] = ()  # settings that its repr leaves out, and so the names of cells and checkpoints
    # marks of buffers that stay at least float32 when the model is cast to half precision
    statistics: tuple[str, ...] = ()
    detections: str = ""  # why boxes cannot be matched across its branches, "" if they can
    channels_first = False  # whether it treats inputs as images [rows, channels, height, width]
    beside_layers: tuple[str, ...] = ()  # names of the extra modules that it computes with if it `repeats`
    earlier_notes: Mapping[str, Any] = {}  # what a state stands for that was saved before `notes` had these
    members = False  # whether its branches are complete models, returned by `voters()`
    # marks of the tensors by which members replace or factor the model's parameters; those with the first mark are [members, ...]
    member_marks: tuple[str, ...] = ()
    # with member_marks: whether all members were equal when training began; None if not checked yet
    alike: bool | None = None

    wrapper: Any = None

    def __init__(self, wrapper: Any = None) -> None:
        self.wrapper = None if wrapper is None else wrapper.alone()

    def settings(self) -> dict[str, Any]:
        """Return the settings that must match for a state_dict to load: by default those that the wrapper declares as `saved`."""
        return {
            described.name: getattr(self.wrapper, described.name)
            for described in settings_of(type(self.wrapper))
            if described.saved
        }

    def arguments(self, wrapped: Any) -> dict[str, Any]:
        """Return the arguments with which the wrapper would create this method in its current state."""
        return self.wrapper.own()

    def notes(self) -> dict[str, Any]:
        """Return what was learned but is not held in tensors, as JSON values; saved in a state along with the settings."""
        return {}

    def recall(self, wrapped: Any, notes: dict[str, Any], stored: dict[str, Tensor], moved: Callable[[], bool]) -> None:
        """Prepare for a state that is about to be loaded.

        Args:
            wrapped: the wrapped object.
            notes: return value of `notes` when the state was saved; empty if the state does not contain this method.
            stored: tensors of the state that belong to no single layer, by name relative to `extras`.
            moved: function that returns whether the state changes weights.
        """

    def adapt(self, table: Table, names: set[str]) -> None:
        """Register the tensors of this method that a state to be loaded has, and drop those that it lacks; `names` are those in the state."""

    def untie(self, table: Table) -> None:
        """For an axis with `own_first`: called after its heads were given a separate trunk."""

    @property
    def movable(self) -> bool:
        """Whether it takes up layers that are put into the model later, and moves others, see `move`."""
        return False

    def move(self, names: dict[str, str], added: list[str]) -> None:
        """With `movable`: peft has put layers into the model, or taken them out.

        Args:
            names: the new names of slots by their old ones; of those that are not in it the layers are gone.
            added: new slots, of which the members have rows of their own.
        """

    def attach(self, table: Table) -> None:
        """Check the model, then register tensors and set rules."""

    def extend(self, table: Table, slots: list[str]) -> None:
        """Called after another method, attached later, has registered tensors in these slots."""

    def axis(self, call: Call) -> Axis | None:
        """Return the axis along which branches differ in this call, or None."""
        return None

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        """Return what happens inside every branch of this call besides replaced tensors, or None."""
        return None

    def deals(self, training: bool, requested: bool = False) -> int:
        """Return the number of branches to which the rows of a batch are dealt, each row to one branch; 0 to not deal.

        Args:
            training: whether the object is in training mode.
            requested: whether the caller requested it (`tile_and_reduce=False`).
        """
        return 0

    def repeats(self, training: bool) -> bool:
        """Return whether every training step (or prediction) runs the same tensor operations and nothing else, so that a graph can replay it.

        Only an override in the class itself counts; subclasses must override it again.
        """
        return False

    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        """Reduce the method's axis; by default its branches are equally likely models, see `spread`.

        Args:
            parts: "y" and the variances so far ("aleatoric", "epistemic"), each with the axis at `dim`.
            dim: dimension of the axis.

        Returns:
            The same without the axis, with the variance of this method added.
        """
        return spread(parts, dim)

    def average(self, y: Tensor, dim: int) -> Tensor:
        """Reduce the method's axis of a prediction without risk, to the "y" that `reduce` would return."""
        return y.mean(dim) if type(self).reduce is Method.reduce else self.reduce({"y": y}, dim)["y"]

    @property
    def likelihood_of_rows(self) -> bool:
        """Whether `likelihood` is a mean over independent rows and draws no random numbers."""
        return False

    def likelihood(self, target: Any, prediction: Any, auxiliary: Any, meaning: Meaning | None = None) -> Tensor:
        """For an axis with `own_first`: return the term that training adds to the loss.

        Args:
            target: targets.
            prediction: output of the model's own branch.
            auxiliary: output of the other branch; if there are several, each leaf is stacked to [branches, ...].
            meaning: meaning of the output if the others are single tensors; None for trees of tensors.
        """
        raise NotImplementedError(f"{self.name} has an axis with own_first and defines no likelihood")

    def probs(self, scores: Tensor, auxiliary: Tensor, meaning: Classes) -> Tensor:
        """For an axis with `own_first`: return class probabilities [..., classes] from the model's scores and the output of the other branch."""
        raise ValueError(f'{self.name} does not support class outputs; use output="values"')

    def prediction(self, primary: Tensor, auxiliary: Tensor) -> Tensor:
        """For an axis with `own_first`: return the prediction for the training loss, from the outputs of the model and the other branch."""
        return primary

    def quantiles(self, prediction: Tensor, auxiliary: Tensor) -> Tensor | None:
        """For an axis with `own_first`: return the quantiles [levels, ...] that the other branches predict, or None."""
        return None

    def check_ready(self, wrapped: Any) -> None:
        """Raise an error if risk cannot be computed yet."""

    def measure(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """With `own_pass`: return the prediction and the risk [rows]."""
        raise NotImplementedError(f"{self.name} has own_pass and defines no measure")

    def refine(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], y: Any, risks: dict[str, Any]
    ) -> dict[str, Any]:
        """With `refines`: return new risks by name, given those of all axes; only in evaluation mode, with inputs in the model's units."""
        return risks

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """With `needs_fit`: fit in closed form to the training inputs, in the forms that `Wrapped.fit` accepts."""

    def check(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise an error if a call with these inputs shows that `fit` would refuse the model; run before training and for an example."""

    def check_targets(self, wrapped: Any, prediction: Any, y: Any) -> None:
        """Raise an error if a prediction and its targets show that `fit` would refuse the data; run before training."""

    def tune(self, wrapped: Any, held_out: Any) -> None:
        """With `needs_fit`: choose settings on validation batches, pairs (input, target); `workbench.fit` calls it after `fit`."""

    def pace(self, at: float, epochs: int) -> float:
        """With `collects`: return the learning rate of `workbench.fit` relative to its peak, after `at` of `epochs` epochs."""
        raise NotImplementedError(f"{self.name} collects weights and defines no learning rate (pace)")

    def collect(self, wrapped: Any, epoch: int, epochs: int) -> None:
        """With `collects`: called by `workbench.fit` after each epoch, counted from 1."""

    def forget(self, table: Table) -> None:
        """Discard what was learned about the old weights; called after loading new ones from a state that does not contain this method."""

    def regularizer(self, table: Table, rows: int | None) -> Tensor | None:
        """Return a regularization term that training adds to the loss, or None."""
        return None

    def __repr__(self) -> str:
        named = {key: value for key, value in self.settings().items() if key not in self.unnamed}
        inside = ", ".join(f"{key}={value}" for key, value in named.items() if value not in (None, ""))
        return f"{self.name}({inside})"


def spread(parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    """Return the mean over an axis of equally likely models, with the variance of their predictions added to the epistemic variance.

    Law of total variance: Var[y] = E[Var[y | model]] + Var[E[y | model]]. Variances already in `parts` are averaged. The variance of the
    predictions is that of the population, not the unbiased estimate, so that a single model has none.
    """
    y = parts["y"]
    out = {name: value.mean(dim) for name, value in parts.items()}
    variance = _variance(y, out["y"], dim)
    out["epistemic"] = out["epistemic"] + variance if "epistemic" in out else variance
    return out


def _variance(y: Tensor, mean: Tensor, dim: int) -> Tensor:
    """Return the population variance along a dimension, given the mean."""
    if not y.numel():
        return mean.real  # torch.var warns about an empty batch
    # torch.export would turn comparisons of `numel` into constraints on the number of rows
    on_cpu = not torch.compiler.is_compiling() and y.device.type == "cpu"
    if not on_cpu or y.dtype not in (torch.float32, torch.float64) or mean.numel() < FEW:
        return torch.var(y, dim, correction=0)
    if y.numel() <= LARGE:
        # about 20 times as fast as torch.var over an outer dimension; relative to the first model, so that models that agree have none
        differences = y - y.narrow(dim, 0, 1)
        return (differences - differences.mean(dim, keepdim=True)).square().mean(dim)
    if torch.is_grad_enabled():
        return torch.var(y, dim, correction=0)
    # branch by branch, in pieces that fit the cache
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
    """Split an axis with `own_first` into the output of the model's own branch and that of the other branch (of several: stacked in front)."""
    primary, *auxiliary = answers.unbind(dim)
    if not auxiliary:  # a distribution without parameters besides the model's own output
        return primary, answers.narrow(dim, 0, 0).movedim(dim, 0)
    return primary, auxiliary[0] if len(auxiliary) == 1 else torch.stack(auxiliary)


class evaluating(Reverted):  # lower case, since it is used like a function
    """Context manager that puts a model in evaluation mode and restores the mode afterwards.

    Args:
        model: the model.
        whole: whether to include modules that wrapping added, which otherwise keep their mode.
    """

    def __init__(self, model: Any, whole: bool = False) -> None:
        seen, waiting = {model}, [model]  # faster than `named_modules`, which builds the path of every module
        self._modules = []
        while waiting:
            module = waiting.pop()
            if module.training:
                self._modules.append(module)
            children = {
                part for name, part in module._modules.items() if part is not None and (whole or "@" not in name)
            }
            waiting += children - seen
            seen |= children

    def begin(self) -> None:
        for module in self._modules:
            module.training = False

    def revert(self) -> None:
        for module in self._modules:
            module.training = True


def sqrt(variance: Tensor) -> Tensor:
    """Return the square root, with a gradient of zero instead of NaN where the variance is zero."""
    if not torch.is_grad_enabled():  # under vmap no tensor says that it requires gradients
        return variance.clamp_min(0).sqrt()  # not in place: recorded graphs are simplified only if nothing writes
    positive = variance > 0
    return torch.where(
        positive, torch.where(positive, variance, 1.0).sqrt(), torch.where(variance.isnan(), variance, 0.0)
    )


__all__ = ["Axis", "Call", "Intervention", "Method", "RankOne", "Rule", "Shared", "Split", "Stacked", "spread", "sqrt"]
