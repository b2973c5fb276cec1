"""Augment: compared with a loop over a deep copy of the model on images flipped and rotated by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import augment, compose, fit, load, save, sculpt, vote
from workbench.core.texts import wrapper_of
from workbench.errors import SettingsNeededError

X = torch.randn(5, 3, 8, 6, generator=torch.Generator().manual_seed(0))
Turn = Callable[[Tensor], Tensor]


def flip(dim: int) -> Turn:
    return lambda image: image.flip(dim)


def quarters(number: int) -> Turn:
    return lambda image: torch.rot90(image, number, (2, 3))


# how an image is transformed and turned back, written out by hand
BY_HAND: dict[str, list[tuple[list[Turn], list[Turn]]]] = {
    "flip": [([], []), ([flip(3)], [flip(3)])],
    "flips": [([], []), ([flip(3)], [flip(3)]), ([flip(2)], [flip(2)]), ([flip(2), flip(3)], [flip(3), flip(2)])],
    "rotations": [([quarters(k)], [quarters(4 - k)]) for k in range(4)],
    "dihedral": [([quarters(k)], [quarters(4 - k)]) for k in range(4)]
    + [([quarters(k), flip(3)], [flip(3), quarters(4 - k)]) for k in range(4)],
}


def segmentation() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)).eval()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 2)), nn.Flatten(), nn.Linear(16, 3))


def applied(turns: list[Turn], image: Tensor) -> Tensor:
    for turn in turns:
        image = turn(image)
    return image


@pytest.mark.parametrize("name", BY_HAND)
def test_maps_are_turned_back_before_they_are_compared(name: Any) -> None:
    model = segmentation()
    y, risk = augment.Wrapper(name)(model).eval()(X, return_risk=True)
    plain = copy.deepcopy(model)
    answers = torch.stack([applied(back, plain(applied(turns, X))) for turns, back in BY_HAND[name]])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))


@pytest.mark.parametrize("name", BY_HAND)
def test_scores_are_compared_as_they_are(name: Any) -> None:
    model = classifier().eval()
    y, risk = augment.Wrapper(name)(model).eval()(X, return_risk=True)
    plain = copy.deepcopy(model)
    answers = torch.stack([plain(applied(turns, X)) for turns, _ in BY_HAND[name]])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))


def test_an_equivariant_model_has_no_risk() -> None:
    _, risk = augment.Wrapper("dihedral")(nn.Conv2d(3, 2, 1)).eval()(X, return_risk=True)
    torch.testing.assert_close(risk, torch.zeros_like(risk), atol=1e-6, rtol=0)


def test_transforms_of_ones_own_and_their_inverses() -> None:
    model = nn.Linear(4, 2)
    x = torch.randn(6, 4)
    wrapped = augment.Wrapper([None, augment.Transform(torch.neg, torch.neg), lambda x: x.roll(1, -1)])(model).eval()
    y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([model(x), -model(-x), model(x.roll(1, -1))])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))


@pytest.mark.parametrize("which", ["first", "all"])
def test_the_first_floating_input_is_transformed_or_all_are(which: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, number: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(a) + 2 * b + number.unsqueeze(1)

    model, number, a, b = Two(), torch.arange(5), torch.randn(5, 3), torch.randn(5, 1)
    y = augment.Wrapper([lambda x: 3 * x], inputs=which)(model).eval()(number, a, b=b)
    torch.testing.assert_close(y, model(number, 3 * a, 3 * b if which == "all" else b))


def test_transforms_and_inverses_see_the_users_units() -> None:
    model, x = nn.Linear(4, 1), torch.randn(6, 4) * 5 + 3
    seen: list[Tensor] = []

    def double(values: Tensor) -> Tensor:
        seen.append(values)
        return 2 * values

    wrapped: Any = augment.Wrapper([augment.Transform(double, double)])(model).eval()
    wrapped.scale(x_mean=x.mean(0), x_scale=x.std(0), y_mean=torch.tensor([7.0]), y_scale=torch.tensor([3.0]))
    y = wrapped(x)
    torch.testing.assert_close(seen[0], x)
    expected = 2 * (model((2 * x - x.mean(0)) / x.std(0)) * 3 + 7)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_with_voters_and_heads_variances_add() -> None:
    wrapped: Any = compose(vote.Wrapper(3), augment.Wrapper("flips"), sculpt.Wrapper(n_layers=1))(segmentation()).eval()
    y, risk = wrapped(X, return_risk=True)
    answers = torch.stack(
        [applied(back, voter(applied(turns, X))) for voter in wrapped.voters() for turns, back in BY_HAND["flips"]]
    )
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk.epistemic, answers.std(0, correction=0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(risk.total**2, risk.aleatoric**2 + risk.epistemic**2)


def test_training_is_that_of_the_model_alone() -> None:
    plain, wrapped = segmentation().train(), augment.Wrapper("rotations")(segmentation()).train()
    assert torch.equal(wrapped(X), plain(X))
    y = torch.randn(5, 2, 8, 6)
    assert torch.equal(wrapped.loss(nn.functional.mse_loss, X, y), nn.functional.mse_loss(plain(X), y))
    rows, targets = torch.randn(40, 3), torch.randn(40, 1)
    layer = nn.Linear(3, 1)
    augmented = fit(augment.Wrapper([None, torch.neg])(copy.deepcopy(layer)), (rows, targets), epochs=2, seed=0)
    alone = fit(compose()(copy.deepcopy(layer)), (rows, targets), epochs=2, seed=0)
    assert [r[:3] for r in augmented.records] == [r[:3] for r in alone.records]


def test_it_is_saved_by_name_and_given_where_it_has_functions(tmp_path: Path) -> None:
    model = segmentation()
    wrapped = augment.Wrapper("flips", maps=True)(model).eval()
    save(wrapped, tmp_path / "named")
    assert torch.equal(load(tmp_path / "named", segmentation()).eval()(X), wrapped(X))
    wrapper = augment.Wrapper([None, torch.neg])
    save(wrapper(model), tmp_path / "own")
    with pytest.raises(ValueError, match="wrapper="):
        load(tmp_path / "own", segmentation())
    again = load(tmp_path / "own", segmentation(), wrapper=wrapper).eval()
    assert torch.equal(again(X), wrapper(model).eval()(X))


def test_what_answers_alike_is_loaded_and_what_does_not_is_refused(tmp_path: Path) -> None:
    first = augment.Wrapper("flips", inputs="first")(segmentation())  # what all files said before there was "auto"
    save(first, tmp_path / "first")
    loaded = load(tmp_path / "first", augment.Wrapper("flips")(segmentation())).eval()
    assert torch.equal(loaded(X), first.eval()(X))
    with pytest.raises(ValueError, match="inputs='first', this object inputs='all'"):
        load(tmp_path / "first", augment.Wrapper("flips", inputs="all")(segmentation()))


def test_texts_name_it() -> None:
    [method] = wrapper_of('augment(transforms="rotations")').make()
    assert (method.name, method.wrapper.transforms) == ("augment", "rotations")


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_and_answers_as_eager(dynamic: bool) -> None:
    wrapped = augment.Wrapper("flips")(segmentation()).eval()
    torch.compiler.reset()  # or sizes that other tests compiled for would decide which are symbols
    with torch.no_grad():
        eager = wrapped(X, return_risk=True)
        compiled = torch.compile(wrapped, backend="eager", fullgraph=True, dynamic=dynamic)(X, return_risk=True)
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)


class _Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)).unsqueeze(1).expand(-1, 7, -1)  # [rows, 7, 4]


def test_what_cannot_be_told_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(ValueError, match=r"output of shape \[5, 7, 4\] is a map.*maps=False"):
        augment.Wrapper()(_Boxes()).eval()(X)
    assert augment.Wrapper(maps=False)(_Boxes()).eval()(X).shape == (5, 7, 4)
    with pytest.raises(ValueError, match=r"is for images \[rows, channels, height, width\].*\[4, 2\].*Transform"):
        augment.Wrapper()(nn.Linear(2, 1)).eval()(torch.ones(4, 2))
    with pytest.raises(TypeError, match=r"found none \(inputs: torch.int64 \[4, 2\]\)"):
        augment.Wrapper([None])(nn.Embedding(3, 2)).eval()(torch.ones(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="same number of rows"):
        augment.Wrapper([lambda x: x[:2]])(nn.Linear(2, 1)).eval()(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"transforms": "flp"}, ValueError, "one of flip, flips, rotations, dihedral"),
        ({"transforms": ()}, ValueError, "or a sequence"),
        ({"transforms": [3]}, TypeError, "must be a function"),
        ({"inputs": "second"}, ValueError, "inputs must be one of auto, first, all"),
        ({"maps": 2}, ValueError, "maps must be"),
    ],
)
def test_bad_settings_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        augment.Wrapper(**arguments)


class Beside(nn.Module):
    """A map of an image and of what is beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, image: Tensor, other: Tensor) -> Tensor:
        other = other if other.dim() == 4 else other[:, None]
        return self.conv(torch.cat([image, other.to(image).expand_as(image)], 1))


