"""Recognition of models whose calls repeat the same computation as long as the models are not changed from outside."""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...engine.effects.private_random import has_generator
from ...introspect.objects import GLOBAL_HOOKS, is_atom
from ...introspect.parameter_writes import is_bounded
from ...introspect.pure_functions import Global, ImpureError, globals_of_pure
from ..additions import EXTRAS, extra
from ..batches.row_weights import alike
from ..ownership import engine_of
from ..standardize import Scaling
from .lone_calls import Alone

# older torch can't tell whether saved tensors are packed (torch.autograd.graph.saved_tensors_hooks): calls count as not plain there
_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

# modules of torch that compute from their tensors, their input and plain attributes only
_LAYERS = """Identity Flatten Unflatten Sequential ModuleList ModuleDict Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
    ConvTranspose3d LayerNorm GroupNorm RMSNorm LocalResponseNorm BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d
    InstanceNorm3d Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout Embedding MaxPool1d MaxPool2d
    MaxPool3d AvgPool1d AvgPool2d AvgPool3d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d LPPool1d LPPool2d
    ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d ZeroPad1d ZeroPad2d ZeroPad3d
    PixelShuffle PixelUnshuffle Upsample UpsamplingNearest2d UpsamplingBilinear2d Unfold Fold CosineSimilarity
    ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Sigmoid Tanh Softplus Softsign Softmin Softmax Softmax2d LogSoftmax LogSigmoid
    Hardtanh Hardsigmoid Hardswish Hardshrink Softshrink Tanhshrink Threshold GLU
    MultiheadAttention Transformer TransformerEncoder TransformerEncoderLayer TransformerDecoder TransformerDecoderLayer
    RNNCell LSTMCell GRUCell"""
LAYERS = frozenset(
    (*(getattr(nn, name) for name in _LAYERS.split() if hasattr(nn, name)), NonDynamicallyQuantizableLinear)
)
_WITH_ACTIVATION = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_ACTIVATIONS = (F.relu, F.gelu)  # functions that the modules in _WITH_ACTIVATION hold as attributes
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)  # known in predictions only
# lists that recurrent layers hold: those that forward reads, and names for pickles
_READ_LISTS, _LISTS = ("_flat_weights", "_flat_weight_refs", "_flat_weights_names"), ("_all_weights",)
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
    """Raised if calls may compute different things each time; the message is the reason."""


class Facts:
    """Snapshot of everything that a call of a wrapped object depends on, other than its inputs and the values of tensors.

    Args:
        wrapped: the wrapped object.
        training: whether calls are training steps instead of predictions.
        auxiliary: other modules that take part, by name.

    Raises:
        UntraceableError: if a call may depend on anything else.
    """

    def __init__(self, wrapped: Any, training: bool, auxiliary: Mapping[str, nn.Module] | None = None) -> None:
        _check_record(wrapped, training)
        modules = dict(wrapped.named_modules())
        if any("_workbench" in module.__dict__ for path, module in modules.items() if path):
            raise UntraceableError("a layer is wrapped itself")
        functions, read = _check_code(modules, LAYERS if training else LAYERS.union(_RECURRENT))
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
        # extra modules that are plain containers: only their sub-modules are compared
        containers = [
            m for path, m in modules.items() if path.split(".")[0] == EXTRAS and type(m) in (nn.Module, nn.ModuleList)
        ]
        self._holders = [*_holders(self._modules, containers), *_settings_of(record)]
        self._sizes = list(map(len, self._holders))
        entries = [(holder, key) for holder in self._holders for key in holder if key not in _IGNORED]
        # three parallel lists, so that one `map` compares all entries; strong references, so that no new object reuses an id
        self._dicts = [*(holder for holder, _ in entries), *(holder for holder, _, _ in read)]
        self._keys = [*(key for _, key in entries), *(key for _, key, _ in read)]
        self._items = [*(holder[key] for holder, key in entries), *(value for _, _, value in read)]
        self._lists = [
            (items, list(items))
            for module in self._modules
            if isinstance(module, _RECURRENT)
            for items in map(module.__dict__.__getitem__, _READ_LISTS)
        ]
        dense_slots = engine_of(wrapped).clones.dense_slots  # a weight that becomes dense is rounded in another way
        self._lists.append((dense_slots, list(dense_slots)))
        self._settings = _SETTINGS(record)
        self.parameters = [p for p in wrapped.parameters() if p.requires_grad]
        self.frozen = [p for p in wrapped.parameters() if not p.requires_grad]
        self.buffers = list(wrapped.buffers())
        tensors = [*self.parameters, *self.frozen, *self.buffers]
        if any(
            type(t.data) is not Tensor
            or t.layout is not torch.strided
            or t.device != tensors[0].device
            or not t.is_contiguous()
            for t in tensors
        ):
            raise UntraceableError("a tensor is on another device than others, or has another layout")
        self.device: Any = tensors[0].device if tensors else None  # None if the model has no tensors
        if self.device is not None and not has_generator(self.device):
            raise UntraceableError(f"random draws cannot be repeated on the device {self.device}")
        self._tensor_forms = _TensorForms(tensors)

    def hold(self) -> bool:
        """Return whether nothing has changed."""
        try:
            same = all(map(operator.is_, map(dict.__getitem__, self._dicts, self._keys), self._items))
        except KeyError:
            return False
        return (
            same
            and list(map(len, self._holders)) == self._sizes
            and all(map(operator.is_, map(type, self._modules), self._classes))
            and all(len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in self._lists)
            and all(map(operator.is_, _SETTINGS(self._record), self._settings))
            and self._tensor_forms.hold()
            and all(map(operator.is_, map(types.MappingProxyType.get, self._spaces, self._names), self._functions))
            and all(map(operator.is_, map(_CODE, self._written), self._codes))
        )


