"""Hooks, threads, modes, autocast and replaced layers act on a wrapped object as on a plain one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapped_models import MAKERS, Net, answer, every_wrapper, wrap
from torch import nn
from torch.nn.utils import prune

from workbench import WorkbenchWarning, compose, sculpt, vote


@every_wrapper
def test_hooks_on_the_wrapped_object_fire_once_a_call(name: str) -> None:
    wrapped = wrap(name, Net())
    fired: list[str] = []
    wrapped.register_forward_pre_hook(lambda module, args: fired.append("before"))
    wrapped.register_forward_hook(lambda module, args, output: fired.append("after"))
    wrapped(torch.randn(4, 3))
    wrapped(torch.randn(4, 3), return_risk=True)
    assert fired == ["before", "after"] * 2


def test_hooks_on_the_given_model_go_along_and_may_change_its_output() -> None:
    model = Net().eval()
    model.register_forward_hook(lambda module, args, output: output + 10)
    model.fc1.register_forward_hook(lambda module, args, output: output * 0)
    x = torch.randn(4, 3)
    plain = model(x)
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model).eval()
    assert torch.allclose(wrapped(x), plain)
    assert torch.allclose(vote.Wrapper(3, finetune=True)(model).eval()(x), plain, atol=1e-6)


def test_hooks_added_to_a_layer_after_wrapping_are_used() -> None:
    wrapped: Any = vote.Wrapper(3)(Net()).eval()
    x = torch.randn(4, 3)
    wrapped(x)
    seen: list[torch.Size] = []
    handle = wrapped.fc2.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    wrapped(x)
    assert len(seen) in (1, 3)
    handle.remove()
    wrapped(x)
    assert len(seen) in (1, 3)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_threads_that_share_an_object_get_right_numbers(strategy: str) -> None:
    wrapper = compose(vote.Wrapper(3, strategy=strategy), sculpt.Wrapper(n_layers=1))
    wrapped: Any = wrapper(Net()).eval()
    inputs = [torch.randn(8, 3) for _ in range(4)]
    expected = [answer(wrapped, x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(8):
            y, risk = wrapped(inputs[i], return_risk=True)
            got = (y, *(risk[part] for part in risk))
            if not all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_wrapper
def test_train_and_eval_switch_every_branch(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(12, 3)
    before = answer(wrapped, x)[0]
    buffers = {key: value.clone() for key, value in wrapped.state_dict().items() if "num_batches_tracked" in key}
    assert buffers
    wrapped(x, return_risk=True)
    assert all(torch.equal(wrapped.state_dict()[key], value) for key, value in buffers.items())
    wrapped.train()
    assert wrapped.fc1.training
    wrapped(x)
    moved = wrapped.state_dict()
    for key, value in buffers.items():
        if "sculpt" not in key:  # the risk head runs only when risk is asked for
            assert torch.equal(moved[key], value + 1), key
    wrapped.eval()
    assert not torch.equal(answer(wrapped, x)[0], before)


@every_wrapper
def test_inference_mode_and_no_grad_give_the_same_numbers(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    with torch.inference_mode():
        inside = answer(wrapped, x)
    with torch.no_grad():
        without = answer(wrapped, x)
    assert not inside[0].requires_grad
    after = answer(wrapped, x)
    assert after[0].requires_grad
    for first, second, third in zip(inside, without, after, strict=True):
        assert torch.allclose(first, second, atol=1e-6)
        assert torch.allclose(second, third, atol=1e-6)


@every_wrapper
def test_autocast_computes_in_half_precision(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    full = answer(wrapped, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = answer(wrapped, x)
    assert half[0].dtype == torch.bfloat16
    if name not in ("sample", "learned"):
        assert torch.allclose(half[0].float(), full[0], atol=0.05)
        assert all(torch.allclose(h.float(), f, atol=0.1) for h, f in zip(half[1:2], full[1:2], strict=True))


@every_wrapper
def test_a_layer_replaced_after_wrapping_is_used(name: str) -> None:
    wrapped = wrap(name, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = torch.randn(4, 3)
    wrapped(x)
    wrapped[1] = nn.ReLU()
    torch.manual_seed(7)
    y = wrapped(x)
    if "vote" in wrapped.methods:
        expected = torch.stack([v[2](torch.relu(v[0](x))) for v in wrapped.voters()]).mean(0)
        assert torch.allclose(y, expected, atol=1e-6)
    elif name in ("sculpt", "neo"):
        assert torch.equal(y, wrapped[2](torch.relu(wrapped[0](x))))
    else:
        wrapped[1] = nn.Threshold(1e9, 0.0)
        assert torch.allclose(wrapped(x), wrapped[2].bias.expand(4, 1), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "learned"])
def test_a_layer_with_weights_replaced_after_wrapping_is_used_or_refused(name: str) -> None:
    def blank() -> nn.Linear:
        layer = nn.Linear(3, 8)
        nn.init.zeros_(layer.weight)
        return layer

    x = torch.randn(4, 3)
    wrapped = wrap(name, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    wrapped(x)
    wrapped[0] = blank()
    if name in ("vote", "rank1", "composed"):  # the voters have weights of their own there
        with pytest.raises(RuntimeError, match=r"0\.(weight|bias) was replaced after wrapping.*wrap it again"):
            wrapped(x)
        return
    torch.manual_seed(7)
    y = wrapped(x)
    torch.manual_seed(7)
    assert torch.allclose(y, wrapped(torch.zeros(4, 3)), atol=1e-6)  # all rows are alike to weights of zero


COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "normalized": nn.utils.spectral_norm,
    "parametrized": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "learned"])
def test_weights_computed_after_wrapping_are_used_or_refused(name: str, compute: Callable[[nn.Module], Any]) -> None:
    def drawn(module: Any) -> Any:
        torch.manual_seed(7)
        return module(x)

    x, model = torch.randn(4, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    first, second = wrap(name, model).eval(), copy.deepcopy(model)
    before = drawn(first)
    try:
        torch.manual_seed(3)
        compute(first[0])
    except (TypeError, KeyError, ValueError):  # in torch's words, since "weight" is no parameter of the layer
        torch.testing.assert_close(drawn(first), before)
        return
    if name in ("rank1", "last"):
        with pytest.raises(RuntimeError, match=r"0\.weight.* was replaced after wrapping.* wrap it again"):
            first(x)
        return
    torch.manual_seed(3)
    compute(second[0])
    torch.testing.assert_close(drawn(first), drawn(wrap(name, second).eval()))


def test_a_layer_with_a_learned_amount_of_noise_cannot_be_replaced_in_silence() -> None:
    wrapped = wrap("learned", nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    wrapped[2] = nn.Linear(8, 1)
    with pytest.raises((KeyError, RuntimeError), match=r"2\.weight.*replaced after wrapping"):
        wrapped(torch.randn(4, 3))


def test_assigned_state_shows_in_the_layers() -> None:
    first: Any = vote.Wrapper(3)(Net()).eval()
    second: Any = vote.Wrapper(3)(Net()).eval()
    x = torch.randn(4, 3)
    second(x)
    second.load_state_dict(first.state_dict(), assign=True)
    assert torch.equal(second(x), first(x))
    with pytest.warns(WorkbenchWarning, match="first voter only"):
        assert torch.equal(second.fc1(x), first.fc1(x))
    assert torch.equal(second.fc1(x), second.voters()[0].fc1(x))
