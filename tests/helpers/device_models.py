"""Models and wrappers for device tests, and wrapped models after a training on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench import Risk, compose, fit, laplace, neo, sample, sculpt, snapshot, swag, vote
from workbench.core.outputs.options import has_classes
from workbench.core.wrapper import Wrapper
from workbench.distributions import LogitNormal, NormalInverseGamma, Quantiles, StudentT


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True), 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def relu_mlp() -> nn.Module:
    """Return an MLP with non-negative last features, which some densities need."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


MODELS = {"mlp": (mlp, (4,)), "cnn": (cnn, (2, 6, 6)), "transformer": (Encoder, (5, 4))}
WRAPPERS: dict[str, Wrapper] = {
    "plain": compose(),
    "vote": vote.Wrapper(3),
    "vote last layer": vote.Wrapper(3, share=1),
    "vote rank-1": vote.Wrapper(3, share="rank1"),
    "vote in chunks": vote.Wrapper(4, chunk=2),
    "sculpt": sculpt.Wrapper(n_layers=1),
    "sculpt, StudentT": sculpt.Wrapper(StudentT, n_layers=1),
    "sculpt, evidence": sculpt.Wrapper(NormalInverseGamma, n_layers=1),
    "sculpt, quantiles": sculpt.Wrapper(Quantiles, n_layers=1),
    "sample": sample.Wrapper(3),
    "sample, weights": sample.Wrapper(3, where="weights"),
    "sample, inputs": sample.Wrapper(3, distribution=sample.Normal(0.1), where="inputs"),
    "sample, trained": sample.Wrapper(3, trainable=True),
    "neo": neo.Wrapper(),
    "neo, flow": neo.Wrapper(density="flow"),
    "laplace": laplace.Wrapper(noise=0.1),
    "swag": swag.Wrapper(n_samples=3, rank=3),
    "snapshot": snapshot.Wrapper(3),
    "vote of sculpt, with neo": compose(vote.Wrapper(3, share=1), sculpt.Wrapper(n_layers=1), neo.Wrapper()),
    "vote of sample of sculpt": compose(vote.Wrapper(2), sample.Wrapper(2), sculpt.Wrapper(n_layers=1)),
    "class probabilities": compose(vote.Wrapper(3, output="logits"), sculpt.Wrapper(LogitNormal, n_layers=1)),
}


def trained(wrapper: Wrapper, model: str, rows: int = 12) -> tuple[Any, Tensor, Any]:
    """Return a wrapped model after a training and one call of each kind on the CPU, with inputs and targets."""
    make, shape = (relu_mlp, (4,)) if model == "relu mlp" else MODELS[model]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, *shape, generator=generator)
    wrapped = wrapper(make())
    classes = has_classes(wrapped._workbench.output)
    y = torch.arange(rows) % 3 if classes else torch.randn(rows, 3, generator=generator)
    if wrapped.needs_fit or any(method.collects for method in wrapped._workbench.methods):
        fit(wrapped, (x, y), epochs=8, validation=0, standardize=False, progress=False, batch_size=6)
    for mode in (True, False):
        wrapped.train(mode)
        wrapped(x)
        wrapped(x, return_risk=True)
    return wrapped, x, y


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def criterion_of(wrapped: Any) -> nn.Module:
    return nn.CrossEntropyLoss() if has_classes(wrapped._workbench.output) else nn.MSELoss()


def still(wrapped: Any) -> Any:
    """Turn off the model's dropout, whose masks differ between devices."""
    for module in wrapped.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return wrapped


def leaves(answer: Any) -> list[Tensor]:
    """Return prediction and risks of a call as a list."""
    y, risk = answer
    return [y, *([getattr(risk, name) for name in risk.names()] if isinstance(risk, Risk) else [risk])]
