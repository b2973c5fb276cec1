"""What users and libraries add around calls of a wrapped object: a replaced forward, and hooks."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapped_models import Net, every_wrapper, wrap
from torch import Tensor, nn

from workbench import compose, sculpt, vote


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def of_voters(wrapped: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    answers = torch.stack([voter.eval()(x) for voter in wrapped.voters()])
    return answers.mean(0), answers.std(0, unbiased=False)


def closure(model: Any) -> None:
    before = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs)

    model.forward = forward


def as_accelerate_casts(model: Any) -> None:
    """`Accelerator.prepare_model` under mixed precision."""

    def to_float32(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            return torch.utils._pytree.tree_map(lambda t: t.float() if isinstance(t, Tensor) else t, output)

        return forward

    model._original_forward = model.forward
    function = model.forward.__func__ if hasattr(model.forward, "__func__") else model.forward
    new = torch.autocast("cpu", torch.bfloat16)(function)
    if hasattr(model.forward, "__func__"):
        model.forward = types.MethodType(new, model)
        model.forward = types.MethodType(to_float32(model.forward.__func__), model)
    else:
        model.forward = to_float32(new)


def as_accelerate_hooks(model: Any) -> None:
    """`add_hook_to_module`, as device_map has it."""
    model._old_forward = model.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs)

    model.forward = functools.update_wrapper(functools.partial(forward, model), model._old_forward)


def bound_method(model: Any) -> None:
    model.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), model)


def partial(model: Any) -> None:
    model.forward = functools.partial(model.forward)


def twice(model: Any) -> None:
    closure(model)
    as_accelerate_hooks(model)


REPLACEMENTS = {
    f.__name__: f for f in (closure, as_accelerate_casts, as_accelerate_hooks, bound_method, partial, twice)
}


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_another_forward_on_the_wrapped_object_keeps_its_numbers(name: str, called_before: bool) -> None:
    wrapped: Any = vote.Wrapper(3)(mlp()).eval()
    x = torch.randn(5, 3)
    y, spread = of_voters(wrapped, x)
    if called_before:
        wrapped(x)
    REPLACEMENTS[name](wrapped)
    near = {"atol": 0.03, "rtol": 0.03} if "casts" in name else {}
    for model in (wrapped, copy.deepcopy(wrapped)):
        torch.testing.assert_close(model(x), y, **near)
        prediction, risk = model(x, return_risk=True)
        torch.testing.assert_close(prediction, y, **near)
        torch.testing.assert_close(risk, spread, **near)
    wrapped.train()(x).sum().backward()  # rows are dealt
    assert all(p.grad is not None for p in wrapped.parameters())
    plain = wrapped.unwrap()
    torch.testing.assert_close(plain(x), wrapped.voters()[0](x))


@every_wrapper
def test_every_wrapper_answers_through_another_forward(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(4, 3)
    torch.manual_seed(3)
    expected = wrapped(x, return_risk=True)
    closure(wrapped)
    torch.manual_seed(3)
    torch.testing.assert_close(wrapped(x, return_risk=True)[0], expected[0])


def test_the_other_forward_runs_once_a_call_and_goes_away_again() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp()).eval()
    x, calls = torch.randn(5, 3), []
    y = wrapped(x)
    before = wrapped.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return before(*args, **kwargs)

    wrapped.forward = forward
    wrapped(x)
    wrapped(x, return_risk=True)
    wrapped.forward(x)
    assert len(calls) == 3
    wrapped.forward = before  # as remove_hook_from_module
    assert "forward" not in wrapped.__dict__
    torch.testing.assert_close(wrapped(x), y)
    wrapped.forward = forward
    del wrapped.forward
    torch.testing.assert_close(wrapped(x), y)
    # as extract_model_from_parallel, which follows __wrapped__ down to the plain function
    wrapped.forward = types.MethodType(nn.Sequential.forward, wrapped)
    torch.testing.assert_close(wrapped(x, return_risk=True)[0], y)


def test_it_may_change_what_goes_in_and_what_comes_out() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp()).eval()
    x = torch.randn(5, 3)
    y, spread = of_voters(wrapped, 2 * x)
    before = wrapped.forward

    def forward(x: Tensor, **kwargs: Any) -> Any:
        output = before(2 * x, **kwargs)
        return tuple(3 * part for part in output) if isinstance(output, tuple) else 3 * output

    wrapped.forward = forward
    torch.testing.assert_close(wrapped(x), 3 * y)
    torch.testing.assert_close(wrapped(x, return_risk=True), (3 * y, 3 * spread))


def without_keywords(before: Any) -> Any:
    return lambda x: before(x)


def swallows_keywords(before: Any) -> Any:
    return lambda x, **kwargs: before(x)


def doubles(before: Any) -> Any:
    return lambda *args, **kwargs: 2 * before(*args, **kwargs)


def shifts(before: Any) -> Any:
    return lambda *args, **kwargs: before(*args, **kwargs) + 1


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (without_keywords, r"test_surrounding\.py:\d+\) takes no return_risk: let it take \*\*kwargs"),
        (swallows_keywords, r"does not pass return_risk on .*call that with \*\*kwargs"),
        (doubles, "returns a tuple of 4 instead of the pair .*pass the second on"),
        (shifts, "cannot work on the pair .*pass the second on"),
    ],
)
def test_a_forward_that_loses_the_risk_is_refused_with_the_line_to_write(replace: Any, message: str) -> None:
    wrapped: Any = vote.Wrapper(3)(mlp()).eval()
    wrapped.forward = replace(wrapped.forward)
    x = torch.randn(5, 3)
    assert wrapped(x).shape == (5, 2)
    with pytest.raises(TypeError, match=message):
        wrapped(x, return_risk=True)


@pytest.mark.filterwarnings("ignore::workbench.WorkbenchWarning")
@every_wrapper
def test_a_forward_that_computes_by_itself_is_refused(name: str) -> None:
    """Its layers are the first voter's, without noise or risk heads."""
    wrapped = wrap(name, Net())
    wrapped.forward = types.MethodType(lambda self, x, **kwargs: self.fc2(torch.relu(self.norm(self.fc1(x)))), wrapped)
    with pytest.raises(RuntimeError, match=r"does not call the previous forward.*set this forward on the plain model"):
        wrapped(torch.randn(4, 3))


