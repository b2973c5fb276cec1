"""Detection of tensors that forward writes into: a shared one would be written once per branch, and a branch's own parameter is a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...introspect.parameter_writes import IN_PLACE, is_bounded, writes_parameters
from ..clone import sparse_buffers
from ..plan import Bank
from ..tree import tensors, tree_map, version
from .attributes import Tree
from .random import values_unavailable

REMEDY = (
    "Switch that off in the model, keep what changes in a buffer, or, if the first call initializes parameters, call the model once "
    "with real inputs before wrapping it"
)

_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__  # what a function mode is handed where code asks for it


class ParameterWrites:
    """Detects writes into parameters by the first two branches of a call.

    Args:
        root: the wrapped module.
        tree: the modules that the first branch will run.
    """

    def __init__(self, root: nn.Module, tree: Tree) -> None:
        self._root = root
        self._shared = {
            id(parameter): (f"{path}.{name}" if path else name, parameter, version(parameter))
            for path, module in tree.items()
            for name, parameter in module._parameters.items()
            # a branch's own tensors can count as parameters, too
            if isinstance(parameter, nn.Parameter) and type(parameter) is not Tensor
        }
        # subclasses of Parameter, such as quantized ones: their attributes and data
        self._subclassed = {
            key: (dict(parameter.__dict__), parameter.data)
            for key, (_, parameter, _) in self._shared.items()
            if nn.Parameter in type(parameter).__mro__[1:]
        }
        self._sparse = [
            (module, name, f"{path}.{name}".lstrip("."), buffer, version(buffer), buffer.detach().clone())
            for path, module in tree.items()
            for name, buffer in sparse_buffers(module)
        ]
        # bounded by each branch, for the rows that it looks up
        self._bounded = {id(module.weight) for module in tree.values() if is_bounded(module)}
        self._norms: dict[str, Tensor] = {}
        self._backup: _Backup | None = None

    def watched(self) -> AbstractContextManager[Any]:
        """Return a context manager for the pass of a branch, which in training mode backs up shared parameters before they are written."""
        if not self._root.training or values_unavailable() or torch.compiler.is_compiling():
            return nullcontext()
        if self._backup is None:
            self._backup = _Backup([parameter for _, parameter, _ in self._shared.values()])
        return self._backup

    def check(self, tree: Tree, bank: Bank, more: bool) -> None:
        """Check the parameters after the first branch.

        Args:
            tree: the modules that it ran.
            bank: the plan's bank.
            more: whether other branches follow.

        Raises:
            RuntimeError: if it wrote into a shared parameter or a sparse buffer, or reassigned the `.data` of a parameter of its own.
        """
        self._check_subclassed()
        self._check_sparse()
        present = {id(parameter) for module in tree.values() for parameter in module._parameters.values()}
        for key, (name, parameter, count) in self._shared.items():
            if key in present and version(parameter) != count:
                self._refuse(name)
        if values_unavailable():
            return
        if (slot := bank.rebound()) is not None:
            raise RuntimeError(
                f"forward of {self._root._get_name()} sets the .data of its parameter {slot!r}, which would be lost after the call, since each "
                f"branch has a view of a stacked tensor. Write into it with .data.copy_(...). {REMEDY}"
            )
        self._norms = self._parameter_norms() if more else {}

    def check_next(self) -> None:
        """Check after the second branch that shared parameters are unchanged, which finds writes through `.data` that torch does not count.

        Raises:
            RuntimeError: if the branch changed a shared parameter.
        """
        before, self._norms = self._norms, {}
        for name, norm in self._parameter_norms().items() if before else ():
            if name in before and not torch.equal(norm.nan_to_num(), before[name].nan_to_num()):
                self._refuse(name)

    def _check_subclassed(self) -> None:
        changed = []
        for key, (attributes, data) in self._subclassed.items():
            name, parameter, _ = self._shared[key]
            held = {k: v for k, v in attributes.items() if isinstance(v, Tensor)}
            same = _memory(parameter) == _memory(data) or torch.equal(parameter.data, data)
            if same and all(parameter.__dict__.get(k) is v for k, v in held.items()):
                continue
            changed.append((name, parameter))
            parameter.data = data
            parameter.__dict__.clear()
            parameter.__dict__.update(attributes)
        for name, parameter in changed[:1]:
            raise RuntimeError(
                f"forward of {self._root._get_name()} removes or repacks what its parameter {name!r}, a {type(parameter).__name__}, holds. The "
                "branches and the given model share it, so that the next branch would find it changed: call the model once with real inputs "
                "before wrapping it, in the mode, and with or without gradients, in which you will call the wrapped one"
            )

    def _check_sparse(self) -> None:
        for module, attribute, name, buffer, count, value in self._sparse:
            if module._buffers.get(attribute) is buffer and version(buffer) == count:
                continue
            module._buffers[attribute] = buffer
            with torch.no_grad():
                buffer.copy_(value)
            raise RuntimeError(
                f"forward of {self._root._get_name()} changes its sparse buffer {name!r}, which all branches share: keep what forward changes "
                "in a dense buffer"
            )

    def _parameter_norms(self) -> dict[str, Tensor]:
        return {
            name: torch.linalg.vector_norm(parameter.detach())
            for name, parameter, _ in self._shared.values()
            if type(parameter) is nn.Parameter
            and id(parameter) not in self._bounded
            and parameter.layout is torch.strided
            and parameter.device.type != "meta"
            and parameter.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        }

    def _refuse(self, name: str) -> None:
        if self._backup is not None:
            self._backup.restore()
        frozen = any(name == other and not parameter.requires_grad for other, parameter, _ in self._shared.values())
        unfreeze = (
            " A frozen parameter is shared by all branches: with share=None, each voter has its own if it requires a gradient before wrapping "
            "(such as a target network that is updated by moving averages under no_grad)."
            if frozen
            else ""
        )
        mode = "" if self._root.training else " in evaluation mode"
        raise RuntimeError(
            f"forward of {self._root._get_name()} writes into its parameter {name!r}{mode}, which the branches and the given model share: it "
            f"would be written once per branch.{unfreeze} {REMEDY}"
        )


class _Backup(TorchFunctionMode):
    """Backs up parameters before a function writes into them; parameters that are never written are not copied.

    Args:
        parameters: the parameters to watch.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._held = [(parameter, parameter.data) for parameter in parameters]
        self._places: dict[int, list[Tensor]] = {}  # parameters by address of their storage
        for parameter in parameters:
            if place := _memory(parameter):
                self._places.setdefault(place, []).append(parameter)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in IN_PLACE or "out" in kwargs:
            for written in tensors((args[:1], kwargs.get("out"))):
                for parameter in self._places.get(_memory(written), ()):
                    self._copies.setdefault(id(parameter), (parameter, parameter.detach().clone()))
        return function(*args, **kwargs)

    def restore(self) -> None:
        """Restore the backed-up values."""
        for parameter, data in self._held:
            if _memory(parameter) != _memory(data):
                parameter.data = data
        for written, copied in self._copies.values():
            written.data.copy_(copied)


