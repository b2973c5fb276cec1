"""Models whose calls are the same computation each time, as long as nobody changes them from outside."""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...engine.plan import RankOne
from ...introspect.objects import is_atom
from ...introspect.pure_functions import Global, ImpureError, globals_of_pure
from ..batches.row_weights import alike
from ..ownership import EXTRAS, extra
from ..standardize import Scaling
from .lone_calls import Alone

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
# those that in training do, while their predictions depend on what state their tensors are in, such as whether they need gradients
_TRAINED = frozenset(
    (
        *(nn.MultiheadAttention, NonDynamicallyQuantizableLinear),
        *(nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer),
    )
)
_ACTIVATIONS = (F.relu, F.gelu)  # which these hold as functions
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
    """A call may compute something else each time; the message says why."""


class Facts:
    """All that a call of a wrapped object depends on beside its inputs and the numbers in tensors: what it was, and whether it is so still.

    Args:
        wrapped: the object.
        training: whether they are training steps, not predictions.
        auxiliary: other modules that take part, by name.

    Raises:
        UntraceableError: it may depend on anything else.
    """

    def __init__(self, wrapped: Any, training: bool, auxiliary: Mapping[str, nn.Module] | None = None) -> None:
        _check_record(wrapped, training)
        modules = dict(wrapped.named_modules())
        if any("_workbench" in module.__dict__ for path, module in modules.items() if path):
            raise UntraceableError("a layer is wrapped itself")
        functions, read = _check_code(modules, LAYERS | _TRAINED if training else LAYERS)
        self._spaces, self._names, self._functions = zip(
            *((vars(cls), name, f) for cls, name, f, _ in functions), strict=True
        )
        self._written = [f for _, _, f, code in functions if code is not None]
        self._codes = [code for *_, code in functions if code is not None]
        record = self._record = wrapped._workbench
        taken_over = {owner for name in record.released for owner in record.slots[name].owners}
        for path, module in modules.items():
            check_contents(path, module, taken_over)
        modules |= auxiliary or {}
        self._modules = list(modules.values())
        self._classes = list(map(type, self._modules))
        # those that only hold others, beside the layers, are asked for no more than what they hold
        aside = [
            m for path, m in modules.items() if path.split(".")[0] == EXTRAS and type(m) in (nn.Module, nn.ModuleList)
        ]
        self._holders = [*_holders(self._modules, aside), *_settings_of(record)]
        self._sizes = list(map(len, self._holders))
        entries = [(holder, key) for holder in self._holders for key in holder if key not in _ASIDE]
        # in columns, so that one `map` asks for all of them; the values are held here, so that no other object gets the place in memory of one
        self._dicts = [*(holder for holder, _ in entries), *(holder for holder, _, _ in read)]
        self._keys = [*(key for _, key in entries), *(key for _, key, _ in read)]
        self._items = [*(holder[key] for holder, key in entries), *(value for _, _, value in read)]
        self._said = _SAID(record)
        self.parameters = [p for p in wrapped.parameters() if p.requires_grad]
        self.frozen = [p for p in wrapped.parameters() if not p.requires_grad]
        self.buffers = list(wrapped.buffers())
        tensors = [*self.parameters, *self.frozen, *self.buffers]
        if any(
            type(t.data) is not Tensor or t.layout is not torch.strided or not t.is_cpu or not t.is_contiguous()
            for t in tensors
        ):
            raise UntraceableError("a tensor is not on the CPU, or has another layout")
        self._forms = _Forms(tensors)

    def hold(self) -> bool:
        """Whether nothing has changed."""
        try:
            same = all(map(operator.is_, map(dict.__getitem__, self._dicts, self._keys), self._items))
        except KeyError:
            return False
        return (
            same
            and list(map(len, self._holders)) == self._sizes
            and all(map(operator.is_, map(type, self._modules), self._classes))
            and all(map(operator.is_, _SAID(self._record), self._said))
            and self._forms.hold()
            and all(map(operator.is_, map(types.MappingProxyType.get, self._spaces, self._names), self._functions))
            and all(map(operator.is_, map(_CODE, self._written), self._codes))
        )


