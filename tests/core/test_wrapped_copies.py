"""Wrapped objects move, copy, pickle, train on and load checkpoints as modules do."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from helpers.wrapped_models import Net, answer, equal, every_wrapper, wrap
from torch import Tensor, nn

from workbench import fit, is_wrapped, vote

# ---- moving and copying ----------------------------------------------------------------------------------------------


@every_wrapper
def test_double_changes_every_tensor_and_the_numbers_stay(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    before = answer(wrapped, x) if name not in ("sample", "learned") else None
    assert wrapped.double() is wrapped
    after = answer(wrapped, x.double())
    assert all(value.dtype == torch.float64 for value in after[:1])
    if before is not None:
        assert all(torch.allclose(a.float(), b, atol=1e-4) for a, b in zip(after, before, strict=True))
    wrapped.to(torch.float32)
    assert answer(wrapped, x)[0].dtype == torch.float32


@every_wrapper
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.filterwarnings("ignore:the weights of the model have changed")
def test_copies_are_equal_and_independent(name: str, how: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    answer(wrapped, x)
    if how == "deepcopy":
        other = copy.deepcopy(wrapped)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(wrapped))
    else:
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, Net)
    assert is_wrapped(other)
    assert other.methods == wrapped.methods
    assert other.layers[0] is other.fc1
    assert equal(wrapped, other, x)
    expected = answer(wrapped, x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert not equal(wrapped, other, x)
    assert all(torch.equal(a, b) for a, b in zip(answer(wrapped, x), expected, strict=True))


@every_wrapper
def test_a_shallow_copy_shares_its_tensors(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    other = copy.copy(wrapped)
    assert equal(wrapped, other, x)
    assert {id(p) for p in other.parameters()} == {id(p) for p in wrapped.parameters()}
    other.note = "mine"
    assert not hasattr(wrapped, "note")


@every_wrapper
def test_copies_train(name: str) -> None:
    other = copy.deepcopy(wrap(name, Net())).train()
    x = torch.randn(12, 3)
    y, risk = other(x, return_risk=True)
    (y.square().mean() + (risk if isinstance(risk, Tensor) else risk.total).sum()).backward()
    reached = [key for key, p in other.named_parameters() if p.grad is not None]
    assert reached
    other.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in other.parameters())


def test_derivatives_by_the_input_are_those_of_the_mean_voter() -> None:
    wrapped: Any = vote.Wrapper(3)(Net()).eval()
    x = torch.randn(5, 3, requires_grad=True)
    expected = torch.stack([torch.autograd.grad(v(x).sum(), x)[0] for v in wrapped.voters()]).mean(0)
    jacobian = torch.func.jacrev(lambda rows: wrapped(rows).sum())(x.detach())
    assert torch.allclose(jacobian, expected, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(wrapped(x).sum(), x)[0], expected, atol=1e-6)
    per_row = torch.vmap(lambda row: wrapped(row[None])[0])(x.detach())
    assert torch.allclose(per_row, wrapped(x), atol=1e-6)


@every_wrapper
def test_other_parameters_can_be_called_functionally(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(4, 3)
    before = answer(wrapped, x)
    if name in ("vote", "sculpt"):
        zeros = {key: torch.zeros_like(p) for key, p in wrapped.named_parameters()}
        assert torch.equal(torch.func.functional_call(wrapped, zeros, (x,)), torch.zeros(4, 1))
    same = dict(wrapped.named_parameters())
    with torch.random.fork_rng():
        torch.manual_seed(7)
        y = torch.func.functional_call(wrapped, same, (x,), {"return_risk": True})[0]
    assert torch.equal(y, before[0])
    assert all(torch.equal(a, b) for a, b in zip(answer(wrapped, x), before, strict=True))


def test_an_average_of_weights_follows_the_training() -> None:
    wrapped: Any = vote.Wrapper(3)(Net()).train()
    average: Any = torch.optim.swa_utils.AveragedModel(wrapped)
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    sums = [torch.zeros_like(p) for p in wrapped.parameters()]
    for _ in range(3):
        opt.zero_grad()
        wrapped(torch.randn(9, 3)).square().mean().backward()
        opt.step()
        average.update_parameters(wrapped)
        sums = [total + p.detach() for total, p in zip(sums, wrapped.parameters(), strict=True)]
    for mean, total in zip(average.module.parameters(), sums, strict=True):
        assert torch.allclose(mean, total / 3, atol=1e-6)
    x = torch.randn(5, 3)
    answers = torch.stack([voter(x) for voter in average.module.eval().voters()])
    assert torch.allclose(average.eval()(x), answers.mean(0), atol=1e-6)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@every_wrapper
def test_a_checkpoint_of_the_plain_model_loads(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        trained = Net().eval()
    wrapped = wrap(name, Net())
    wrapped.load_state_dict(trained.state_dict())
    x = torch.randn(4, 3)
    if name in ("sculpt", "neo"):
        assert torch.equal(wrapped(x), trained(x))
    elif name in ("vote", "composed", "last"):
        for voter in wrapped.voters():
            assert torch.equal(voter(x), trained(x))
    elif name == "rank1":
        assert torch.equal(dict(wrapped.named_base_parameters())["fc1.weight"], trained.fc1.weight)
        assert all(torch.equal(voter.fc1.bias, trained.fc1.bias) for voter in wrapped.voters())
    else:
        assert torch.equal(wrapped.unwrap()(x), trained(x))


@every_wrapper
def test_keys_of_shared_parameters_are_the_models(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    state = wrapped.state_dict()
    shared = {key for key in state if "@" not in key}
    assert shared <= model.state_dict().keys()
    if name in ("sample", "sculpt", "neo"):
        assert shared == model.state_dict().keys()


@every_wrapper
@pytest.mark.filterwarnings("ignore:the weights of the model have changed")
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(name: str) -> None:
    def steps(wrapped: Any, opt: torch.optim.Optimizer, seeds: range) -> None:
        wrapped.train()
        for seed in seeds:
            torch.manual_seed(seed)
            x = torch.randn(12, 3)
            opt.zero_grad()
            wrapped.loss(nn.MSELoss(), x, x.sum(1, keepdim=True)).backward()
            opt.step()

    wrapped = wrap(name, Net())
    opt = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    steps(wrapped, opt, range(3))
    file = io.BytesIO()
    torch.save({"model": wrapped.state_dict(), "opt": opt.state_dict()}, file)
    steps(wrapped, opt, range(3, 6))
    file.seek(0)
    saved = torch.load(file)
    other = wrap(name, Net())
    other_opt = torch.optim.Adam(other.parameters(), lr=0.01)
    other.load_state_dict(saved["model"])
    other_opt.load_state_dict(saved["opt"])
    steps(other, other_opt, range(3, 6))
    for (key, p), (other_key, q) in zip(wrapped.named_parameters(), other.named_parameters(), strict=True):
        assert key == other_key
        assert torch.equal(p, q), key
    x = torch.randn(5, 3)
    assert equal(wrapped.eval(), other.eval(), x)


@every_wrapper
def test_a_wrapped_model_works_as_a_part_of_another(name: str) -> None:
    whole = nn.Sequential(nn.Linear(2, 3), wrap(name, Net())).eval()
    x = torch.randn(4, 2)
    torch.manual_seed(7)
    y = whole(x)
    twin = copy.deepcopy(whole)
    torch.manual_seed(7)
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1)
    twin.load_state_dict(whole.state_dict())
    torch.manual_seed(7)
    assert torch.equal(twin(x), y)


def test_a_memory_format_of_images_changes_no_number() -> None:
    wrapped: Any = vote.Wrapper(2)(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))).eval()
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = wrapped(x, return_risk=True)
    wrapped.to(memory_format=torch.channels_last)
    after = wrapped(x.contiguous(memory_format=torch.channels_last), return_risk=True)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


@every_wrapper
def test_the_setting_by_which_torch_swaps_parameters_changes_no_number(name: str) -> None:
    def numbers() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        wrapped = wrap(name, Net())
        x = torch.randn(20, 3)
        fit(wrapped, (x, x.sum(1, keepdim=True)), epochs=2, progress=False)
        wrapped.double().float().load_state_dict(wrapped.state_dict())
        return answer(wrapped.eval(), x)

    expected = numbers()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        swapped = numbers()
        assert torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(torch.equal(one, other) for one, other in zip(swapped, expected, strict=True))
