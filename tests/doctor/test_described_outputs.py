"""`diagnose` says how each output is interpreted and what to write, in agreement with what the wrappers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import diagnose, laplace, vote
from workbench.doctor import KINDS
from workbench.outputs import Binary, Detections, Logits, Probs


class Made(nn.Module):
    """A layer, and a function of it and the input that makes the output."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.function = layer or nn.Linear(3, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer, x)


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 3)))


def options(diagnosis: Any) -> list[str]:
    return [line.partition("  #")[0] for output in diagnosis.outputs for line in output.lines]


SINGLE: dict[str, tuple[Callable[[nn.Module, Tensor], Any], Tensor, list[str]]] = {
    "classes": (lambda f, x: f(x), rows(), ['output="logits"', 'output="binary"']),
    "one score": (lambda f, x: f(x)[:, 0], rows(), ['output="binary"']),
    "one column": (lambda f, x: f(x)[:, :1], rows(), ['output="binary"']),
    "sigmoid": (lambda f, x: f(x)[:, :1].sigmoid(), rows(), ["output=Binary(logits=False)"]),
    "labels": (lambda f, x: f(x).sigmoid(), rows(), ["output=Binary(logits=False)"]),
    "softmax": (lambda f, x: f(x).softmax(-1), rows(), ['output="probs"']),
    "normalized": (lambda f, x: f(x).exp() / f(x).exp().sum(1, keepdim=True), rows(), ['output="probs"']),
    "log-softmax": (lambda f, x: f(x).log_softmax(-1), rows(), ['output="logits"']),
    "map": (lambda f, x: f(x).movedim(-1, 1), rows(2, 8, 8, 3), ["output=Logits(dim=1)"]),
    "map of probabilities": (lambda f, x: f(x).softmax(-1).movedim(-1, 1), rows(2, 8, 8, 3), ["output=Probs(dim=1)"]),
    "map of one": (lambda f, x: f(x)[..., 0][:, None], rows(2, 8, 8, 3), ['output="binary"']),
    "series": (lambda f, x: f(x), rows(2, 5, 3), ["output=Logits(dim=1)", "output=Logits(dim=-1)"]),
    "tokens": (
        lambda f, x: f(nn.functional.one_hot(x, 3).float()),
        torch.arange(14).reshape(2, 7) % 3,
        ["output=Logits(dim=-1)"],
    ),
}


@pytest.mark.filterwarnings("ignore::workbench.errors.WorkbenchWarning")
@pytest.mark.parametrize("name", SINGLE)
def test_the_lines_for_a_single_output_are_taken(name: str) -> None:
    function, x, expected = SINGLE[name]
    diagnosis = diagnose(Made(function), x)
    y = Made(function)(x)
    (output,) = diagnosis.outputs
    assert (output.name, output.shape, output.dtype) == ("", tuple(y.shape), "float32")
    assert output.taken_for == "values, with a standard deviation each"
    assert options(diagnosis) == expected
    names = {"Logits": Logits, "Probs": Probs, "Binary": Binary}
    for option in expected:
        meaning = eval(option.partition("=")[2], names)
        wrapped = vote.Wrapper(2, output=meaning)(Made(function)).eval()
        _, risk = wrapped(x, return_risk=True)
        assert bool((risk.total > 0).all())  # entropies


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        scores = self.a(x)
        extra = [scores.softmax(-1), scores.argmax(-1)]
        return {"scores": scores, "logits": scores, "heads": [self.b(x), extra], "loss": scores.mean(), "name": "a"}


def test_several_outputs_are_named_as_the_option_names_them() -> None:
    diagnosis = diagnose(Several(), rows())
    described = {output.name: (output.kind(), output.taken_for.partition(",")[0]) for output in diagnosis.outputs}
    assert described == {
        "scores": ("float32 [6, 4]", "values"),
        "logits": ("float32 [6, 4]", "values"),
        "heads.0": ("float32 [6, 1]", "values"),
        "heads.1.0": ("float32 [6, 4]", "values"),
        "heads.1.1": ("int64 [6]", "whole numbers"),
        "loss": ("float32 []", "mean"),
        "name": ("str", "the same in all branches"),
    }
    lines = options(diagnosis)
    assert "output={'scores': \"logits\"}" in lines
    assert 'output="logits"' in lines  # finds the output of this name
    assert "output={'heads.0': \"binary\"}" in lines
    assert "output={'heads.1.0': \"probs\"}" in lines
    remedy = diagnosis.find("probabilities")[0].remedy
    assert remedy.endswith("keep it and wrap with output={'heads.1.0': \"probs\"}")
    _, risk = vote.Wrapper(2, output={"heads.0": "binary", "heads.1.0": "probs"})(Several()).eval()(
        rows(), return_risk=True
    )
    assert risk.total["heads"][1][0].shape == (6,)


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (
            lambda f, x: f(x).sigmoid(),
            'wrap with output="binary", or keep it and wrap with output=Binary(logits=False)',
        ),
        (lambda f, x: f(x).softmax(-1), 'wrap with output="logits", or keep it and wrap with output="probs"'),
        (
            lambda f, x: f(x)[:, :, None].softmax(1),
            "output=Logits(dim=1), or keep it and wrap with output=Probs(dim=1)",
        ),
    ],
)
def test_the_remedy_for_probabilities_fits_them(function: Any, remedy: str) -> None:
    assert diagnose(Made(function), rows()).find("probabilities")[0].remedy.endswith(remedy)


