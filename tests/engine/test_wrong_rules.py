"""vmap is right for all operations of torch, in forward and backward pass, or they are known as wrong: torch's own samples against a loop."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench import vote
from workbench.engine.executors.wrong_rules import wrong_rule
from workbench.testing.models import seeded

BRANCHES = 3
SAMPLES = 4  # of each operation, spread over all that torch has
# operations that draw random numbers, leave memory as it was, or need a GPU
LEFT_OUT = (
    *("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "cauchy", "geometric"),
    *("fractional", "lowrank", "empty", "jiterator"),
)
OPERATIONS = {
    f"{op.name} {op.variant_test_name}".strip(): op
    for op in op_db
    if torch.float64 in op.supported_dtypes("cpu") and not any(word in op.name for word in LEFT_OUT)
}


class Refusal(TorchFunctionMode):
    """Refuses what is known as wrong."""

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if wrong := wrong_rule(function, args, kwargs or {}):
            raise RuntimeError(wrong)
        return function(*args, **(kwargs or {}))


def objective(outputs: Sequence[Tensor], lead: int) -> Tensor | None:
    """Return a sum of the floating-point outputs with different weights; the first `lead` dimensions are those of branches."""
    terms = []
    for output in outputs:
        if output.is_floating_point() and output.requires_grad:
            shape = output.shape[lead:]
            terms.append((output * torch.linspace(0.5, 1.5, math.prod(shape), dtype=output.dtype).view(shape)).sum())
    return torch.stack(terms).sum() if terms else None


def gradients(outputs: Sequence[Tensor], lead: int, leaves: list[Tensor]) -> list[Tensor]:
    total = objective(outputs, lead)
    if total is None or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad.to_dense() for leaf, grad in zip(leaves, grads, strict=True)
    ]


def varied(value: Tensor, branch: int, name: str) -> Tensor:
    """Return what a branch gets in place of a tensor."""
    if value.is_floating_point():
        return value * (1 + 0.05 * branch) if branch else value.clone()
    return value.roll(branch, 0) if "embedding" in name and value.dim() else value.clone()


def check(op: Any, sample: Any, differ: Callable[[list[int]], list[int]]) -> None:
    """Compare an operation under vmap with a loop; `differ` chooses which tensors differ between branches."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    chosen = differ(tensors)
    learned = [i for i in tensors if flat[i].is_floating_point()] if op.supports_autograd else []
    if not chosen:
        return

    def call(values: dict[int, Tensor]) -> list[Tensor]:
        leaves = [values.get(i, leaf) for i, leaf in enumerate(flat)]
        first, args, kwargs = tree_unflatten(leaves, spec)
        output = sample.output_process_fn_grad(op(first, *args, **kwargs))
        return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]

    def leaf(tensor: Tensor, i: int) -> Tensor:
        return tensor.requires_grad_() if i in learned else tensor

    expected = []
    for branch in range(BRANCHES):
        values = {i: leaf(varied(flat[i], branch if i in chosen else 0, op.name), i) for i in tensors}
        outputs = call(values)
        expected.append((outputs, gradients(outputs, 0, [values[i] for i in learned])))
    stacked = {
        i: leaf(
            torch.stack([varied(flat[i], branch, op.name) for branch in range(BRANCHES)])
            if i in chosen
            else flat[i].clone(),
            i,
        )
        for i in tensors
    }
    try:
        with Refusal():
            outputs = torch.vmap(lambda *batched: call({**stacked, **dict(zip(chosen, batched, strict=True))}))(
                *[stacked[i] for i in chosen]
            )
        grads = gradients(outputs, 1, [stacked[i] for i in learned])
    except Exception:  # refused, by torch or as known; a wrapped model then runs branch by branch
        return
    for branch, (plain, _) in enumerate(expected):
        for output, like in zip(outputs, plain, strict=True):
            torch.testing.assert_close(output[branch], like, equal_nan=True, check_layout=False)
    for number, i in enumerate(learned):
        like = torch.stack([plain[number] for _, plain in expected])
        like = like if i in chosen else like.sum(0)
        torch.testing.assert_close(grads[number], like, equal_nan=True, check_layout=False)


@functools.cache
def samples_of(name: str) -> list[Any]:
    op = OPERATIONS[name]
    with seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # op.sample_inputs would walk the stack for each, looking for a unittest
        samples = list(op.sample_inputs_func(op, "cpu", torch.float64, requires_grad=False))
    return [samples[i] for i in sorted({round(i * (len(samples) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)})]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_right_or_known_as_wrong(name: str) -> None:
    for sample in samples_of(name):
        for differ in (lambda i: i, lambda i: i[:1], lambda i: i[1:]):
            try:
                check(OPERATIONS[name], copy.deepcopy(sample), differ)
            except AssertionError:
                raise
            except Exception:  # the loop itself fails, also where torch_geometric has replaced an operation of torch
                continue


# ---- operations that are known as wrong, in models
class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.select_scatter(x, self.layer(x)[:, 0], 1, 2)


class Exported(Selects):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.select_scatter.default(x, self.layer(x)[:, 0], 1, 2)


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x.index_fill(1, torch.tensor([1, 3]), self.value) * self.value


class Rolls(Fills):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.value.roll(1)


class Scales(nn.Module):
    """Looks up the tokens that follow from its own scores in weights that all voters share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4, scale_grad_by_freq=True)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(self.layer(x).argmax(1)) + self.layer(x)


@pytest.mark.parametrize("build", [Selects, Exported, Fills, Rolls])
def test_voters_are_plain_copies(build: type[nn.Module]) -> None:
    wrapped, x = vote.Wrapper(3)(build().double()), torch.randn(6, 4).double()
    words = r"vmap (computes|differentiates) (roll|index_fill|select_scatter) wrongly"
    with pytest.raises(RuntimeError, match=words):
        vote.Wrapper(3, strategy="vmap")(build().double())(x, tile_and_reduce=True)
    copies = wrapped.voters()
    answers = torch.stack([voter(x) for voter in copies])
    for _ in range(2):
        wrapped.zero_grad()
        y = wrapped(x, tile_and_reduce=True)
        torch.testing.assert_close(y, answers.mean(0))
        y.square().sum().backward()
    answers.mean(0).square().sum().backward()
    for name, parameter in wrapped.named_parameters():
        expected = torch.stack([voter.get_parameter(name.partition("@")[0]).grad for voter in copies])
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this version of torch has none")
def test_a_loss_that_is_differentiated_in_its_forward_pass_is_known_as_wrong() -> None:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)  # by chunks
    wrapped = vote.Wrapper(3, strategy="vmap")(nn.LinearCrossEntropyLoss(4, 3, options=options))
    with pytest.raises(RuntimeError, match="vmap differentiates linear_cross_entropy wrongly"):
        wrapped(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), tile_and_reduce=True)


def test_gradients_scaled_by_frequency_of_shared_weights_are_known_as_wrong() -> None:
    net = Scales()
    net.embedding.requires_grad_(False)
    wrapped = vote.Wrapper(3, strategy="vmap")(net)
    with pytest.raises(RuntimeError, match="vmap differentiates embedding with padding or scale_grad_by_freq wrongly"):
        wrapped(torch.randn(6, 4), tile_and_reduce=True)
