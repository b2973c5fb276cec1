"""Buffers of all branches are merged in few operations, whose number does not grow with the branches."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import vote
from workbench.engine.effects.buffers import merged_buffers
from workbench.engine.plan import Axis, Bank, Plan, Shared, Split, Stacked
from workbench.engine.results import Result, StackedResults

N_NORMS = 10
N_BUFFERS = 3 * N_NORMS


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket] += 1
        return function(*args, **(kwargs or {}))


def network():
    torch.manual_seed(0)
    blocks = [
        layer
        for _ in range(N_NORMS)
        for layer in (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


X, Y = torch.randn(8, 4, 8, 8), torch.randn(8, 3)


def operations(step):
    """Return the operations of a training step."""
    for _ in range(3):
        step()
    with _Count() as counter:
        step()
    return counter.counts


def plain_step(model):
    return lambda: nn.functional.mse_loss(model(X), Y).backward()


def wrapped_step(wrapped):
    return lambda: wrapped.loss(nn.MSELoss(), X, Y).backward()


def test_a_shared_trunk_with_norms_costs_no_operation_per_branch():
    plain = operations(plain_step(network())).total()
    no_norms = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
    plain_head = operations(plain_step(no_norms)).total()
    totals = {}
    for n in (4, 16):
        heads = operations(wrapped_step(vote.Wrapper(n, share=1, strategy="vmap")(no_norms))).total() - plain_head
        totals[n] = operations(wrapped_step(vote.Wrapper(n, share=1, strategy="vmap")(network()))).total()
        # each buffer is copied before the pass, and detached after it
        assert totals[n] <= plain + heads + 2 * N_BUFFERS + 10, (n, totals[n], plain, heads)


@pytest.mark.slow
def test_voters_own_buffers_are_written_whole():
    few, many = (
        operations(wrapped_step(vote.Wrapper(n, strategy="vmap")(network())))[torch.ops.aten.select] for n in (2, 6)
    )
    assert many - few <= 8  # the voters' losses, but no buffer


@pytest.mark.parametrize("strategy", ["vmap", "replay", "loop"])
def test_a_shared_trunk_keeps_the_statistics_of_the_plain_model(strategy):
    model = network()
    reference = copy.deepcopy(model).train()
    wrapped = vote.Wrapper(5, share=1, strategy=strategy)(model).train()
    for _ in range(3):
        x = torch.randn(8, 4, 8, 8)
        wrapped.loss(nn.MSELoss(), x, Y)  # every voter on all rows
        reference(x)
    kept = dict(wrapped.named_buffers())
    for name, value in reference.named_buffers():
        assert torch.equal(kept[name], value), name


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_voters_keep_the_statistics_of_a_loop_over_copies(strategy, chunk):
    wrapped = vote.Wrapper(3, strategy=strategy, chunk=chunk)(network()).train()
    voters = [copy.deepcopy(voter).train() for voter in wrapped.voters()]
    for _ in range(2):
        x = torch.randn(8, 4, 8, 8)
        wrapped.loss(nn.MSELoss(), x, Y)  # every voter on all rows
        for voter in voters:
            voter(x)
    for voter, reference in zip(wrapped.voters(), voters, strict=True):
        kept = dict(voter.named_buffers())
        for name, value in reference.named_buffers():
            torch.testing.assert_close(kept[name], value, rtol=1e-5, atol=1e-6, msg=name)


SPECIAL = torch.tensor([0.1, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo().max])
RULES = {
    "shared": None,
    "own": Stacked("vote", "buffer@vote"),
    "heads": Split("sculpt", (Shared("buffer"), Shared("buffer@sculpt"))),
    "same heads": Split("sculpt", (Shared("buffer"), Shared("buffer"))),
}


@pytest.mark.parametrize("differs", ["", "vote", "sculpt", "vote sculpt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=["float", "integer"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.filterwarnings("ignore:.*holds integers that differ")
def test_stacked_buffers_are_merged_as_separate_ones(rule, dtype, differs):
    sizes = (3, 2)
    axes = (Axis("vote", 3), Axis("sculpt", 2))
    shape = [size if axis.name in differs else 1 for size, axis in zip(sizes, axes, strict=True)]
    values = torch.rand(*shape, 6).where(torch.rand(*shape, 6) < 0.5, SPECIAL) * 100
    if not dtype.is_floating_point:
        values = values.nan_to_num(1, 2, 3).clamp(-9, 99)
    values = values.to(dtype)
    registered = {"buffer": torch.zeros(6), "buffer@sculpt": torch.zeros(6), "buffer@vote": torch.zeros(3, 6)}
    bank = Bank({name: tensor.to(dtype) for name, tensor in registered.items()}.__getitem__)
    plan = Plan(axes, {} if RULES[rule] is None else {"buffer": RULES[rule]}, bank)
    branches = values.expand(*sizes, 6)
    if differs:
        stacked = StackedResults(sizes, [], list, {"buffer": branches}, {})
    else:
        stacked = StackedResults(sizes, [], list, {}, {}, shared={"buffer": values[0, 0]})
    separate = [Result(None, {"buffer": branches[i, j].clone()}) for i in range(3) for j in range(2)]

    def written(results):
        new = {name: tensor.to(dtype) for name, tensor in registered.items()}
        plan.bank = Bank({name: tensor.clone() for name, tensor in new.items()}.__getitem__)
        for target, value in zip(*merged_buffers(plan, results), strict=True):
            target.copy_(value)
        return {name: plan.bank.get(name) for name in new}

    ours, theirs = written(stacked), written(separate)
    for name, value in theirs.items():
        assert torch.equal(value.isnan(), ours[name].isnan()), name
        kept, expected = (tensor.nan_to_num(7, torch.inf, -torch.inf) for tensor in (ours[name], value))
        assert torch.equal(kept, expected), name
        assert torch.equal(kept.signbit(), expected.signbit()), name
    joined = stacked + stacked
    assert torch.equal(joined[7].buffers["buffer"].nan_to_num(7), branches[0, 1].nan_to_num(7))
