"""Wrapped models with PyTorch's module tools: hooks, parametrizations, pruning, quantization, averaging, export."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.reference_from_state import (
    CERTAIN,
    KINDS,
    SAMPLES,
    VOTERS,
    Net,
    assert_answer,
    assert_gradients,
    close,
    data,
    expected,
    objective,
    parts,
    seeded,
    state_of,
    wrap,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
every_kind = pytest.mark.parametrize("name", KINDS)
BRANCHES = {  # passes of one call with risk
    "vote": VOTERS,
    "vote_rank1": VOTERS,
    "vote_last2": VOTERS,
    "sculpt": 2,
    "sample_activations": SAMPLES,
    "sample_weights": SAMPLES,
    "vote_sculpt": 2 * VOTERS,
    "sample_sculpt": 2 * SAMPLES,
}


# ---- hooks -----------------------------------------------------------------------------------------------------------


@every_kind
def test_hooks_on_the_wrapped_object_see_each_call_once_and_may_change_it(name: str) -> None:
    wrapped = wrap(name).eval()
    state, (x, _) = state_of(wrapped), data()
    seen: list[Any] = []

    def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        seen.append("pre")
        return (args[0] / 2,)

    def before_with_kwargs(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> None:
        seen.append(sorted(kwargs))

    def after(module: nn.Module, args: tuple[Tensor], output: Any) -> Any:
        seen.append(len(parts(output)))
        return 3 * output[0], output[1]

    wrapped.register_forward_pre_hook(before)
    wrapped.register_forward_pre_hook(before_with_kwargs, with_kwargs=True)
    wrapped.register_forward_hook(after)
    wrapped.register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    inputs = x.clone().requires_grad_()
    output = seeded(wrapped, inputs, return_risk=True)
    answer = seeded(expected, name, state, x / 2)
    close(output[0], 3 * answer.y, "y")
    output[0].sum().backward()
    assert seen == ["pre", ["return_risk"], 4 if "_sculpt" in name else 2, "backward"]


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@every_kind
def test_hooks_on_a_layer_see_every_pass(name: str, strategy: str) -> None:
    """One pass for each branch; what they change counts in each branch."""

    class Doubled(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.second(torch.tanh(self.norm(self.first(x)))))
            return 2 * self.last(h / 2)

    wrapped = wrap(name, strategy=strategy).eval()
    state, (x, _) = state_of(wrapped), data()
    wrapped(x, return_risk=True)  # hooks that come later are seen, too
    seen: list[torch.Size] = []
    wrapped.last.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    wrapped.last.register_forward_hook(lambda module, args, output: 2 * output)
    wrapped.last.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
    output = seeded(wrapped, x, return_risk=True)
    assert seen == [torch.Size([6, 2])] * BRANCHES[name]
    assert_answer(output, seeded(expected, name, state, x, make=Doubled))


def test_hooks_under_vmap_are_refused() -> None:
    """They would get tensors that stand for all branches."""
    wrapped = wrap("vote", strategy="vmap").eval()
    wrapped(data()[0])
    wrapped.last.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match=r'strategy="vmap" is not possible for Net \(last has hooks'):
        wrapped(data()[0])


def test_backward_hooks_on_a_layer_see_every_pass() -> None:
    wrapped = wrap("vote", strategy="loop").eval()
    seen: list[Tensor] = []
    wrapped.last.register_full_backward_hook(lambda module, grads, outputs: seen.append(outputs[0]))
    x = data()[0]
    wrapped(x).sum().backward()
    assert len(seen) == VOTERS
    for gradient in seen:
        close(gradient, torch.full((6, 2), 1 / VOTERS, dtype=torch.float64), "gradient of one voter")


# ---- other parameters ------------------------------------------------------------------------------------------------


def _weight_norm(net: Net) -> Net:
    parametrizations.weight_norm(net.second)
    return net


def _spectral_norm(net: Net) -> Net:
    parametrizations.spectral_norm(net.second)
    return net.eval()


def _orthogonal(net: Net) -> Net:
    parametrizations.orthogonal(net.second, orthogonal_map="cayley")
    return net


@pytest.mark.parametrize("change", [_weight_norm, _spectral_norm, _orthogonal])
@pytest.mark.parametrize("name", CERTAIN)
def test_parametrized_layers_answer_and_learn_as_in_plain_models(name: str, change: Any) -> None:
    def make() -> nn.Module:
        return change(Net())

    wrapped = wrap(name, seeded(make)).eval()
    state, (x, _) = state_of(wrapped), data()
    output, answer = wrapped(x, return_risk=True), expected(name, state, x, make=make)
    assert_answer(output, answer)
    objective(output).backward()
    objective(answer).backward()
    assert_gradients(wrapped, state)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("layer", ["first", "last"])
@every_kind
def test_parametrizing_a_layer_after_wrapping_is_used_or_refused(name: str, layer: str) -> None:
    def change(net: nn.Module) -> nn.Module:
        parametrize.register_parametrization(net.get_submodule(layer), "weight", Halved())
        return net

    wrapped = wrap(name).eval()
    x = data()[0]
    before = seeded(wrapped, x, return_risk=True)
    error: Exception | None = None
    try:
        change(wrapped)
        output = seeded(wrapped, x, return_risk=True)
    except (RuntimeError, ValueError) as raised:
        error = raised
    if error is None:
        answer = seeded(expected, name, state_of(wrapped), x, make=lambda: change(Net()))
        assert_answer(output, answer)
    elif isinstance(error, ValueError):  # torch's own: the weight is no parameter of the layer any more
        assert "'weight'" in str(error)
        assert_answer(before, seeded(expected, name, state_of(wrapped), x))
    else:
        assert f"{layer}.weight" in str(error)
        assert "plain model" in str(error), "and what to do"


@every_kind
def test_quantized_layers_are_used_or_refused(name: str) -> None:
    """What a method owns or must see cannot be packed away; each voter by itself can."""
    wrapped = wrap(name, seeded(lambda: Net().float())).eval()
    x = data()[0].float()
    wrapped(x)
    with pytest.raises((RuntimeError, ValueError), match=r"was replaced|found no activation"):
        torch.ao.quantization.quantize_dynamic(wrapped, {nn.Linear}, dtype=torch.qint8)(x, return_risk=True)
    packed = [torch.ao.quantization.quantize_dynamic(v, {nn.Linear}, dtype=torch.qint8) for v in wrapped.voters()]
    for voter, small in zip(wrapped.voters(), packed, strict=True):
        torch.testing.assert_close(small(x), voter(x), rtol=0.1, atol=0.1)


# ---- averages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [None, 0.5])
@every_kind
def test_an_average_of_the_weights(name: str, decay: float | None) -> None:
    wrapped = wrap(name).train()
    average: Any = torch.optim.swa_utils.AveragedModel(
        wrapped,
        multi_avg_fn=None if decay is None else torch.optim.swa_utils.get_ema_multi_avg_fn(decay),
        use_buffers=True,
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    history = []
    for seed in range(3):
        optimizer.zero_grad()
        seeded(wrapped.loss, nn.functional.mse_loss, *data(seed=seed)).backward()
        optimizer.step()
        average.update_parameters(wrapped)
        history.append({key: tensor.detach().clone() for key, tensor in wrapped.named_parameters()})
    like = dict(history[0])
    for number, step in enumerate(history[1:], 1):
        for key in like:
            keep = number / (number + 1) if decay is None else decay
            like[key] = keep * like[key] + (1 - keep) * step[key]
    for key, tensor in average.module.named_parameters():
        close(tensor.detach(), like[key], key)
    average.eval()
    x = data()[0]
    assert_answer(seeded(average, x, return_risk=True), seeded(expected, name, state_of(average.module), x))


# ---- leaving Python --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strict", [pytest.param(False, id="non-strict"), pytest.param(True, id="strict", marks=pytest.mark.slow)]
)
@every_kind
def test_exported_programs_answer_as_plain_models_for_any_number_of_rows(name: str, strict: bool) -> None:
    wrapped = wrap(name).eval()
    state, (x, _) = state_of(wrapped), data()
    seeded(wrapped, x)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(wrapped, (x,), dynamic_shapes=({0: rows},), strict=strict)
    module = program.module()
    for number in (6, 9):
        batch = data(number)[0]
        assert_answer(seeded(module, batch), seeded(expected, name, state, batch, risk=False))
    output, answer = seeded(wrapped, x, return_risk=True), seeded(expected, name, state, x)  # and the object lives on
    assert_answer(output, answer)
    objective(output).backward()
    objective(answer).backward()
    assert_gradients(wrapped, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", CERTAIN)
def test_export_with_risk(name: str) -> None:
    class Asked(nn.Module):
        def __init__(self, wrapped: Any) -> None:
            super().__init__()
            self.wrapped = wrapped

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return parts(self.wrapped(x, return_risk=True))

    wrapped = wrap(name).eval()
    state, (x, _) = state_of(wrapped), data()
    wrapped(x, return_risk=True)
    output = torch.export.export(Asked(wrapped), (x,), strict=False).module()(x)
    answer = expected(name, state, x)
    close(output["y"], answer.y, "y")
    for key, risk in output.items():
        if key != "y":
            close(risk, answer.risks[key] if key in answer.risks else next(iter(answer.risks.values())), key)


@pytest.mark.parametrize("name", CERTAIN)
def test_traced_models_answer_as_plain_models(name: str) -> None:
    wrapped = wrap(name).eval()
    state, (x, _) = state_of(wrapped), data()
    for gradients in (False, True):  # the calls in which the model is looked at would be traced otherwise
        with torch.set_grad_enabled(gradients):
            wrapped(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(wrapped, (x,))
    batch = data(seed=4)[0]
    close(traced(batch), expected(name, state, batch, risk=False).y, "y")


def test_scripting_a_wrapped_model_is_refused() -> None:
    with pytest.raises(Exception, match=r"(?i)script"):
        torch.jit.script(wrap("vote"))
