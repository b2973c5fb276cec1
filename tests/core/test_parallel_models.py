"""Wrapped models in torch's parallel containers, and models in such containers that are wrapped, in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import mlp
from helpers.reference_from_copies import VOTERS, WRAPPERS, Net, asked, inputs, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import workbench
from workbench import swag, vote


def wrapped_as(kind: str, model: nn.Module) -> Any:
    with seeded(1):
        return WRAPPERS[kind]("auto", 0.0)(model).eval()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this one process: what it says about many is that nothing stands in the way."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard(module: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("how", ["data parallel", "sharded"])
@pytest.mark.usefixtures("process_group")
def test_wrapped_models_run_distributed(how: str, kind: str) -> None:
    wrapped = wrapped_as(kind, Net())
    single = copy.deepcopy(wrapped)
    spread: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel if how == "data parallel" else shard
    model = spread(wrapped)
    grads = []
    for run in (model, single):
        with seeded(0):
            y, risk = run(inputs(), return_risk=True)
        (y.sum() + (risk if isinstance(risk, Tensor) else risk.total).sum()).backward()
        owner = wrapped if run is model else single
        grads.append([p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in owner.parameters()])
    for parallel, like in zip(*grads, strict=True):
        torch.testing.assert_close(parallel, like)


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_must_be_wrapped_first(kind: str) -> None:
    with pytest.raises(TypeError, match=r"shard.*wrap"):
        wrapped_as(kind, shard(Net()))


@pytest.mark.usefixtures("process_group")
def test_what_needs_whole_parameters_is_refused_for_a_sharded_model(tmp_path: Path) -> None:
    x, y = inputs(), Net()(inputs()).detach()
    wrapped: Any = shard(swag.Wrapper(2)(Net()))
    calls: list[Callable[[], Any]] = [
        lambda: workbench.fit(wrapped, (x, y), epochs=4),
        lambda: wrapped.fit(x),
        lambda: swag.collect(wrapped),
        lambda: workbench.save(wrapped, tmp_path / "model"),
        wrapped.voters,
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"is sharded .*before fully_shard.*full_state_dict=True"):
            call()
    whole: Any = swag.Wrapper(2)(Net())
    whole.load_state_dict(get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True)))
    assert swag.collect(whole) == 1


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.usefixtures("process_group")
def test_a_data_parallel_model_is_wrapped(kind: str) -> None:
    plain = Net().eval()
    wrapped = wrapped_as(kind, nn.parallel.DistributedDataParallel(copy.deepcopy(plain)))
    y, risks = asked(wrapped, (inputs(),))
    answers = [voter(inputs()) for voter in wrapped.voters()]
    torch.testing.assert_close(y, torch.stack(answers).mean(0))
    assert set(risks) <= {"aleatoric", "epistemic"}


def test_replicas_of_data_parallel_are_refused() -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(mlp())
    with pytest.raises(TypeError, match=r"use DistributedDataParallel\(wrapped\)"):
        wrapped._replicate_for_data_parallel()  # as DataParallel does with several devices


def test_threads_of_data_parallel_on_one_device() -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(mlp()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y, risk = nn.DataParallel(wrapped)(inputs(), return_risk=True)
    like, like_risk = wrapped(inputs(), return_risk=True)
    assert torch.equal(y, like)
    assert torch.equal(risk, like_risk)
