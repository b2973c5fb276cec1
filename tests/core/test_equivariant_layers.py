"""Layers of e3nn: voters equal plain copies and stay equivariant."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, sample, sculpt, vote

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of torch.jit and of packages
    pytest.importorskip("e3nn")
    from e3nn import nn as e3nn_nn
    from e3nn import o3

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Convolution(nn.Module):
    """Features and directions -> a number and a vector, by a tensor product with spherical harmonics."""

    def __init__(self) -> None:
        super().__init__()
        self.product = o3.FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1x1o", "3x0e+2x1o")
        self.linear = o3.Linear("3x0e+2x1o", "1x0e+1x1o")

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        return self.linear(self.product(x, o3.spherical_harmonics("1x0e+1x1o", direction, True)))


CASES = {
    "linear": (lambda: o3.Linear("4x0e+2x1o", "3x0e+1x1o"), 1),
    "tensor product": (Convolution, 2),
    "network": (lambda: e3nn_nn.FullyConnectedNet([10, 8, 2], torch.nn.functional.silu), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_prediction_and_risk_are_those_of_plain_voters(case: str) -> None:
    make, inputs = CASES[case]
    wrapped: Any = vote.Wrapper(3)(make()).eval()
    args = (torch.randn(5, 10), torch.randn(5, 3))[:inputs]
    y, risk = wrapped(*args, return_risk=True)
    plain = torch.stack([voter(*args) for voter in wrapped.voters()])
    torch.testing.assert_close(y, plain.mean(0))
    torch.testing.assert_close(risk, plain.std(0, correction=0))
    assert float(risk.min(0).values.max()) > 1e-4


def test_the_mean_of_voters_turns_with_the_input() -> None:
    wrapped: Any = vote.Wrapper(3)(Convolution()).eval()
    x, direction, turn = torch.randn(5, 10), torch.randn(5, 3), o3.rand_matrix()
    into, out = (o3.Irreps(irreps).D_from_matrix(turn) for irreps in ("4x0e+2x1o", "1x0e+1x1o"))
    vectors = o3.Irreps("1x1o").D_from_matrix(turn)
    torch.testing.assert_close(
        wrapped(x @ into.T, direction @ vectors.T), wrapped(x, direction) @ out.T, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("wrapper", [sculpt.Wrapper(), sample.Wrapper(4), compose(vote.Wrapper(2), sculpt.Wrapper())])
def test_each_wrapper_takes_a_tensor_product_and_learns(wrapper: Any) -> None:
    wrapped = wrapper(Convolution())
    x, direction, target = torch.randn(8, 10), torch.randn(8, 3), torch.randn(8, 4)
    wrapped.train().loss(nn.functional.mse_loss, (x, direction), target).backward()
    assert all(parameter.grad is not None for parameter in wrapped.parameters())
    y, _ = wrapped.eval()(x, direction, return_risk=True)
    assert y.shape == (8, 4)
