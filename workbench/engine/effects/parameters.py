"""Parameters that forward writes into: of those that branches share every branch would write once, and of its own a branch has a view."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..plan import Bank
from ..tree import version
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
        self._norms: dict[str, Tensor] = {}

    def check(self, tree: Tree, bank: Bank, more: bool) -> None:
        """After the first branch.

        Args:
            tree: the modules that it ran.
            bank: of the plan.
            more: whether other branches follow.

        Raises:
            RuntimeError: if it wrote into a parameter that the branches share, or put another tensor behind one of its own.
        """
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
        mode = "" if self._root.training else " in evaluation mode"
        raise RuntimeError(
            f"forward of {self._root._get_name()} writes into its parameter {name!r}{mode}, which the branches and the given model share: it "
            f"would be written once for each of them. {REMEDY}"
        )


def explain_write(root: nn.Module, error: RuntimeError) -> None:
    """Say what to do where the pass of a branch has ended in what torch says of a view.

    Raises:
        RuntimeError: if forward writes into a parameter of which the branch has a view.
    """
    if "output of a function that returns multiple views" in str(error):
        raise RuntimeError(
            f"forward of {root._get_name()} writes into a parameter, of which each branch sees a part of a larger tensor that torch does not "
            f"let it write into. {REMEDY}"
        ) from error


__all__ = ["ParameterWrites", "explain_write"]
