"""Checks of one wrapper on one model, which every wrapper must pass on every model that it does not refuse."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.additions import extra
from ..core.outputs.options import has_classes
from ..core.ownership import engine_of
from ..core.prior import NAME as PRIOR
from ..core.wrapped import Wrapped, is_wrapped
from ..core.wrapper import Wrapper, compose
from ..engine.run import STRATEGIES
from ..engine.tree import flatten, is_float, map_tensors
from .branches import (
    check_autocast,
    check_bfloat16,
    check_branches,
    check_float64,
    check_strategy,
    check_training,
)
from .models import (
    assert_structure,
    assert_tree,
    build,
    call,
    close,
    exactly,
    inputs,
    parameters,
    parts,
    rng_states,
    seeded,
    state,
    total,
)
from .trial import Trial, ask, can_be_pickled
from .zoo import leaves, modules

EXECUTORS = [name for name in STRATEGIES if name not in ("auto", "loop", "tune")]  # the other checks run the loop


def check_untouched(trial: Trial) -> None:
    """Check that wrapping and calling leave the given model as it was: parameters, buffers, attributes, mode, random state."""
    case = trial.case
    model, plain = build(case, training=True), build(case)
    before, identities = copy.deepcopy(dict(state(model))), _identities(model)
    with seeded(7):
        states = rng_states()
        wrapped = trial.wrapper()(model)
        for name, value in rng_states().items():
            assert value == states[name], f"wrapping moves the global random state of {name}"
    if isinstance(model, nn.Module):
        assert isinstance(wrapped, type(parts(model)[""])), f"{type(wrapped)} is no {type(parts(model)[''])}"
    assert is_wrapped(wrapped), "the result is not a wrapped model"
    assert wrapped.training, "the wrapped model is not in the mode of the given one"
    wrapped.train(False).train()
    args, kwargs = inputs(case)
    with seeded(), torch.no_grad():
        wrapped.eval()(*args, **kwargs)
        states = rng_states()
        ask(trial.fitted(wrapped), inputs(case))
        assert rng_states()["numpy"] == states["numpy"], "a call moves the global random state of numpy"
        for name, tensor in [*nn.Module.named_parameters(wrapped), *nn.Module.named_buffers(wrapped)]:
            if "@" in name and is_float(tensor):
                tensor.zero_()
    assert all(module.training for module in modules(model)), "the given model changed its mode"
    after = state(model)
    assert list(after) == list(before), "the given model has other tensors"
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), f"{name} of the given model changed"
    assert _identities(model) == identities, "attributes of the given model changed"
    for module in modules(model):
        module.eval()
    output = call(plain, inputs(case))
    assert_tree(call(model, inputs(case)), output, exactly(output), "the given model")


def _identities(model: Any) -> dict[str, Any]:
    """Identities of everything that the modules hold, including hooks and whether parameters require gradients."""
    identities: dict[str, Any] = {}
    for root in modules(model):
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                identities[f"{path}.{name}"] = sorted(map(str, value)) if isinstance(value, dict) else id(value)
            for name, parameter in module._parameters.items():
                identities[f"{path}.{name}.learns"] = parameter is not None and parameter.requires_grad
    return identities


def check_prediction(trial: Trial) -> None:
    """Check in both modes that the prediction has the structure and shapes of the model's output, and each risk the right ones."""
    case = trial.case
    wrapped = trial.fitted(trial.wrap(build(case)))
    output = wrapped._workbench.output
    before = {name: buffer.clone() for name, buffer in nn.Module.named_buffers(wrapped)}
    for training in (False, True):
        plain_arguments, arguments = inputs(case), inputs(case)
        like = call(build(case, training=training), plain_arguments)
        wrapped.train(training)
        with torch.no_grad():
            y, risks = ask(wrapped, arguments)
        for leaf, other in zip(flatten(arguments)[0], flatten(plain_arguments)[0], strict=True):
            if isinstance(leaf, Tensor) and "mutates_input" not in case.tags:
                assert torch.equal(leaf, other), "the call writes into its inputs"
        assert_structure(y, like, "prediction")
        for (path, leaf), (_, other) in zip(leaves(y), leaves(like), strict=True):
            if isinstance(other, Tensor):
                assert leaf.shape == other.shape, f"prediction {path}: {tuple(leaf.shape)}, not {tuple(other.shape)}"
                assert leaf.dtype == other.dtype, f"prediction {path}: {leaf.dtype}, not {other.dtype}"
                assert not is_float(leaf) or leaf.isfinite().all(), f"prediction {path} is not finite"
        assert risks, "no risk was measured"
        for name, risk in risks.items():
            _assert_risk(name, risk, like, output)
        _assert_total(risks, output)
        if training:
            continue
        if not {"captures_self", "mutates_attribute"} & case.tags:
            with torch.no_grad():
                again, _ = ask(wrapped, inputs(case))
            assert_tree(again, like, exactly(y), "with the same seed, prediction")
            without_risk = call(wrapped, inputs(case))
            executors = {decision.executor for decision in engine_of(wrapped).dispatcher.decisions.values()}
            # noise is drawn at once under vmap, which may refuse the model with risk heads only
            if len(executors) == 1 or not trial.random:
                assert_tree(without_risk, like, exactly(y), "without risk, prediction", 1e-6)
        for name, buffer in nn.Module.named_buffers(wrapped):
            assert torch.equal(buffer, before[name]), f"buffer {name} moved in evaluation mode"


