"""The copy of the model that a branch runs on: which tensors it takes, where they are installed, and what must not replace them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..introspect.bytecode import methods_of
from ..introspect.objects import tensors_and_generators
from ..introspect.parameter_writes import is_bounded, writes_parameters
from ..introspect.unregistered import assigned_in_forward, unregistered
from .clone import places
from .effects.attributes import Tree, Values, modules
from .effects.branch_values import MISSING, copy_values, set_values
from .effects.later_changes import LaterChanges
from .effects.parameters import REMEDY, ParameterViews
from .embeddings import LookUpForward, has_padding
from .encoder_layers import PaddedForward, WholeForward, can_be_padded, can_be_whole
from .joint_layers import JointForward, can_be_joint
from .plan import Index, Intervention, Plan, RankOne, Rule
from .rank_one import LAYERS, PLAIN, SMALL, DenseSlots, FactoredWeight, LayerForward, product
from .surroundings import is_symbolic
from .tree import tensors


class Clone:
    """Copy of the model's modules for one branch.

    Args:
        root: a structural copy of the model.
        slots: id of a tensor in the tree -> slot name, for every parameter that branches replace and for every buffer.
        buffers: slot names of the buffers.
        method: name of the method that a branch calls.
        rules: rules of the plans that it will run, by slot.
        dense_slots: slots that must hold dense tensors, not factors.
        undisturbed: function that returns whether no function mode or transform is active around the present call of the wrapped object.
    """

    def __init__(
        self,
        root: nn.Module,
        slots: dict[int, str],
        buffers: set[str],
        method: str,
        rules: dict[str, Rule],
        dense_slots: DenseSlots,
        undisturbed: Callable[[], bool],
    ) -> None:
        self.root, self.method = root, method
        self.tree = modules(root)
        self.places = places(root, slots)
        self._kept: list[tuple[Any, Any, str]] = []  # places where forward has put tensors of slots
        self._unregistered: set[tuple[nn.Module, str]] | None = None  # modules, and attributes that hold tensors
        self._assigned: list[tuple[nn.Module, str]] | None = None  # modules, and attributes that forward may set
        # its attributes before a pass of a model that has changed none, and what of them belongs to slots
        self.later: tuple[LaterChanges, list[tuple[Any, Any, Tensor]]] | None = None
        self.buffers = buffers
        self.copied_buffers = buffers  # buffers that the next pass may write into, so that it gets copies
        # buffers that may be written in evaluation mode too; torch's own layers write theirs in training mode only
        self.written_in_eval = {slot for slot in buffers if not _is_torch_layer(self.tree.get(slot.rpartition(".")[0]))}
        self._parameters = [
            (module._parameters, name, f"{path}.{name}" if path else name)
            for path, module in self.tree.items()
            for name in module._parameters
        ]
        names = {(id(holder), key): name for holder, key, name in self._parameters}
        # replaced parameters: container, key, slot, and parameter name
        self.taken_over = [
            (container, key, slot, names[id(container), key])
            for container, key, slot in self.places
            if slot not in buffers and (id(container), key) in names
        ]
        classes: list[Any] = [type(module) for module in self.tree.values()]
        # nn.Module registers what counts as a parameter, also if forward only keeps it in an attribute
        kind = {"_is_param": True} if any(map(_asks_for_parameters, classes)) else {}
        self._registers = any(map(_registers_parameters, classes))
        self._writes = any(map(is_bounded, self.tree.values())) or writes_parameters(root)
        # what users have set on a parameter, which torch's operations leave out, and what else tells a parameter from a tensor
        self._attributes = [
            (
                slot,
                vars(container[key]) if type(container[key]) in PLAIN else {},
                {**kind, "__deepcopy__": functools.partial(_copy_installed, container, key)},
            )
            for container, key, slot, _ in self.taken_over
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
            elif can_be_whole(module):
                module.__dict__["forward"] = WholeForward(module, path)
            elif can_be_padded(module):
                module.__dict__["forward"] = PaddedForward(module, undisturbed)
            elif has_padding(module):
                module.__dict__["forward"] = LookUpForward(module)

    def _factored_layers(self, factored: set[str]) -> dict[str, nn.Module]:
        """Return, by slot, the layers that can use a factored weight, which must not be used anywhere else."""
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
        """Return the slots whose weights are installed as factors; none if an intervention needs the dense weights."""
        if not self.layers:
            return ()
        replaces_tensors = any(type(i).tensors is not Intervention.tensors for i in plan.interventions)
        return () if replaces_tensors or torch.compiler.is_compiling() else self.layers.keys()

    def weight(self, slot: str, factors: Iterable[Tensor]) -> Tensor:
        """Return the weight of a layer with factors W, s and r: a `FactoredWeight`, or the product if that is simpler or faster."""
        weight, left, right = factors
        outside_vmap = torch._C._functorch.peek_interpreter_stack() is None
        # tensor subclasses (sharded, fake) need their own operations, and small products take less time than the factored way
        if type(weight) not in PLAIN or (outside_vmap and weight.numel() < SMALL):
            return product(weight, left, right)
        return FactoredWeight(slot, weight, left, right, self.dense_slots)

    def values(self, plan: Plan, index: Index) -> dict[str, Tensor]:
        """Return the tensors of a branch by slot: those that the rules pick and the buffers, as copies if the pass may write into them."""
        factored = self.factored_slots(plan)
        values = {slot: rule.pick(plan.bank, index) for slot, rule in plan.rules.items() if slot not in factored}
        for slot in factored:
            values[slot] = self.weight(slot, [factor.pick(plan.bank, index) for factor in plan.rules[slot].factors])
        values.update({slot: plan.bank.get(slot) for slot in self.buffers if slot not in values})
        if self.copied_buffers:
            with torch.inference_mode(False):  # tensors of inference mode would not count in-place writes
                values.update({slot: values[slot].clone() for slot in self.copied_buffers})
        return values

    def install(self, values: dict[str, Tensor]) -> None:
        """Install tensors by slot; those of parameters have their attributes, and can be told from tensors and deep-copied as they can."""
        if not torch.compiler.is_compiling():
            for slot, users_attributes, our_attributes in self._attributes:
                if type(value := values.get(slot)) in (Tensor, FactoredWeight):
                    attributes = vars(value)
                    attributes.update(users_attributes)
                    attributes.update(our_attributes)
        for container, key, slot in (*self.places, *self._kept):
            if slot in values:
                container[key] = values[slot]

    def note_kept(self, values: Values) -> None:
        """Note which of these attributes hold tensors of the pass, for which the next pass has others."""
        slots = {id(container[key]): slot for slot, (container, key) in self.first_place.items()}
        if any(id(item) in slots for value in values.values() for item in tensors_and_generators(value)):
            known = {(id(container), key) for container, key, _ in self.places}
            present = places(self.root, slots, [value for value in values.values() if value is not MISSING])
            self._kept = [place for place in present if (id(place[0]), place[1]) not in known]
        else:
            self._kept = []

    def copy_attributes(self, attributes: Values, source: Tree, temporary: bool = False) -> None:
        """Replace attributes of the clone by copies of another tree's attributes.

        Containers, and unregistered modules inside them, can hold tensors of slots; `places` is updated to those in the copies.

        Args:
            attributes: attribute values that refer to modules of `source`.
            source: the other tree, or the clone's own.
            temporary: whether the present attributes will be restored later and must still be updated until then.
        """
        values = copy_values(attributes, source, self.tree)
        set_values(values, self.tree)
        slots = {id(container[key]): slot for container, key, slot in self.places} if values else {}
        if any(id(item) in slots for value in values.values() for item in tensors_and_generators(value)):
            copies = [value for name, value in values.items() if value is not attributes.get(name)]
            self.places = [*(self.places if temporary else ()), *places(self.root, slots, copies)]

    def constants(self) -> list[Tensor]:
        """Return the tensors that were no parameters and buffers when the model was wrapped, other than those that forward leaves behind.

        Buffers of torch's layers among them were added since, by pruning and normalizing hooks.
        """
        if self._unregistered is None:
            with torch._C.DisableTorchFunctionSubclass():  # a factored weight that is looked at becomes a product
                entries = unregistered(self.root)
            self._unregistered = {(entry.owner, entry.attribute) for entry in entries if not entry.requires_grad}
        held = tensors([owner.__dict__.get(attribute) for owner, attribute in self._unregistered])
        return held + self._buffers_since(_is_torch_layer)

    def left_behind(self) -> list[Tensor]:
        """Return the tensors that earlier calls have left in attributes, and in buffers that they have made."""
        if self._assigned is None:
            self._assigned = assigned_in_forward(self.root)
        slots = self._installed()
        held = tensors([owner.__dict__.get(attribute) for owner, attribute in self._assigned])
        made = self._buffers_since(lambda module: not _is_torch_layer(module))
        return made + [tensor for tensor in held if id(tensor) not in slots]

    def _installed(self) -> set[int]:
        return {id(container[key]) for container, key in self.first_place.values()}

    def _buffers_since(self, which: Callable[[nn.Module], bool]) -> list[Tensor]:
        """Return the buffers of such modules that they did not have when the model was wrapped."""
        slots = self._installed()
        buffers = tensors([list(module._buffers.values()) for module in self.tree.values() if which(module)])
        return [buffer for buffer in buffers if id(buffer) not in slots]

    def loose_tensors(self) -> list[tuple[Any, Any, Tensor]]:
        """Return the tensors of slots that lie in attributes, or in lists and dicts held by these, as (container, key, tensor)."""
        registered = {id(d) for m in self.tree.values() for d in (m._parameters, m._buffers)}
        return [
            (container, key, container[key])
            for container, key, _ in (*self.places, *self._kept)
            if id(container) not in registered
        ]

    @contextmanager
    def with_tensors(self, loose: list[tuple[Any, Any, Tensor]]) -> Iterator[None]:
        """Reinstall these tensors inside the block, so that the tensors installed for a pass do not count as changes.

        An attribute that forward has set to another tensor is left as it is.
        """
        attributes = {id(module.__dict__) for module in self.tree.values()}
        installed = {id(container[key]) for container, key in self.first_place.values()}
        loose = [
            (container, key, tensor)
            for container, key, tensor in loose
            if id(container) not in attributes or id(container.get(key)) in installed
        ]
        before = [(container, key, container[key]) for container, key, _ in loose if _has_key(container, key)]
        for container, key, tensor in loose if len(before) == len(loose) else ():
            container[key] = tensor
        try:
            yield
        finally:
            for container, key, tensor in before:
                container[key] = tensor

    def refuse_changed_holders(self, changes: Collection[tuple[str, str]]) -> None:
        """Raise RuntimeError if forward changed a list or dict that holds tensors of slots: the next pass could not replace them."""
        for path, name in changes:
            value = self.tree[path].__dict__.get(name)
            slot = next((slot for container, _, slot in self.places if container is value), None)
            if slot is not None:
                raise RuntimeError(
                    f"forward of {type(self.root).__name__} changes {f'{path}.{name}'.lstrip('.')!r}, a {type(value).__name__} that also holds "
                    f"the parameter {slot!r}, of which every branch has its own: keep what forward changes in another attribute"
                )

    @torch.no_grad()  # activation checkpointing counts the tensors saved for gradients, and later calls have no such test
    def refuse_lost_writes(self, plan: Plan) -> None:
        """Raise RuntimeError if the first pass wrote into a product of rank-one factors, where the write would be lost."""
        if torch.compiler.is_compiling() or is_symbolic():
            return
        if any(type(i).tensors is not Intervention.tensors for i in plan.interventions):
            return
        for container, key, slot, name in self.taken_over:
            rule, present = plan.rules.get(slot), container[key]
            if not isinstance(rule, RankOne) or isinstance(present, FactoredWeight) or present.is_meta:
                continue
            if is_batched(present):
                expected, present = rule.dense(plan.bank)[0], torch._C._functorch.get_unwrapped(present)
            else:
                expected = rule.pick(plan.bank, plan.indices[0])
            # inside a function transform of the user, values cannot be compared
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (expected, present))):
                continue
            # a layer may have been cast to another dtype, which is no write
            if expected.shape == present.shape and not torch.equal(expected.detach().to(present), present.detach()):
                raise RuntimeError(
                    f"forward of {type(self.root).__name__} writes into its parameter {name!r}, which is a product of factors in each branch: "
                    f"the write would be lost after the call. With share=None every voter has its own. {REMEDY}"
                )

    def refuse_replaced(self, values: dict[str, Tensor]) -> None:
        """Raise RuntimeError if a pass has replaced a parameter that the branch has of its own."""
        for container, key, slot, name in self.taken_over:
            if slot in values and container[key] is not values[slot]:
                raise RuntimeError(replaced_parameter(type(self.root).__name__, name))

    def call_model(self, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        """Call the model with its hooks, or the other method that is wrapped."""
        with self._parameter_views(plan):
            if self.method == "forward":
                return self.root(*args, **kwargs)
            return getattr(self.root, self.method)(*args, **kwargs)

    def _parameter_views(self, plan: Plan) -> AbstractContextManager[Any]:
        if torch.compiler.is_compiling() or not self._writes:
            return ParameterViews(self.root, ()) if self._registers else nullcontext()
        axes = {axis.name for axis in plan.axes if axis.size > 1}
        return ParameterViews(
            self.root,
            [
                (name, container[key], axes <= {*plan.rules[slot].axes()} if slot in plan.rules else False)
                for container, key, slot, name in self.taken_over
            ],
        )

    def parameters(self) -> list[tuple[Tensor, str]]:
        """Return every installed parameter with its name."""
        return [(tensor, name) for holder, key, name in self._parameters if (tensor := holder[key]) is not None]


@functools.cache
def _asks_for_parameters(cls: Any) -> bool:
    """Return whether the code of a class asks whether something is an `nn.Parameter`."""
    codes = [function.__code__.co_names for _, function in methods_of(cls)]
    return any("get_parameter" in names or {"isinstance", "Parameter"} <= set(names) for names in codes)


@functools.cache
def _registers_parameters(cls: Any) -> bool:
    """Return whether a class registers what it is handed if that is an `nn.Parameter`; forward may make modules of it from its parameters."""
    names = {"isinstance", "Parameter", "register_parameter"}
    return any(names <= set(function.__code__.co_names) for _, function in methods_of(cls))


def _copy_installed(container: Any, key: Any, memo: Any) -> nn.Parameter:
    """Return a copy of an installed parameter, as torch copies a parameter."""
    return nn.Parameter(container[key].detach().clone(), container[key].requires_grad)


def _has_key(container: Any, key: Any) -> bool:
    try:
        container[key]
    except (IndexError, KeyError):
        return False
    return True


def replaced_parameter(model: str, name: str) -> str:
    """Return the error message for a forward that replaces a parameter."""
    path, _, attribute = name.rpartition(".")
    return (
        f"forward of {model} replaces its parameter {name!r} by another tensor, which would be lost after the call. A value that forward "
        f"computes, such as a moving average, belongs in a buffer: self.register_buffer({attribute!r}, ...) when {path or 'the model'} is "
        "made, "
        f"and self.{attribute} = tensor, without nn.Parameter, in forward"
    )


def _is_torch_layer(module: nn.Module | None) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def is_batched(tensor: Any) -> bool:
    """Return whether a tensor is batched by vmap; such tensors do not count in-place writes."""
    return isinstance(tensor, Tensor) and torch._C._functorch.is_batchedtensor(tensor)