def test_errors_of_the_model_pass_through_as_they_are() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("return_risk is not the word")

    wrapped: Any = vote.Wrapper(3)(Raises()).eval()
    closure(wrapped)
    wrapped.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(TypeError, match=r"^return_risk is not the word$"):
        wrapped(torch.randn(5, 3), return_risk=True)


@pytest.mark.parametrize("name", [*REPLACEMENTS, "free_closure", "replaced"])
def test_a_forward_that_was_set_on_the_plain_model_goes_along_into_every_branch(name: str) -> None:
    model = mlp()
    if name == "free_closure":
        model.forward = lambda x: 2 * nn.Sequential.forward(model, x)  # type: ignore[assignment]
    elif name == "replaced":
        model.forward = types.MethodType(lambda self, x: self[2](torch.relu(self[0](x))), model)  # type: ignore[assignment]
    else:
        REPLACEMENTS[name](model)
    x = torch.randn(5, 3)
    plain = model(x)
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(model).eval()
    voters = wrapped.voters()
    assert not torch.allclose(voters[0](x), voters[1](x))
    y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([voter(x) for voter in voters])
    near = {"atol": 0.03, "rtol": 0.03} if "casts" in name else {}
    torch.testing.assert_close(y, answers.mean(0), **near)
    torch.testing.assert_close(risk.epistemic, answers.std(0, unbiased=False), **near)
    assert torch.equal(model(x), plain)


def test_forwards_of_layers_may_be_replaced_after_wrapping() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp()).eval()
    x = torch.randn(5, 3)
    expected = of_voters(wrapped, x)
    for layer in wrapped:
        as_accelerate_hooks(layer)
    torch.testing.assert_close(wrapped(x, return_risk=True), expected)


# ---- hooks ---------------------------------------------------------------------------------------------------------


@every_wrapper
def test_a_hook_that_takes_the_pair_for_a_prediction_is_refused(name: str) -> None:
    x = torch.randn(4, 3)
    for hook, message in (
        (lambda module, args, output: 2 * output, "returns a tuple of 4 instead of the pair"),
        (lambda module, args, output: output + 1, "cannot work on the pair"),
        (lambda module, args, output: output[0], "returns a Tensor instead of the pair"),
    ):
        wrapped = wrap(name, Net())
        handle = wrapped.register_forward_hook(hook)
        with pytest.raises(TypeError, match=f"a forward hook of the wrapped Net {message}.*before wrapping"):
            wrapped(x, return_risk=True)
        handle.remove()
        wrapped(x, return_risk=True)


@every_wrapper
def test_hooks_may_look_at_the_pair_and_change_it(name: str) -> None:
    wrapped, seen = wrap(name, Net()), []
    x = torch.randn(4, 3)
    torch.manual_seed(3)
    expected = wrapped(x, return_risk=True)
    wrapped.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    wrapped.register_forward_hook(lambda module, args, output: (2 * output[0], output[1]))
    torch.manual_seed(3)
    y, _ = wrapped(x, return_risk=True)
    assert seen == [2]
    torch.testing.assert_close(y, 2 * expected[0])
