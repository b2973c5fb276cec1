"""Inputs and outputs of all kinds."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .core import TABLE, Base, case, normal


@case("two_inputs", inputs=normal((5,), (8,)))
class TwoInputs(Base):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        return self.c(self.trunk(x) * z)


@case("kwargs_tensor", inputs=lambda seed=0, rows=6: (TABLE(seed, rows)[0], {"mask": normal((8,))(seed, rows)[0][0]}))
class KwargsTensor(Base):
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.c(self.trunk(x) * (mask > 0))


@case("kwargs_nontensor", inputs=lambda seed=0, rows=6: (TABLE(seed, rows)[0], {"scale": 2.0, "activation": "relu"}))
class KwargsNonTensor(Base):
    def forward(self, x: Tensor, *, scale: float = 1.0, activation: str = "tanh") -> Tensor:
        return self.c(getattr(torch, activation)(self.trunk(x) * scale))


@case("dict_out", "structured_output")
class DictOut(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"logits": self.c(h), "hidden": h}


@case("tuple_out", "structured_output")
class TupleOut(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.c(h), h


class Moments(NamedTuple):
    mean: Tensor
    scale: Tensor


@case("namedtuple_out", "structured_output")
class NamedTupleOut(Base):
    def forward(self, x: Tensor) -> Moments:
        mean, scale = self.c(self.trunk(x)).split(1, dim=1)
        return Moments(mean, F.softplus(scale))


@dataclasses.dataclass(frozen=True)
class Prediction:
    logits: Tensor
    hidden: Tensor


@case("dataclass_out", "structured_output")
class DataclassOut(Base):
    def forward(self, x: Tensor) -> Prediction:
        h = self.trunk(x)
        return Prediction(self.c(h), h)


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Tensor]):
    """Behaves like the outputs of transformers: a dataclass that is also a dict, without the fields that are None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@case("hf_dataclass", "structured_output")
class HfDataclass(Base):
    def forward(self, x: Tensor) -> ModelOutput:
        h = self.trunk(x)
        return ModelOutput(logits=self.c(h), hidden=h)


@case("nested_out", "structured_output", "non_tensor_output")
class NestedOut(Base):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.trunk(x)
        return {"heads": (self.c(h), [h, len(self.c.bias)]), "aux": None, "kind": "regression"}


@case("int_and_float_out", "structured_output", "integer_output")
class IntAndFloatOut(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.c(self.trunk(x))
        return logits, logits.argmax(-1)


@case("scalar_output", "batch_mixing", "not_dealable")
class ScalarOutput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)).square().mean()


def absent(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*TABLE(seed, rows)[0], None), {}


@case("optional_input", "no_grad_params", inputs=absent)
class OptionalInput(nn.Module):
    """An optional second input, which is None."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.c = nn.Linear(3, 8), nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h if context is None else h * self.gate(context))


@case("star_args", inputs=normal((5,), (8,)))
class StarArgs(Base):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, *factors = args
        h = self.trunk(x)
        for factor in (*factors, *kwargs.values()):
            h = h * factor
        return self.c(h)


@case("keyword_only", inputs=lambda seed=0, rows=6: ((), {"x": TABLE(seed, rows)[0][0]}))
class KeywordOnly(Base):
    def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.c(self.trunk(x))


@case("dict_input", inputs=lambda seed=0, rows=6: (({"features": TABLE(seed, rows)[0][0], "name": "row"},), {}))
class DictInput(Base):
    def forward(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return self.c(self.trunk(batch["features"]))


@case("ragged_out", "structured_output", "not_dealable")
class RaggedOut(Base):
    """A tensor of different length for every row, as detectors return."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [row.repeat(1 + number % 3, 1) for number, row in enumerate(self.c(self.trunk(x)))]


@case("passthrough_out", "structured_output")
class PassthroughOut(Base):
    """Returns its input along with the prediction."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x, "y": self.c(self.trunk(x))}


@case("constant_leaf", "structured_output", "not_dealable")
class ConstantLeaf(Base):
    """A part of the output depends on neither the input nor the parameters."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.c(self.trunk(x)), torch.linspace(0, 1, 3, dtype=x.dtype, device=x.device)


@case("complex_out", "structured_output")
class ComplexOut(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"spectrum": torch.fft.rfft(h.float() if h.dtype == torch.bfloat16 else h), "y": self.c(h)}


@case("generator_out", "structured_output", "iterator_output")
class GeneratorOut(Base):
    """Returns an iterator: nothing is computed before it is read."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for factor in (1, 2):
            yield self.c(self.trunk(factor * x))
