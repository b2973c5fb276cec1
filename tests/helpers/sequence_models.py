"""Small models around torch's attention and recurrent layers, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, STEPS, WIDTH = 3, 5, 8
Inputs = tuple[Tensor, ...]


class Net(nn.Module):
    """A layer between two_sequences others, called by a function, with its options as attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.entry, self.layer, self.out = nn.Linear(2, WIDTH), layer, nn.Linear(WIDTH, 1)


class Plain(Net):
    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        h = self.entry(x)
        h = self.layer(h) if padding is None else self.layer(h, src_key_padding_mask=padding)
        return self.out(h.mean(1))


class Causal(Net):
    """With a mask that forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        return self.out(self.layer(self.entry(x), mask)[:, -1])


class Held(Net):
    """With a mask that the module holds, which torch compares with a causal one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.register_buffer("mask", torch.rand(STEPS, STEPS) > 0.8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.entry(x), self.mask)[:, -1])


class Attending(Net):
    """Attention of a sequence to itself, and its weights."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        h = self.entry(x)
        h, weights = self.layer(h, h, h, key_padding_mask=padding)
        return self.out(h.mean(1)) + weights.flatten(1)[:, :1]


class Crossing(Net):
    """Attention of a sequence to another one."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        key = self.entry(other)
        return self.out(self.layer(self.entry(x), key, key, need_weights=False)[0].mean(1))


class Decoding(Net):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.out(self.layer(self.entry(x), self.entry(other)).mean(1))


class Recurrent(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.entry(x))[0][:, -1, :WIDTH])


class GoesOn(Net):
    """From a state that is an input."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y, last = self.layer(self.entry(x), h)
        return self.out(y[:, -1]) + last.mean()


class Cells(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.entry(x[:, 0]))
        return self.out(h[0] if isinstance(h, tuple) else h)


def encoder(nested: bool = False, n_heads: int = 2, check: bool = True, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, n_heads, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=nested, mask_check=check)


def decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True, **options), 2)


def attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(WIDTH, **{"num_heads": 2, "batch_first": True, **options})


def sequence(seed: int) -> Inputs:
    return (torch.randn(ROWS, STEPS, 2, generator=torch.Generator().manual_seed(seed)),)


def two_sequences(seed: int) -> Inputs:
    return *sequence(seed), *sequence(seed + 1000)


def padded(seed: int) -> Inputs:
    """With padding steps, of which no call has as many as the one before."""
    kept = 1 + torch.randint(STEPS, (ROWS, 1), generator=torch.Generator().manual_seed(seed))
    return *sequence(seed), torch.arange(STEPS) >= kept


def with_holes(seed: int) -> Inputs:
    x, padding = padded(seed)
    return x, padding.flip(1) if seed % 2 else padding


def with_state(seed: int) -> Inputs:
    return *sequence(seed), torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


# model, inputs, whether it is recorded
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs], bool]] = {
    "encoder": (lambda: Plain(encoder()), sequence, True),
    "layer": (
        lambda: Plain(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, activation="gelu")),
        sequence,
        True,
    ),
    "norms first": (lambda: Plain(encoder(norm_first=True)), sequence, True),
    "odd heads": (lambda: Plain(encoder(n_heads=1)), sequence, True),
    "activation": (lambda: Plain(encoder(activation=nn.SiLU())), sequence, True),
    "no biases": (lambda: Plain(encoder(bias=False)), sequence, True),
    "steps first": (lambda: Plain(nn.TransformerEncoderLayer(WIDTH, 2, 16)), sequence, True),
    "causal": (lambda: Causal(encoder()), sequence, True),
    "held mask": (lambda: Held(encoder()), sequence, False),  # torch looks at its numbers
    "padding": (lambda: Plain(encoder()), padded, True),
    "padding of a layer": (lambda: Plain(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)), padded, True),
    "nested": (lambda: Plain(encoder(nested=True)), padded, False),
    "nested, holes": (lambda: Plain(encoder(nested=True)), with_holes, False),
    "nested, unchecked": (lambda: Plain(encoder(nested=True, check=False)), padded, False),
    "attention": (lambda: Attending(attention()), sequence, True),
    "attention, padding": (lambda: Attending(attention()), padded, True),
    "attention, odd heads": (lambda: Attending(attention(num_heads=1)), sequence, True),
    "attention, zeros and biases": (lambda: Attending(attention(add_zero_attn=True, add_bias_kv=True)), sequence, True),
    "cross attention": (lambda: Crossing(attention(kdim=WIDTH, vdim=WIDTH)), two_sequences, True),
    "decoder": (lambda: Decoding(decoder()), two_sequences, True),
    "decoder, norms first": (lambda: Decoding(decoder(norm_first=True, activation="gelu")), two_sequences, True),
    "transformer": (lambda: Decoding(nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)), two_sequences, True),
    "LSTM": (lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True)), sequence, True),
    "LSTM, deep": (
        lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5, bidirectional=True)),
        sequence,
        True,
    ),
    "LSTM, projected": (lambda: Recurrent(nn.LSTM(WIDTH, 12, proj_size=WIDTH)), sequence, True),
    "GRU": (lambda: Recurrent(nn.GRU(WIDTH, WIDTH, batch_first=True)), sequence, True),
    "GRU, no biases": (lambda: Recurrent(nn.GRU(WIDTH, WIDTH, bias=False)), sequence, True),
    "GRU, state": (lambda: GoesOn(nn.GRU(WIDTH, WIDTH, batch_first=True)), with_state, True),
    "RNN": (lambda: Recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True, nonlinearity="relu")), sequence, True),
    "LSTM cell": (lambda: Cells(nn.LSTMCell(WIDTH, WIDTH)), sequence, True),
    "GRU cell": (lambda: Cells(nn.GRUCell(WIDTH, WIDTH)), sequence, True),
}
