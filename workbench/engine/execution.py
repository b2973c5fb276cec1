"""Order of execution: the layers that a model runs to compute each of its outputs, observed in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..introspect.parameter_writes import IN_PLACE
from .plan import Index, Intervention
from .sites import CHOOSING, METADATA, Sites, tensors_among
from .tensor_facts import TensorFacts
from .tree import flatten, is_float, paths

Positions = dict[str, int]  # path of a module with parameters -> position of its last run


@dataclass(frozen=True)
class Execution:
    """Record of one pass of a model.

    Args:
        outputs: for each main output, the paths of the modules whose parameters it depends on, in the order of their last runs. Outputs that
            other outputs are computed from (hidden states, caches), and scalars next to other outputs (losses), are not main outputs.
        names: names of the main outputs.
        noisy: parameter names of each call that mixes parameters with data other than the model's inputs alone.
        raw: parameter names of each call that mixes parameters with the model's inputs alone.
    """

    outputs: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    noisy: frozenset[tuple[str, ...]] = frozenset()
    raw: frozenset[tuple[str, ...]] = frozenset()

    def modules(self) -> list[str]:
        """Return the paths of all modules that the main outputs depend on."""
        return [path for output in self.outputs for path in output]


class Watch(Intervention):
    """Intervention that observes one pass and stores it in `execution`.

    Args:
        owners: path of the owning module by parameter name.
        contractions: see `Sites`.
        choices: whether a tensor also depends on tensors that only selected it from another, as scores select boxes.
    """

    def __init__(self, owners: Mapping[str, str], contractions: bool, choices: bool = True) -> None:
        self.owners, self.contractions, self.choices, self.taps = owners, contractions, choices, {}
        self.execution: Execution | None = None

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        return installed  # overridden so that dense weights are installed instead of factors

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        owned = [(tensor, self.owners[name]) for tensor, name in parameters if name in self.owners]
        self._order = _Order(owned, self.choices)
        self._calls: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}

        def at_site(names: frozenset[str], leaves: list[Any], live: list[int], raw: list[int]) -> list[Any]:
            self._calls[bool(live)].add(tuple(sorted(names)))
            return leaves

        return self._observed(Sites(parameters, state, inputs, at_site, contractions=self.contractions))

    @contextmanager
    def _observed(self, sites: Sites) -> Iterator[None]:
        with self._order, sites:
            yield

    def output(self, output: Any, index: Index) -> Any:

        named = zip(paths(output), flatten(output)[0], strict=True)
        leaves = [(name, leaf, self._order.behind(leaf)) for name, leaf in named if is_float(leaf)]
        leaves = [entry for entry in leaves if entry[2]]
        leaves = [entry for entry in leaves if entry[1].dim()] or leaves
        main = [
            (name, positions)
            for name, _, positions in leaves
            if not any(positions.keys() < others.keys() for _, _, others in leaves)
        ]
        self.execution = Execution(
            tuple(tuple(sorted(positions, key=positions.__getitem__)) for _, positions in main),
            tuple(name for name, _ in main),
            frozenset(self._calls[True]),
            frozenset(self._calls[False] - self._calls[True]),
        )
        return output


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """A call that parameters went into, and the steps behind its inputs: copies of all modules so far would grow with every layer."""

    before: tuple[_Step, ...]
    modules: Sequence[str]
    position: int


class _Order(TorchFunctionMode):
    """Function mode that records, for every tensor, the modules whose parameters it was computed from, and when each of them ran.

    Tensors are identified by their storage, so that a write into a part of a tensor counts for the whole.
    """

    def __init__(self, parameters: Sequence[tuple[Tensor, str]], choices: bool) -> None:
        super().__init__()
        self._choices = choices
        self._owners = TensorFacts((tensor, frozenset((path,))) for tensor, path in parameters)
        self._registered = {path: i for i, path in enumerate(dict.fromkeys(path for _, path in parameters))}
        self._behind: dict[int, _Step] = {}
        self._alive: list[Any] = []  # strong references, so that storages are not reused
        self._count = 0

    def behind(self, tensor: Tensor) -> Positions:
        """Return the modules that a tensor depends on, with the positions of their last runs."""
        if owners := self._owners.get(tensor):
            return dict.fromkeys(self._in_order(owners), 0)
        step = self._behind.get(_memory(tensor))
        steps = {} if step is None else {id(step): step}
        waiting = list(steps.values())
        while waiting:
            for step in waiting.pop().before:
                if id(step) not in steps:
                    steps[id(step)] = step
                    waiting.append(step)
        ordered = sorted(steps.values(), key=lambda step: step.position)
        return {path: step.position for step in ordered for path in step.modules}

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        out = function(*args, **kwargs)
        if name not in METADATA or isinstance(out, Tensor):  # attributes such as `weight.T` return tensors
            self._note(name, args, kwargs, out)
        return out

    def _note(self, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        tensors, results = tensors_among((*args, *kwargs.values())), tensors_among((out,))
        if name in CHOOSING and not self._choices:
            tensors = tensors[:1]
        owners = [self._owners.get(tensor) for tensor in tensors]
        modules: frozenset[str] = frozenset().union(*(owner for owner in owners if owner))
        if tensors and all(owners):  # a tensor computed from parameters alone counts as the parameter
            for tensor in results:
                self._owners.set(tensor, modules)
            return
        inputs = [self._behind.get(_memory(tensor)) for tensor, owner in zip(tensors, owners, strict=True) if not owner]
        self._count += bool(modules)
        if name in IN_PLACE:
            results = [*results, *tensors[:1]]
        for tensor in results if modules or any(inputs) else ():
            memory = _memory(tensor)
            before = {id(step): step for step in (*inputs, self._behind.get(memory)) if step is not None}
            self._alive.append(tensor)
            self._behind[memory] = (
                next(iter(before.values()))
                if len(before) == 1 and not modules
                else _Step(tuple(before.values()), self._in_order(modules), self._count)
            )

    def _in_order(self, modules: Iterable[str]) -> list[str]:
        """Return modules in the order of their registration, which no hash decides."""
        return sorted(modules, key=self._registered.__getitem__)


def _memory(tensor: Tensor) -> int:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have no single storage
        return id(tensor)


__all__ = ["Execution", "Watch"]
