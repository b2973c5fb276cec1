"""Trainings and peers in the benchmark `speed`: what runs beside the wrappers, and messages where it cannot."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

from workbench.experiments.worker import load_file
from workbench.training import traced_step


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "speed.py")


# ---- trainings
@pytest.mark.slow
def test_trainings_are_of_all_wrappers_and_larger_models(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is run, and the page tells of those that there are."""
    pandas = pytest.importorskip("pandas")
    trainings = sys.modules["speed_fit"]
    names = ["vote of sculpt, last layer, 5 x 8-50-50-1", "sample, 8-50-50-1", "transformer, vote 5"]
    short = {name: replace(speed.TRAININGS[name], epochs=1, rows=32, batch=16, rounds=2) for name in names}
    monkeypatch.setattr(trainings, "TRAININGS", short)
    rows = [{"training": name, "on": "cpu", **speed.run(training=name, on="cpu")} for name in names]
    heads, noise, large = rows
    assert heads.keys() >= {"fit_vote", "fit_func", "fit_stacked", "fit_loop", "fit_eager", "making_s", "fit_rmse"}
    assert "fit_func" not in noise
    assert "fit_rmse" not in large
    assert large["steps"] == 2
    page = sys.modules["speed_page"]._trainings(pandas.DataFrame(rows))
    assert "nan" not in page
    assert page.count("\n|") == 2 + len(names)


def test_how_long_graphs_are_made_is_told(speed: ModuleType) -> None:
    making = sys.modules["speed_fit"].Making()
    with making.watching:
        traced_step.Graph(lambda x: [x + 1], [], [], (torch.zeros(2),))
    assert making.seconds > 0


