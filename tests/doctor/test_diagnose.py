"""`diagnose` finds each problem in the model that has it, at its line, and in no other model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.default_suite import one_in
from helpers.troubled_models import (
    TROUBLES,
    AddsInPlace,
    AlwaysNoisy,
    Base,
    ChangesObject,
    Checkpointed,
    Counts,
    Grows,
    If,
    Item,
    LogSoftmax,
    Mask,
    NumpyNoise,
    OwnGenerator,
    PythonNoise,
    RaisesInTraining,
    Scalar,
    Tied,
    Unregistered,
    Unused,
    frozen,
    marked,
    x,
)
from helpers.zoo import CASES
from torch import Tensor, nn

from workbench import augment, compose, diagnose, laplace, neo, sample, sculpt, snapshot, swag, vote
from workbench.core.registry import wrapper_names
from workbench.doctor import KINDS, Diagnosis
from workbench.engine.tree import flatten, is_float

troubles = pytest.mark.parametrize(
    ("kind", "build", "has_line"), TROUBLES, ids=[f"{kind}-{build.__name__}" for kind, build, _ in TROUBLES]
)


# who refuses these models in words of its own: laplace where the output is not that of the last layer alone
REFUSING: dict[Any, set[str]] = {
    **{build: {"laplace"} for build in (NumpyNoise, PythonNoise, OwnGenerator, AlwaysNoisy, Scalar, Unused)},
    Checkpointed: {"sample"},
    next(build for kind, build, _ in TROUBLES if kind == "wrapped"): {"snapshot", "swag"},
}


def concerned(finding: Any) -> list[str]:
    """The wrappers for which a finding means anything."""
    return [name for name, verdict in finding.means.items() if verdict not in ("ok", "needs settings")]


# ---- what is found ---------------------------------------------------------------------------------------------------
@troubles
def test_the_trouble_is_found_at_its_line_and_no_other(kind: str, build: Any, has_line: bool) -> None:
    diagnosis = diagnose(build(), x())
    refusing = {name for each in diagnosis.find("refused") for name in concerned(each)}
    assert refusing == REFUSING.get(build, set())
    assert {each.kind for each in diagnosis.findings} - {"refused"} == {kind}
    assert {each.line for each in diagnosis.find(kind)} == {marked(build) if has_line else ""}
    if has_line and kind != "hooks":
        assert all(each.code.endswith("# HERE") for each in diagnosis.find(kind))


PLAIN: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (6, 3)),
    "own class": (Base, (6, 3)),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)), (6, 3)),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(2)),
        (6, 1, 5, 5),
    ),
    "lstm": (lambda: CASES["lstm"].build(), (6, 4, 8)),
    "transformer": (lambda: CASES["transformer"].build(), (6, 4, 8)),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
        (6, 3),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("training", [True, False])
def test_ordinary_models_have_no_findings(name: str, training: bool) -> None:
    build, shape = PLAIN[name]
    model = build()
    model(torch.randn(shape))  # the lazy layer of one of them
    diagnosis = diagnose(model.train(training), torch.randn(shape))
    assert diagnosis.findings == []
    assert diagnosis.ok
    images = len(shape) == 4
    assert diagnosis.verdicts == {
        **dict.fromkeys(wrapper_names(), "ok"),
        "augment": "ok" if images else "needs settings",
    }
    takes_it = "every wrapper takes it." if images else "every wrapper takes it (augment with settings that fit)."
    assert diagnosis.headline().endswith(f"nothing found, {takes_it}")


def test_every_kind_has_its_model() -> None:
    assert {kind for kind, _, _ in TROUBLES} | {"refused"} == set(KINDS)


def test_what_is_said() -> None:
    assert diagnose(Counts(), x()).find("state")[0].what == "steps: 0 before the call, 1 after"
    assert diagnose(ChangesObject(), x()).find("state")[0].what == "the contents of statistics, a Statistics"
    assert diagnose(Grows(), x()).find("grows")[0].what == "info: 0 items before the call, 1 after"
    assert [f.what for f in diagnose(Unregistered(), x()).findings] == [
        "scales[0], float32 []",
        "scales[1], float32 []",
    ]
    error = diagnose(RaisesInTraining(), x())
    assert error.findings[0].what == "KeyError: 'no such thing' (in training mode)"
    assert diagnose(Tied(), x()).findings[0].what == "c.weight = d.weight"
    assert "logits" in diagnose(LogSoftmax(), x()).find("probabilities")[0].remedy
    assert diagnose(frozen(), x()).findings[0].what == "a.weight, a.bias (2 of 4)"


@pytest.mark.slow
def test_a_cache_that_is_filled_once_does_not_grow() -> None:
    (finding,) = diagnose(CASES["cache_dict"].build(), *CASES["cache_dict"].inputs()[0]).findings
    assert finding.kind == "state"
    assert "in the first call only" in finding.what


# ---- verdicts --------------------------------------------------------------------------------------------------------
MAKERS: dict[str, Callable[[], Any]] = {
    "augment": augment.Wrapper,
    "laplace": laplace.Wrapper,
    "neo": neo.Wrapper,
    "sample": lambda: sample.Wrapper(3),
    "sculpt": sculpt.Wrapper,
    "snapshot": lambda: snapshot.Wrapper(2),
    "swag": lambda: swag.Wrapper(3),
    "vote": lambda: vote.Wrapper(3),
}


def ready(wrapper: str, build: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """A wrapped model that has learned or collected what it needs."""
    wrapped = MAKERS[wrapper]()(build()).eval()
    if wrapper in ("snapshot", "swag"):
        (snapshot if wrapper == "snapshot" else swag).collect(wrapped)
        (snapshot if wrapper == "snapshot" else swag).collect(wrapped)
    if wrapper in ("laplace", "swag"):
        with torch.no_grad():
            y = wrapped(*args, **kwargs)
        leaves = [leaf for leaf in flatten(y)[0] if is_float(leaf)]
        noisy = [leaf + torch.randn_like(leaf) for leaf in leaves]
        inputs = inspect.signature(build().forward).bind(*args, **kwargs).arguments if kwargs else args
        for target in noisy:  # laplace wants that of its layer
            with contextlib.suppress(TypeError, ValueError):
                return wrapped.fit([(inputs, target)])
        wrapped.fit([(inputs, noisy[0])])
    return wrapped


def takes(wrapper: str, build: Callable[[], Any], args: Any, kwargs: Any) -> bool:
    """Whether a wrapper takes a model: it wraps, and answers in both modes."""
    try:
        MAKERS[wrapper]()(build()).train()(*args, **kwargs)
        MAKERS[wrapper]()(build()).train()(*args, **kwargs, return_risk=True)
        if wrapper != "neo":
            with torch.no_grad():
                ready(wrapper, build, args, kwargs).eval()(*args, **kwargs, return_risk=True)
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore::workbench.errors.WorkbenchWarning")
@pytest.mark.parametrize("name", one_in(16, CASES))
def test_verdicts_are_true_on_the_zoo(name: str) -> None:
    case = CASES[name]
    args, kwargs = case.inputs()
    diagnosis = diagnose(case.build(), *args, **kwargs)
    assert list(diagnosis.verdicts) == wrapper_names()
    for wrapper, verdict in diagnosis.verdicts.items():
        assert verdict in ("ok", "note", "slower", "refused", "needs settings")
        assert (verdict not in ("refused", "needs settings")) == takes(wrapper, case.build, *case.inputs()), wrapper
        reasons = [each for each in diagnosis.findings if each.means[wrapper] == verdict]
        if verdict == "needs settings":
            assert wrapper == "augment"
            assert any(remark.startswith("augment needs") for remark in diagnosis.remarks)
            continue
        assert verdict == "ok" or reasons, f"{wrapper}: {verdict} for no reason"
        if verdict == "slower" and wrapper in ("vote", "sample", "sculpt"):
            assert not takes_one_pass(wrapper, case)


def takes_one_pass(wrapper: str, case: Any) -> bool:
    """Whether all branches run in one pass, in each mode by one of the two ways that there are."""
    args, kwargs = case.inputs()
    make: Any = {"vote": vote, "sample": sample, "sculpt": sculpt}[wrapper].Wrapper
    for training in (True, False):
        refused = 0
        for strategy in ("vmap", "rescue"):
            try:
                make(strategy=strategy)(case.build()).train(training)(*args, **kwargs, return_risk=True)
            except Exception:
                refused += 1
        if refused == 2:
            return False
    return True


@pytest.mark.parametrize("build", [If, Item, Mask, AddsInPlace])
def test_slower_is_what_vmap_refuses(build: Any) -> None:
    diagnosis = diagnose(build(), x())
    assert diagnosis.verdicts["vote"] == "slower"
    assert diagnosis.verdicts["neo"] == "ok"
    assert not diagnosis.ok
    with pytest.raises(Exception, match=r"."):
        vote.Wrapper(2, strategy="vmap")(build())(x(), return_risk=True)


def test_a_refusal_is_told_in_the_words_of_the_wrapper() -> None:
    class TwoModels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.weight = nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    diagnosis = diagnose(TwoModels(), x())
    assert diagnosis.verdicts["sample"] == "refused"
    words = {concerned(each)[0]: each.what for each in diagnosis.find("refused")}
    assert "sample found no activation" in words["sample"]
    assert words["laplace"].startswith(
        "laplace needs a last layer that is an nn.Linear with real floating-point weights, but 'the model itself'"
    )
    assert diagnosis.find("unused")[0].what == "weight"


# ---- examples --------------------------------------------------------------------------------------------------------
class TwoInputs(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


class DictInput(Base):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["x"])


@pytest.mark.slow
def test_examples_are_taken_as_tensors_tuples_dicts_and_keywords() -> None:
    mask = torch.ones(6, 1)
    for diagnosis in (
        diagnose(TwoInputs(), x(), mask),
        diagnose(TwoInputs(), (x(), mask)),
        diagnose(TwoInputs(), {"x": x(), "mask": mask}),
        diagnose(TwoInputs(), x(), mask=mask),
        diagnose(DictInput(), {"x": x()}),
    ):
        assert diagnosis.ok, str(diagnosis)
    assert diagnose(TwoInputs(), x(), mask=mask).example == "float32 [6, 3], mask=float32 [6, 1]"


def test_without_an_example_only_what_stands_there_is_found() -> None:
    diagnosis = diagnose(Unregistered())
    assert {each.kind for each in diagnosis.findings} == {"unregistered"}
    assert set(diagnosis.verdicts.values()) == {"not run"}
    assert "there is no example" in diagnosis.remarks[0]
    assert not diagnose(Base()).ok
    assert "wrapping works" in diagnose(Base()).headline()
    assert set(diagnose(nn.ReLU()).verdicts.values()) == {"refused"}


def test_one_row_is_enough_for_all_wrappers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    diagnosis = diagnose(model, x(1))
    assert diagnosis.ok
    assert "One row" in diagnosis.remarks[0]


def test_functions_are_looked_at() -> None:
    net = Base()

    def twice(x: Tensor) -> Tensor:
        y = net(x)
        if y.sum() > 1e9:  # HERE
            return y
        return 2 * y

    diagnosis = diagnose(twice, x())
    assert diagnosis.name == "twice"
    (condition,) = diagnosis.find("control_flow")
    assert condition.line == marked(twice)
    with pytest.raises(TypeError, match=r"nn\.Module or a function"):
        diagnose(3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_wrapped_models_are_looked_at_as_plain_ones() -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(If())
    diagnosis = diagnose(wrapped, x())
    assert diagnosis.find("wrapped")[0].what == "with vote, sculpt"
    assert diagnosis.find("control_flow")[0].line == marked(If)
    verdicts = {"vote": "refused", "sample": "slower", "sculpt": "refused", "neo": "ok"}
    assert {name: diagnosis.verdicts[name] for name in verdicts} == verdicts
    wrapped.scale(x_mean=torch.zeros(3), x_scale=torch.ones(3), y_mean=torch.zeros(2), y_scale=torch.ones(2))
    scaled = diagnose(wrapped, x())
    assert {each.kind for each in scaled.findings} == {"wrapped", "control_flow", "refused"}
    assert {name for each in scaled.find("refused") for name in concerned(each)} == {"snapshot", "swag"}  # beside vote


def test_a_wrapped_object_without_methods_is_not_taken_for_a_compiled_model() -> None:
    plain = nn.Linear(3, 2)
    assert list(diagnose(compose()(plain), x()).findings) == []
    assert [each.kind for each in diagnose(torch.compile(plain), x()).findings] == ["compiled"]


# ---- the report ------------------------------------------------------------------------------------------------------
def test_the_report_lists_verdicts_findings_and_lines() -> None:
    expected = f"""\