_LOOKUPS = (F.embedding, F.embedding_bag)


class ParameterViews(TorchFunctionMode):
    """Lets forward use a branch's parameters, which are views, as parameters.

    Modules that forward makes can register them, although they have a `grad_fn`, and forward can write into them without gradients: torch
    allows no write into one of several views, nor would the other branches' gradients be valid after one that it counts.

    Args:
        root: the module that runs.
        parameters: name, tensor, and whether no other branch has the tensor.
    """

    def __init__(self, root: nn.Module, parameters: Iterable[tuple[str, Tensor, bool]]) -> None:
        super().__init__()
        self._root = root
        places = [(_memory(parameter), name, alone) for name, parameter, alone in parameters]
        self._own = {place for place, _, alone in places if alone and place}
        self._common = {place: name for place, name, alone in places if place and not alone}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _GRAD_FN and isinstance(args[0], nn.Parameter):
            return None
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function in _LOOKUPS and kwargs.get("max_norm") is not None:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                # each branch scales the rows that it looks up, also of a weight that all share, as one model does
                torch.embedding_renorm_(args[1].data, args[0].contiguous(), kwargs["max_norm"], kwargs["norm_type"])
            return function(*args, **{**kwargs, "max_norm": None})
        in_place = name in IN_PLACE or (name.startswith("_foreach_") and name.endswith("_"))
        if not in_place and "out" not in kwargs:
            return function(*args, **kwargs)
        written = (args[:1] if in_place else (), kwargs.get("out"))
        for tensor in tensors(written):
            if (common := self._common.get(_memory(tensor))) is not None:
                raise RuntimeError(
                    f"forward of {self._root._get_name()} writes into its parameter {common!r}, which several branches share: it would be "
                    f"written once per branch. {REMEDY}"
                )
        if torch.is_grad_enabled():
            return function(*args, **kwargs)
        uncounted, out = tree_map(self._uncounted, written)
        result = function(
            *uncounted, *args[len(uncounted) :], **({**kwargs, "out": out} if "out" in kwargs else kwargs)
        )
        originals = {id(new): old for new, old in zip(tensors((uncounted, out)), tensors(written), strict=True)}
        return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)

    def _uncounted(self, leaf: Any) -> Any:
        """Return the memory of a leaf without its version counter, if it belongs to a parameter of the branch alone."""
        return leaf.data if isinstance(leaf, Tensor) and _memory(leaf) in self._own else leaf


