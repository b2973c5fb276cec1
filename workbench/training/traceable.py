"""Models and criteria whose training step is the same computation each time, as long as nobody changes them from outside."""

from __future__ import annotations

import operator
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from workbench.core.lone_calls import Alone
from workbench.core.outputs import form_of
from workbench.core.ownership import EXTRAS, extra
from workbench.core.row_weights import alike
from workbench.core.standardize import Scaling
from workbench.core.wrapped import Wrapped
from workbench.distributions.values import Cauchy, Laplace, Normal
from workbench.engine.effects.attributes import ModuleContents
from workbench.engine.plan import RankOne
from workbench.introspect.objects import is_atom
from workbench.introspect.pure_functions import Global, ImpureError, globals_of_pure
from workbench.methods.sculpt import Sculpt
from workbench.methods.vote import Vote
from workbench.training.criteria import LossByMeaning, cross_entropy_of_probs

# modules of torch that compute from their tensors, their input and plain attributes
_LAYERS = """Identity Flatten Unflatten Sequential ModuleList ModuleDict Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
    ConvTranspose3d LayerNorm GroupNorm RMSNorm LocalResponseNorm BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d
    InstanceNorm3d Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout Embedding MaxPool1d MaxPool2d
    MaxPool3d AvgPool1d AvgPool2d AvgPool3d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d LPPool1d LPPool2d
    ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d ZeroPad1d ZeroPad2d ZeroPad3d
    PixelShuffle PixelUnshuffle Upsample UpsamplingNearest2d UpsamplingBilinear2d Unfold Fold CosineSimilarity
    ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Sigmoid Tanh Softplus Softsign Softmin Softmax Softmax2d LogSoftmax LogSigmoid
    Hardtanh Hardsigmoid Hardswish Hardshrink Softshrink Tanhshrink Threshold GLU"""