def _assert_risk(name: str, risk: Any, like: Any, output: Any) -> None:
    if name == "vacuitic":
        assert isinstance(risk, Tensor) and risk.dim() == 1, "vacuitic risk must be one number per row"  # noqa: PT018
        assert risk.isfinite().all(), "vacuitic risk is not finite"
        return
    assert_structure(risk, like, f"{name} risk")
    for (path, leaf), (_, other) in zip(leaves(risk), leaves(like), strict=True):
        what = f"{name} risk {path}".strip()
        if not is_float(other):
            assert leaf is None, f"{what}: a risk of an output that is no floating-point tensor"
            continue
        shape = other.shape if not has_classes(output) else other.shape[:-1]
        assert isinstance(leaf, Tensor), f"{what} is missing"
        assert leaf.shape == shape, f"{what}: {tuple(leaf.shape)}, not {tuple(shape)}"
        assert leaf.isfinite().all(), f"{what} is not finite"
        assert not leaf.is_complex() and (leaf >= 0).all(), f"{what} is negative"  # noqa: PT018


def _assert_total(risks: dict[str, Any], output: Any) -> None:
    """Assert that variances (or entropies, for classes) add up to the total."""
    if "total" not in risks:
        return
    power = 2 if not has_classes(output) else 1
    named = {name: dict(leaves(risk)) for name, risk in risks.items() if name != "vacuitic"}
    for path, whole in named.pop("total").items():
        if isinstance(whole, Tensor):
            expected = torch.stack([risk[path] ** power for risk in named.values()]).sum(0)
            close(whole**power, expected, f"total risk {path}: its square is not the sum of squares", 1e-8)


def check_loss(trial: Trial) -> None:
    """Check that the training loss is finite, and that the loss or the risk has a gradient for every parameter that wrapping added.

    Parameters that the plain model does not train are exempt.
    """
    case = trial.case
    if case.inputs()[1]:
        return  # `loss` takes positional inputs
    wrapped = trial.wrap(build(case, training=True))
    plain = build(case, training=True)
    args, _ = inputs(case)
    y = plain(*args)
    if not any(is_float(leaf) for _, leaf in leaves(y)):
        return
    total(y).backward()
    unused = {name for name, p in parameters(plain).items() if p.grad is None}
    args, _ = inputs(case)
    with seeded():
        loss = Wrapped.loss(
            wrapped, lambda prediction, target: (total(prediction) - total(target)) ** 2, *_arguments(args, y)
        )
    assert loss.dim() == 0 and loss.isfinite(), f"the loss is {loss}"  # noqa: PT018
    loss.backward()
    y, risks = ask(wrapped, inputs(case))
    for (path, leaf), (_, other) in zip(leaves(y), leaves(plain(*inputs(case)[0])), strict=True):
        if is_float(other) and other.requires_grad:
            assert leaf.requires_grad, f"in training mode, {f'prediction {path}'.strip()} has no gradient"
    total(*(risk for risk in risks.values())).backward()
    for name, parameter in nn.Module.named_parameters(wrapped):
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
        elif "@" in name and parameter.requires_grad and name.partition("@")[0] not in unused:
            raise AssertionError(f"neither loss nor risk has a gradient for {name}")


def _arguments(args: tuple[Any, ...], y: Any) -> tuple[Any, Any]:
    return args if len(args) > 1 else args[0], map_tensors(lambda t: t.detach(), y)


def check_state_dict(trial: Trial) -> None:
    """Check that a saved state loads, strictly, into a newly wrapped model, which then predicts the same."""
    file = io.BytesIO()
    torch.save(trial.pristine.state_dict(), file)
    file.seek(0)
    for method in trial.pristine._workbench.methods:
        json.dumps(method.settings())
    other = trial.wrap(build(trial.case), seed=2).eval()
    other.load_state_dict(torch.load(file, weights_only=True))
    _assert_equal(trial, other)


