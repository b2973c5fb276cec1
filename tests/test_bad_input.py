"""Bad input gets a clear error or documented behaviour, with nothing changed or lost."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.model_facts import facts
from helpers.models import mlp
from torch import Tensor, nn

import workbench
from workbench import NotFittedError, WorkbenchWarning, compose, is_wrapped, neo, sample, sculpt, vote

MAKERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "sample": lambda: sample.Wrapper(3),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
}


# ---- what can be wrapped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("target", [None, 3, "model", [nn.Linear(1, 1)], torch.zeros(2), dict, int])
def test_what_is_no_module_is_refused(name: str, target: Any) -> None:
    with pytest.raises(TypeError, match=r"wraps an nn\.Module"):
        MAKERS[name]()(target)


@pytest.mark.parametrize("name", MAKERS)
def test_lazy_parameters_are_refused(name: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"0\.weight.*call the model once.*example=x"):
        MAKERS[name]()(model)
    y = model(torch.zeros(2, 3))
    assert y.shape == (2, 1)
    assert MAKERS[name]()(model)(torch.zeros(6, 3)).shape == (6, 1)


@pytest.mark.parametrize("name", MAKERS)
def test_lazy_parameters_get_their_shapes_from_an_example_on_a_copy(name: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1)).train()
    before = torch.get_rng_state()
    wrapped: Any = MAKERS[name]().with_options(example=torch.ones(2, 3))(model)
    assert name == "sample" or torch.equal(torch.get_rng_state(), before)  # its noise in the call of the example
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    assert model.training
    assert wrapped.training
    assert wrapped(torch.zeros(6, 3)).shape == (6, 1)
    assert not any(p is q for p in model.parameters() for q in wrapped.parameters())


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_a_scripted_model_is_refused(name: str) -> None:
    model = torch.jit.trace(mlp(), torch.zeros(1, 3))
    with pytest.raises(TypeError, match="before scripting"):
        MAKERS[name]()(model)
    assert model(torch.zeros(2, 3)).shape == (2, 1)


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_without_parameters_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no floating-point parameters"):
        MAKERS[name]()(nn.Sequential(nn.ReLU()))


# ---- targets of another shape ----------------------------------------------------------------------------------------


def as_frame(y: Tensor) -> Any:
    return pd.DataFrame(y.numpy()) if y.dim() > 1 else pd.Series(y.numpy())


@pytest.mark.parametrize(
    ("outputs", "advice"),
    [
        (
            "column",
            {"y[:, None] of a tensor": lambda y: y[:, None], "y.to_frame() of a pandas Series": lambda y: y.to_frame()},
        ),
        ("vector", {"y[:, 0] of a tensor": lambda y: y[:, 0], "y.iloc[:, 0] of a DataFrame": lambda y: y.iloc[:, 0]}),
    ],
)
def test_the_advice_for_targets_of_another_shape_can_be_followed(
    outputs: str, advice: dict[str, Callable[[Any], Any]]
) -> None:
    model = nn.Sequential(nn.Linear(3, 1), *([nn.Flatten(0)] if outputs == "vector" else []))
    x, y = torch.randn(40, 3), torch.randn(40) if outputs == "column" else torch.randn(40, 1)
    for (words, follow), targets in zip(advice.items(), (y, as_frame(y)), strict=True):
        wrapped = vote.Wrapper(2)(model)
        with pytest.raises(ValueError, match=re.escape(words)):
            workbench.fit(wrapped, (x, targets), epochs=1, progress=False)
        workbench.fit(wrapped, (x, follow(targets)), epochs=1, progress=False)


def test_no_column_is_advised_where_it_would_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[n, 3\]; they must have one shape$"):
        workbench.fit(vote.Wrapper(2)(nn.Linear(3, 3)), (torch.randn(40, 3), torch.randn(40)), epochs=1, progress=False)


# ---- twice the same --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_method_twice_is_refused_and_the_wrapped_object_kept(name: str) -> None:
    wrapped: Any = MAKERS[name]()(mlp())
    before = facts(wrapped)
    with pytest.raises(ValueError, match=rf"carries {name} already.*unwrap"):
        MAKERS[name]()(wrapped)
    with pytest.raises(ValueError, match=f"{name} is composed 2 times"):
        compose(MAKERS[name](), MAKERS[name]())(mlp())
    assert facts(wrapped) == before
    assert wrapped.methods == (name,)
    if name == "neo":
        wrapped.fit(torch.randn(50, 3))
    _, risk = wrapped(torch.randn(6, 3), return_risk=True)
    assert bool(torch.isfinite(risk).all())
    again: Any = MAKERS[name]()(wrapped.unwrap())
    assert again.methods == (name,)


@pytest.mark.parametrize("name", MAKERS)
def test_adding_another_method_leaves_the_wrapped_object_alone(name: str) -> None:
    wrapped: Any = MAKERS[name]()(mlp())
    before = facts(wrapped)
    other = next(n for n in MAKERS if n != name)
    both: Any = MAKERS[other]()(wrapped)
    assert set(both.methods) == {name, other}
    assert wrapped.methods == (name,)
    assert facts(wrapped) == before


@pytest.mark.parametrize("outer", MAKERS)
@pytest.mark.parametrize("inner", MAKERS)
def test_a_wrapped_part_inside_a_model_is_refused_with_a_remedy(inner: str, outer: str) -> None:
    model = nn.Sequential(MAKERS[inner]()(mlp(3)), nn.Linear(3, 1))
    before = facts(model)
    with pytest.raises((TypeError, ValueError), match=r"'0'.*(compose|unwrap)"):
        MAKERS[outer]()(model)
    assert facts(model) == before


# ---- outputs and inputs ----------------------------------------------------------------------------------------------


class Decided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"top": self.fc(x).argmax(-1)}


@pytest.mark.parametrize("name", ["vote", "sample", "sculpt"])
def test_an_output_without_floating_numbers_is_refused(name: str) -> None:
    wrapped: Any = MAKERS[name]()(Decided()).eval()
    with pytest.raises(TypeError, match=r"output\['top'\].*int64.*outside the wrapped model"):
        wrapped(torch.randn(6, 3), return_risk=True)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("output", ["values", "logits"])
@pytest.mark.parametrize("name", [*MAKERS, "vote of sculpt"])
def test_rows_with_nan_get_nan_risk_one_warning_and_others_are_untouched(name: str, output: str, strategy: str) -> None:
    common: Any = {"output": output, "strategy": strategy}
    head: Any = {"distribution": sculpt.LogitNormal} if output == "logits" else {}
    wrappers = {
        "vote": lambda: vote.Wrapper(3, **common),
        "sample": lambda: sample.Wrapper(3, where="weights", **common),
        "sculpt": lambda: sculpt.Wrapper(n_layers=1, **head, **common),
        "neo": lambda: neo.Wrapper(**common),
        "vote of sculpt": lambda: compose(vote.Wrapper(3, **common), sculpt.Wrapper(n_layers=1, **head)),
    }
    wrapped: Any = wrappers[name]()(mlp(4)).eval()
    if name == "neo":
        wrapped.fit(torch.randn(50, 3))
    x = torch.randn(6, 3)
    broken = x.clone()
    broken[2, 1] = float("nan")
    torch.manual_seed(1)
    y, risk = wrapped(x, return_risk=True)
    torch.manual_seed(1)
    with pytest.warns(WorkbenchWarning, match="NaN") as caught:
        y_broken, risk_broken = wrapped(broken, return_risk=True)
    assert len(caught) == 1
    rest = [0, 1, 3, 4, 5]
    assert bool(y_broken[2].isnan().all())
    assert torch.allclose(y_broken[rest], y[rest], atol=1e-6)
    names = risk.names() if hasattr(risk, "names") and not isinstance(risk, Tensor) else [None]
    for part in names:
        good, bad = (risk, risk_broken) if part is None else (risk[part], risk_broken[part])
        assert bool(bad[2].isnan().all()), part
        assert torch.allclose(bad[rest], good[rest], atol=1e-5), part
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(broken, return_risk=True)


def test_a_wrong_input_is_an_error_of_the_model_and_the_next_call_is_right() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped: Any = vote.Wrapper(3)(model)
    before = facts(wrapped)
    for kwargs in ({}, {"return_risk": True}):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            wrapped(torch.randn(8, 5), **kwargs)
    assert facts(wrapped) == before
    x = torch.randn(8, 3)
    assert not torch.allclose(wrapped(x), wrapped(x, tile_and_reduce=True))  # rows are still dealt to the voters
    assert wrapped.eval()(x).shape == (8, 1)


def test_an_example_that_does_not_fit_shows_at_once() -> None:
    model = mlp()
    before = facts(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        vote.Wrapper(3, example=torch.zeros(2, 5))(model)
    assert facts(model) == before
    wrapped: Any = vote.Wrapper(3, example=torch.zeros(2, 3))(model)
    assert wrapped.training
    with pytest.raises(TypeError, match="no floating-point tensor"):
        sculpt.Wrapper(example=torch.zeros(2, 3))(Decided())


def test_class_scores_that_are_none_are_refused() -> None:
    x = torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"outside \[0, 1\].*logits"):
        vote.Wrapper(3, output="probs")(mlp(4)).eval()(10 * x, return_risk=True)
    with pytest.raises(ValueError, match="LogitNormal"):
        sculpt.Wrapper(sculpt.Laplace, n_layers=1, output="logits")(mlp(4)).eval()(x, return_risk=True)


class Escaping(nn.Module):
    """Holds a function that reaches its layer past the module tree."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)
        weights = {"weight": self.fc.weight}
        self.apply_weight = lambda x: x @ weights["weight"].T

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x)