@pytest.mark.filterwarnings("ignore::workbench.errors.WorkbenchWarning")
def test_laplace_that_needs_to_know_probabilities_is_no_flaw_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    diagnosis = diagnose(model, rows())
    assert diagnosis.verdicts["laplace"] == "needs settings"
    assert any(remark.startswith('laplace needs output="probs"') for remark in diagnosis.remarks)
    x, y = rows(40, 3), torch.arange(40) % 4
    assert laplace.Wrapper(output="probs")(model).eval().fit([(x, y)])(x, return_risk=True)[1].total.shape == (40,)
    with pytest.raises(ValueError, match="up to a shift and a scale"):
        laplace.Wrapper()(model).eval().fit([(x, rows(40, 4))])


# ---- caches and state
class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class ReturnsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        cache.keys.append(self.key(x))
        return self.head(torch.stack(cache.keys).mean(0).tanh()), cache


class KeepsCache(ReturnsCache):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.cache)[0]


def test_what_is_said_of_a_cache_that_is_returned_is_true() -> None:
    diagnosis = diagnose(ReturnsCache(), rows())
    assert diagnosis.outputs[1].kind() == "Cache"
    assert "passed back unchanged, each branch continues with its own" in diagnosis.outputs[1].taken_for
    assert "each branch continues with its own" in KINDS["non_tensor_output"].why
    wrapped = vote.Wrapper(3)(ReturnsCache()).eval()
    voters: list[Any] = [voter.eval() for voter in wrapped.voters()]
    cache, caches = None, [None] * 3
    for _ in range(3):
        x = rows()
        y, cache = wrapped(x, cache)
        answers = [voter(x, kept) for voter, kept in zip(voters, caches, strict=True)]
        caches = [kept for _, kept in answers]
        assert torch.allclose(y, torch.stack([answer for answer, _ in answers]).mean(0), atol=1e-6)
    assert torch.allclose(cache.keys[0], caches[0].keys[0], atol=1e-6)  # what is returned is the first branch's


def test_what_is_said_of_a_cache_that_is_kept_is_true() -> None:
    diagnosis = diagnose(KeepsCache(), rows())
    assert {each.kind for each in diagnosis.findings} <= {"state", "grows"}
    assert set(diagnosis.verdicts.values()) == {"note", "ok", "needs settings"}
    assert "Each branch has its own, and continues with it in the next call" in KINDS["state"].why
    wrapped = vote.Wrapper(3)(KeepsCache()).eval()
    voters = [voter.eval() for voter in wrapped.voters()]
    for _ in range(3):
        x = rows()
        y = wrapped(x)
        assert torch.allclose(y, torch.stack([voter(x) for voter in voters]).mean(0), atol=1e-6)
    first: Any = voters[0]
    assert torch.allclose(wrapped.cache.keys[0], first.cache.keys[0], atol=1e-6)  # the model shows the first one's


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        h, state = self.layer(x, state)
        return self.head(h), state


@pytest.mark.parametrize(("build", "x"), [(Cell, rows(6, 5, 3)), (ReturnsCache, rows())], ids=["lstm", "cache"])
def test_state_has_the_line_to_write(build: Any, x: Tensor) -> None:
    first, *states = diagnose(build(), x).outputs
    assert not any(line.startswith("state") for line in first.lines)
    assert {line.partition("  #")[0] for output in states for line in output.lines} == {"state=1"}
    wrapped = vote.Wrapper(3, state=1)(build()).eval()
    _, state = wrapped(x)
    assert torch.isfinite(wrapped(x, state)[0]).all()


# ---- detections
class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box, self.classes = nn.Linear(3, 4), nn.Linear(3, 3)

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        detections = []
        for image in images:
            corners = self.box(image).abs()
            boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:] + 1], 1)
            scores, labels = self.classes(image).softmax(-1).max(-1)
            keep = scores > 0.4
            detections.append({"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]})
        return detections


@pytest.mark.slow
def test_boxes_are_one_output() -> None:
    diagnosis = diagnose(Detector(), rows(2, 150, 3))
    (output,) = diagnosis.outputs
    assert output.kind().startswith("boxes of 2 images")
    assert options(diagnosis) == ["output=Detections()"]
    # weights that differ select other boxes, also those that training collects
    assert {diagnosis.verdicts[name] for name in ("vote", "snapshot", "swag")} == {"needs settings"}
    assert any(remark.startswith("vote needs output=Detections()") for remark in diagnosis.remarks)
    wrapped = vote.Wrapper(3, output=Detections())(Detector()).eval()
    boxes, _ = wrapped(rows(2, 30, 3), return_risk=True)
    assert boxes[0]["boxes"].shape[1] == 4


# ---- the report
def test_text_and_html_show_the_same_lines() -> None:
    from bs4 import BeautifulSoup

    diagnosis = diagnose(Several(), rows())
    text = str(diagnosis)
    page = BeautifulSoup(diagnosis._repr_html_(), "html.parser").get_text()
    lines = [line for output in diagnosis.outputs for line in output.lines]
    assert len(lines) == 6
    assert all(line in text and line in page for line in lines)
    assert "Several go into one dict" in text
    assert "  loss  float32 []: mean, without a risk" in text


def test_many_outputs_are_abbreviated() -> None:
    text = str(diagnose(Made(lambda f, x: [f(x) for _ in range(20)]), rows()))
    assert "and 8 more outputs" in text
    assert "  11  float32" in text
    assert "  12  float32" not in text
