"""Per-pixel risks of depth and disparity: compared with plain copies of common networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import Risk, augment, neo, sample, sculpt, vote
from workbench.distributions import Normal

GENERATOR = torch.Generator().manual_seed(0)
LEFT, RIGHT = torch.rand(2, 4, 3, 32, 32, generator=GENERATOR)


class Monocular(nn.Module):
    """A U-Net whose depth is 1 / sigmoid, or softplus."""

    def __init__(self, inverse: bool) -> None:
        super().__init__()
        self.inverse = inverse
        self.fine = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ELU(inplace=True))
        self.coarse = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.up = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(12, 4, 3), nn.ELU(inplace=True))
        self.out = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.fine(image)
        coarse = F.interpolate(self.coarse(fine), scale_factor=2, mode="nearest")
        h = self.out(F.interpolate(self.up(torch.cat([coarse, fine], 1)), size=image.shape[-2:], mode="bilinear"))
        return 1 / (0.01 + 9.99 * h.sigmoid()) if self.inverse else F.softplus(h)


class Stereo(nn.Module):
    """Disparity [n, h, w] by a cost volume of shared features, 3d convolutions and soft-argmin (Kendall et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
        )
        self.costs = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.features(left), self.features(right)
        volume = a.new_zeros(len(a), 4, 5, *a.shape[2:])
        for d in range(5):
            volume[:, :2, d, :, d:] = a[..., d:]
            volume[:, 2:, d, :, d:] = b[..., : b.shape[-1] - d]
        shares = (-self.costs(volume)[:, 0]).softmax(1)
        return (shares * torch.arange(5).to(shares)[:, None, None]).sum(1)


def dpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.DPTForDepthEstimation(
        transformers.DPTConfig(
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=32,
            patch_size=8,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=8,
            is_hybrid=False,
        )
    )


def glpn() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GLPNForDepthEstimation(
        transformers.GLPNConfig(
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=8,
            sr_ratios=[4, 2, 1, 1],
            mlp_ratios=[2, 2, 2, 2],
        )
    )


def depth_anything() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    backbone = transformers.Dinov2Config(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        reshape_hidden_states=False,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return transformers.DepthAnythingForDepthEstimation(
        transformers.DepthAnythingConfig(
            backbone_config=backbone,
            patch_size=14,
            reassemble_hidden_size=16,
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=8,
            head_hidden_size=8,
        )
    )


HAND_WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "softplus": lambda: Monocular(inverse=False),
    "inverse of a sigmoid": lambda: Monocular(inverse=True),
    "stereo": Stereo,
}
LIBRARY: dict[str, Callable[[], nn.Module]] = {"dpt": dpt, "glpn": glpn, "depth anything": depth_anything}
KINDS = [
    *(pytest.param(make, id=name) for name, make in HAND_WRITTEN.items()),
    *(pytest.param(make, id=name, marks=pytest.mark.slow) for name, make in LIBRARY.items()),
]


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """A network whose batch norms are no identities, its inputs, and the options of a wrapper."""
    torch.manual_seed(0)
    net = make().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.3, 0.3)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    if make is depth_anything:
        return net, (torch.rand(4, 3, 56, 56),), {"output": {"predicted_depth": "values"}}
    if make in LIBRARY.values():
        return net, (LEFT,), {"output": {"predicted_depth": "values"}}
    return net, (LEFT, RIGHT) if make is Stereo else (LEFT,), {}


def depth(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["predicted_depth"]


def map_of(risk: Any, kind: str) -> Tensor:
    return depth(getattr(risk, kind) if isinstance(risk, Risk) else risk)


@torch.no_grad()
@pytest.mark.parametrize("share", [None, 2, "rank1"])
@pytest.mark.parametrize("make", KINDS)
def test_voters_are_those_of_plain_networks(make: Callable[[], nn.Module], share: Any) -> None:
    net, x, options = built(make)
    wrapped: Any = vote.Wrapper(3, share=share, **options)(net).eval()
    for p in wrapped.parameters():
        p.add_(0.05 * torch.randn_like(p))
    y, risk = wrapped(*x, return_risk=True)
    answers = torch.stack([depth(voter.eval()(*x)) for voter in wrapped.voters()])
    assert answers.std(0).mean() > 1e-4
    torch.testing.assert_close(depth(y), answers.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(map_of(risk, "epistemic"), answers.std(0, correction=0), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make", KINDS)
def test_heads_and_densities_leave_the_prediction_as_it_was(make: Callable[[], nn.Module]) -> None:
    net, x, options = built(make)
    expected = depth(copy.deepcopy(net)(*x))
    y, risk = sculpt.Wrapper(Normal, **options)(copy.deepcopy(net)).eval()(*x, return_risk=True)
    torch.testing.assert_close(depth(y), expected, rtol=1e-4, atol=1e-5)
    aleatoric = map_of(risk, "aleatoric")
    assert aleatoric.shape == expected.shape
    assert (aleatoric > 0).all()
    if make is not Stereo:  # its last layers have a third axis
        wrapped: Any = neo.Wrapper(per="position", **options)(net).eval().fit(*x)
        y, risk = wrapped(*x, return_risk=True)
        assert torch.equal(depth(y), expected)
        assert map_of(risk, "vacuitic").shape == expected.shape


@torch.no_grad()
@pytest.mark.parametrize("make", KINDS)
def test_noisy_passes_have_a_spread_at_each_pixel(make: Callable[[], nn.Module]) -> None:
    net, x, options = built(make)
    _, risk = sample.Wrapper(n_samples=3, **options)(copy.deepcopy(net)).eval()(*x, return_risk=True)
    assert map_of(risk, "epistemic").shape == depth(net(*x)).shape
    assert map_of(risk, "epistemic").mean() > 0


@torch.no_grad()
@pytest.mark.parametrize("make", [kind for kind in KINDS if kind.values[0] is not Stereo])
def test_mirrored_depth_is_turned_back(make: Callable[[], nn.Module]) -> None:
    net, (x,), options = built(make)
    y, risk = augment.Wrapper("flip", maps=True, **options)(copy.deepcopy(net)).eval()(x, return_risk=True)
    answers = torch.stack([depth(net(x)), depth(net(x.flip(-1))).flip(-1)])
    torch.testing.assert_close(depth(y), answers.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(map_of(risk, "epistemic"), answers.std(0, correction=0), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_stereo_pair_is_not_mirrored_by_half_and_has_no_density_of_pixels() -> None:
    net, x, _ = built(Stereo)
    with pytest.raises(ValueError, match="A flipped stereo pair is no longer a stereo pair"):
        augment.Wrapper()(copy.deepcopy(net)).eval()(*x)
    rows = [{"left": left, "right": right} for left, right in zip(*x, strict=True)]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='use per="row"'):
        neo.Wrapper(per="position")(copy.deepcopy(net)).eval().fit(loader)
    _, risk = neo.Wrapper()(net).eval().fit(loader)(*x, return_risk=True)
    assert risk.shape == (4,)
