"""Risks of large class maps, computed some positions at a time: equal to a plain loop over the voters."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from workbench import vote
from workbench.core.calls import running_moments
from workbench.errors import OutputShapeError
from workbench.outputs import Binary, Logits, Probs

MAPS, VOLUMES = (2, 3, 6, 5), (1, 3, 4, 6, 5)
CASES: dict[str, tuple[Any, nn.Module, tuple[int, ...], int | None]] = {
    "maps": (Logits(dim=1), nn.Conv2d(3, 4, 1), MAPS, 1),
    "maps, from behind": (Logits(dim=-3), nn.Conv2d(3, 4, 1), MAPS, 1),
    "maps of probabilities": (Probs(dim=1), nn.Sequential(nn.Conv2d(3, 4, 1), nn.Softmax(1)), MAPS, 1),
    "volumes": (Logits(dim=1), nn.Conv3d(3, 4, 1), VOLUMES, 1),
    "tokens": (Logits(dim=-1), nn.Linear(3, 4), (2, 9, 3), -1),
    "rows": ("logits", nn.Linear(3, 4), (11, 3), -1),
    "yes or no": (Binary(), nn.Conv2d(3, 2, 1), MAPS, None),
}


def entropy(p: Tensor, dim: int) -> Tensor:
    return -(p * p.log()).sum(dim)


@pytest.mark.parametrize("piece", [1, 37, 100])
@pytest.mark.parametrize("name", CASES)
def test_pieces_are_the_whole(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    output, model, shape, dim = CASES[name]
    wrapped = vote.Wrapper(3, output=output)(model).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, all_at_once = wrapped(x, return_risk=True)
        monkeypatch.setattr(running_moments, "PIECE_SIZE", piece)
        monkeypatch.setitem(running_moments.BRANCH_PIECE_SIZES, "cpu", piece)
        y, risk = wrapped(x, return_risk=True)
        only = wrapped(x)
        scores = [voter(x) for voter in wrapped.voters()]
    assert torch.allclose(y, whole, atol=1e-6)
    assert torch.equal(only, y)
    for kind in ("aleatoric", "epistemic", "total"):
        assert torch.allclose(getattr(risk, kind), getattr(all_at_once, kind), atol=1e-6)
    if dim is None:
        probs = [torch.stack([1 - s.sigmoid(), s.sigmoid()], -1) for s in scores]
    else:
        probs = scores if isinstance(output, Probs) else [s.softmax(dim) for s in scores]
    over = -1 if dim is None else dim
    mean = torch.stack(probs).mean(0)
    said = y.exp() if isinstance(output, Logits) or output == "logits" else y.sigmoid() if dim is None else y
    assert torch.allclose(said, mean[..., 1] if dim is None else mean, atol=1e-6)
    assert torch.allclose(risk.total, entropy(mean, over), atol=1e-6)
    assert torch.allclose(risk.aleatoric, torch.stack([entropy(p, over) for p in probs]).mean(0), atol=1e-6)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most memory that torch holds at once while something runs, beside what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes))


TAIL = {"classes": (Logits(dim=1), nn.Conv2d(2, 19, 1)), "values": ("values", nn.Conv2d(2, 19, 1))}


@pytest.mark.parametrize(("share", "strategy"), [(1, "auto"), (1, "replay"), (None, "loop")])
@pytest.mark.parametrize("kind", TAIL)
def test_with_chunk_no_more_than_a_voters_map_is_kept(kind: str, share: int | None, strategy: Any) -> None:
    output, tail = TAIL[kind]
    wrapper = vote.Wrapper(6, share=share, output=output, strategy=strategy)
    wrapped = wrapper.with_options(chunk=1)(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Tanh(), tail)).eval()
    x = torch.rand(1, 3, 128, 96)
    with torch.no_grad():
        first, first_risk = wrapped(x, return_risk=True)
        a_map = first.numel() * first.element_size()
        # what is added up of it, what its layers and a prediction take meanwhile
        assert peak_bytes(lambda: wrapped(x, return_risk=True)) < 5.5 * a_map
        y, risk = wrapped(x, return_risk=True)
        scores = torch.stack([voter(x) for voter in wrapped.voters()])
        assert torch.equal(wrapped(x), y)
    assert torch.equal(first, y)
    if kind == "values":
        assert torch.equal(first_risk, risk)
        assert torch.allclose(y, scores.mean(0), atol=1e-6)
        assert torch.allclose(risk, scores.std(0, correction=0), atol=1e-6)
        return
    probs = scores.softmax(2)
    assert torch.allclose(y.exp(), probs.mean(0), atol=1e-6)
    assert torch.allclose(risk.total, entropy(probs.mean(0), 1), atol=1e-5)
    assert torch.allclose(risk.aleatoric, entropy(probs, 2).mean(0), atol=1e-5)
    assert torch.allclose(risk.epistemic, entropy(probs.mean(0), 1) - entropy(probs, 2).mean(0), atol=1e-5)


def test_what_is_between_is_less_than_the_voters_maps() -> None:
    wrapped = vote.Wrapper(6, share=1, output=Logits(dim=1))(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 19, 1)))
    x = torch.rand(1, 3, 128, 96)
    with torch.no_grad():
        y, _ = wrapped.eval()(x, return_risk=True)
        # vmap holds the maps twice where it adds their biases
        assert peak_bytes(lambda: wrapped(x, return_risk=True)) < 13.5 * y.numel() * y.element_size()


def test_large_maps_with_classes_that_are_ruled_out() -> None:
    scores = torch.randn(3, 1, 4, 300, 300, generator=torch.Generator().manual_seed(0))
    scores[:, :, 1] = -torch.inf
    scores[1, :, 2] = -torch.inf
    means = running_moments.RunningClasses(Logits(dim=-3), scores, return_risk=True)
    means.add(scores)
    y, risks = means.result()
    probs = scores.double().softmax(2)
    assert torch.allclose(y.exp().double(), probs.mean(0), atol=1e-6)
    assert torch.allclose(risks["total"].double(), torch.special.entr(probs.mean(0)).sum(1), atol=1e-5)
    assert torch.allclose(risks["aleatoric"].double(), torch.special.entr(probs).sum(2).mean(0), atol=1e-5)


def test_branches_of_other_shapes_are_refused_with_chunk() -> None:
    like = torch.zeros(1, 1, 4, 30, 30)
    means = running_moments.RunningClasses(Logits(dim=-3), like, return_risk=True)
    with pytest.raises(OutputShapeError, match="different shapes"):
        means.add(like[..., :-1])
