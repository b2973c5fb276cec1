"""Wrapped models under PyTorch's gradient modes and precisions equal plain models."""

from __future__ import annotations

import concurrent.futures
import copy
from typing import Any

import pytest
import torch
from helpers.reference_from_state import (
    CERTAIN,
    KINDS,
    Net,
    assert_answer,
    assert_buffers,
    assert_gradients,
    close,
    data,
    expected,
    expected_loss,
    objective,
    parts,
    seeded,
    state_of,
    wrap,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap
from torch.utils.checkpoint import checkpoint

every_kind = pytest.mark.parametrize("name", KINDS)
every_certain_kind = pytest.mark.parametrize("name", CERTAIN)


# ---- a step of training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@every_kind
def test_an_answer_its_gradients_and_the_statistics(name: str, training: bool) -> None:
    wrapped = wrap(name).train(training)
    state, (x, _) = state_of(wrapped), data()
    output = seeded(wrapped, x, return_risk=True)
    answer = seeded(expected, name, state, x, training)
    assert_answer(output, answer)
    objective(output).backward()
    objective(answer).backward()
    assert_gradients(wrapped, state)
    assert_buffers(wrapped, answer)


@every_kind
def test_the_loss_and_its_gradients(name: str) -> None:
    wrapped = wrap(name).train()
    state = state_of(wrapped)
    loss = seeded(wrapped.loss, nn.functional.mse_loss, *data())
    like = seeded(expected_loss, name, state, *data())
    close(loss, like, "loss")
    loss.backward()
    like.backward()
    assert_gradients(wrapped, state)


@every_kind
def test_gradients_accumulate_and_are_clipped(name: str) -> None:
    wrapped = wrap(name).eval()
    state = state_of(wrapped)
    for seed in range(3):
        x = data(seed=seed)[0]
        objective(seeded(wrapped, x, return_risk=True)).backward()
        objective(seeded(expected, name, state, x)).backward()
    assert_gradients(wrapped, state)
    norms = [
        nn.utils.clip_grad_norm_(parameters, 0.5)
        for parameters in (wrapped.parameters(), [tensor for tensor in state.values() if tensor.requires_grad])
    ]
    assert norms[0] > 0.5
    close(norms[0], norms[1], "norm of the gradients")
    assert_gradients(wrapped, state)


@every_certain_kind
def test_gradients_of_gradients(name: str) -> None:
    wrapped = wrap(name).eval()
    state, (x, _) = state_of(wrapped), data()
    penalties = []
    for run in (lambda x: wrapped(x, return_risk=True), lambda x: expected(name, state, x)):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(objective(run(inputs)), inputs, create_graph=True)
        penalties.append(slope.square().sum())
        penalties[-1].backward()
    close(penalties[0], penalties[1], "gradient penalty")
    assert_gradients(wrapped, state)


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
@every_kind
def test_answers_without_gradients_are_those_of_plain_models(name: str, training: bool, mode: Any) -> None:
    wrapped = wrap(name).train(training)
    state, (x, _) = state_of(wrapped), data()
    with mode():
        output = seeded(wrapped, x, return_risk=True)
    answer = seeded(expected, name, state, x, training)
    assert not any(tensor.requires_grad for tensor in parts(output).values())
    assert_answer(output, answer)
    assert_buffers(wrapped, answer)
    state = state_of(wrapped)  # and then with gradients
    output, answer = seeded(wrapped, x, return_risk=True), seeded(expected, name, state, x, training)
    objective(output).backward()
    objective(answer).backward()
    assert_gradients(wrapped, state)


@every_kind
def test_autocast_computes_as_plain_models_do(name: str) -> None:
    def make() -> nn.Module:
        return Net().float()

    wrapped = wrap(name, seeded(make)).train()
    state, x = state_of(wrapped), data()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        output = seeded(wrapped, x, return_risk=True)
        answer = seeded(expected, name, state, x, True, make=make)
    assert output[0].dtype == answer.outputs.dtype == torch.bfloat16
    for part, like in zip(sorted(parts(output)), sorted(["y", *answer.risks]), strict=True):
        whole = answer.y if like == "y" else answer.risks[like]
        torch.testing.assert_close(parts(output)[part].float(), whole.float(), rtol=0.02, atol=0.02)
    for key, value in answer.buffers.items():
        torch.testing.assert_close(wrapped.state_dict()[key].float(), value.float())
    output[0].float().square().mean().backward()
    answer.y.float().square().mean().backward()
    for key, parameter in wrapped.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            torch.testing.assert_close(parameter.grad, state[key].grad, rtol=0.05, atol=0.02)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(Net):
    """`Net`, whose middle is computed again in the backward pass."""

    reentrant = False

    def middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(h)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.norm(self.first(x)), use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("cls", [Checkpointed, Reentrant])
@pytest.mark.parametrize("name", [*CERTAIN, "sample_weights"])
def test_gradients_through_recomputed_activations(name: str, cls: type[Net], strategy: str) -> None:
    wrapped = wrap(name, seeded(cls), strategy=strategy).train()
    state, (x, _) = state_of(wrapped), data()
    output, answer = seeded(wrapped, x, return_risk=True), seeded(expected, name, state, x, True)
    assert_answer(output, answer)
    objective(output).backward()
    objective(answer).backward()
    assert_gradients(wrapped, state)
    assert_buffers(wrapped, answer)


@pytest.mark.parametrize("cls", [Checkpointed, Reentrant])
@pytest.mark.parametrize("name", ["sample_activations", "sample_sculpt"])
def test_noise_on_recomputed_activations_is_refused_in_the_forward_pass(name: str, cls: type[Net]) -> None:
    wrapped = wrap(name, seeded(cls)).train()
    x = data()[0]
    with pytest.raises(RuntimeError, match="checkpoint"):
        wrapped(x, return_risk=True)
    with torch.no_grad():  # nothing is computed again
        answer = seeded(expected, name, state_of(wrapped), x, True)
        assert_answer(seeded(wrapped, x, return_risk=True), answer)


def test_noise_is_refused_by_name_under_hooks_of_saved_tensors() -> None:
    wrapped = wrap("sample_activations").train()
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match=r"save_on_cpu.*where=\"weights\""):
        wrapped(data()[0])