class _TensorForms:
    """Snapshot of the devices, dtypes and shapes of contiguous tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._dtypes, self._shapes = list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors))
        self._devices = list(map(_DEVICE, tensors))
        # by inference mode: torch's own guard, which takes a quarter of the time, if this version of torch has it
        self._guards: dict[bool, Any] = {}

    def hold(self) -> bool:
        """Return whether nothing has changed."""
        inference = torch.is_inference_mode_enabled()
        guard = self._guards.get(inference)
        if guard is not None and guard.check(*self._tensors):
            return True
        if not (
            all(map(operator.is_, map(_DTYPE, self._tensors), self._dtypes))
            and list(map(_SHAPE, self._tensors)) == self._shapes
            and list(map(_DEVICE, self._tensors)) == self._devices
            and all(map(Tensor.is_contiguous, self._tensors))
        ):
            return False
        if guard is None:
            # a private class of torch; it also compares modes, so that it may fail where the comparison above does not
            with contextlib.suppress(AttributeError, TypeError):
                sizes: list[Any] = [list(t.shape) for t in self._tensors]
                strides: list[Any] = [list(t.stride()) for t in self._tensors]
                self._guards[inference] = torch._C._dynamo.guards.TensorGuards(
                    *self._tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
                )
        return True


_CONTENTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
# attributes of every module that do not affect calls without gradients and without hooks
_IGNORED_NAMES = """_non_persistent_buffers_set _backward_hooks _backward_pre_hooks _is_full_backward_hook _forward_hooks_with_kwargs
    _forward_hooks_always_called _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
    _load_state_dict_post_hooks"""
_IGNORED = frozenset(_IGNORED_NAMES.split())
_DTYPE, _SHAPE, _DEVICE, _CODE = map(operator.attrgetter, ("dtype", "shape", "device", "__code__"))
_SETTINGS = operator.attrgetter(
    "output", "state", "strategy", "purity", "chunk", "rows", "says_distributions", "methods"
)


def _holders(modules: Sequence[nn.Module], containers: Collection[nn.Module]) -> Iterator[dict[str, Any]]:
    for module in modules:
        if any(module is item for item in containers):
            yield module._modules
            continue
        yield module.__dict__
        yield from (module.__dict__[kind] for kind in _CONTENTS)


def _settings_of(record: Any) -> Iterator[dict[str, Any]]:
    """Yield the dicts of settings that determine the branches of a wrapped object."""
    yield record.rules
    for method in record.methods:
        yield vars(method)
        parts = [method.wrapper, *vars(method).values()]
        yield from {id(part): vars(part) for part in parts if _is_ours(part)}.values()


def _is_ours(part: Any) -> bool:
    return type(part).__module__.startswith("workbench.") and hasattr(part, "__dict__")


def torch_now() -> tuple[Any, ...]:
    """Return the modes and settings of torch in this thread that affect what a call computes."""
    return (
        torch.is_grad_enabled(),
        torch._C._is_any_autocast_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
        any(GLOBAL_HOOKS),
        _TOP_HOOKS is not None and _TOP_HOOKS(False) is None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.compiler.is_compiling(),
    )


def is_plain(torch_now: tuple[Any, ...], gradients: bool) -> bool:
    """Return whether no mode is active that would change the computation.

    Args:
        torch_now: result of `torch_now`.
        gradients: whether gradients must be enabled or disabled.
    """
    with_gradients, autocast, anomaly, modes, hooks, unpacked, _, _, compiling = torch_now
    return bool(with_gradients is gradients and not (autocast or anomaly or modes or hooks or compiling) and unpacked)


def _check_record(wrapped: Any, training: bool) -> None:
    record = wrapped._workbench
    for method in record.methods:
        if "repeats" not in vars(type(method)) or not method.repeats(training):
            raise UntraceableError(f"the method {method.name}")
    if record.method != "forward" or record.state or record.says_distributions:
        raise UntraceableError("more than a forward pass that returns tensors")
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
        raise UntraceableError("extra modules of the wrapped object")


def check_contents(path: str, module: nn.Module, taken_over: Collection[tuple[str, str]] = ()) -> None:
    """Check that a module has plain attributes only and no hooks.

    Args:
        path: path of the module.
        module: the module.
        taken_over: (path, name) of tensors that voters have replaced; what stands in their place is not used in calls.

    Raises:
        UntraceableError: if there are hooks or other attributes.
    """
    for name in _HOOKS:
        if any(not isinstance(hook, Alone) for hook in getattr(module, name).values()):
            raise UntraceableError(f"{path} has hooks")
    if is_bounded(module):
        raise UntraceableError(f"{path} scales its rows in place")
    if path.split(".")[0] == EXTRAS:
        return
    for name, value in module.__dict__.items():
        if name in _MODULE and name != "forward":
            continue
        if (path, name) in taken_over:
            continue
        if (
            name == "activation"
            and isinstance(module, _WITH_ACTIVATION)
            and any(value is function for function in _ACTIVATIONS)
        ):
            continue
        if type(value) is list and name in (*_READ_LISTS, *_LISTS) and isinstance(module, _RECURRENT):
            continue
        values = value if type(value) in (tuple, torch.Size) else (value,)
        if not all(map(is_atom, values)) or any(isinstance(item, type | types.ModuleType) for item in values):
            raise UntraceableError(f"{path}.{name} is a {type(value).__name__}")


Function = tuple[type, str, Any, types.CodeType | None]  # class, name, function, its code


def _check_code(modules: dict[str, nn.Module], known: Collection[type]) -> tuple[list[Function], list[Global]]:
    """Return the functions of the user's classes that a call may reach, and the globals that they read.

    Args:
        modules: the modules by path.
        known: classes of torch that need no inspection.

    Raises:
        UntraceableError: if a function may have side effects or read other state.
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
    class_names = {name for cls in users for name in vars(cls)}
    special = sorted(name for name in class_names - _DUNDERS if name.startswith("__"))
    if special:
        raise UntraceableError(f"{special[0]} of a layer")
    # included for torch's own classes too, since their forward may be replaced
    functions = list({_defined(type(module), "forward") for module in modules.values()})
    read: list[Global] = []
    pending, seen = ["forward"], {"forward"}
    while pending:
        name = pending.pop()
        for cls in users:
            if name not in vars(cls):
                continue
            value = vars(cls)[name]
            if not isinstance(value, types.FunctionType):
                raise UntraceableError(f"{cls.__name__}.{name} is a {type(value).__name__}")
            functions.append((cls, name, value, value.__code__))
            try:
                read += globals_of_pure(value, (attributes - _MODULE) | class_names | {"training"})
            except ImpureError as error:
                raise UntraceableError(str(error)) from None
            new = set(value.__code__.co_names) & class_names - seen
            seen |= new
            pending += sorted(new)
    return functions, read


def _defined(cls: Any, name: str) -> Function:
    """Return the function of a class, and the base class that defines it."""
    cls = getattr(cls, "_plain_class", cls)
    home = next(base for base in cls.__mro__ if name in vars(base))
    function: Any = vars(home)[name]
    return home, name, function, getattr(function, "__code__", None)


def _users_classes(module: nn.Module, known: Collection[type]) -> Iterator[type]:
    """Yield the classes of a module that are not torch's own."""
    cls: Any = getattr(type(module), "_plain_class", type(module))
    for base in cls.__mro__:
        if base is nn.Module or base is object or base in known:
            return
        if base.__module__.startswith(("torch.", "workbench.")) and not base.__module__.startswith("workbench.models."):
            raise UntraceableError(f"the layer {base.__name__}")
        yield base


__all__ = ["Facts", "UntraceableError", "check_contents", "is_plain", "torch_now"]