OTHERS = {
    "the other image of a pair": X.flip(0),
    "a mask": (X[:, :1] > 0).float(),
    "a mask of yes and no": X[:, 0] > 0,
    "a map of classes": (4 * X[:, :1]).long(),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_inputs_that_could_turn_with_the_image_are_asked_for(other: Tensor) -> None:
    torch.manual_seed(0)
    model = Beside().eval()
    with pytest.raises(
        SettingsNeededError, match=r"whether to transform other inputs .* have its height and width; .*inputs=\"all\""
    ):
        augment.Wrapper("flips")(model).eval()(X, other)
    for which in ("first", "all") if other.is_floating_point() else ("first",):
        y = augment.Wrapper("flips", inputs=which)(model).eval()(X, other)
        plain, as_image = copy.deepcopy(model), other if other.dim() == 4 else other[:, None]
        answers = [
            applied(back, plain(applied(turns, X), applied(turns, as_image) if which == "all" else as_image))
            for turns, back in BY_HAND["flips"]
        ]
        torch.testing.assert_close(y, torch.stack(answers).mean(0))


def test_inputs_that_are_no_maps_beside_the_image_are_left_as_they_are() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(()))

        def forward(self, image: Tensor, strength: Tensor, small: Tensor) -> Tensor:
            return image * strength[:, :, None, None] + small.mean() + self.shift

    strength, small = torch.randn(5, 1), torch.randn(5, 3, 4, 3)
    y = augment.Wrapper()(Conditioned()).eval()(X, strength, small)
    torch.testing.assert_close(y, Conditioned()(X, strength, small))


@pytest.mark.parametrize("which", ["auto", "first", "all"])
def test_numbers_before_the_image_are_left_as_they_are(which: Any) -> None:
    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(X.shape[1], 2, 3, padding=1)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.conv(batch["image"]) * batch["gain"][:, None, None, None]

    model, gain = Gained().eval(), torch.rand(len(X))
    y = augment.Wrapper("flip", inputs=which)(model).eval()({"gain": gain, "image": X})
    answers = [model({"gain": gain, "image": X}), model({"gain": gain, "image": X.flip(-1)}).flip(-1)]
    torch.testing.assert_close(y, torch.stack(answers).mean(0))
