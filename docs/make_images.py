"""Make the pictures of the README and of the page on outputs: python docs/make_images.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import nn

from workbench import compose, data, fit, neo, outputs, plots, sculpt, vote
from workbench.distributions import LogitNormal

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Make all pictures."""
    IMAGES.mkdir(exist_ok=True)
    draw_risks()
    draw_maps()


def draw_risks() -> None:
    """Train on the two toys of `notebooks/first_look.ipynb`, and draw their risks side by side."""
    torch.manual_seed(0)
    curve = data.toy.cubic()
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    wrapped = compose(vote.Wrapper(5, prior=300), sculpt.Wrapper(), neo.Wrapper())(model)
    fit(wrapped, curve, progress=False)

    moons = data.toy.moons(n_train=3000)
    model = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 2))
    classifier = compose(vote.Wrapper(5, output="logits"), sculpt.Wrapper(LogitNormal), neo.Wrapper())(model)
    fit(classifier, moons, epochs=50, progress=False)

    xx, yy = torch.meshgrid(torch.linspace(-3, 4, 140), torch.linspace(-2.5, 3, 140), indexing="xy")
    with torch.no_grad():
        y, risk = wrapped(curve.test.x, return_risk=True)
        _, on_grid = classifier(torch.stack([xx.flatten(), yy.flatten()], 1), return_risk=True)

    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained", width_ratios=(1.35, 1, 1))
    truth = (curve.test.x, curve.test.y)
    observed = (curve.train.x[::5], curve.train.y[::5])
    bands = (y, risk.aleatoric, risk.epistemic, risk.vacuitic)
    plots.bands(curve.test.x, *bands, truth=truth, observed=observed, ax=axes[0])
    axes[0].set_ylim(-40, 45)
    points = (moons.train.x[::20], moons.train.y[::20])
    plots.decision_map(xx, yy, on_grid.aleatoric, axes[1], label="aleatoric risk (nats)", points=points)
    plots.decision_map(xx, yy, on_grid.vacuitic, axes[2], label="vacuitic risk", points=points, limits=(0, 20))
    titles = ("a curve: three risks", "two classes: wrong labels in one corner", "two classes: what was never seen")
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    figure.savefig(IMAGES / "risks.png", dpi=80, metadata={"Software": None})


def discs(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images [n, 1, 48, 48] of a bright and a dark disc, and the class of each pixel: 0 nothing, 1 bright, 2 dark."""
    rows, columns = torch.meshgrid(torch.arange(48.0), torch.arange(48.0), indexing="ij")
    labels = torch.zeros(n, 48, 48, dtype=torch.int64)
    for label in (1, 2):
        y, x = 8 + 32 * torch.rand(2, n, 1, 1, generator=generator)
        labels[
            (rows - y).square() + (columns - x).square() < (5 + 4 * torch.rand(n, 1, 1, generator=generator)) ** 2
        ] = label
    clean = torch.tensor([0.0, 1.0, -1.0])[labels][:, None]
    blurred = nn.functional.avg_pool2d(clean, 5, 1, 2)
    return blurred + 0.2 * torch.randn(blurred.shape, generator=generator), labels


def draw_maps() -> None:
    """Train a small segmentation network on discs, and draw its risks on an image that also holds a checked square, which it has never met."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)

    def layer(n_in: int, n_out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(n_in, n_out, 5, padding=2), nn.ReLU())

    model = nn.Sequential(layer(1, 8), layer(8, 8), nn.Conv2d(8, 3, 1))
    wrapped = vote.Wrapper(5, output=outputs.Logits(dim=1))(model)
    fit(wrapped, discs(200, generator), epochs=12, batch_size=10, progress=False)
    image, _ = discs(1, torch.Generator().manual_seed(4))
    checks = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(2, 2)
    image[0, 0, 29:45, 29:45] = checks.repeat_interleave(4, 0).repeat_interleave(4, 1)
    with torch.no_grad():
        y, risk = wrapped(image, return_risk=True)
    pictures = {
        "image [1, 1, 48, 48]": (image[0, 0], "gray"),
        "most probable class, of y [1, 3, 48, 48]": (y[0].argmax(0), "viridis"),
        "risk.aleatoric [1, 48, 48], nats": (risk.aleatoric[0], "magma"),
        "risk.epistemic [1, 48, 48], nats": (risk.epistemic[0], "magma"),
    }
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.7), layout="constrained")
    for ax, (title, (values, colours)) in zip(axes, pictures.items(), strict=True):
        drawn = ax.imshow(values, cmap=colours)
        ax.set(title=title, xticks=[], yticks=[])
        if colours == "magma":
            figure.colorbar(drawn, ax=ax, fraction=0.046)
    figure.savefig(IMAGES / "outputs.png", dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main()
