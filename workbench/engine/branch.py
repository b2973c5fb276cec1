"""One branch: install its tensors in a clone, run the model there, read back what changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor, nn

from .clone import places
from .effects.attributes import modules
from .plan import Index, Intervention, Plan, Rule
from .rank_one import LAYERS, PLAIN, SMALL, Factored, Opener, Whole, product
from .tree import tensors, version


class Clone:
    """A module tree of its own for one branch.

    Args:
        root: a structural copy of the model.
        slots: id of a tensor that the tree holds -> slot name, for every taken-over parameter and for every buffer.
        buffers: the slot names that are buffers.
        method: name of the method that a branch calls.
        rules: of the plans that it will run.
        whole: slots that must hold whole tensors, no factors.
    """

    def __init__(
        self,
        root: nn.Module,
        slots: dict[int, str],
        buffers: set[str],
        method: str,
        rules: dict[str, Rule],
        whole: Whole,
    ) -> None:
        self.root, self.method = root, method
        self.tree = modules(root)
        self.places = places(root, slots)
        self.buffers = buffers
        self.own = buffers  # those among them that the next pass may write into, so that it has copies of them
        # torch's own layers write into theirs in training mode only
        self.unsteady = {slot for slot in buffers if not _is_torchs(self.tree.get(slot.rpartition(".")[0]))}
        self._parameters = [
            (module._parameters, name, f"{path}.{name}" if path else name)
            for path, module in self.tree.items()
            for name in module._parameters
        ]
        self.home: dict[str, tuple[Any, Any]] = {}
        for container, key, slot in self.places:
            self.home.setdefault(slot, (container, key))
        self.whole = whole
        self.layers = self._layers({slot for slot, rule in rules.items() if rule.factors and slot not in whole})
        for layer in self.layers.values():
            layer.__dict__["forward"] = Opener(layer)

    def _layers(self, factored: set[str]) -> dict[str, nn.Module]:
        """The layers that can work with a factored weight, by its slot: those whose own weight it is, and nobody else's."""
        uses = Counter(slot for _, _, slot in self.places)
        owners = {
            id(module._parameters): module
            for module in self.tree.values()
            if type(module) in LAYERS and "forward" not in module.__dict__
        }
        return {
            slot: owners[id(container)]
            for slot, (container, key) in self.home.items()
            if slot in factored and id(container) in owners and key == "weight" and uses[slot] == 1
        }

    def factored(self, plan: Plan) -> Collection[str]:
        """The slots whose weights the layers of the clone take in factors, unless somebody else is to have a look at them before."""
        if not self.layers:
            return ()
        exchanged = any(type(i).tensors is not Intervention.tensors for i in plan.interventions)
        return () if exchanged or torch.compiler.is_compiling() else self.layers.keys()

    def weight(self, slot: str, factors: Iterable[Tensor]) -> Tensor:
        """What stands for the product of the factors W, s and r in a layer."""
        weight, left, right = factors
        alone = torch._C._functorch.peek_interpreter_stack() is None
        # sharded, or without values: it has its own ways; or multiplied sooner than its layer is told of factors
        if type(weight) not in PLAIN or (alone and weight.numel() < SMALL):
            return product(weight, left, right)
        return Factored(slot, weight, left, right, self.whole)

    def install(self, values: dict[str, Tensor]) -> None:
        for container, key, slot in self.places:
            if slot in values:
                container[key] = values[slot]

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives: as it is called, with its own hooks; or by another method."""
        if self.method == "forward":
            return self.root(*args, **kwargs)
        return getattr(self.root, self.method)(*args, **kwargs)

    def parameters(self) -> list[tuple[Tensor, str]]:
        """Every parameter in place with its name, the taken-over ones included."""
        return [(tensor, name) for held, key, name in self._parameters if (tensor := held[key]) is not None]


def _is_torchs(module: nn.Module | None) -> bool:
    return type(module).__module__.startswith("torch.nn.")


@dataclass
class Result:
    """What one branch gave."""

    output: Any
    buffers: dict[str, Tensor]  # the slots whose value changed
    taps: dict[str, Tensor] = field(default_factory=dict)


class Together(Sequence[Result]):
    """What all branches gave in one pass, cut apart only where a single one is asked for.

    Args:
        sizes: number of branches along each axis, outermost first.
        leaves: the leaves of the output: tensors [*sizes, ...], and whatever is no tensor once for all.
        rebuild: puts as many leaves into the shape of the model's output.
        buffers, taps: [*sizes, ...], see `Result`.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        leaves: list[Any],
        rebuild: Callable[[list[Any]], Any],
        buffers: dict[str, Tensor],
        taps: dict[str, Tensor],
    ) -> None:
        self.sizes, self.leaves, self.rebuild, self.buffers, self.taps = sizes, leaves, rebuild, buffers, taps

    def __len__(self) -> int:
        return math.prod(self.sizes)

    @overload
    def __getitem__(self, k: int) -> Result: ...
    @overload
    def __getitem__(self, k: slice) -> list[Result]: ...
    def __getitem__(self, k: int | slice) -> Result | list[Result]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        place: list[int] = []
        rest = range(len(self))[k]
        for size in reversed(self.sizes):
            rest, position = divmod(rest, size)
            place.insert(0, position)
        at = tuple(place)
        return Result(
            self.rebuild([leaf[at] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]),
            {slot: tensor[at] for slot, tensor in self.buffers.items()},
            {name: tensor[at] for name, tensor in self.taps.items()},
        )

    def __add__(self, other: Together) -> Together:
        """Those of two parts of the outermost axis."""
        return Together(
            (self.sizes[0] + other.sizes[0], *self.sizes[1:]),
            [
                torch.cat([mine, theirs]) if isinstance(mine, Tensor) else mine
                for mine, theirs in zip(self.leaves, other.leaves, strict=True)
            ],
            self.rebuild,
            {slot: torch.cat([tensor, other.buffers[slot]]) for slot, tensor in self.buffers.items()},
            {name: torch.cat([tensor, other.taps[name]]) for name, tensor in self.taps.items()},
        )


