"""Layers and parameters in plain lists whose parameters alone are registered: every branch must use its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote

pytestmark = pytest.mark.filterwarnings("ignore:.*neither parameters nor buffers")


class Block(nn.Module):
    """A block of a forecaster, with a basis that it never registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.basis = nn.Linear(3, 3), torch.linspace(0, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.basis


class Blocks(nn.Module):
    """Blocks in a plain list, as published N-BEATS keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[Block()], [Block()]]
        self.weights = nn.ParameterList([p for stack in self.stacks for block in stack for p in block.parameters()])

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            x = stack[0](x) + x
        return x


class Normalizes(Block):
    """A block that keeps statistics of its input for later, as reversible normalization does."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean(1, keepdim=True)
        return self.layer(x - self.mean) * self.basis + self.mean


class NormalizingBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[Normalizes()], [Normalizes()]]
        self.weights = nn.ParameterList([p for stack in self.stacks for block in stack for p in block.parameters()])


class Coefficients(nn.Module):
    """Parameters beside constants in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = [nn.Parameter(torch.randn(3)), torch.ones(3)]
        self.weights = nn.ParameterList([self.terms[0]])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.terms[0] + self.terms[1]


@pytest.mark.parametrize("strategy", ["loop", "vmap", "replay", "auto"])
@pytest.mark.parametrize("share", [None, "rank1"])
@pytest.mark.parametrize("model", [Blocks, NormalizingBlocks, Coefficients])
def test_voters_use_their_own(model: type[nn.Module], share: Any, strategy: Any) -> None:
    wrapped, x = vote.Wrapper(3, share=share, strategy=strategy)(model()), torch.randn(5, 3)
    for training in (False, True, False):
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.normal_()  # as a training moves them: the first voter is no longer the given model
        wrapped.train(training)
        voters = wrapped.voters()
        prediction, risk = wrapped(x, return_risk=True)
        outputs = torch.stack([voter(x) for voter in voters])
        torch.testing.assert_close(prediction, outputs.mean(0))
        torch.testing.assert_close(risk, outputs.std(0, unbiased=False))
        (gradient,) = torch.autograd.grad(prediction.sum(), [wrapped.get_parameter(_first(wrapped))])
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("share", [None, "rank1"])
def test_a_list_of_parameters_that_forward_changes_is_refused(share: Any) -> None:
    class Counting(Coefficients):
        def forward(self, x: Tensor) -> Tensor:
            self.terms.append(0)
            return super().forward(x)

    wrapped = vote.Wrapper(3, share=share)(Counting())
    with pytest.raises(
        RuntimeError, match=r"Counting changes 'terms', a list that also holds the parameter 'weights\.0'"
    ):
        wrapped(torch.randn(5, 3), return_risk=True)


def _first(wrapped: nn.Module) -> str:
    return next(name for name, _ in wrapped.named_parameters() if "@" in name)
