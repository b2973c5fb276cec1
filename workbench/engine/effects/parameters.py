"""Parameters that forward writes into: of those that branches share every branch would write once, and of its own a branch has a view."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..plan import Bank
from ..tree import tensors, version
from .attributes import Tree
from .random import values_unavailable

REMEDY = (
    "Switch that off in the model, keep what changes in a buffer, or, if parameters are made ready in the first call, call the model once "
    "with real inputs before wrapping it"
)


class ParameterWrites:
    """What the first branches of a call write into parameters.

    Args:
        root: the wrapped module.
        tree: the modules that the first branch runs, before it does.
    """

    def __init__(self, root: nn.Module, tree: Tree) -> None:
        self._root = root
        self._shared = {
            id(parameter): (f"{path}.{name}" if path else name, parameter, version(parameter))
            for path, module in tree.items()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, nn.Parameter)
        }
        # of quantised ones and their like: what each keeps beside its numbers, and these
        self._kept = {
            key: (dict(parameter.__dict__), parameter.data)
            for key, (_, parameter, _) in self._shared.items()
            if nn.Parameter in type(parameter).__mro__[1:]
        }
        self._norms: dict[str, Tensor] = {}
        self._before: _Before | None = None

    def watched(self) -> AbstractContextManager[Any]:
        """Around the pass of a branch: keeps what it writes into shared parameters in training mode as it was, for a refusal."""
        if not self._root.training or values_unavailable() or torch.compiler.is_compiling():
            return nullcontext()
        if self._before is None:
            self._before = _Before([parameter for _, parameter, _ in self._shared.values()])
        return self._before

    def check(self, tree: Tree, bank: Bank, more: bool) -> None:
        """After the first branch.

        Args:
            tree: the modules that it ran.
            bank: of the plan.
            more: whether other branches follow.

        Raises:
            RuntimeError: if it wrote into a parameter that the branches share, or put another tensor behind one of its own.
        """
        self._check_kept()
        present = {id(parameter) for module in tree.values() for parameter in module._parameters.values()}
        for key, (name, parameter, count) in self._shared.items():
            if key in present and version(parameter) != count:
                self._refuse(name)
        if values_unavailable():
            return
        if (slot := bank.rebound()) is not None:
            raise RuntimeError(
                f"forward of {self._root._get_name()} sets the .data of its parameter {slot!r}, which would be gone after the call, since each "
                f"branch sees a part of a larger tensor. Write into it with .data.copy_(...). {REMEDY}"
            )
        self._norms = self._measured() if more else {}

    def check_next(self) -> None:
        """After the second branch: writes that torch does not count, through `.data`, must be the same in every branch.

        Raises:
            RuntimeError: if it changed a parameter that the branches share.
        """
        before, self._norms = self._norms, {}
        for name, norm in self._measured().items() if before else ():
            if name in before and not torch.equal(norm.nan_to_num(), before[name].nan_to_num()):
                self._refuse(name)

    def _check_kept(self) -> None:
        changed = []
        for key, (attributes, data) in self._kept.items():
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
                f"forward of {self._root._get_name()} takes away or packs anew what its parameter {name!r}, a {type(parameter).__name__}, "
                "holds. The branches and the given model share it, so that the next one would not find it as it was: call the model once with "
                "real inputs before wrapping it, in the mode and with or without gradients as you will call the wrapped one"
            )

    def _measured(self) -> dict[str, Tensor]:
        return {
            name: torch.linalg.vector_norm(parameter.detach())
            for name, parameter, _ in self._shared.values()
            if type(parameter) is nn.Parameter
            and parameter.layout is torch.strided
            and parameter.device.type != "meta"
            and parameter.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        }

    def _refuse(self, name: str) -> None:
        if self._before is not None:
            self._before.restore()
        frozen = any(name == own and not parameter.requires_grad for own, parameter, _ in self._shared.values())
        unfreeze = (
            " A frozen parameter is shared by all branches: one that requires a gradient before wrapping (a target that follows by moving "
            "averages, computed under no_grad) is each voter's own with share=None."
            if frozen
            else ""
        )
        mode = "" if self._root.training else " in evaluation mode"
        raise RuntimeError(
            f"forward of {self._root._get_name()} writes into its parameter {name!r}{mode}, which the branches and the given model share: it "
            f"would be written once for each of them.{unfreeze} {REMEDY}"
        )


class _Before(TorchFunctionMode):
    """What parameters hold before a function writes into them; only those that are written into are copied.

    Args:
        parameters: which.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._held = [(parameter, parameter.data) for parameter in parameters]
        self._places: dict[int, list[Tensor]] = {}  # by where their memory is
        for parameter in parameters:
            if place := _memory(parameter):
                self._places.setdefault(place, []).append(parameter)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if (name.endswith("_") and name != "requires_grad_") or "out" in kwargs:  # mul_, __imul__, __setitem__, out=
            for written in tensors((args[:1], kwargs.get("out"))):
                for parameter in self._places.get(_memory(written), ()):
                    self._copies.setdefault(id(parameter), (parameter, parameter.detach().clone()))
        return function(*args, **kwargs)

    def restore(self) -> None:
        """Give the parameters back what they held."""
        for parameter, data in self._held:
            if _memory(parameter) != _memory(data):
                parameter.data = data
        for written, copied in self._copies.values():
            written.data.copy_(copied)


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor is; 0 if it has none of its own."""
    with suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().data_ptr()
    return 0


def explain_write(root: nn.Module, error: Exception) -> None:
    """Say what to do where the pass of a branch has ended in what torch says of a view, or of a tensor that is no parameter.

    Raises:
        RuntimeError: if forward writes into a parameter of which the branch has a view, or ties parameters.
    """
    if isinstance(error, TypeError) and "as parameter" in str(error):
        raise RuntimeError(
            f"forward of {root._get_name()} puts one of its parameters in the place of another, and each branch has a part of a larger tensor "
            f"there ({error}). Tie them when the model is made, in __init__: self.decoder.weight = self.encoder.weight"
        ) from error
    if "output of a function that returns multiple views" in str(error):
        raise RuntimeError(
            f"forward of {root._get_name()} writes into a parameter, of which each branch sees a part of a larger tensor that torch does not "
            f"let it write into. {REMEDY}"
        ) from error


__all__ = ["ParameterWrites", "explain_write"]
