"""Occlusion of images and tokens: compared with closed forms, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calibration_models import known, rng
from torch import Tensor, nn

from workbench import attributions, compose, sample, sculpt, vote


class Patch(nn.Module):
    """Looks at one patch of an image alone: its mean, times a weight that voters have each of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x[..., 2:4, 5:7].flatten(1).mean(1, keepdim=True))


def voters(plain: nn.Module, *weights: float) -> Any:
    """A voter for each weight of the only layer, in double precision."""
    wrapped = vote.Wrapper(len(weights), use_bias=False)(plain.double())
    ((name, stacked),) = wrapped.named_risk_parameters()
    wrapped.set_risk_parameters({name: torch.tensor(weights).double().view_as(stacked)})
    return wrapped.eval()


def test_only_the_patch_that_the_model_looks_at_has_an_attribution() -> None:
    """f = w * mean of a patch of 2 x 2 ones, w = 1 or 3: covering k of its four pixels by 0 takes k / 4 of the prediction 2 and the risk 1."""
    x = torch.ones(2, 1, 8, 9, dtype=torch.float64)
    wrapped = voters(Patch(), 1.0, 3.0)
    attribution = attributions.occlusion(wrapped, x, window=1, baseline=0.0)
    risk = wrapped(x, return_risk=True)[1][0].item()
    patch = torch.zeros(8, 9, dtype=torch.float64)
    patch[2:4, 5:7] = 1 / 4
    torch.testing.assert_close(attribution.change["prediction"], 2 * patch.expand(2, 8, 9), rtol=0, atol=1e-12)
    torch.testing.assert_close(attribution.change["epistemic"], risk * patch.expand(2, 8, 9), rtol=0, atol=1e-12)
    assert risk == pytest.approx(1.0)
    assert attribution.before["prediction"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("window", "stride"), [(3, 1), (3, 2), ((2, 4), 2), (8, 3)])
def test_a_place_has_the_mean_over_all_windows_that_cover_it(window: Any, stride: int) -> None:
    """Against a loop over windows, pixel by pixel."""
    x = torch.rand(3, 2, 8, 9, generator=rng(1), dtype=torch.float64)
    wrapped = voters(Patch(), 1.0, 3.0, -1.0)
    attribution = attributions.occlusion(wrapped, x, window=window, stride=stride, batch_size=7)
    high, wide = window if isinstance(window, tuple) else (window, window)
    mean = x.mean((0, 2, 3))[:, None, None]
    before = wrapped(x, return_risk=True)[1][:, 0].detach()
    changes: dict[tuple[int, int], list[Tensor]] = {(i, j): [] for i in range(8) for j in range(9)}
    for top in {*range(0, 8 - high + 1, stride), 8 - high}:
        for left in {*range(0, 9 - wide + 1, stride), 9 - wide}:
            covered = x.clone()
            covered[:, :, top : top + high, left : left + wide] = mean
            change = before - wrapped(covered, return_risk=True)[1][:, 0].detach()
            for i in range(top, top + high):
                for j in range(left, left + wide):
                    changes[i, j].append(change)
    for (i, j), values in changes.items():
        torch.testing.assert_close(attribution.change["epistemic"][:, i, j], torch.stack(values).mean(0))


def test_the_noise_of_an_image_is_where_its_raw_number_stands() -> None:
    """A picture of two pixels [mu, raw]: the aleatoric risk falls from softplus(raw) to softplus(0) where raw is covered, and there alone."""
    flat = known()

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(1))

    plain = Image()
    plain.load_state_dict({"inner.weight": torch.tensor([[1.0, 0.0]]).double()})
    wrapped = sculpt.Wrapper(n_layers=1)(plain)
    ((name, _),) = wrapped.named_risk_parameters()
    wrapped.set_risk_parameters({name: torch.tensor([[0.0, 1.0]]).double()})
    x = torch.tensor([[[4.0, 2.0]]], dtype=torch.float64)
    attribution = attributions.occlusion(wrapped.eval(), x, baseline=0.0)
    assert flat(x.flatten(1), return_risk=True)[1].item() == pytest.approx(attribution.before["aleatoric"].item())
    softplus = nn.functional.softplus
    wanted = softplus(torch.tensor(2.0, dtype=torch.float64)) - softplus(torch.tensor(0.0, dtype=torch.float64))
    torch.testing.assert_close(attribution.change["aleatoric"], torch.stack([0 * wanted, wanted])[None, None])
    torch.testing.assert_close(attribution.change["prediction"], torch.tensor([[[4.0, 0.0]]]).double())