def undo_writes(root: nn.Module) -> Callable[[], None]:
    """Return a function that undoes what passes write into the parameters of a model from now on, if its code may do so."""
    if torch.compiler.is_compiling() or not writes_parameters(root):
        return lambda: None
    before = [(parameter, parameter.detach().clone()) for parameter in root.parameters() if not parameter.is_meta]

    def undo() -> None:
        for parameter, value in before:
            parameter.data.copy_(value)

    return undo


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, 0 if it has none."""
    with suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().data_ptr()
    return 0


def explain_write(root: nn.Module, error: Exception) -> None:
    """Raise a clearer error if the pass of a branch failed by writing into a view, freezing it, or assigning a tensor that is no parameter.

    Args:
        root: the wrapped module.
        error: the error of the pass.

    Raises:
        RuntimeError: if forward writes into a parameter of which the branch has a view, freezes it, or ties parameters.
    """
    if isinstance(error, TypeError | ValueError) and ("as parameter" in str(error) or "to parameter" in str(error)):
        raise RuntimeError(
            f"forward of {root._get_name()} assigns one of its parameters to a layer, which in each branch is a view of a stacked tensor "
            f"({error}). Tie them in __init__: self.decoder.weight = self.encoder.weight; and instead of a new layer with the model's "
            "parameters, use the function, such as torch.nn.functional.linear(x, self.layer.weight). A table outside the model that hands its "
            "parameters out by name, as that of pyro does for PyroParam, gives all copies of a model the same ones: let each have its own, "
            "pyro.settings.set(module_local_params=True)"
        ) from error
    if "you can only change requires_grad flags of leaf variables" in str(error):
        raise RuntimeError(
            f"forward of {root._get_name()} freezes a parameter (requires_grad = False), which in each branch is a view of a stacked tensor: "
            "freeze it before wrapping, share it (vote.Wrapper(share=k)), or use the layer under torch.no_grad() or its weight.detach()"
        ) from error
    if "output of a function that returns multiple views" in str(error):
        raise RuntimeError(
            f"forward of {root._get_name()} writes into a parameter, which in each branch is a view of a stacked tensor that torch does not "
            f"allow to be written. {REMEDY}"
        ) from error


__all__ = ["ParameterViews", "ParameterWrites", "explain_write", "undo_writes"]