def check_deepcopy(trial: Trial) -> None:
    """Check that a deep copy predicts the same, and shares no tensors."""
    _assert_equal(trial, copy.deepcopy(trial.pristine))


def check_pickle(trial: Trial) -> None:
    """Check that a pickled model predicts the same, if the plain model can be pickled and the method can be imported."""
    if can_be_pickled(trial.case) and all(_importable(type(m)) for m in trial.make().make()):
        _assert_equal(trial, pickle.loads(pickle.dumps(trial.pristine)))


def _importable(cls: type) -> bool:
    """Whether unpickling can import the class: not if it was defined in a function."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _assert_equal(trial: Trial, other: Any) -> None:
    """Assert that a copy predicts the same as the original, and shares no tensor with it."""
    wrapped, (y, risks) = trial.pristine, trial.answer
    assert type(other) is type(wrapped), f"{type(other)} instead of {type(wrapped)}"
    pointers = {tensor.data_ptr() for tensor in [*nn.Module.parameters(wrapped), *nn.Module.buffers(wrapped)]}
    tensors = [*nn.Module.named_parameters(other), *nn.Module.named_buffers(other)]
    shared = [name for name, tensor in tensors if tensor.numel() and tensor.data_ptr() in pointers]
    assert not shared, f"the copy shares {', '.join(shared[:3])}"
    with torch.no_grad():
        z, others = ask(other, inputs(trial.case))
    for what, tree, like in [("prediction", z, y), *((f"{n} risk", others.get(n), r) for n, r in risks.items())]:
        assert_tree(tree, like, exactly(like), what, 1e-12)


def check_plain_state(trial: Trial) -> None:
    """Check that the state of the plain model loads into the wrapped one, and that unwrapping returns it."""
    plain, wrapped = build(trial.case), trial.wrap(build(trial.case)).eval()
    with torch.no_grad():
        for number, parameter in enumerate(parameters(plain).values()):
            parameter.mul_(1 + 0.1 * number)
    loaded = dict(state(plain))
    wrapped.load_state_dict(copy.deepcopy(loaded))
    now = dict(nn.Module.named_parameters(wrapped))
    for name, parameter in parameters(plain).items():
        if name in now:
            assert torch.equal(now[name], parameter), f"{name} is not the one that was loaded"
    model = Wrapped.unwrap(wrapped)
    has_prior = extra(wrapped, PRIOR) is not None  # unwrapping keeps it, in an object that is still wrapped
    assert is_wrapped(model) is has_prior, "unwrap gives a wrapped model"
    unwrapped_state, expected = [key for key in model.state_dict() if not has_prior or "@" not in key], state(plain)
    names = {name.removeprefix("_orig_mod.") for name in expected}
    assert set(unwrapped_state) == names, f"unwrapped, the state has {sorted(set(unwrapped_state) ^ names)[:3]}"
    with torch.no_grad():
        assert_structure(call(model, inputs(trial.case)), call(plain, inputs(trial.case)), "unwrapped")


def check_composition(trial: Trial, other: Wrapper) -> None:
    """Check that with another wrapper variances add, and that the order of wrapping does not matter."""
    case, wrapper = trial.case, trial.wrapper()
    with seeded(1):
        first = compose(wrapper, other)(build(case))
        nested = [other(wrapper(build(case))), wrapper(other(build(case)))]
    trial.fitted(first)
    with torch.no_grad():
        y, risks = ask(first, inputs(case))
        _assert_total(risks, first._workbench.output)
        kinds = {method.kind for method in first._workbench.methods}
        assert kinds <= set(risks), f"the risks are {sorted(risks)}; {sorted(kinds - set(risks))} is missing"
        for wrapped in nested:
            wrapped.eval().load_state_dict(first.state_dict())
            z, others = ask(wrapped, inputs(case))
            assert_tree(z, y, exactly(y), "in another order, prediction", 1e-9)
            for name, risk in risks.items():
                assert_tree(others[name], risk, exactly(risk), f"in another order, {name} risk", 1e-9)


CHECKS: dict[str, Callable[[Trial], None]] = {
    "untouched": check_untouched,
    "prediction": check_prediction,
    "branches": check_branches,
    "training": check_training,
    "loss": check_loss,
    "state_dict": check_state_dict,
    "plain state": check_plain_state,
    "deepcopy": check_deepcopy,
    "pickle": check_pickle,
    "float64": check_float64,
    "bfloat16": check_bfloat16,
    "autocast": check_autocast,
    **{name: functools.partial(check_strategy, strategy=name) for name in EXECUTORS},
}
COMPOSED_ON = ("mlp", "cnn_bn", "lstm", "dict_out")  # models of the zoo; users' own cases are all composed
__all__ = ["CHECKS", "COMPOSED_ON"]
