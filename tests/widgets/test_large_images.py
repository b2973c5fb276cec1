"""Large images in `Explorer`: no copies of them as a whole, and thumbnails that look like those of the whole."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.widget_cases import CARD, pictures
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import vote
from workbench.data import Column, Data, Split
from workbench.widgets import Explorer
from workbench.widgets.common.cases import thumbnail

pytest.importorskip("ipywidgets")


class NewTensors(TorchDispatchMode):
    """Records the most numbers that an operation returns in new memory."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor) and part.untyped_storage().data_ptr() not in self.known:
                self.most = max(self.most, part.untyped_storage().nbytes() // part.element_size())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("space", ["features", "inputs"])
def test_large_images_are_not_copied_as_a_whole(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.core.batches.rows.CHECKED_AT_ONCE", 80 * 80)
    monkeypatch.setattr("workbench.widgets.explorer.neighbours.CHECKED_AT_ONCE", 80 * 80)
    monkeypatch.setattr("workbench.widgets.common.inputs.LARGEST_BATCH", 4 * 80 * 80)
    monkeypatch.setattr("workbench.widgets.explorer.scene.EDITED_NUMBERS", 1)
    small = pictures()
    parts = (Split(nn.functional.interpolate(part.x, (80, 80)), part.y) for part in (small.train, small.test))
    d = Data("stripes", "classification", *parts, (Column("brightness"),), Column("place"), CARD, small.classes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = vote.Wrapper(2, output="logits")(nn.Sequential(nn.AvgPool2d(20), nn.Flatten(), nn.Linear(16, 3)))
    with NewTensors([d.train.x, d.test.x]) as new:
        explorer = Explorer(model, d, space=space)
        assert explorer.widget is not None
        explorer.select(3)
    assert new.most <= 9 * 80 * 80  # the points of the curve along a knob
    if space == "inputs":
        scale = d.train.x.double().flatten(1).var(0, correction=0).mean().sqrt()
        wanted = ((d.train.x - d.test.x[3]).double().flatten(1).norm(dim=1) / scale).sort()
        assert explorer.neighbours.indices.tolist() == wanted.indices[:5].tolist()
        torch.testing.assert_close(explorer.neighbours.distances, wanted.values[:5])


def test_a_thumbnail_of_a_large_image_looks_like_that_of_the_whole() -> None:
    x = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(0))
    large = nn.functional.interpolate(x[None], (900, 1000), mode="bilinear")[0]
    shown = _decoded(thumbnail(large, x, "alt"))
    whole = Image.fromarray((large.permute(1, 2, 0) * 255).round().byte().numpy())
    whole.thumbnail((64, 64))
    assert shown.size == whole.size
    assert np.abs(np.asarray(shown, dtype=float) - np.asarray(whole, dtype=float)).max() < 8


def _decoded(element: str) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(re.findall(r"base64,([^\"]+)", element)[0])))


def test_black_and_white_of_large_images_are_those_of_some_of_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(0, 1, 100 * 40 * 40).reshape(100, 40, 40)
    monkeypatch.setattr("workbench.widgets.common.cases.MAX_RANGED", x.numel() // 9)
    x[0, 1, 1] = 100.0  # one that is not looked at
    shown = np.asarray(_decoded(thumbnail(x[-1], x, "alt")))
    assert shown.shape == (40, 40)
    assert shown.min() == round(255 * (x[-1].min() / x[-1, 39, 39]).item())
    assert shown.max() == 255