class Bag(nn.Module):
    """A sum of the embeddings of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = nn.Embedding(5, 1, padding_idx=0)
        self.last = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.worth.weight.copy_(torch.tensor([[0.0], [1.0], [0.0], [-2.0], [5.0]]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.worth(tokens).sum(1))


def test_each_token_of_a_bag_carries_its_own_worth() -> None:
    bag = Bag().double()
    wrapped = vote.Wrapper(2, share=1, use_bias=False)(bag)
    ((name, stacked),) = wrapped.named_risk_parameters()
    wrapped.set_risk_parameters({name: torch.tensor([1.0, 3.0]).double().view_as(stacked)})
    tokens = torch.tensor([[1, 4, 2, 3], [2, 2, 2, 4]])
    attribution = attributions.occlusion(wrapped.eval(), tokens, baseline=0)
    # prediction 2 * worth; risk |sum of worths| of standard deviation 1: 4 and 5, of which covering takes what it changes
    torch.testing.assert_close(
        attribution.change["prediction"], 2 * torch.tensor([[1.0, 5.0, 0, -2], [0, 0, 0, 5]]).double()
    )
    wanted = torch.tensor([[4 - 3, 4 - 1, 0, 4 - 6], [0, 0, 0, 5.0]]).double()
    torch.testing.assert_close(attribution.change["epistemic"], wanted)
    assert attribution.window == (1,)
    assert repr(attribution) == "Occlusion([2, 4] by 1: prediction, epistemic, total)"


def test_classes_change_by_the_probability_of_the_class_predicted_at_first() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    x = torch.rand(2, 2, 2, generator=rng(1))
    attribution = attributions.occlusion(compose(output="logits")(model), x, window=(1, 2), baseline=0.0)
    covered = x.clone()
    covered[:, 0] = 0
    before, after = (model(inputs).softmax(-1) for inputs in (x, covered))
    at = before.argmax(-1, keepdim=True)
    wanted = (before - after).gather(1, at)[:, 0].double()
    torch.testing.assert_close(attribution.change["prediction"][:, 0, 1], wanted, rtol=1e-4, atol=1e-6)


def test_draws_of_the_method_are_not_taken_for_the_places() -> None:
    """A model that reads one pixel: under the same noise, nothing else changes anything, also where windows could be asked at once."""

    class Corner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x[:, 0, :1])

    torch.manual_seed(0)
    attribution = attributions.occlusion(
        sample.Wrapper(4)(Corner()), torch.rand(2, 3, 3, generator=rng(1)), window=1, baseline=5.0
    )
    places = attribution.change["epistemic"].clone()
    assert (places[:, 0, 0] != 0).all()
    places[:, 0, 0] = 0
    assert not places.any()


def test_inputs_draws_and_mode_stay_as_they_were() -> None:
    wrapped = voters(Patch(), 1.0, 3.0).train()
    x = torch.rand(1, 1, 8, 9, dtype=torch.float64, generator=rng(1))
    x_before, state = x.clone(), torch.get_rng_state()
    attributions.occlusion(wrapped, x)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), state)
    assert wrapped.training


IMAGES, TOKENS = torch.rand(2, 1, 8, 9, dtype=torch.float64), torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.rand(4, 3)}, r"x has shape \[4, 3\].*permutation_importance"),
        ({"x": IMAGES[:0]}, r"x has shape \[0, 1, 8, 9\]"),
        ({"x": IMAGES * torch.nan}, "NaN or infinite in 2 of 2"),
        ({"x": TOKENS}, "baseline: give the number of a token"),
        ({"x": TOKENS, "baseline": 0.5}, "whole numbers"),
        ({"baseline": torch.nan}, "baseline: it is NaN"),
        ({"baseline": torch.zeros(3)}, r"\[3\] does not broadcast to a row \[1, 8, 9\]"),
        ({"window": 9}, r"sides from 1 to \[8, 9\]; found 9"),
        ({"window": (2, 2, 2)}, "window"),
        ({"window": 0}, "window"),
        ({"window": 2, "stride": 3}, "so that every place is covered; found 3"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    arguments = {"x": IMAGES, **change}
    with pytest.raises(ValueError, match=said):
        attributions.occlusion(voters(Patch(), 1.0, 3.0), arguments.pop("x"), **arguments)


def test_models_and_inputs_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="of=None: the model has several inputs; say which is changed, of 'x'"):
        attributions.occlusion(voters(Patch(), 1.0, 3.0), {"x": IMAGES})
    with pytest.raises(
        TypeError, match="expected a tensor of images or tokens, or a tuple or dict of inputs; found str"
    ):
        attributions.occlusion(voters(Patch(), 1.0, 3.0), "x")
    with pytest.raises(TypeError, match="not wrapped"):
        attributions.occlusion(Patch(), IMAGES)