class _Forms:
    """Dtypes and shapes of contiguous tensors: what they were, and whether they are so still."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._dtypes, self._shapes = list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors))
        # in inference mode or not: what says so in a fourth of the time, where torch has it
        self._quick: dict[bool, Any] = {}

    def hold(self) -> bool:
        """Whether nothing has changed."""
        inference = torch.is_inference_mode_enabled()
        quick = self._quick.get(inference)
        if quick is not None and quick.check(*self._tensors):
            return True
        if not (
            all(map(operator.is_, map(_DTYPE, self._tensors), self._dtypes))
            and list(map(_SHAPE, self._tensors)) == self._shapes
            and all(map(Tensor.is_contiguous, self._tensors))
        ):
            return False
        if quick is None:
            # a private class, which compares more than that, such as the modes of torch in which it is made
            with contextlib.suppress(AttributeError, TypeError):
                sizes: list[Any] = [list(t.shape) for t in self._tensors]
                strides: list[Any] = [list(t.stride()) for t in self._tensors]
                self._quick[inference] = torch._C._dynamo.guards.TensorGuards(
                    *self._tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
                )
        return True


_CONTENTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
# what torch keeps in every module and no call asks for that takes no gradients, where there are no hooks
_NAMES = """_non_persistent_buffers_set _backward_hooks _backward_pre_hooks _is_full_backward_hook _forward_hooks_with_kwargs
    _forward_hooks_always_called _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
    _load_state_dict_post_hooks"""
_ASIDE = frozenset(_NAMES.split())
_DTYPE, _SHAPE, _CODE = map(operator.attrgetter, ("dtype", "shape", "__code__"))
_SAID = operator.attrgetter("output", "state", "strategy", "purity", "chunk", "rows", "says_distributions", "methods")


def _holders(modules: Sequence[nn.Module], aside: Collection[nn.Module]) -> Iterator[dict[str, Any]]:
    for module in modules:
        if any(module is each for each in aside):
            yield module._modules
            continue
        yield module.__dict__
        yield from (module.__dict__[kind] for kind in _CONTENTS)


def _settings_of(record: Any) -> Iterator[dict[str, Any]]:
    """What says what the branches of a wrapped object are."""
    yield record.rules
    for method in record.methods:
        yield vars(method)
        parts = [method.wrapper, *vars(method).values()]
        yield from {id(part): vars(part) for part in parts if _is_ours(part)}.values()


def _is_ours(part: Any) -> bool:
    return type(part).__module__.startswith("workbench.") and hasattr(part, "__dict__")


def torch_now() -> tuple[Any, ...]:
    """What torch is in this thread, as far as it decides what a call computes."""
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


def is_plain(torch_now: tuple[Any, ...], gradients: bool) -> bool:
    """Whether torch is in no mode that would change what is computed."""
    with_gradients, autocast, anomaly, modes, hooks, unpacked, _, _, compiling = torch_now
    return bool(with_gradients is gradients and not (autocast or anomaly or modes or hooks or compiling) and unpacked)


def _check_record(wrapped: Any, training: bool) -> None:
    record = wrapped._workbench
    for method in record.methods:
        if "repeats" not in vars(type(method)) or not method.repeats(training):
            raise UntraceableError(f"the method {method.name}")
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
    extras_module: Any = wrapped._modules.get(EXTRAS)
    known = {"scaling", *(name for method in record.methods for name in method.beside_layers)}
    if extras_module is not None and (
        set(extras_module._modules) - known or type(extra(wrapped, "scaling")) not in (Scaling, type(None))
    ):
        raise UntraceableError("what wrapping holds beside the layers")


def check_contents(path: str, module: nn.Module, taken_over: Collection[tuple[str, str]] = ()) -> None:
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
        if name == "activation" and type(module) in _TRAINED and any(value is function for function in _ACTIVATIONS):
            continue
        values = value if type(value) in (tuple, torch.Size) else (value,)
        if not all(map(is_atom, values)) or any(isinstance(each, type | types.ModuleType) for each in values):
            raise UntraceableError(f"{path}.{name} is a {type(value).__name__}")


Function = tuple[type, str, Any, types.CodeType | None]  # class, name, function, its code


def _check_code(modules: dict[str, nn.Module], known: Collection[type]) -> tuple[list[Function], list[Global]]:
    """The functions of the user's own classes that a call reaches, and the globals that they read.

    Args:
        modules: by path.
        known: classes of torch that compute from what is looked at.
    """
    users = {
        cls: None
        for path, module in modules.items()
        if path.split(".")[0] != EXTRAS
        for cls in _users_classes(module, known)
    }
    attributes = {
        name
        for module in modules.values()
        for name in (*module.__dict__, *module._parameters, *module._buffers, *module._modules)
    }
    theirs = {name for cls in users for name in vars(cls)}
    strange = sorted(name for name in theirs - _DUNDERS if name.startswith("__"))
    if strange:
        raise UntraceableError(f"{strange[0]} of a layer")
    # torch's own may be replaced, too
    functions = list({_defined(type(module), "forward") for module in modules.values()})
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
                read += globals_of_pure(value, (attributes - _MODULE) | theirs | {"training"})
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


def _users_classes(module: nn.Module, known: Collection[type]) -> Iterator[type]:
    """The classes of a module that are not torch's own."""
    cls: Any = getattr(type(module), "_plain_class", type(module))
    for base in cls.__mro__:
        if base is nn.Module or base is object or base in known:
            return
        if base.__module__.startswith(("torch.", "workbench.")) and not base.__module__.startswith("workbench.models."):
            raise UntraceableError(f"the layer {base.__name__}")
        yield base


__all__ = ["Facts", "UntraceableError", "check_contents", "is_plain", "torch_now"]
