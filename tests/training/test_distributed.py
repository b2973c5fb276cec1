"""Two processes (gloo, on the CPU): gradients, buffers and training are those of one process with plain models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.reference_from_state import (
    KINDS,
    Kind,
    Net,
    assert_answer,
    assert_gradients,
    close,
    data,
    expected,
    expected_loss,
    objective,
    seeded,
    state_of,
    wrap,
)
from helpers.two_processes import WORLD, in_two_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench import vote

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


class Training(nn.Module):
    """The documented way to train on `wrapped.loss` in parallel: a module whose forward computes it."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.wrapped.loss(nn.functional.mse_loss, x, target)


def shards(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """The rows of each process."""
    x, target = data(2 * WORLD * 3, seed)
    return [(x[rank::WORLD], target[rank::WORLD]) for rank in range(WORLD)]


def risk_head_idle(kind: Kind, risk: bool) -> bool:
    return kind.head and not risk


def statistics(wrapped: nn.Module, source: int = 0) -> None:
    """What DistributedDataParallel does before a pass: all processes take the buffers of the first."""
    for buffer in wrapped.buffers():
        dist.broadcast(buffer, source)


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------


def _gradients(rank: int, names: list[str]) -> None:
    for name in names:
        for risk in (False, True):
            wrapped = wrap(name).train()
            state = state_of(wrapped)
            kwargs: dict[str, Any] = {"return_risk": True} if risk else {}
            if "vote" in name and not risk:
                kwargs["tile_and_reduce"] = True
            # a risk head that is not asked for is not used, which its owner has to say, as of any model
            parallel = DistributedDataParallel(wrapped, find_unused_parameters=risk_head_idle(KINDS[name], risk))
            answers = [seeded(expected, name, state, x, True, risk, seed=7 + i) for i, (x, _) in enumerate(shards())]
            torch.stack([objective(answer) for answer in answers]).mean().backward()
            output = seeded(parallel, shards()[rank][0], **kwargs, seed=7 + rank)
            assert_answer(output, answers[rank])
            objective(output).backward()
            assert_gradients(wrapped, state)
            for key, value in answers[rank].buffers.items():
                close(wrapped.state_dict()[key], value, f"{key} moves with the rows of its process")
            seeded(parallel.eval(), shards()[rank][0], **kwargs)
            for _ in range(2):  # a second step finds no reduction unfinished
                objective(seeded(parallel.train(), shards()[rank][0], **kwargs)).backward()


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    in_two_processes(_gradients, tmp_path, list(KINDS))


def _training(rank: int, names: list[str]) -> None:
    for name in names:
        wrapped = wrap(name).train()
        # every parameter has a part in the loss, so nothing needs to be said about unused ones
        parallel = DistributedDataParallel(Training(wrapped))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(3):
            statistics(wrapped)
            state = state_of(wrapped)
            rows = shards(seed=step)
            losses = [seeded(expected_loss, name, state, x, target, seed=i) for i, (x, target) in enumerate(rows)]
            torch.stack(losses).mean().backward()
            loss = seeded(parallel, *rows[rank], seed=rank)
            close(loss, losses[rank], f"{name}: loss of step {step}")
            optimizer.zero_grad()
            loss.backward()
            assert_gradients(wrapped, state)
            optimizer.step()
        for key, tensor in wrapped.named_parameters():
            others = [torch.empty_like(tensor) for _ in range(WORLD)]
            dist.all_gather(others, tensor.detach())
            assert torch.equal(*others), f"{name}: {key} is not alike in both processes"


def test_training_on_the_loss_is_that_of_one_process(tmp_path: Path) -> None:
    in_two_processes(_training, tmp_path, list(KINDS))


def _buffers(rank: int) -> None:
    for name in ("vote", "vote_last2", "sculpt", "sample_weights"):
        wrapped = wrap(name).train()
        with torch.no_grad():
            for buffer in wrapped.buffers():
                buffer.add_(rank)
        parallel = DistributedDataParallel(wrapped)
        for key, buffer in wrapped.named_buffers():
            others = [torch.empty_like(buffer) for _ in range(WORLD)]
            dist.all_gather(others, buffer)
            assert torch.equal(*others), f"{name}: {key} is not the first process's"
        wrapped.eval()
        first = wrap(name).eval()
        x = data()[0]
        assert_answer(seeded(parallel, x, return_risk=True), seeded(expected, name, state_of(first), x))


def test_all_processes_begin_with_the_buffers_and_parameters_of_the_first(tmp_path: Path) -> None:
    in_two_processes(_buffers, tmp_path)


def _dealt(rank: int) -> None:
    for name in ("vote", "vote_rank1", "vote_last2"):
        wrapped = wrap(name, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()).train()
        parallel = DistributedDataParallel(wrapped)
        voters = wrapped.voters()
        x, target = shards()[rank]
        torch.manual_seed(rank)
        y = parallel(x)
        said = torch.isclose(torch.stack([voter(x) for voter in voters]), y).all(2)
        assert torch.equal(said.sum(1), torch.full((3,), len(x) // 3)), "each voter answers as many rows"
        (y - target).square().mean().backward()
        dealt = torch.stack([voter(x) for voter in voters]).gather(
            0, said.int().argmax(0)[None, :, None].expand(1, -1, 2)
        )
        (dealt[0] - target).square().mean().backward()
        if name == "vote":  # each voter's share of the gradient, averaged over the processes
            for key, parameter in wrapped.named_parameters():
                plain = torch.stack([voter.get_parameter(key.removesuffix("@vote")).grad for voter in voters])
                dist.all_reduce(plain)
                close(parameter.grad, plain / WORLD, key)


def test_rows_are_dealt_in_each_process(tmp_path: Path) -> None:
    in_two_processes(_dealt, tmp_path)


def _accumulated(rank: int) -> None:
    wrapped = wrap("vote_sculpt", nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()).train()
    parallel = DistributedDataParallel(Training(wrapped))
    x, target = shards()[rank]
    parallel(x, target).backward()
    whole = {key: parameter.grad.clone() for key, parameter in wrapped.named_parameters()}
    wrapped.zero_grad()
    with parallel.no_sync():
        (parallel(x[:3], target[:3]) / 2).backward()
    (parallel(x[3:], target[3:]) / 2).backward()
    for key, parameter in wrapped.named_parameters():
        close(parameter.grad, whole[key], key)


def test_gradients_accumulate_without_talking(tmp_path: Path) -> None:
    in_two_processes(_accumulated, tmp_path)


def _inside(rank: int) -> None:
    plain = DistributedDataParallel(Net())
    before = dict(vars(plain))
    for kind in KINDS.values():
        for wrapper, at in ((kind.make(), None), (kind.make(), "module")):
            with pytest.raises(TypeError, match=r"DistributedDataParallel\(wrapped\)"):
                wrapper(plain, at=at)
    assert vars(plain) == before
    with pytest.raises(TypeError, match=r"the sub-module 0.*wrap"):
        vote.Wrapper(2)(nn.Sequential(plain, nn.Linear(2, 1)))


def test_a_model_whose_own_gradients_alone_are_averaged_is_refused(tmp_path: Path) -> None:
    in_two_processes(_inside, tmp_path)


def _saved(rank: int, names: list[str]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for name in names:
        parallel, other = DistributedDataParallel(wrap(name)), wrap(name)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        state = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
        assert state.keys() == other.state_dict().keys()
        with pytest.raises(RuntimeError, match=r"set_model_state_dict\(parallel\.module"):
            set_model_state_dict(parallel, dict(state))
        set_model_state_dict(other, state, options=whole)
        for key, parameter in parallel.module.named_parameters():
            assert torch.equal(other.get_parameter(key), parameter), f"{name}: {key}"


def test_states_of_torchs_distributed_checkpoints_load(tmp_path: Path) -> None:
    in_two_processes(_saved, tmp_path, list(KINDS))


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------

# A branch runs on a copy of the modules, whose layers could not gather their shards: the wrapped model is one shard group.
SHARDED = ["sample_activations", "sample_weights", "sculpt", "vote_last2", "vote", "vote_sculpt"]


def _sharded(rank: int, names: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (WORLD,))
    for name in names:
        wrapped = wrap(name).train()
        state = state_of(wrapped)
        kwargs: dict[str, Any] = {"return_risk": True}
        fully_shard(wrapped, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in wrapped.parameters())
        answers = [seeded(expected, name, state, x, True, seed=7 + i) for i, (x, _) in enumerate(shards())]
        torch.stack([objective(answer) for answer in answers]).mean().backward()
        output = seeded(wrapped, shards()[rank][0], **kwargs, seed=7 + rank)
        assert_answer(output, answers[rank])
        objective(output).backward()
        for key, parameter in wrapped.named_parameters():
            like, grad = state[key].grad, parameter.grad
            if like is not None and like.any():
                close(grad.full_tensor(), like, f"{name}: gradient of {key}")
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        stepped = {
            key: tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
            for key, tensor in wrapped.state_dict().items()
        }
        for key, tensor in state.items():
            if tensor.grad is not None:
                close(stepped[key], tensor.detach() - 0.1 * tensor.grad, f"{name}: {key} after a step")
        wrapped.eval()
        with torch.no_grad():
            again = seeded(wrapped, data()[0], **kwargs)
        assert_answer(
            again, seeded(expected, name, {k: v for k, v in stepped.items() if "@workbench" not in k}, data()[0])
        )


def test_sharded_models_give_the_numbers_of_whole_ones(tmp_path: Path) -> None:
    in_two_processes(_sharded, tmp_path, SHARDED)


def _sharded_layers(rank: int, names: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for name in names:
        wrapped = wrap(name).train()
        fully_shard(wrapped.second, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
        with pytest.raises(RuntimeError, match=r"second.*fully_shard"):
            wrapped(data()[0], return_risk=True)


def test_layers_that_are_sharded_by_themselves_are_refused(tmp_path: Path) -> None:
    in_two_processes(_sharded_layers, tmp_path, SHARDED)
