"""Reduction of maps and sequences to short vectors: pooling, padding and principal components."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.density_rows import correlated, draw
from sklearn.decomposition import PCA
from torch import Tensor, nn

from workbench.methods.densities import Reduce, pool
from workbench.methods.densities.padding import kept_steps


def test_reduce_keeps_the_principal_subspace_and_the_residual() -> None:
    x = draw(400, 20) @ draw(20, 200, seed=1) + 0.05 * draw(400, 200, seed=2)
    reduce = Reduce(n_components=20)
    reduce.fit(x)
    out = reduce(x)
    z = ((x - x.mean(0)) / x.std(0, correction=0)).numpy()
    pca = PCA(20, svd_solver="full").fit(z)
    scores = pca.transform(z)
    np.testing.assert_allclose(out[:, :20].square().sum(1), (scores**2).sum(1), rtol=1e-3)
    np.testing.assert_allclose(out[:, :20].abs(), abs(scores), atol=0.05)
    residual = ((z - pca.inverse_transform(scores)) ** 2).sum(1)
    np.testing.assert_allclose(out[:, 20], np.log1p(residual), rtol=1e-2, atol=1e-3)
    assert reduce(draw(50, 200, seed=3))[:, 20].min() > 5 * out[:, 20].max()


@pytest.mark.parametrize("n", [2, 10, 50, 500])
def test_reduced_size_does_not_depend_on_the_number_of_rows(n: int) -> None:
    reduce = Reduce(n_components=16)
    reduce.fit(draw(n, 40))
    assert reduce(draw(3, 40)).shape == (3, 17)
    assert reduce(draw(n, 40))[:, 16].min() > 0.1  # training rows keep a residual


def test_few_features_are_only_standardized() -> None:
    x = correlated(100)
    reduce = Reduce()
    reduce.fit(x)
    torch.testing.assert_close(reduce(x), (x - x.mean(0)) / x.std(0, correction=0))
    nearly_dead = torch.cat([x, 1e-6 * draw(100, 1)], 1)
    reduce.fit(nearly_dead)
    spread = reduce(nearly_dead).std(0, correction=0)
    assert spread[:5].tolist() == pytest.approx([1] * 5, rel=1e-4)
    floor = 1e-3 * x.std(0, correction=0).max()
    assert spread[5].item() == pytest.approx((nearly_dead[:, 5].std(correction=0) / floor).item(), rel=1e-3)


def test_pool_averages_over_a_grid() -> None:
    image = draw(3, 4, 6, 8)
    quarters = [image[:, :, i : i + 3, j : j + 4].mean((2, 3)) for i in (0, 3) for j in (0, 4)]
    torch.testing.assert_close(pool(image, 3), torch.stack(quarters, 2).flatten(1))
    torch.testing.assert_close(pool(image.permute(0, 2, 3, 1), 3, channel_dim=-1), pool(image, 3))
    sequence = draw(3, 10, 4)
    halves = torch.stack([sequence[:, :5].mean(1), sequence[:, 5:].mean(1)], 2).flatten(1)
    torch.testing.assert_close(pool(sequence, 3), halves)
    torch.testing.assert_close(pool(sequence.transpose(0, 1), 3, row_dim=1), halves)
    torch.testing.assert_close(pool(sequence.transpose(1, 2), 3, channel_dim=1), halves)


@pytest.mark.parametrize(
    ("shape", "width"),
    [((3,), 1), ((3, 5), 5), ((3, 1, 5), 10), ((3, 5, 1, 1), 5), ((3, 5, 1, 9), 10), ((3, 2, 4, 4, 4), 16),
     ((3, 2, 4, 4, 4, 3), 16), ((0, 5), 5), ((0, 5, 4, 4), 20)],
)  # fmt: skip
def test_pooled_features_have_the_width_of_their_shape(shape: tuple[int, ...], width: int) -> None:
    assert pool(torch.ones(shape), shape[0]).shape == (shape[0], width)
    assert pool(torch.ones(shape, dtype=torch.bfloat16), shape[0]).dtype == torch.float32


def test_pool_refuses_what_has_no_rows() -> None:
    with pytest.raises(ValueError, match=r"\[6, 5\] does not have the 3 rows"):
        pool(torch.ones(6, 5), 3)
    with pytest.raises(ValueError, match="nothing to average"):
        pool(torch.ones(3, 5, 0), 3)
    with pytest.raises(TypeError, match="complex"):
        pool(torch.ones(3, 5, dtype=torch.complex64), 3)


def test_pool_of_other_axes_is_adaptive_pooling() -> None:
    for axes in [(7,), (1,), (5, 9), (1, 4), (3, 4, 5)]:
        image = draw(2, 3, *axes)
        kind: Any = [torch.nn.AdaptiveAvgPool1d, torch.nn.AdaptiveAvgPool2d, torch.nn.AdaptiveAvgPool3d][len(axes) - 1]
        bins = [min(2, size) for size in axes]
        expected = kind(tuple(bins) if len(bins) > 1 else bins[0])(image).flatten(1)
        torch.testing.assert_close(pool(image, 2, channel_dim=1), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(pool(image, 2, channel_dim=1), expected)
        torch.testing.assert_close(pool(image.double(), 2, channel_dim=1), expected.double())


def test_padding_neither_counts_nor_shows_its_amount() -> None:
    steps = draw(4, 9, 3)
    lengths = torch.tensor([9, 5, 1, 0])
    keep = torch.arange(9) < lengths[:, None]
    pooled = pool(steps, 4, keep=keep)
    for row, n in enumerate(lengths.tolist()):
        unpadded = steps[row, :n]
        halves = [unpadded[: -(-n // 2)], unpadded[n // 2 :]] if n else [torch.zeros(1, 3)] * 2
        expected = torch.stack([half.mean(0) for half in halves], 1).flatten()
        torch.testing.assert_close(pooled[row], expected)
    wild = torch.where(keep[:, :, None], steps, 1e6)
    torch.testing.assert_close(pool(wild, 4, keep=keep), pooled)
    longer = torch.cat([wild, torch.full((4, 7, 3), -1e6)], 1)
    torch.testing.assert_close(pool(longer, 4, keep=torch.cat([keep, torch.zeros(4, 7, dtype=torch.bool)], 1)), pooled)
    moved = torch.cat([torch.full((4, 7, 3), 5.0), wild], 1)  # padding may come first
    torch.testing.assert_close(pool(moved, 4, keep=torch.cat([torch.zeros(4, 7, dtype=torch.bool), keep], 1)), pooled)
    torch.testing.assert_close(pool(wild.transpose(0, 1), 4, row_dim=1, keep=keep), pooled)
    torch.testing.assert_close(pool(steps, 4, keep=torch.ones(4, 9, dtype=torch.bool)), pool(steps, 4))
    with pytest.raises(ValueError, match=r"mask \[4, 9\].*got \[4, 8\]"):
        pool(steps, 4, keep=keep[:, :8])


def masked(*args: Tensor, **kwargs: Tensor) -> list[list[bool]] | None:
    kept = kept_steps(nn.Embedding(9, 2, padding_idx=0), forward, args, kwargs)
    return None if kept is None else kept.tolist()


def forward(
    x: Tensor,
    attention_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    **more: Tensor,
) -> None:
    """The parameters of a model."""


def test_what_tells_padding() -> None:
    x, tokens = torch.zeros(2, 3, 4), torch.tensor([[3, 0, 0], [1, 2, 3]])
    expected = [[True, False, False], [True, True, True]]
    keep = torch.tensor(expected)
    assert masked(x, attention_mask=keep.long()) == expected
    assert masked(x, keep) == expected
    assert masked(x, src_key_padding_mask=~keep) == expected
    assert masked(x, lengths=keep.sum(1)) == expected
    assert masked(tokens) == expected
    assert masked(decoder_attention_mask=keep, input_ids=tokens) == expected


def test_what_does_not_tell_padding() -> None:
    x = torch.zeros(2, 3, 4)  # zeros may be values
    assert masked(x) is None
    assert masked(x, torch.ones(2, 1, 3, 3)) is None  # a mask of pairs
    assert masked(x, torch.zeros(2, 3)) is None  # to be added, or ones to be kept?
    assert masked(x, src_key_padding_mask=torch.full((2, 3), -torch.inf)) is None
    assert masked(x, lengths=torch.tensor([1, 2, 3])) is None
    assert masked(torch.tensor([1, 2])) is None
    two = nn.ModuleList([nn.Embedding(9, 2, padding_idx=0), nn.Embedding(9, 2, padding_idx=1)])
    assert kept_steps(two, forward, (torch.ones(2, 3, dtype=torch.int64),), {}) is None


@pytest.mark.parametrize("shape", [(4, 6, 14, 14), (4, 6, 7, 5), (4, 6, 5, 1)])
def test_memory_layout_does_not_matter(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pool(x.to(memory_format=torch.channels_last), 4), pool(x, 4))
