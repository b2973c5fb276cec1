"""Architectures: residual, convolutional, recurrent, attention, graphs, mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from .core import IMAGE, SEQUENCE, TABLE, Base, case


@case("res_inplace")
class ResInplace(Base):
    def forward(self, x: Tensor) -> Tensor:
        skip = self.a(x)
        h = self.b(F.relu(skip))
        h += skip
        return self.c(F.relu_(h))


@case("unet", inputs=IMAGE)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        h = F.relu(self.middle(F.max_pool2d(skip, 2)))
        return self.up(torch.cat([skip, F.interpolate(h, scale_factor=2.0)], dim=1))


@case("lstm", inputs=SEQUENCE)
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def padded(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = SEQUENCE(seed, rows)
    return (x, torch.randint(1, 5, (rows,), generator=torch.Generator().manual_seed(seed))), {}


@case("packed_seq", inputs=padded)
class PackedSeq(Lstm):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-1])


def timefirst(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (SEQUENCE(seed, rows)[0][0].transpose(0, 1).contiguous(),), {}


@case("grucell_timefirst", "not_dealable", inputs=timefirst)
class GruCellTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 8, dtype=x.dtype, device=x.device)
        for step in x:
            h = self.cell(step, h)
        return self.head(h)


@case("transformer", inputs=SEQUENCE)
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


@case("mha_module", "structured_output", inputs=SEQUENCE)
class MhaModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, weights = self.attention(x, x, x)
        return self.head(h), weights


@case("sdpa", inputs=SEQUENCE)
class Sdpa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.qkv = nn.Linear(8, 2), nn.Linear(8, 24)  # registered in the reverse of their execution order

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def graph(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    node = torch.arange(rows)
    ring = torch.stack([torch.cat([node, node]), torch.cat([(node + 1) % rows, (node - 1) % rows])])
    return TABLE(seed, rows)[0], {"edge_index": ring}


@case("gnn_scatter", "batch_mixing", "not_dealable", inputs=graph)
class GnnScatter(Base):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.a(x))
        source, target = edge_index
        return self.c(torch.tanh(h + torch.zeros_like(h).index_add_(0, target, self.b(h)[source])))


@case("moe_topk")
class MoeTopK(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        out = self.c(h)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            out = out.index_add(0, rows, weights[rows, slot, None] * expert(h[rows]))
        return out


@case("conv1d_series", "buffers", "batch_mixing_train", inputs=SEQUENCE)
class Conv1dSeries(nn.Module):
    """Forecast the next values of a time series [rows, channels, steps]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 2, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.pad(F.gelu(self.norm(self.first(x))), (4, 0)))[:, :, -1]


@case("gru_packed", inputs=padded)
class GruPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 4, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        steps, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(steps.sum(1))


@case("tied_autoencoder")
class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(5, 8), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T, self.bias)