@pytest.mark.slow
def test_races_are_run_with_members_of_tabm(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    trainings = sys.modules["speed_fit"]
    name = "vote of sculpt, last layer, 5 x 8-50-50-1"
    monkeypatch.setattr(trainings, "TRAININGS", {name: replace(speed.TRAININGS[name], epochs=2, rows=32, batch=16)})
    monkeypatch.setattr(trainings, "ROUNDS", 2)
    row = {"race": name, "on": "cpu", **speed.run(race=name, on="cpu")}
    assert row.keys() >= {"tabm_s", "tabm_nll", "tabm_reached", "fit_tabm", "stacked_s"}
    page = sys.modules["speed_page"]._races(pandas.DataFrame([row]))
    assert "TabM" in page
    assert "laplace-torch" not in page


def test_members_of_tabm_share_weights_and_learn(speed: ModuleType) -> None:
    trainings, hand = sys.modules["speed_fit"], sys.modules["speed_hand"]
    case = replace(speed.TRAININGS["vote of sculpt, last layer, 5 x 8-50-50-1"], rows=128, epochs=40)
    torch.manual_seed(0)
    x, y, *_ = trainings._data(case)
    nlls = [hand.nll_of(hand._tabm(replace(case, epochs=epochs), x, y)(x).detach(), y) for epochs in (1, 40)]
    assert nlls[1] < nlls[0] - 0.3
    assert hand._tabm(replace(case, epochs=1), x, y)(x[:3]).shape == (5, 3, 2)


@pytest.mark.slow
def test_a_training_with_laplace_torch_ends_with_its_posterior(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Laplace:
        def __init__(self, model: nn.Module, likelihood: str, subset_of_weights: str) -> None:
            self.model = model
            asked.extend((likelihood, subset_of_weights))

        def fit(self, loader: Any) -> None:
            asked.append(f"{sum(len(x) for x, _ in loader)} rows")

        def optimize_prior_precision(self, method: str) -> None:
            asked.append(method)

        def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.model(x), torch.ones(len(x), 1, 1)

    trainings = sys.modules["speed_fit"]
    monkeypatch.setitem(sys.modules, "laplace", types.SimpleNamespace(Laplace=Laplace))
    monkeypatch.setattr(sys.modules["speed_hand"], "lacking", lambda peer: "")
    name = "laplace, 8-50-50-1"
    monkeypatch.setattr(
        trainings, "TRAININGS", {name: replace(speed.TRAININGS[name], epochs=1, rows=32, batch=16, rounds=2)}
    )
    row = speed.run(training=name, on="cpu")
    assert row.keys() >= {"laplace_torch_s", "fit_laplace_torch", "laplace_torch_rmse"}
    assert asked == 2 * ["regression", "last_layer", "32 rows", "marglik"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vote of sculpt, last layer, 5 x 8-50-50-1", "sample of sculpt, last layer, 8-50-50-1"]
)
def test_networks_of_torch_uncertainty_learn_and_race(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Ensemble(nn.Module):
        def __init__(self, networks: list[nn.Module], **_: Any) -> None:
            super().__init__()
            self.networks = nn.ModuleList(networks)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([network(x) for network in self.networks])

    class Dropout(nn.Module):
        def __init__(self, network: nn.Module, n: int, **_: Any) -> None:
            super().__init__()
            self.network, self.n = network, n

        def forward(self, x: Tensor) -> Tensor:
            return self.network.train()(x if self.training else x.repeat(self.n, 1))

    def packed_mlp(features: int, outputs: int, hidden: list[int], num_estimators: int, alpha: int) -> nn.Module:
        width = hidden[0] * alpha // num_estimators
        networks = [
            nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, outputs))
            for _ in range(num_estimators)
        ]
        return Ensemble(networks)

    methods = types.SimpleNamespace(deep_ensembles=Ensemble, mc_dropout=Dropout)
    for path, module in {"": None, ".methods": methods, ".models": None, ".models.mlp": None}.items():
        full = f"torch_uncertainty{path}"
        monkeypatch.setitem(sys.modules, full, module or types.ModuleType(full))
    vars(sys.modules["torch_uncertainty.models.mlp"])["packed_mlp"] = packed_mlp
    trainings, hand = sys.modules["speed_fit"], sys.modules["speed_hand"]
    monkeypatch.setattr(hand, "lacking", lambda peer: "")
    case = replace(speed.TRAININGS[name], rows=128, epochs=40)
    torch.manual_seed(0)
    x, y, *_ = trainings._data(case)
    ways = hand.by_torch_uncertainty(case)
    assert ways.keys() == ({"uncertainty_dropout"} if case.method else {"uncertainty_ensemble", "uncertainty_packed"})
    for kind in (way.removeprefix("uncertainty_") for way in ways):
        nlls = []
        for epochs in (1, 40):
            members = hand._torch_uncertainty(replace(case, epochs=epochs), kind, x, y)
            with torch.no_grad():
                answers = members(x)
            assert answers.shape == (5, len(x), 2)  # voters, or passes with dropout
            nlls.append(hand.nll_of(answers, y))
        assert nlls[1] < nlls[0] - 0.1
    monkeypatch.setattr(trainings, "TRAININGS", {name: replace(case, rows=32, batch=16, epochs=2)})
    monkeypatch.setattr(trainings, "ROUNDS", 2)
    row = speed.run(race=name, on="cpu")
    assert row.keys() >= {f"{way}_{what}" for way in ways for what in ("s", "nll", "reached")}


# ---- peers
def test_a_peer_that_is_not_there_or_broken_is_told(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = sys.modules["speed_peers"]

    def fails(name: str) -> None:
        raise RuntimeError("it was built for CUDA")

    monkeypatch.setattr(speed, "lacking", peers.lacking.__wrapped__)
    cell = {"peer": "laplace-torch", "task": "fit, 10 classes", "on": "cpu"}
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert speed.possible(cell) == "laplace-torch is not installed"
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(peers.importlib, "import_module", fails)
    assert speed.possible(cell) == "laplace-torch can't be imported (it was built for CUDA)"
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: None)
    assert speed.possible(cell) == ""


def test_dropout_stands_where_noise_enters(speed: ModuleType) -> None:
    models, peers = sys.modules["speed_models"], sys.modules["speed_peers"]
    plain, x = models.build("cnn").eval(), models.batch_of("cnn", 2)[0]
    dropping = peers.dropped(plain)
    torch.testing.assert_close(dropping.eval()(x), plain(x))
    after = [type(dropping[i + 1]) for i, layer in enumerate(dropping) if isinstance(layer, nn.Dropout)]
    assert after == [nn.Conv2d, nn.Conv2d, nn.Linear]


@pytest.mark.slow
def test_a_peer_is_measured_in_turn(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def mc_dropout(model: nn.Module, n: int, on_batch: bool, **_: Any) -> nn.Module:
        class Repeated(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return model(x.repeat(n, 1, 1, 1)) if on_batch else torch.cat([model(x) for _ in range(n)])

        return Repeated()

    methods = types.SimpleNamespace(mc_dropout=mc_dropout, deep_ensembles=None)
    monkeypatch.setitem(sys.modules, "torch_uncertainty", types.ModuleType("torch_uncertainty"))
    monkeypatch.setitem(sys.modules, "torch_uncertainty.methods", methods)
    monkeypatch.setattr(sys.modules["speed_clock"], "ROUNDS", (3, 3))
    batch_of = sys.modules["speed_models"].batch_of
    monkeypatch.setattr(sys.modules["speed_peers"], "batch_of", lambda name, rows: batch_of(name, 2))
    row = speed.run(peer="torch-uncertainty", task="MC dropout, n = 16", on="cpu")
    assert row["peer_way"] in ("loop", "on batch")
    assert row["peer_ratio_low"] <= row["peer_ratio"] <= row["peer_ratio_high"]
    assert row["memory_peer"] > 0.1