LAYERS = frozenset(getattr(nn, name) for name in _LAYERS.split() if hasattr(nn, name))
_FUNCTIONS: tuple[Any, ...] = (
    *(None, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.cross_entropy, F.nll_loss, cross_entropy_of_probs),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss),
)
_LOSSES = (
    *(
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.CrossEntropyLoss,
        nn.NLLLoss,
        nn.BCELoss,
        nn.BCEWithLogitsLoss,
    ),
    nn.PoissonNLLLoss,
)
_FAMILIES = (Normal, Laplace, Cauchy)  # whose likelihood looks at no target before it is computed
_MODULE = frozenset(nn.Module().__dict__) | {"_workbench", "_engine"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DUNDERS = frozenset(
    {"__init__", "__module__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__", "__qualname__"}
)
_DUNDERS |= {
    "__static_attributes__",
    "__firstlineno__",
    "__annotations_cache__",
    "__parameters__",
    "__repr__",
    "__dict__",
    "__weakref__",
}


class UntraceableError(Exception):
    """A step may be another one each time; the message says why."""


class Facts:
    """All that a training step depends on beside the batch and the numbers in tensors: what it was, and whether it is so still.

    Args:
        wrapped: the model, in training.
        criterion: what it is trained with.

    Raises:
        UntraceableError: it may depend on anything else.
    """

    def __init__(self, wrapped: Wrapped, criterion: Any) -> None:
        self._wrapped = wrapped
        _check_methods(wrapped)
        _check_criterion(criterion)
        modules = dict(wrapped.named_modules())
        if any("_workbench" in module.__dict__ for path, module in modules.items() if path):
            raise UntraceableError("a layer is wrapped itself")
        self._functions, self._globals = _check_code(modules)
        record = wrapped._workbench
        taken_over = {owner for name in record.released for owner in record.slots[name].owners}
        for path, module in modules.items():
            _check_contents(path, module, taken_over)
        if isinstance(criterion, nn.Module):
            modules["criterion@"] = criterion
        self._contents = ModuleContents(modules, frozenset())
        self._classes = [(module, type(module)) for module in modules.values()]
        self._backward_hooks = [module._backward_pre_hooks for module in modules.values()]
        self._settings = list(_settings(wrapped))
        self.parameters = [p for p in wrapped.parameters() if p.requires_grad]
        self.frozen = [p for p in wrapped.parameters() if not p.requires_grad]
        self.buffers = list(wrapped.buffers())
        self._forms = self._forms_now()
        self._torch = _torch_now()
        if (reason := self._unfit()) is not None:
            raise UntraceableError(reason)

    def _forms_now(self) -> list[Any]:
        return [
            (t.requires_grad, t.dtype, t.shape, t.stride(), t._backward_hooks)
            for t in (*self.parameters, *self.frozen, *self.buffers)
        ]

    def _unfit(self) -> str | None:
        tensors = [*self.parameters, *self.frozen, *self.buffers]
        if any(
            type(t.data) is not Tensor or t.layout is not torch.strided or not t.is_cpu or not t.is_contiguous()
            for t in tensors
        ):
            return "a tensor is not on the CPU, or has another layout"
        if any(t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None) for t in self.parameters):
            return "a parameter has hooks"
        if not _is_plain(self._torch):
            return "torch is in another mode"
        return None

    def hold(self) -> bool:
        """Whether nothing has changed."""
        return (
            self._contents.unchanged()
            and not any(self._backward_hooks)
            and all(type(module) is cls for module, cls in self._classes)
            and _same(list(_settings(self._wrapped)), self._settings)
            and all(holder.get(name) is value for holder, name, value in self._globals)
            and all(
                vars(cls).get(name) is f and getattr(f, "__code__", None) is code
                for cls, name, f, code in self._functions
            )
            and self._forms_now() == self._forms
            and not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.parameters)
            and _torch_now() == self._torch
        )


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _torch_now() -> tuple[Any, ...]:
    """What torch is in this thread, as far as it decides what a step computes."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
        torch_module._has_any_global_hook(),
        torch._C._autograd._top_saved_tensors_default_hooks(False) is None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.compiler.is_compiling(),
    )


def _is_plain(torch_now: tuple[Any, ...]) -> bool:
    gradients, autocast, anomaly, modes, hooks, unpacked, _, _, compiling = torch_now
    return bool(gradients and not (autocast or anomaly or modes or hooks or compiling) and unpacked)


def _settings(wrapped: Wrapped) -> Iterator[Any]:
    """The objects that say what the branches of a wrapped model are."""
    record = wrapped._workbench
    yield from (
        record.output,
        record.state,
        record.strategy,
        record.purity,
        record.chunk,
        record.rows,
        record.says_distributions,
    )
    yield from record.rules.values()
    for method in record.methods:
        yield method
        yield from vars(method).values()
        yield from vars(method.wrapper).values() if method.wrapper is not None else ()


def _check_methods(wrapped: Wrapped) -> None:
    record = wrapped._workbench
    for method in record.methods:
        if type(method) not in (Vote, Sculpt):
            raise UntraceableError(f"the method {method.name}")
        if type(method) is Sculpt and not (
            type(method.distribution) in _FAMILIES and form_of(record.output) in (None, "values")
        ):
            raise UntraceableError(f"the distribution {type(method.distribution).__name__}")
    if any(isinstance(rule, RankOne) for rule in record.rules.values()):
        raise UntraceableError("factored weights")
    if record.method != "forward" or record.state or record.says_distributions:
        raise UntraceableError("more than a forward pass that gives tensors")
    if (
        record.output is not None
        and not isinstance(record.output, str)
        and not type(record.output).__module__.startswith("workbench.")
    ):
        raise UntraceableError(f"the output is {type(record.output).__name__}")
    if alike(wrapped) is not None:
        raise UntraceableError("voters that weigh rows")
    extras: Any = wrapped._modules.get(EXTRAS)
    if extras is not None and (
        set(extras._modules) - {"scaling"} or type(extra(wrapped, "scaling")) not in (Scaling, type(None))
    ):
        raise UntraceableError("what wrapping holds beside the layers")


def _check_criterion(criterion: Any) -> None:
    if any(criterion is function for function in _FUNCTIONS):
        return
    if type(criterion) is LossByMeaning and criterion.class_weight is None:
        return
    if type(criterion) in _LOSSES:
        return _check_contents("criterion", criterion)
    raise UntraceableError(f"the criterion {getattr(criterion, '__name__', type(criterion).__name__)}")


def _check_contents(path: str, module: nn.Module, taken_over: Collection[tuple[str, str]] = ()) -> None:
    """Attributes that say all, and no hooks; what stands in the place of tensors that voters have taken over is not computed with."""
    for name in _HOOKS:
        if any(not isinstance(hook, Alone) for hook in getattr(module, name).values()):
            raise UntraceableError(f"{path} has hooks")
    if path.split(".")[0] == EXTRAS:
        return
    for name, value in module.__dict__.items():
        if name in _MODULE and name != "forward":
            continue
        if (path, name) in taken_over:
            continue
        values = value if type(value) in (tuple, torch.Size) else (value,)
        if not all(map(is_atom, values)) or any(isinstance(each, type | types.ModuleType) for each in values):
            raise UntraceableError(f"{path}.{name} is a {type(value).__name__}")


Function = tuple[type, str, Any, types.CodeType | None]  # class, name, function, its code


def _check_code(modules: dict[str, nn.Module]) -> tuple[list[Function], list[Global]]:
    """The functions of the user's own classes that a call reaches, and the globals that they read."""
    users = {
        cls: None for path, module in modules.items() if path.split(".")[0] != EXTRAS for cls in _users_classes(module)
    }
    held = {
        name
        for module in modules.values()
        for name in (*module.__dict__, *module._parameters, *module._buffers, *module._modules)
    }
    theirs = {name for cls in users for name in vars(cls)}
    strange = sorted(name for name in theirs - _DUNDERS if name.startswith("__"))
    if strange:
        raise UntraceableError(f"{strange[0]} of a layer")
    functions = list(
        {_defined(type(module), "forward") for module in modules.values()}
    )  # torch's own may be replaced, too
    read: list[Global] = []
    todo, seen = ["forward"], {"forward"}
    while todo:
        name = todo.pop()
        for cls in users:
            if name not in vars(cls):
                continue
            value = vars(cls)[name]
            if not isinstance(value, types.FunctionType):
                raise UntraceableError(f"{cls.__name__}.{name} is a {type(value).__name__}")
            functions.append((cls, name, value, value.__code__))
            try:
                read += globals_of_pure(value, (held - _MODULE) | theirs | {"training"})
            except ImpureError as error:
                raise UntraceableError(str(error)) from None
            new = set(value.__code__.co_names) & theirs - seen
            seen |= new
            todo += sorted(new)
    return functions, read


def _defined(cls: Any, name: str) -> Function:
    """Where a class has a function from."""
    cls = getattr(cls, "_plain_class", cls)
    home = next(base for base in cls.__mro__ if name in vars(base))
    function: Any = vars(home)[name]
    return home, name, function, getattr(function, "__code__", None)


def _users_classes(module: nn.Module) -> Iterator[type]:
    """The classes of a module that are not torch's own."""
    cls: Any = getattr(type(module), "_plain_class", type(module))
    if cls in LAYERS:
        return
    for base in cls.__mro__:
        if base is nn.Module or base is object:
            return
        if base in LAYERS:
            return
        if base.__module__.startswith(("torch.", "workbench.")):
            raise UntraceableError(f"the layer {base.__name__}")
        yield base


__all__ = ["Facts", "UntraceableError"]