def test_a_parameter_that_is_reached_past_the_module_is_refused() -> None:
    model = Escaping()
    wrapped: Any = vote.Wrapper(3)(model).eval()
    with pytest.raises(RuntimeError, match=r"fc\.weight.*self\.layer\.weight"):
        wrapped(torch.randn(4, 3), return_risk=True)
    assert model(torch.randn(4, 3)).shape == (4, 1)


def test_voters_without_gradients_are_not_wrong_in_silence() -> None:
    wrapped: Any = vote.Wrapper(3)(Escaping()).eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"fc\.weight"):
        wrapped(torch.randn(4, 3), return_risk=True)


# ---- small batches, neo, states --------------------------------------------------------------------------------------


def test_a_batch_smaller_than_the_voters_trains_all_on_it_with_one_warning() -> None:
    wrapped: Any = vote.Wrapper(5)(mlp())
    x = torch.randn(4, 3)
    with pytest.warns(WorkbenchWarning, match=r"batch of 4 rows.*5 voters.*tile_and_reduce") as caught:
        y = wrapped(x)
    assert len(caught) == 1
    assert torch.allclose(y, torch.stack([voter(x) for voter in wrapped.voters()]).mean(0), atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(x)
        wrapped(x, tile_and_reduce=True)


def test_neo_before_fitting_is_refused_and_still_predicts() -> None:
    model = mlp()
    wrapped: Any = neo.Wrapper()(model).eval()
    x = torch.randn(6, 3)
    with pytest.raises(NotFittedError, match=r"wrapped\.fit\(loader\)"):
        wrapped(x, return_risk=True)
    assert torch.equal(wrapped(x), model(x))
    both: Any = compose(neo.Wrapper(), vote.Wrapper(3))(model).eval()
    with pytest.raises(NotFittedError, match=r"wrapped\.fit\(loader\)"):
        both(x, return_risk=True)
    wrapped.fit(x.repeat(8, 1) + torch.randn(48, 3))
    assert wrapped(x, return_risk=True)[1].shape == (6,)


def test_fit_without_inputs_is_refused() -> None:
    wrapped: Any = neo.Wrapper()(mlp())
    with pytest.raises(ValueError, match="no inputs"):
        wrapped.fit([])


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (lambda: vote.Wrapper(3), lambda: vote.Wrapper(4), "n_voters.*3.*n_voters.*4"),
        (lambda: vote.Wrapper(3), lambda: vote.Wrapper(3, share="rank1"), "share.*rank1"),
        (lambda: vote.Wrapper(3), lambda: sculpt.Wrapper(), "vote.*no such method|no such method.*vote"),
        (lambda: sculpt.Wrapper(sculpt.Laplace), lambda: sculpt.Wrapper(), "Laplace.*Normal"),
        (lambda: sculpt.Wrapper(n_layers=1), lambda: sculpt.Wrapper(n_layers=2), "n_layers"),
        (lambda: sample.Wrapper(3), lambda: sample.Wrapper(3, sample.Bernoulli(0.3)), r"Bernoulli\(0.3\)"),
        (lambda: neo.Wrapper(density="flow"), lambda: neo.Wrapper(), "flow.*signature"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(first: Any, second: Any, says: str) -> None:
    state = first()(mlp()).state_dict()
    kept = copy.deepcopy(state)
    other = second()(mlp())
    before = facts(other)
    with pytest.raises(ValueError, match=says):
        other.load_state_dict(state)
    assert facts(other) == before
    assert state.keys() == kept.keys()
    assert all(torch.equal(state[name], kept[name]) for name in kept)


@pytest.mark.parametrize("build", [lambda: vote.Wrapper(3), lambda: sculpt.Wrapper(), lambda: sample.Wrapper(3)])
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_names_of_the_model(build: Any) -> None:
    wrapped: Any = build()(mlp(4))
    short = mlp(4).state_dict()
    del short["0.bias"]
    with pytest.raises(RuntimeError, match=r"[Mm]issing.*0\.bias"):
        wrapped.load_state_dict(short)
    with pytest.raises(RuntimeError, match=r"2\.weight"):
        wrapped.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.weight|2\.weight.*shape"):
        wrapped.load_state_dict(mlp(1).state_dict())
    with pytest.raises(RuntimeError, match="zebra"):
        wrapped.load_state_dict({**mlp(4).state_dict(), "zebra": torch.zeros(1)})


def test_risk_parameters_that_do_not_fit_change_nothing() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp())
    before = facts(wrapped)
    values = {name: torch.zeros_like(p) for name, p in wrapped.named_risk_parameters()}
    first = next(iter(values))
    with pytest.raises(ValueError, match=first):
        wrapped.set_risk_parameters({name: value for name, value in values.items() if name != first})
    with pytest.raises(ValueError, match=first):
        wrapped.set_risk_parameters({**values, first: torch.zeros(2, 2)})
    assert facts(wrapped) == before


def test_the_global_random_stream_and_dtype_are_left_alone() -> None:
    model = mlp()
    before, dtype = torch.get_rng_state(), torch.get_default_dtype()
    for name in ("sculpt", "neo"):
        wrapped: Any = MAKERS[name]()(model).eval()
        if name == "neo":
            wrapped.fit(torch.linspace(-1, 1, 90).reshape(30, 3))
        wrapped(torch.ones(4, 3), return_risk=True)
        assert torch.equal(torch.get_rng_state(), before), name
    assert torch.get_default_dtype() == dtype
    assert not is_wrapped(model)
