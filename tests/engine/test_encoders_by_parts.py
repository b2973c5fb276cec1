"""Encoder layers of torch that neo looks into: computed by parts, with the features and predictions that independent formulas give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_encoders import Sentences, mean_of_copies, sentences
from torch import Tensor, nn

from workbench import neo
from workbench.engine import encoder_layers


class Tagged(nn.Module):
    """Layers whose inputs neo looks at between the steps of an encoder."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for parameter in self.encoder.parameters():  # norms and biases do not start as constants
            nn.init.normal_(parameter, std=0.5)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


INSIDE = {
    "attention": "encoder.layers.0.self_attn",
    "its output": "encoder.layers.1.self_attn.out_proj",
    "first linear layer": "encoder.layers.0.linear1",
    "second linear layer": "encoder.layers.1.linear2",
}


def halves(steps: Tensor) -> Tensor:
    """The means over both halves of the steps [rows, t, d], which are the features of a sequence."""
    return torch.stack([half.mean(1) for half in steps.chunk(2, 1)], -1).flatten(1)


def inputs_of_layers(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Compute the inputs of the layers of `INSIDE`, in double precision, by the formulas of the paper."""
    model = copy.deepcopy(model).double()
    inputs: dict[str, Tensor] = {}
    x = x.double()
    for i, layer in enumerate(model.encoder.layers):
        attention = layer.self_attn
        inputs[f"encoder.layers.{i}.self_attn"] = x
        heads = []
        for head in range(2):
            q, k, v = (
                x @ attention.in_proj_weight[8 * p + 4 * head :][:4].T + attention.in_proj_bias[8 * p + 4 * head :][:4]
                for p in range(3)
            )
            heads.append((q @ k.transpose(1, 2) / 2).softmax(-1) @ v)
        inputs[f"encoder.layers.{i}.self_attn.out_proj"] = mixed = torch.cat(heads, -1)
        inputs[f"encoder.layers.{i}.linear1"] = x = layer.norm1(x + attention.out_proj(mixed))
        inputs[f"encoder.layers.{i}.linear2"] = hidden = layer.activation(layer.linear1(x))
        x = layer.norm2(x + layer.linear2(hidden))
    return inputs


@pytest.mark.parametrize("rows", [5, 6])  # 6: as many as steps
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("inside", INSIDE)
@torch.no_grad()
def test_features_inside_encoder_layers_are_the_inputs_of_their_layers(
    inside: str, activation: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tagged(activation).eval()
    wrapped: Any = neo.Wrapper(layers=INSIDE[inside])(model).eval().fit(torch.randn(40, 6, 8))
    by_parts = count_calls(monkeypatch, "_by_parts")
    x = torch.randn(rows, 6, 8)
    (method,) = wrapped._workbench.methods
    y, _, features, _ = method.features(wrapped, (x,), {})
    torch.testing.assert_close(y, model(x))
    expected = [halves(value) for name, value in inputs_of_layers(model, x).items() if name == INSIDE[inside]]
    if inside == "attention":
        expected.append(halves(inputs_of_layers(model, x)[f"{INSIDE[inside]}.out_proj"]))
    torch.testing.assert_close(features, [value.float() for value in expected], rtol=1e-4, atol=1e-5)
    assert len(by_parts) == 1  # the other layer has a fused kernel


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda layer: layer.linear1.register_forward_hook(lambda _, args, out: out + 1),
    "another linear layer": lambda layer: setattr(layer, "linear1", Doubled(8, 16)),
    "another norm": lambda layer: setattr(layer, "norm1", DoubledNorm(8)),
}


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_encoder_layers_whose_parts_do_something_else_are_not_computed_by_parts(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tagged().eval()
    CHANGES[change](model.encoder.layers[0])
    by_parts = count_calls(monkeypatch, "_by_parts")
    wrapped: Any = neo.Wrapper(layers="encoder.layers.0.linear2")(model).eval().fit(torch.randn(40, 6, 8))
    x = torch.randn(5, 6, 8)
    wrapped(x, return_risk=True)
    assert not by_parts


class Halved(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


UNFUSED: dict[str, Callable[[Any], object]] = {
    "dropout layers of another kind": lambda layer: setattr(layer, "dropout1", Halved()),
    "another gelu": lambda layer: setattr(layer, "activation", nn.GELU("tanh")),
    "a step of zeros": lambda layer: setattr(layer.self_attn, "add_zero_attn", True),
}


@pytest.mark.parametrize("reason", ["an odd number of heads", "norms of different eps"])
@pytest.mark.parametrize("change", UNFUSED)
@torch.no_grad()
def test_encoder_layers_that_torch_does_not_fuse_have_all_their_parts(change: str, reason: str) -> None:
    model = Tagged("gelu").eval()
    layer: Any = model.encoder.layers[0]
    UNFUSED[change](layer)
    if reason == "an odd number of heads":
        layer.self_attn.num_heads, layer.self_attn.head_dim = 1, 8
    else:
        layer.norm1.eps = 1e-3
    wrapped: Any = (
        neo.Wrapper(layers="encoder.layers.0.linear2")(copy.deepcopy(model)).eval().fit(torch.randn(40, 6, 8))
    )
    x = torch.randn(5, 6, 8)
    torch.testing.assert_close(wrapped(x, return_risk=True)[0], model(x), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_masks_have_their_part_in_encoder_layers_whose_inside_neo_looks_at() -> None:
    wrapped: Any = neo.Wrapper(layers="encoder.layers.0.linear2", per="row")(
        Sentences(True, nested=False).eval()
    ).eval()
    wrapped.fit(sentences(40))
    words = sentences(5)
    torch.testing.assert_close(wrapped(words, return_risk=True)[0], mean_of_copies(wrapped, words))


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Return a list to which each call of a function of `encoder_layers` adds its layer."""
    calls: list[Any] = []
    function = getattr(encoder_layers, name)

    def counted(layer: Any, *args: Any) -> Any:
        calls.append(layer)
        return function(layer, *args)

    monkeypatch.setattr(encoder_layers, name, counted)
    return calls


@pytest.mark.slow
@torch.no_grad()
def test_calls_that_are_recorded_as_graphs_give_the_same_as_the_first_one() -> None:
    model = Tagged().eval()
    wrapped: Any = neo.Wrapper(layers="encoder.layers.0.linear2")(model).eval().fit(torch.randn(40, 6, 8))
    batches = [torch.randn(5, 6, 8) for _ in range(60)]
    (method,) = wrapped._workbench.methods
    for x in batches:
        y, risk = wrapped(x, return_risk=True)
        torch.testing.assert_close(y, model(x))
        features = halves(inputs_of_layers(model, x)["encoder.layers.0.linear2"]).float()
        torch.testing.assert_close(risk, method.model(wrapped)([features]), rtol=1e-3, atol=1e-4)
    assert wrapped._engine.recorded.replays