# ---- function transforms ---------------------------------------------------------------------------------------------


@every_kind
def test_a_call_with_other_tensors(name: str) -> None:
    wrapped = wrap(name).eval()
    before = copy.deepcopy(wrapped.state_dict())
    x = data()[0]
    state = {
        key: (tensor.detach() * 0.7).requires_grad_()
        for key, tensor in state_of(wrapped).items()
        if tensor.requires_grad
    }
    fixed = {key: tensor for key, tensor in state_of(wrapped).items() if key not in state}
    mine = {key: tensor.detach().clone().requires_grad_() for key, tensor in state.items()}
    output = seeded(functional_call, wrapped, {**mine, **fixed}, (x,), {"return_risk": True})
    answer = seeded(expected, name, {**state, **fixed}, x)
    assert_answer(output, answer)
    objective(output).backward()
    objective(answer).backward()
    for key, tensor in mine.items():
        like = state[key].grad
        close(
            tensor.grad if tensor.grad is not None else torch.zeros(()),
            like if like is not None else torch.zeros(()),
            key,
        )
    assert all(torch.equal(tensor, before[key]) for key, tensor in wrapped.state_dict().items())


@every_certain_kind
def test_grad_of_a_function_of_the_parameters(name: str) -> None:
    wrapped = wrap(name).eval()
    state, (x, _) = state_of(wrapped), data()

    def value(parameters: dict[str, Tensor]) -> Tensor:
        return objective(functional_call(wrapped, parameters, (x,), {"return_risk": True}))

    gradients = grad(value)({key: tensor.detach() for key, tensor in wrapped.named_parameters()})
    objective(expected(name, state, x)).backward()
    for key, slope in gradients.items():
        like = state[key].grad
        close(slope, torch.zeros_like(slope) if like is None else like, key)


@every_certain_kind
def test_derivatives_by_the_input(name: str) -> None:
    wrapped = wrap(name).eval()
    state, (x, _) = state_of(wrapped), data(2)

    def plain(x: Tensor) -> Tensor:
        return expected(name, state, x, risk=False).y

    like = torch.autograd.functional.jacobian(plain, x)
    close(jacrev(wrapped)(x), like, "jacrev")
    close(jacfwd(wrapped)(x), like, "jacfwd")
    second = torch.autograd.functional.hessian(lambda x: plain(x).sum(), x)
    close(hessian(lambda x: wrapped(x).sum())(x), second, "hessian")


@every_certain_kind
def test_vmap_over_batches(name: str) -> None:
    wrapped = wrap(name).eval()
    state = state_of(wrapped)
    batches = [data(seed=seed)[0] for seed in range(3)]
    outputs = [parts(wrapped(x, return_risk=True)) for x in batches]
    mapped = parts(vmap(lambda x: wrapped(x, return_risk=True))(torch.stack(batches)))
    for key, tensor in mapped.items():
        close(tensor, torch.stack([output[key] for output in outputs]), key)
    close(mapped["y"][1], expected(name, state, batches[1]).y, "y")


@pytest.mark.parametrize("name", ["vote", "vote_last2", "sculpt"])
def test_a_gradient_for_each_row(name: str) -> None:
    wrapped = wrap(name).eval()
    state, (x, target) = state_of(wrapped), data()

    def value(parameters: dict[str, Tensor], row: Tensor, to: Tensor) -> Tensor:
        return (functional_call(wrapped, parameters, (row[None],)) - to).square().sum()

    parameters = {key: tensor.detach() for key, tensor in wrapped.named_parameters()}
    gradients = vmap(grad(value), (None, 0, 0))(parameters, x, target)
    for i, (row, to) in enumerate(zip(x, target, strict=True)):
        for tensor in state.values():
            tensor.grad = None
        (expected(name, state, row[None], risk=False).y - to).square().sum().backward()
        for key, slopes in gradients.items():
            like = state[key].grad
            close(slopes[i], torch.zeros_like(slopes[i]) if like is None else like, key)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@every_certain_kind
def test_eight_threads_share_one_object(name: str, strategy: str) -> None:
    wrapped = wrap(name, strategy=strategy).eval()
    state = state_of(wrapped)
    answers = [expected(name, state, data(seed=seed)[0]) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            outputs = pool.map(lambda seed: wrapped(data(seed=seed)[0], return_risk=True), range(8))
            for output, answer in zip(outputs, answers, strict=True):
                assert_answer(output, answer)


def test_statistics_move_once_for_each_thread() -> None:
    wrapped = wrap("vote_sculpt").train()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: wrapped(data(seed=seed)[0], return_risk=True), range(8)))
    assert torch.equal(wrapped.state_dict()["norm.num_batches_tracked@vote"], torch.full((3,), 8))
