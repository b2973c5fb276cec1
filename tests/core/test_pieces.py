"""Risks of large maps of classes, some positions at a time: the numbers of a plain loop over the voters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote
from workbench.core import predict
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
        monkeypatch.setattr(predict, "PIECE", piece)
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


def test_what_is_between_is_never_as_large_as_all_voters_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = predict._classes

    def watched(record: Any, committee: Any, axes: Any, leaf: Tensor, *rest: Any) -> Any:
        sizes.append(leaf.numel())
        return original(record, committee, axes, leaf, *rest)

    monkeypatch.setattr(predict, "_classes", watched)
    wrapped = vote.Wrapper(4, share=1, output=Logits(dim=1))(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 19, 1)))
    with torch.no_grad():
        y, risk = wrapped.eval()(torch.rand(1, 3, 160, 120), return_risk=True)
    assert y.shape == (1, 19, 160, 120)
    assert risk.total.shape == (1, 160, 120)
    assert sum(sizes) == 4 * y.numel()
    assert max(sizes) <= predict.PIECE < sum(sizes)
