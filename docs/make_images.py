"""Make the picture of the README: python docs/make_images.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import nn

from workbench import compose, data, fit, neo, plots, sculpt, vote
from workbench.distributions import LogitNormal

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Train on the two toys of `notebooks/first_look.ipynb`, and draw their risks side by side."""
    torch.manual_seed(0)
    curve = data.toy.cubic()
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    wrapped = compose(vote.Wrapper(5), sculpt.Wrapper(), neo.Wrapper())(model)
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
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / "risks.png", dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main()
