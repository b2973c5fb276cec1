"""neo on maps, tokens and volumes: a risk per position, and one per image from its positions."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.density_rows import draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import workbench
from workbench import compose, neo, vote
from workbench.errors import NotFittedError
from workbench.methods.densities import Gaussian
from workbench.outputs import Binary, Logits, Probs, Values

RHO = 0.01


class Segmenter(nn.Module):
    """Half the resolution inside; `last` reads it, and is upsampled."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, stride=2, padding=1)
        self.last = nn.Conv2d(6, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.last(torch.relu(self.first(x))), size=x.shape[2:], mode="bilinear")


def seeded(kind: Any, *args: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(*args).eval()


def images(n: int, seed: int = 0, size: int = 8) -> Tensor:
    return F.avg_pool2d(draw(n, 2, size + 2, size + 2, seed=seed), 3, 1) * 3


NET, X, NEW = seeded(Segmenter), images(60), images(7, seed=5)
MAP = Logits(dim=1)


def wrapped_by(per: Any = None, density: Any = None, **options: Any) -> Any:
    density = Gaussian(shrinkage=RHO) if density is None else density
    return neo.Wrapper(per=per, density=density, output=MAP, **options)(NET).eval().fit(X)


def ask(wrapped: Any, *x: Any, **named: Any) -> Any:
    with torch.no_grad():
        _, risk = wrapped(*x, return_risk=True, **named)
    return risk if isinstance(risk, Tensor | dict) else risk.vacuitic


# ---- by hand: features of a forward hook, Gaussians of numpy
def entering(layer: str, x: Tensor) -> np.ndarray:
    caught: list[Tensor] = []
    hook = NET.get_submodule(layer).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        NET(x)
    hook.remove()
    return caught[0].double().numpy()


def places() -> np.ndarray:
    return torch.rand(60, 64, 3, generator=torch.Generator().manual_seed(0)).numpy()


def score(layer: str, x: Tensor) -> np.ndarray:
    """Half the squared Mahalanobis distance [n, H, W] at the positions of the output."""
    features, u = entering(layer, X), places()
    height, width = features.shape[2:]
    rows, columns = (u[:, :, 0] * height).astype(int), (u[:, :, 1] * width).astype(int)
    sample = features[np.arange(60)[:, None], :, rows, columns]
    sample = sample[np.arange(60) % 5 != 4].reshape(-1, features.shape[1])
    mean, sd = sample.mean(0), sample.std(0)
    z = (sample - mean) / sd
    covariance = (1 - RHO) * z.T @ z / len(z) + RHO * (z**2).mean() * np.eye(z.shape[1])
    z = (np.moveaxis(entering(layer, x), 1, -1) - mean) / sd
    distance = np.einsum("...i,ij,...j->...", z, np.linalg.inv(covariance), z) / 2
    return F.interpolate(torch.tensor(distance)[:, None], size=x.shape[2:], mode="bilinear")[:, 0].numpy()


def standardized(scores: Any) -> np.ndarray:
    held = scores(X[4::5])
    return (scores(NEW) - held.mean()) / held.std()


@pytest.mark.parametrize("layer", ["first", "last"])
def test_the_risk_of_a_position_is_its_distance_at_the_resolution_of_the_layer(layer: str) -> None:
    wrapped = wrapped_by(layers=layer)
    risk = ask(wrapped, NEW)
    assert risk.shape == (7, 8, 8)
    np.testing.assert_allclose(risk, standardized(lambda x: score(layer, x)), rtol=1e-3, atol=1e-4)


def test_layers_are_added_in_units_of_their_own_scores() -> None:
    wrapped = wrapped_by()
    scales = [layer.scale.item() for layer in wrapped.get_submodule("extras@workbench").density.layers]
    expected = standardized(lambda x: sum(score(name, x) / scales[i] for i, name in enumerate(("first", "last"))))
    np.testing.assert_allclose(ask(wrapped, NEW), expected, rtol=1e-3, atol=1e-4)


def test_the_risk_of_an_image_is_the_mean_of_its_riskiest_positions() -> None:
    position, image = wrapped_by("position", layers="last"), wrapped_by("image", layers="last")

    def tops(x: Tensor) -> np.ndarray:
        return np.sort(ask(position, x).flatten(1).numpy(), 1)[:, -3:].mean(1)  # of 64

    held = tops(X[4::5])
    np.testing.assert_allclose(ask(image, NEW), (tops(NEW) - held.mean()) / held.std(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_an_unknown_patch_is_found_where_it_is() -> None:
    strange = NEW.clone()
    strange[:, :, 2:6, 2:6] = 8.0
    for density in ("signature", "gaussian", "classwise"):
        risk = ask(wrapped_by(density=density), strange)
        assert risk[:, 3:5, 3:5].min() > 2 + risk[:, [0, -1]].mean(), density
        assert (ask(wrapped_by("image", density), strange) > ask(wrapped_by("image", density), NEW) + 2).all()
    for density in ("knn", "energy", "max_logit"):
        assert ask(wrapped_by(density=density), NEW).shape == (7, 8, 8)


# ---- the rest of a wrapped object
@pytest.mark.parametrize("density", ["signature", "classwise", "energy"])
def test_copies_and_files_give_the_same_risk(density: str, tmp_path: Path) -> None:
    wrapped = wrapped_by(density=density)
    expected = ask(wrapped, NEW)
    workbench.save(wrapped, tmp_path / "model")
    loaded: Any = neo.Wrapper(density=density, output=MAP)(Segmenter()).eval()
    loaded.load_state_dict(wrapped.state_dict())
    copies = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), loaded]
    for other in (*copies, workbench.load(tmp_path / "model", Segmenter())):
        assert torch.equal(ask(other.eval(), NEW), expected)
    with pytest.raises(ValueError, match="other wrapper settings"):
        neo.Wrapper(density=density, output=MAP, per="image")(Segmenter()).load_state_dict(wrapped.state_dict())


def test_a_state_of_before_positions_gives_a_number_a_row() -> None:
    old: Any = neo.Wrapper(output=MAP, per="row")(NET).eval().fit(X)
    state = old.state_dict()
    settings = bytes(state["settings@workbench"].tolist()).decode().replace(', "per": "row"', "")
    state["settings@workbench"] = torch.tensor(list(settings.encode()), dtype=torch.uint8)
    new: Any = neo.Wrapper(output=MAP)(Segmenter()).eval()
    new.load_state_dict(state)
    assert ask(new, NEW).shape == (7,)
    assert torch.equal(ask(new, NEW), ask(old, NEW))
    assert ask(new.fit(X), NEW).shape == (7, 8, 8)


@pytest.mark.slow
def test_composed_and_compiled_it_is_the_same() -> None:
    alone = ask(wrapped_by(), NEW)
    both: Any = compose(vote.Wrapper(2), neo.Wrapper(density=Gaussian(shrinkage=RHO), output=MAP))(NET).eval().fit(X)
    with torch.no_grad():
        y, risk = both(NEW, return_risk=True)
        assert risk.vacuitic.shape == risk.epistemic.shape == (7, 8, 8)
        single: Any = neo.Wrapper(density=Gaussian(shrinkage=RHO), output=MAP)(both.unwrap()).eval().fit(X)
        torch.testing.assert_close(risk.vacuitic, ask(single, NEW))
        assert torch.equal(y, both(NEW))
    wrapped = wrapped_by()
    compiled = torch.compile(wrapped, backend="eager")
    torch.testing.assert_close(ask(compiled, NEW), alone)


def test_under_autocast_features_are_half_and_distances_are_not() -> None:
    wrapped = wrapped_by()
    expected = ask(wrapped, NEW)
    with torch.autocast("cpu", torch.bfloat16):
        risk = ask(wrapped, NEW)
    assert risk.dtype == torch.float32
    torch.testing.assert_close(risk, expected, rtol=0.1, atol=0.1)


def test_nothing_else_moves() -> None:
    state = torch.get_rng_state()
    wrapped = wrapped_by()
    y, _ = wrapped(NEW, return_risk=True)
    assert torch.equal(y, NET(NEW))
    assert torch.equal(torch.get_rng_state(), state)
    for inputs in ([X], iter([X]), DataLoader(TensorDataset(X, torch.zeros(60, 8, 8).long()), 60)):
        again: Any = neo.Wrapper(density=Gaussian(shrinkage=RHO), output=MAP)(NET).eval().fit(inputs)
        assert torch.equal(ask(again, NEW), ask(wrapped, NEW))


# ---- what has positions
def test_values_have_positions_where_it_is_said() -> None:
    usual: Any = neo.Wrapper()(NET).eval().fit(X)
    assert ask(usual, NEW).shape == (7,)
    told: Any = neo.Wrapper(per="position")(NET).eval().fit(X)
    risk = ask(told, NEW)
    assert risk.shape == (7, 3, 8, 8)
    assert torch.equal(risk[:, 0], risk[:, 2])
    binary: Any = neo.Wrapper(per="position", output=Binary())(seeded(Segmenter, 1)).eval().fit(X)
    assert ask(binary, NEW).shape == (7, 1, 8, 8)


def test_series_volumes_and_channels_last() -> None:
    series: Any = neo.Wrapper(output=MAP)(seeded(nn.Conv1d, 2, 3, 3)).eval().fit(draw(60, 2, 12))
    assert ask(series, draw(4, 2, 12)).shape == (4, 10)
    volume: Any = neo.Wrapper(output=Probs(dim=1))(nn.Sequential(seeded(nn.Conv3d, 2, 3, 1), nn.Softmax(1))).eval()
    assert ask(volume.fit(draw(20, 2, 4, 5, 6)), draw(3, 2, 4, 5, 6)).shape == (3, 4, 5, 6)
    last: Any = neo.Wrapper(output=Logits(dim=-1))(seeded(nn.Linear, 2, 3)).eval().fit(draw(20, 4, 5, 2))
    assert ask(last, draw(3, 4, 5, 2)).shape == (3, 4, 5)
    assert ask(
        neo.Wrapper(output=Values(), per="position")(seeded(nn.Linear, 2, 3)).fit(draw(20, 5, 2)).eval(), draw(3, 5, 2)
    ).shape == (3, 5, 3)


class Tagger(nn.Module):
    """Scores of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.hidden, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.tokens(ids))))


def test_padding_of_tokens_counts_nowhere() -> None:
    ids = torch.randint(1, 20, (60, 9), generator=torch.Generator().manual_seed(0))
    ids[torch.arange(9) >= torch.arange(60)[:, None] % 8 + 2] = 0
    longer = F.pad(ids, (0, 11))
    net = seeded(Tagger)
    for per in ("position", "image"):
        short, long = (neo.Wrapper(output=Logits(dim=-1), per=per)(net).eval().fit(part) for part in (ids, longer))
        new, new_longer = ids[:5], longer[:5]
        risk, risk_longer = ask(short, new), ask(long, new_longer)
        assert risk.shape == ((5, 9) if per == "position" else (5,))
        kept = new != 0 if per == "position" else ...
        torch.testing.assert_close(risk_longer[:, :9] if per == "position" else risk_longer, risk)
        assert risk[kept].isfinite().all()


def test_of_several_outputs_each_has_its_positions() -> None:
    class Both(Segmenter):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            small = self.last(torch.relu(self.first(x)))
            return {"out": F.interpolate(small, size=x.shape[2:]), "aux": small, "level": small.mean((2, 3))}

    wrapped: Any = neo.Wrapper(output={"out": MAP, "aux": MAP})(seeded(Both)).eval().fit(X)
    risk = ask(wrapped, NEW)
    assert (risk["out"].shape, risk["aux"].shape, risk["level"]) == ((7, 8, 8), (7, 4, 4), None)


# ---- what has none
def test_scores_of_rows_have_a_risk_for_each_row_as_before() -> None:
    net, rows = seeded(nn.Linear, 4, 3), draw(80, 4)
    for inputs in (rows, iter(rows.split(20)), rows.split(20)):
        told: Any = neo.Wrapper(output=MAP)(net).eval().fit(inputs)
        usual: Any = neo.Wrapper(output="logits")(net).eval().fit(rows)
        assert torch.equal(ask(told, rows), ask(usual, rows))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="the output has no positions"):
        neo.Wrapper(per="position")(nn.Linear(4, 3)).fit(draw(80, 4))
    pooled = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 12), nn.Unflatten(1, (3, 4))
    )
    with pytest.raises(ValueError, match="the output has no positions"):
        neo.Wrapper(per="image")(pooled).fit(X)
    with pytest.raises(ValueError, match="the positions of the output have none"):
        neo.Wrapper(per="position", density="classwise")(NET).fit(X)
    with pytest.raises(ValueError, match=r"which dimension holds the classes, output=Logits\(dim=1\)"):
        neo.Wrapper(per="position", density="energy")(NET).fit(X)
    with pytest.raises(ValueError, match="per must be"):
        neo.Wrapper(per="pixel")  # type: ignore[arg-type]
    unfitted: Any = neo.Wrapper(output=MAP)(NET)
    for mode in (True, False):
        with pytest.raises(NotFittedError, match=r"call wrapped\.fit"):
            unfitted.train(mode)(NEW, return_risk=True)


def test_layers_that_run_on_reordered_rows_are_left_out() -> None:
    """The risk of the positions of an image is then its own, in whatever batch it comes."""

    class Sorted(Segmenter):
        def forward(self, x: Tensor) -> Tensor:
            order = x.mean((1, 2, 3)).argsort()
            h = torch.relu(self.first(x[order]))
            return self.last(torch.tanh(self.middle(h))[order.argsort()])

    model = seeded(Sorted)
    model.middle = nn.Conv2d(6, 6, 1)
    wrapped: Any = neo.Wrapper(density="gaussian", output=MAP)(model).eval().fit(X)
    alone = torch.cat([ask(wrapped, row) for row in NEW.split(1)])
    torch.testing.assert_close(ask(wrapped, NEW), alone, rtol=1e-3, atol=1e-3)
