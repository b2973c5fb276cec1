"""Networks with complex weights, such as Fourier neural operators, stay complex in `fit`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, fit, sculpt, vote

WRAPPERS = {
    "vote": lambda: vote.Wrapper(2),
    "rank1": lambda: vote.Wrapper(2, share="rank1"),
    "sculpt of vote": lambda: compose(vote.Wrapper(2), sculpt.Wrapper()),
}


class Spectral(nn.Module):
    """A layer in Fourier space."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.modes = nn.Linear(4, 6), nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.project = nn.Linear(6, 1)
        self.register_buffer("phase", torch.exp(1j * torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.fft.irfft(torch.fft.rfft(self.lift(x)) * self.modes * self.phase, n=6))


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("name", WRAPPERS)
def test_complex_weights_are_trained_as_complex_numbers(name: str, dtype: Any) -> None:
    wrapped, x = WRAPPERS[name]()(Spectral()), torch.randn(64, 4)
    before = {key: value.clone() for key, value in wrapped.named_parameters() if value.is_complex()}
    fit(wrapped, (x, x[:, :1]), epochs=2, dtype=dtype, standardize=False)
    kind = torch.complex64 if dtype is None else torch.complex128
    after = dict(wrapped.named_parameters())
    assert before
    assert all(after[key].dtype == kind for key in before)
    assert [buffer.dtype for key, buffer in wrapped.named_buffers() if key.startswith("phase")] == [kind]
    assert all((after[key].imag - value.imag).abs().max() > 0 for key, value in before.items())
    inputs = x.to(dtype or torch.float32)
    expected = torch.stack([voter.eval()(inputs) for voter in wrapped.voters()])
    torch.testing.assert_close(wrapped.eval()(inputs), expected.mean(0))