If on float32 [6, 3]: 1 thing to know, every wrapper takes it (augment with settings that fit).

  augment   needs settings
  laplace   ok
  neo       ok
  sample    ok
  sculpt    slower          [1]
  snapshot  slower          [1]
  swag      slower          [1]
  vote      slower          [1]

[1] Control flow depends on values (slower: sculpt, snapshot, swag, vote)
    {marked(If)} in If: if h[:, 0].max() > -9: # HERE
      a tensor as a condition
    Branches may take different paths. One pass for all branches (vmap) is not possible, so each voter, sample
    or risk head is a pass of its own.
    What to do: compute both and choose: torch.where(condition, a, b).

Outputs, how each is interpreted, and what to write if one means something else:
  output  float32 [6, 2]: values, with a standard deviation each
      output="logits"  # scores of 2 classes
      output="binary"  # scores of 2 labels, each a yes or no

augment needs transforms=...: transforms="flip" is for images [rows, channels, height, width], but the input
has shape [6, 3]; use augment.Wrapper([augment.Transform(apply, inverse), ...]) with your own transforms"""
    diagnosis = diagnose(If(), x())
    assert str(diagnosis) == repr(diagnosis) == expected


def test_harmless_findings_come_last_in_one_line() -> None:
    text = str(diagnose(Tied(), x()))
    assert text.startswith(
        "Tied on float32 [6, 3]: every wrapper takes it (augment with settings that fit).\n\n"
        "Also seen, and no wrapper minds:\n    tied parameters: c.weight = d.weight\n\nOutputs"
    )


@pytest.mark.slow
def test_findings_of_many_layers_take_one_place() -> None:
    text = str(diagnose(nn.Sequential(*(nn.Sequential(Noisy()) for _ in range(5))), x()))
    assert "in 0.0 and 4 more" in text
    assert text.count("torch.randn") == 1


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(3)


@pytest.mark.slow
def test_html_is_escaped_and_leaves_colours_to_the_theme() -> None:
    page = diagnose(If(), x())._repr_html_()
    assert "if h[:, 0].max() &gt; -9:" in page
    assert "vote: slower" in page
    assert "color: inherit; background: transparent" in page
    assert "<script" not in page
    from bs4 import BeautifulSoup

    findings, outputs = BeautifulSoup(page, "html.parser").select("table")
    assert findings.select("td")[1].get_text() == "sculpt, snapshot, swag, vote: slower"
    assert [code.get_text() for code in outputs.select("code")] == [
        'output="logits"  # scores of 2 classes',
        'output="binary"  # scores of 2 labels, each a yes or no',
    ]
    assert "found</th>" not in diagnose(Base(), x())._repr_html_()


def test_kinds_are_checked() -> None:
    diagnosis = diagnose(Base(), x())
    assert isinstance(diagnosis, Diagnosis)
    assert diagnosis.find("state") == []
    with pytest.raises(ValueError, match="kind must be one of"):
        diagnosis.find("stat")
