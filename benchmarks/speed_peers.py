"""Comparison with other packages on the same task, if they are installed."""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any

import torch
from speed_cases import WRAPPERS, P
from speed_clock import Pass, middle, peak, timed
from speed_models import batch_of, build
from torch import Tensor, nn

from workbench import laplace

PACKAGES = {"laplace-torch": "laplace", "torch-uncertainty": "torch_uncertainty"}  # import names
TASKS = {
    "laplace-torch": tuple(f"{what}, {n} classes" for what in ("fit", "predict") for n in (10, 100)),
    "torch-uncertainty": ("MC dropout, n = 16", "deep ensemble, n = 5"),
}
FEATURES, ROWS, DRAWS = 512, 2048, 32


@functools.cache
def lacking(peer: str) -> str:
    """Return why a package can't be measured here, "" if it can."""
    if importlib.util.find_spec(PACKAGES[peer]) is None:
        return f"{peer} is not installed"
    try:
        importlib.import_module(PACKAGES[peer])
    except Exception as error:  # an import may fail in any way on an unsupported machine
        return f"{peer} can't be imported ({error})"
    return ""


def against(peer: str, task: str, on: str) -> dict[str, Any]:
    """Measure our time and the peer's, in turn.

    Args:
        peer: name of the package.
        task: one of its `TASKS`.
        on: "cpu" or "cuda".

    Returns:
        "wrapped_ms", "peer_ms", their ratio with its quartiles, and the peak memory of both.
    """
    makers = {"laplace-torch": _laplace, "torch-uncertainty": _torch_uncertainty}
    our_pass, peer_passes = makers[peer](task, on)
    times = timed({"ours": our_pass, **peer_passes}, on)
    best = min(peer_passes, key=lambda name: middle(times[name])[0])
    ratios = [our_time / peer_time for our_time, peer_time in zip(times["ours"], times[best], strict=True)]
    return {
        "rounds": len(ratios),
        "wrapped_ms": 1e3 * middle(times["ours"])[0],
        "peer_ms": 1e3 * middle(times[best])[0],
        "peer_way": best,
        **dict(zip(("peer_ratio", "peer_ratio_low", "peer_ratio_high"), middle(ratios), strict=True)),
        "memory_wrapped": peak(our_pass, on),
        "memory_peer": peak(peer_passes[best], on),
    }


def _laplace(task: str, device: str) -> tuple[Pass, dict[str, Pass]]:
    """Return passes that fit a Kronecker-factored posterior of the last layer with the likeliest prior, or predict with 32 draws of logits."""
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    what, classes = task.split(", ")[0], int(task.split()[1])
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, FEATURES), nn.ReLU(), nn.Linear(FEATURES, classes)).to(device).eval()
    x = torch.randn(ROWS, 64, generator=draw).to(device)
    y = torch.randint(classes, (ROWS,), generator=draw).to(device)
    loader = DataLoader(TensorDataset(x, y), batch_size=256)
    wrapped = laplace.Wrapper(output="logits", n_samples=DRAWS)(model).eval()

    def fit_theirs() -> Any:
        posterior = Laplace(copy.deepcopy(model), "classification", subset_of_weights="last_layer")
        posterior.fit(loader)
        posterior.optimize_prior_precision(method="marglik")
        return posterior

    def fit_ours() -> Any:
        return wrapped.fit(loader)

    if what == "fit":
        return fit_ours, {"kron": fit_theirs}
    fit_ours()
    peer, rows = fit_theirs(), x[:16]  # few rows, since the peer's Jacobians are [rows, classes, parameters]

    def predict_ours() -> Any:
        with torch.no_grad():
            return wrapped(rows, return_risk=True)

    def predict_theirs() -> Tensor:
        with torch.no_grad():
            return peer(rows, link_approx="mc", n_samples=DRAWS)

    return predict_ours, {"kron, mc": predict_theirs}


def _torch_uncertainty(task: str, device: str) -> tuple[Pass, dict[str, Pass]]:
    """Return passes for the mean and spread of the small CNN's outputs for 64 images."""
    from torch_uncertainty.methods import deep_ensembles, mc_dropout

    name, n = ("vote", 5) if task.startswith("deep") else ("sample", 16)
    plain = build("cnn").to(device).eval()
    x = batch_of("cnn", 64)[0].to(device)
    wrapped = WRAPPERS[name](n)(plain)
    regression = {"task": "regression", "probabilistic": False}
    if name == "vote":
        copies = [copy.deepcopy(plain) for _ in range(n)]
        peers = {"list of models": deep_ensembles(copies, **regression)}
    else:
        dropping = dropped(plain)
        peers = {way: mc_dropout(dropping, n, on_batch=way == "on batch", **regression) for way in ("loop", "on batch")}

    def pass_of(model: nn.Module) -> Pass:
        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                outputs = model(x).view(n, len(x), -1)
                return outputs.mean(0), outputs.std(0, correction=0)

        return run

    def predict_ours() -> Any:
        with torch.no_grad():
            return wrapped(x, return_risk=True)

    return predict_ours, {way: pass_of(model.eval()) for way, model in peers.items()}


def dropped(plain: nn.Module) -> nn.Sequential:
    """Return a sequence of the layers, with dropout before each layer with weights except the first."""
    layers: list[nn.Module] = []
    for layer in plain.modules():
        if isinstance(layer, nn.Sequential):
            continue
        if isinstance(layer, nn.Conv2d | nn.Linear) and layers:
            layers.append(nn.Dropout(P))
        layers.append(copy.deepcopy(layer))
    return nn.Sequential(*layers)


__all__ = ["PACKAGES", "TASKS", "against", "dropped", "lacking"]
