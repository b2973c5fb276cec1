"""One branch in a clone of the model: install its tensors, run the model, read back what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..introspect.objects import tensors_and_generators
from .clone import places
from .effects.attributes import Tree, Values, modules
from .effects.branch_values import carried, put
from .effects.containers import Containers, holds_mutable
from .effects.parameters import REMEDY
from .joint_convolution import JointForward, can_be_joint
from .plan import Index, Intervention, Plan, RankOne, Rule
from .rank_one import LAYERS, PLAIN, SMALL, DenseSlots, FactoredWeight, LayerForward, product
from .results import Result
from .state import seal, unseal
from .tree import tensors, version


class Clone:
    """A module tree of its own for one branch.

    Args:
        root: a structural copy of the model.
        slots: id of a tensor that the tree holds -> slot name, for every taken-over parameter and for every buffer.
        buffers: the slot names that are buffers.
        method: name of the method that a branch calls.
        rules: of the plans that it will run.
        dense_slots: slots that must hold whole tensors, no factors.
    """

    def __init__(
        self,
        root: nn.Module,
        slots: dict[int, str],
        buffers: set[str],
        method: str,
        rules: dict[str, Rule],
        dense_slots: DenseSlots,
    ) -> None:
        self.root, self.method = root, method
        self.tree = modules(root)
        self.places = places(root, slots)
        self.buffers = buffers
        self.copied_buffers = buffers  # those that the next pass may write into, so that it is given copies of them
        # those that may be written into in evaluation mode as well: torch's layers write into theirs in training mode only
        self.unsteady_buffers = {slot for slot in buffers if not _is_torchs(self.tree.get(slot.rpartition(".")[0]))}
        self._parameters = [
            (module._parameters, name, f"{path}.{name}" if path else name)
            for path, module in self.tree.items()
            for name in module._parameters
        ]
        names = {(id(holder), key): name for holder, key, name in self._parameters}
        # the parameters that each pass finds other tensors in: where they are, their slots, and their names
        self.taken_over = [
            (container, key, slot, names[id(container), key])
            for container, key, slot in self.places
            if slot not in buffers and (id(container), key) in names
        ]
        self.first_place: dict[str, tuple[Any, Any]] = {}  # by slot: container and key
        for container, key, slot in self.places:
            self.first_place.setdefault(slot, (container, key))
        self.dense_slots = dense_slots
        self.layers = self._factored_layers(
            {slot for slot, rule in rules.items() if rule.factors and slot not in dense_slots}
        )
        for layer in self.layers.values():
            layer.__dict__["forward"] = LayerForward(layer)
        for path, module in self.tree.items():
            pair = [f"{path}.{name}".lstrip(".") for name in ("weight", "bias")]
            if can_be_joint(module) and all(slot in rules and rules[slot].axes() for slot in pair):
                module.__dict__["forward"] = JointForward(module)

    def _factored_layers(self, factored: set[str]) -> dict[str, nn.Module]:
        """The layers that can work with a factored weight, by its slot: those whose own weight it is, and nobody else's."""
        uses = Counter(slot for _, _, slot in self.places)
        owners = {
            id(module._parameters): module
            for module in self.tree.values()
            if type(module) in LAYERS and "forward" not in module.__dict__
        }
        return {
            slot: owners[id(container)]
            for slot, (container, key) in self.first_place.items()
            if slot in factored and id(container) in owners and key == "weight" and uses[slot] == 1
        }

    def factored_slots(self, plan: Plan) -> Collection[str]:
        """The slots whose weights the layers of the clone take in factors, unless somebody else is to have a look at them before."""
        if not self.layers:
            return ()
        exchanged = any(type(i).tensors is not Intervention.tensors for i in plan.interventions)
        return () if exchanged or torch.compiler.is_compiling() else self.layers.keys()

    def weight(self, slot: str, factors: Iterable[Tensor]) -> Tensor:
        """The product of the factors W, s and r for a layer, or what stands for it there."""
        weight, left, right = factors
        alone = torch._C._functorch.peek_interpreter_stack() is None
        # sharded, or without values: it has its own ways; or multiplied sooner than its layer is told of factors
        if type(weight) not in PLAIN or (alone and weight.numel() < SMALL):
            return product(weight, left, right)
        return FactoredWeight(slot, weight, left, right, self.dense_slots)

    def values(self, plan: Plan, index: Index) -> dict[str, Tensor]:
        """The tensors of a branch by slot: those that the rules pick, and the buffers; of those that it may write into, copies."""
        factored = self.factored_slots(plan)
        values = {slot: rule.pick(plan.bank, index) for slot, rule in plan.rules.items() if slot not in factored}
        for slot in factored:
            values[slot] = self.weight(slot, [factor.pick(plan.bank, index) for factor in plan.rules[slot].factors])
        values.update({slot: plan.bank.get(slot) for slot in self.buffers if slot not in values})
        if self.copied_buffers:
            with torch.inference_mode(False):  # what is written into must keep count of it, in inference mode as well
                values.update({slot: values[slot].clone() for slot in self.copied_buffers})
        return values

    def install(self, values: dict[str, Tensor]) -> None:
        """Put tensors in the places of their slots."""
        for container, key, slot in self.places:
            if slot in values:
                container[key] = values[slot]

    def take_up(self, attributes: Values, source: Tree, for_now: bool = False) -> None:
        """Put copies of another tree's attributes in the place of the clone's own.

        Containers, and modules in them that nobody has registered, can hold tensors of slots: those of the copies are found as well.

        Args:
            attributes: they are in terms of the modules of `source`.
            source: the other tree, or the clone's own.
            for_now: what is there at present comes back later, and is kept up to date until then.
        """
        values = carried(attributes, source, self.tree)
        put(values, self.tree)
        slots = {id(container[key]): slot for container, key, slot in self.places} if values else {}
        if any(id(item) in slots for value in values.values() for item in tensors_and_generators(value)):
            self.places = [*(self.places if for_now else ()), *places(self.root, slots)]

    def loose_tensors(self) -> list[tuple[Any, Any, Tensor]]:
        """What is at present in the places of slots in lists and dicts that are attributes: container, key and tensor."""
        of_modules = {id(d) for m in self.tree.values() for d in (m.__dict__, m._parameters, m._buffers)}
        return [
            (container, key, container[key]) for container, key, _ in self.places if id(container) not in of_modules
        ]

    @contextmanager
    def with_tensors(self, loose: list[tuple[Any, Any, Tensor]]) -> Iterator[None]:
        """With these in their places again, so that what a pass was given to work with does not count as a change."""
        before = [(container, key, container[key]) for container, key, _ in loose if _has(container, key)]
        for container, key, tensor in loose if len(before) == len(loose) else ():
            container[key] = tensor
        try:
            yield
        finally:
            for container, key, tensor in before:
                container[key] = tensor

    def refuse_changed_holders(self, changes: Collection[tuple[str, str]]) -> None:
        """Raise RuntimeError where forward changed a list or dict that holds tensors of slots: the next pass would find them in another."""
        for path, name in changes:
            value = self.tree[path].__dict__.get(name)
            slot = next((slot for container, _, slot in self.places if container is value), None)
            if slot is not None:
                raise RuntimeError(
                    f"forward of {type(self.root).__name__} changes {f'{path}.{name}'.lstrip('.')!r}, a {type(value).__name__} that holds the "
                    f"parameter {slot!r} as well, of which every branch has its own: keep what forward changes in another attribute"
                )

    def refuse_lost_writes(self, plan: Plan) -> None:
        """Raise RuntimeError if the first pass wrote into a product of rank-one factors, which nobody keeps."""
        if torch.compiler.is_compiling() or any(
            type(i).tensors is not Intervention.tensors for i in plan.interventions
        ):
            return
        for container, key, slot, name in self.taken_over:
            rule, present = plan.rules.get(slot), container[key]
            if not isinstance(rule, RankOne) or isinstance(present, FactoredWeight) or present.is_meta:
                continue
            if is_batched(present):
                expected, present = rule.dense(plan.bank)[0], torch._C._functorch.get_unwrapped(present)
            else:
                expected = rule.pick(plan.bank, plan.indices[0])
            # inside of the user's own transform
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (expected, present))):
                continue
            # a layer may have been cast to another dtype, which is no write
            if expected.shape == present.shape and not torch.equal(expected.detach().to(present), present.detach()):
                raise RuntimeError(
                    f"forward of {type(self.root).__name__} writes into its parameter {name!r}, which is a product of factors in each branch: "
                    f"what is written would be gone after the call. With share=None every voter has it as its own. {REMEDY}"
                )

    def refuse_replaced(self, values: dict[str, Tensor]) -> None:
        """Raise RuntimeError if a pass has put another tensor in the place of a parameter that the branch has of its own."""
        for container, key, slot, name in self.taken_over:
            if slot in values and container[key] is not values[slot]:
                raise RuntimeError(replaced_parameter(type(self.root).__name__, name))

    def call_model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as its user does, with its own hooks; or its other method that is wrapped."""
        if self.method == "forward":
            return self.root(*args, **kwargs)
        return getattr(self.root, self.method)(*args, **kwargs)

    def parameters(self) -> list[tuple[Tensor, str]]:
        """Every parameter in place with its name, the taken-over ones included."""
        return [(tensor, name) for holder, key, name in self._parameters if (tensor := holder[key]) is not None]


def _has(container: Any, key: Any) -> bool:
    try:
        container[key]
    except (IndexError, KeyError):
        return False
    return True


def replaced_parameter(model: str, name: str) -> str:
    """What to do where forward makes a parameter anew."""
    path, _, attribute = name.rpartition(".")
    return (
        f"forward of {model} puts another tensor in the place of its parameter {name!r}, which would be gone after the call. What forward "
        f"computes, such as a moving average, belongs in a buffer: self.register_buffer({attribute!r}, ...) when {path or 'the model'} is made, "
        f"and self.{attribute} = tensor, without nn.Parameter, in forward"
    )


def _is_torchs(module: nn.Module | None) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def is_batched(tensor: Any) -> bool:
    """Whether a tensor is one of vmap's, which do not count what is written into them."""
    return isinstance(tensor, Tensor) and torch._C._functorch.is_batchedtensor(tensor)


