"""Augmentations of `fit`: an image and its map change together, as in a plain loop over the augmented rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_models import interrupt_after, quiet, same, weights
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, data, vote
from workbench.core.batches.row_weights import row_weights
from workbench.errors import WorkbenchWarning
from workbench.outputs import Logits
from workbench.training import RandomCrop, RandomFlip
from workbench.training import checkpoint as checkpoint_module

VOID = -100


def numbered(n: int = 6, height: int = 5, width: int = 7) -> tuple[Tensor, Tensor]:
    """Images whose pixels are numbered from 1, and maps of the same numbers."""
    maps = torch.arange(1, n * height * width + 1).reshape(n, height, width)
    return maps[:, None].expand(n, 2, height, width).float(), maps


def scenes(n: int = 12, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = 5 + 3 * torch.randn(n, 2, size, size, generator=generator)
    maps = (images[:, 0] > 5).long() + (images[:, 1] > 7).long()
    maps[:, 0] = VOID
    return images, maps


def segmenter(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


class Recorded:
    """An augmentation that keeps what another one has made."""

    def __init__(self, *inner: Any) -> None:
        self.inner, self.pairs = inner, []

    def __call__(self, x: Any, y: Any, generator: torch.Generator) -> tuple[Any, Any]:
        for each in self.inner:
            x, y = each(x, y, generator)
        self.pairs.append((x, y))
        return x, y


def test_a_map_moves_with_its_image_and_each_row_by_itself() -> None:
    x, y = numbered(40)
    flipped, labels = RandomFlip()(x, y, torch.Generator().manual_seed(0))
    mirrored = [not torch.equal(a, b) for a, b in zip(labels, y, strict=True)]
    assert 8 < sum(mirrored) < 32
    for row, label, turned in zip(y, labels, mirrored, strict=True):
        assert torch.equal(label, row.flip(-1) if turned else row)
    assert torch.equal(flipped, labels[:, None].expand_as(x).float())


@pytest.mark.parametrize(("size", "padding"), [(4, 0), ((3, 6), 2), ((9, 4), 0), (12, 1)])
def test_a_crop_is_a_window_of_both_and_void_beyond_the_border(size: Any, padding: int) -> None:
    x, y = numbered(60)
    crop = RandomCrop(size, padding=padding, fill=(-1.0, -2.0))
    images, maps = crop(x, y, torch.Generator().manual_seed(0))
    height, width = crop.sides
    assert images.shape == (60, 2, height, width)
    assert maps.shape == (60, height, width)
    beyond = maps == VOID
    assert torch.equal(images[:, 0], torch.where(beyond, -1, maps).float())
    assert torch.equal(images[:, 1], torch.where(beyond, -2, maps).float())
    corners = set()
    for row, piece in zip(y, maps, strict=True):
        wide = F.pad(row, (12, 12, 12, 12), value=VOID)
        windows = wide.unfold(0, height, 1).unfold(1, width, 1)
        places = (windows == piece).all(-1).all(-1).nonzero() - 12
        assert len(places) == 1
        corners.add(tuple(places[0].tolist()))
    for axis, (length, side) in enumerate(zip((5, 7), (height, width), strict=True)):
        first, last = sorted((-padding, length + padding - side))
        assert {corner[axis] for corner in corners} == set(range(first, last + 1))  # all places, and no others


def test_what_belongs_to_the_whole_image_stays_and_what_has_its_size_moves() -> None:
    x, y = numbered()
    targets = {"map": y, "depth": x[:, 1], "class": torch.arange(6), "age": torch.rand(6, 1)}
    inputs = {"image": x, "mask": y > 9, "where": torch.rand(6, 3)}
    moved_x, moved = RandomFlip(1.0)(inputs, targets, torch.Generator())
    assert torch.equal(moved["map"], y.flip(-1))
    assert torch.equal(moved["depth"], x[:, 1].flip(-1))
    assert torch.equal(moved_x["mask"], y.flip(-1) > 9)
    assert torch.equal(moved["class"], targets["class"])
    assert torch.equal(moved["age"], targets["age"])
    assert torch.equal(moved_x["where"], inputs["where"])
    labels = torch.randint(0, 2, (6, 4))
    assert torch.equal(RandomFlip(1.0, keep=True)(x, labels, torch.Generator())[1], labels)


@pytest.mark.parametrize(
    ("augment", "x", "y", "match"),
    [
        (RandomFlip(), torch.rand(4, 3, 8, 8), torch.rand(4, 4), "keep=True"),
        (RandomFlip(), torch.rand(4, 3, 8, 8), torch.rand(4, 1, 4, 4), "8 x 8 pixels"),
        (RandomFlip(), torch.rand(4, 8, 8, 3), torch.arange(4), r"\[n, channels, height, width\]"),
        (RandomFlip(), torch.rand(4, 8, 8), torch.arange(4), r"\[n, channels, height, width\]"),
        (RandomCrop(9), torch.rand(4, 3, 8, 8), torch.rand(4, 8, 8), "holds values"),
        (RandomCrop(4, padding=1), torch.rand(4, 3, 8, 8), torch.rand(4, 8, 8), "holds values"),
        (RandomCrop(4, fill=(0.0, 1.0)), torch.rand(4, 3, 8, 8), torch.arange(4), "2 channels"),
        (RandomCrop(4, fill=0.5), torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4), "uint8"),
    ],
)
def test_what_could_move_wrongly_is_refused(augment: Any, x: Tensor, y: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        augment(x, y, torch.Generator())


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomFlip(p=1.5),
        lambda: RandomFlip(p=True),
        lambda: RandomCrop(0),
        lambda: RandomCrop((3, 4, 5)),
        lambda: RandomCrop(4, padding=-1),
        lambda: RandomCrop(4, fill=float("nan")),
        lambda: RandomCrop(4, void=2.5),
    ],
)
def test_settings_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"Random(Flip|Crop)\("):
        make()


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("n_voters", [0, 2])
def test_a_training_is_the_plain_loop_over_the_changed_pairs(values: bool, n_voters: int) -> None:
    """Inputs standardized by the rows as they are, every voter trained on every row with its own loss."""
    x, y = scenes()
    y = 20 + 4 * x[:, :1] if values else y
    model = segmenter()
    if values:
        model[2] = nn.Conv2d(4, 1, 1)
    options = {} if values else {"output": Logits(dim=1)}
    wrapped = (vote.Wrapper(n_voters, **options) if n_voters else compose().with_options(**options))(model)
    plain = [copy.deepcopy(voter) for voter in wrapped.voters()] if n_voters else [copy.deepcopy(model)]
    record = Recorded(RandomFlip(), RandomCrop(6) if values else RandomCrop(6, padding=2))
    quiet(wrapped, (x, y), epochs=3, batch_size=5, validation=0, optimizer=sgd, augment=[record])
    pairs = record.pairs[1:]  # the first is a trial before anything changes
    assert len(pairs) == 9

    steps = sgd([p for member in plain for p in member.parameters()])
    for images, target in pairs:
        scaled = (images - x.mean()) / x.std(correction=0)
        if values:
            target = (target - y.mean()) / y.std(correction=0)
        losses = [
            F.mse_loss(member(scaled), target) if values else F.cross_entropy(member(scaled), target, ignore_index=VOID)
            for member in plain
        ]
        steps.zero_grad()
        torch.stack(losses).mean().backward()
        steps.step()
    trained = wrapped.voters() if n_voters else [wrapped]
    scaled = (x - x.mean()) / x.std(correction=0)
    for member, expected in zip(trained, plain, strict=True):
        wanted = expected(scaled)
        wanted = wanted * y.std(correction=0) + y.mean() if values else wanted
        assert torch.allclose(member(x), wanted, atol=2e-4 if values else 1e-5)


def test_draws_repeat_with_the_seed_and_leave_the_global_generator_alone() -> None:
    def shifted(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return x + torch.rand(len(x), 1, 1, 1), y  # torch's own draws

    x, y = scenes()
    before = torch.random.get_rng_state()
    results = []
    for seed in (0, 0, 1):
        wrapped = compose().with_options(output=Logits(dim=1))(segmenter())
        quiet(wrapped, (x, y), epochs=2, batch_size=4, seed=seed, augment=[RandomFlip(), RandomCrop(6), shifted])
        results.append(weights(wrapped))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_rows_to_validate_on_stay_as_they_are() -> None:
    x, y = scenes()
    wrapped = compose().with_options(output=Logits(dim=1))(segmenter())
    history = quiet(
        wrapped, (x, y), epochs=1, batch_size=4, validation=(x, y), augment=RandomCrop(4), standardize=False
    )
    assert history.frame.validation_loss[0] == pytest.approx(F.cross_entropy(wrapped(x), y).item(), rel=1e-5)


@pytest.mark.parametrize("n_voters", [0, 2])
def test_a_resumed_training_ends_in_the_same_bits(
    n_voters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    rows = scenes()
    options: dict[str, Any] = {"epochs": 4, "batch_size": 4, "augment": [RandomFlip(), RandomCrop(6, padding=1)]}

    def model() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            wrapper = vote.Wrapper(n_voters) if n_voters else compose()
            return wrapper.with_options(output=Logits(dim=1))(segmenter())

    whole, resumed = model(), model()
    quiet(whole, rows, **options)
    path = tmp_path / "state.pt"
    interrupt_after(2, monkeypatch)
    with pytest.warns(WorkbenchWarning, match="interrupted after 2 of 4") as told:
        quiet(model(), rows, **options, checkpoint=path)
    assert told[0].filename == __file__
    quiet(resumed, rows, **options, checkpoint=path)
    assert same(weights(resumed), weights(whole))
    with pytest.raises(ValueError, match="augment: RandomFlip"):
        quiet(model(), rows, **{**options, "augment": RandomFlip()}, checkpoint=path)


def test_voters_that_start_alike_know_a_row_by_what_it_was() -> None:
    """One step by hand, with the weights of the rows as they were before the change."""
    x, y = torch.randn(8, 1, 4, 4), torch.randn(8, 1, 4, 4)
    model = nn.Conv2d(1, 1, 1)
    wrapped = vote.Wrapper(2, finetune=True)(model)
    pairs: list[tuple[Tensor, Tensor]] = []

    def noted(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs.append((x, y))
        return x + torch.rand(len(x), 1, 1, 1, generator=generator), y

    record = Recorded(noted)
    quiet(wrapped, (x, y), epochs=1, batch_size=8, validation=0, standardize=False, optimizer=sgd, augment=record)
    (changed, target), (before, _) = record.pairs[-1], pairs[-1]
    shares = row_weights(before, target, 2)
    for voter, share in zip(wrapped.voters(), shares, strict=True):
        plain = copy.deepcopy(model)
        step = sgd(plain.parameters())
        (share[:, None, None, None] * (plain(changed) - target).square()).mean().div(2).backward()
        step.step()
        assert torch.allclose(voter(x), plain(x), atol=1e-6)


def test_a_crop_without_a_label_adds_nothing() -> None:
    x, y = scenes()
    y[:] = VOID
    wrapped = compose().with_options(output=Logits(dim=1))(segmenter())
    before = weights(wrapped)
    history = quiet(wrapped, (x, y), epochs=1, batch_size=4, validation=0, standardize=False)
    assert history.frame.loss[0] == 0
    assert same(weights(wrapped), before)


def test_a_data_of_maps_is_trained_on_its_pieces() -> None:
    x, y = scenes(20)
    rows = data.Data.from_arrays(x, y.where(y != VOID, 255), void=255, classes=["a", "b", "c"])
    record = Recorded(RandomCrop(4))
    quiet(compose().with_options(output=Logits(dim=1))(segmenter()), rows, epochs=1, augment=record)
    assert {tuple(target.shape[1:]) for _, target in record.pairs} == {(4, 4)}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"augment": 3}, TypeError, "function augment"),
        ({"augment": RandomFlip}, TypeError, "function augment"),
        ({"augment": lambda x, y, generator: x}, TypeError, "return the pair"),
        ({"augment": lambda x, y, generator: (x[:3], y[:3])}, ValueError, "as many rows"),
        ({"augment": lambda x, y, generator: (x, (y, y))}, ValueError, "the same targets"),
        ({"augment": RandomFlip(), "folds": 2}, ValueError, "cross-fitting"),
    ],
)
def test_what_is_no_change_of_a_pair_is_refused_before_anything_changes(options: Any, error: Any, match: str) -> None:
    wrapped = vote.Wrapper(2, output=Logits(dim=1))(segmenter())
    before = weights(wrapped)
    with pytest.raises(error, match=match):
        quiet(wrapped, scenes(), epochs=1, **options)
    assert same(weights(wrapped), before)
    assert wrapped.training