def is_batched(tensor: Any) -> bool:
    """Whether a tensor is one of vmap's, which do not count what is written into them."""
    return isinstance(tensor, Tensor) and torch._C._functorch.is_batchedtensor(tensor)


@contextmanager
def refuse_recomputing(why: str = "activation checkpointing recomputes outside this pass") -> Iterator[None]:
    """Around a pass that cannot be run again in the backward pass: activation checkpointing raises there and then."""
    if not torch.is_grad_enabled():
        yield
        return
    with torch.autograd.graph.disable_saved_tensors_hooks(why):
        try:
            yield
        except RuntimeError as error:
            if why not in str(error):
                raise
            raise RuntimeError(why) from None


_DRAWN = (
    "noise on activations cannot be drawn again where activation checkpointing recomputes them in the backward pass: use "
    'sample.Wrapper(where="weights"), or switch checkpointing off'
)


def call(
    clone: Clone,
    plan: Plan,
    values: dict[str, Tensor],
    index: Index,
    args: tuple,
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any] | None = None,
) -> Result:
    """Run one branch on a clone.

    Args:
        clone: where.
        plan: the interventions are taken from it.
        values: the tensors to install, by slot; buffers among them must be the branch's own.
        index: the branch.
        args, kwargs: the inputs.
        mode: what is to be active while the model itself runs, inside the interventions.
    """
    picked = values
    for intervention in plan.interventions:
        values = intervention.tensors(values, index)
        args, kwargs = intervention.inputs(args, kwargs)
    clone.install(values)
    versions = {slot: _writes(values[slot]) for slot in clone.buffers}
    if not plan.interventions and mode is None:
        output = clone.called(*args, **kwargs)
        return Result(output, _written(clone, values, versions))
    with ExitStack() as stack:
        if plan.interventions:
            parameters, inputs = clone.parameters(), tensors((args, kwargs))
            state = [values[slot] for slot in clone.buffers]
            for intervention in plan.interventions:
                context = intervention.active(parameters, state, inputs)
                if context is not None:
                    stack.enter_context(context)
                    if intervention.draws:  # the noise would be another one
                        stack.enter_context(refuse_recomputing(_DRAWN))
        if mode is not None:
            stack.enter_context(mode)
        output = clone.called(*args, **kwargs)
    new = _written(clone, values, versions)
    if values is not picked and not torch.is_grad_enabled():  # no backward pass will ask for the tensors of this one
        clone.install({slot: value for slot, value in picked.items() if slot not in clone.buffers})
    taps = {name: tensor for intervention in plan.interventions for name, tensor in intervention.taps.items()}
    return Result(output, new, taps)


def _written(clone: Clone, values: dict[str, Tensor], versions: dict[str, int]) -> dict[str, Tensor]:
    """The buffers that a pass has changed."""
    if not clone.buffers:
        return {}
    # batch norm does not count its writes into running statistics, so in training every buffer is taken for written
    training = any(module.training for module in clone.tree.values())
    new: dict[str, Tensor] = {}
    for slot in clone.buffers:
        container, key = clone.home[slot]
        value = container[key]
        if training or value is not values[slot] or _writes(value) != versions[slot]:
            new[slot] = value
    return new


def _writes(tensor: Tensor) -> int:
    """How often a tensor was written in place; vmap's do not count it, but those inside of them do."""
    while is_batched(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return version(tensor)