def refuse_recomputing(
    why: str = "activation checkpointing recomputes outside this pass",
) -> AbstractContextManager[None]:
    """Around a pass that cannot be run again in the backward pass: activation checkpointing raises there and then."""
    return _refusing(why) if torch.is_grad_enabled() else nullcontext()


@contextmanager
def _refusing(why: str) -> Iterator[None]:
    with torch.autograd.graph.disable_saved_tensors_hooks(why):
        try:
            yield
        except RuntimeError as error:
            if why not in str(error):
                raise
            raise RuntimeError(why) from None


def run_branch(
    clone: Clone,
    plan: Plan,
    values: dict[str, Tensor],
    index: Index,
    args: tuple,
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any] | None = None,
    sealed: bool = False,
) -> Result:
    """Run one branch on a clone.

    Args:
        clone: where.
        plan: the interventions are taken from it.
        values: the tensors to install, by slot; buffers among them must be the branch's own.
        index: the branch.
        args, kwargs: the inputs.
        mode: what is to be active while the model itself runs, inside the interventions.
        sealed: whether there are parts of states among the inputs, which are sealed.
    """
    picked = values
    for intervention in plan.interventions:
        values = intervention.tensors(values, index)
        args, kwargs = intervention.inputs(args, kwargs, index)
    clone.install(values)
    versions = {slot: _count_writes(values[slot]) for slot in clone.buffers}
    if not plan.interventions and mode is None:
        args, kwargs, containers = _opened(args, kwargs, sealed)
        output = seal(clone.call_model(*args, **kwargs), plan.state)
        clone.refuse_replaced(values)
        return Result(output, _written_buffers(clone, values, versions), inputs=containers)
    with ExitStack() as stack:
        if plan.interventions:
            parameters, inputs = clone.parameters(), tensors((args, kwargs))
            state = [values[slot] for slot in clone.buffers]
            for intervention in plan.interventions:
                context = intervention.active(parameters, state, inputs)
                if context is not None:
                    stack.enter_context(context)
                    if intervention.draws:  # the noise would be another one
                        why = (
                            "noise on activations cannot be drawn again where activation checkpointing recomputes them in the backward pass: "
                            + intervention.checkpoint_remedy
                        )
                        stack.enter_context(refuse_recomputing(why))
        if mode is not None:
            stack.enter_context(mode)
        args, kwargs, containers = _opened(args, kwargs, sealed)
        output = seal(clone.call_model(*args, **kwargs), plan.state)
    clone.refuse_replaced(values)
    for intervention in reversed(plan.interventions):
        output = intervention.output(output, index)
    new = _written_buffers(clone, values, versions)
    if values is not picked and not torch.is_grad_enabled():  # no backward pass will ask for the tensors of this one
        clone.install({slot: value for slot, value in picked.items() if slot not in clone.buffers})
    taps = {name: tensor for intervention in plan.interventions for name, tensor in intervention.taps.items()}
    return Result(output, new, taps, containers)


def _opened(
    args: tuple, kwargs: dict[str, Any], sealed: bool
) -> tuple[tuple[Any, ...], dict[str, Any], Containers | None]:
    """The inputs as the model gets them, and the containers among them that it may fill."""
    opened = unseal((args, kwargs)) if sealed else (args, kwargs)
    return (*opened, Containers(args, kwargs, opened) if holds_mutable(args, kwargs) else None)


def _written_buffers(clone: Clone, values: dict[str, Tensor], versions: dict[str, int]) -> dict[str, Tensor]:
    """The buffers that a pass has changed."""
    if not clone.buffers:
        return {}
    # batch norm does not count its writes into running statistics, so in training every buffer is taken for written
    training = any(module.training for module in clone.tree.values())
    new: dict[str, Tensor] = {}
    for slot in clone.buffers:
        container, key = clone.first_place[slot]
        value = container[key]
        if training or value is not values[slot] or _count_writes(value) != versions[slot]:
            new[slot] = value
    return new


def _count_writes(tensor: Tensor) -> int:
    """How often a tensor was written in place; vmap's do not count it, but those inside of them do."""
    while is_batched(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return version(tensor)
