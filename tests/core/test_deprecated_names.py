"""Deprecated names work for one version, and their warnings name the replacement."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import workbench
from workbench import compose, neo, sculpt, vote
from workbench.deprecation import MODULES


def voted() -> Any:
    return vote.Wrapper(2)(nn.Linear(3, 1))


@pytest.mark.parametrize("which", ["risk", "base"])
def test_parameters_by_group_still_answer_as_a_dict(which: str) -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(nn.Linear(3, 1))
    named = dict(getattr(wrapped, f"named_{which}_parameters")())
    assert len(named) == 2

    def old() -> Any:
        return getattr(wrapped, f"{which}_parameters")()

    with pytest.warns(DeprecationWarning, match=rf"dict\(wrapped.named_{which}_parameters\(\)\)"):
        assert list(old().items()) == list(named.items())
    with pytest.warns(DeprecationWarning, match="as a dict"):
        assert list(old().keys()) == list(named)
    with pytest.warns(DeprecationWarning, match="as a dict"):
        assert [id(p) for p in old().values()] == [id(p) for p in named.values()]
    name, parameter = next(iter(named.items()))
    with pytest.warns(DeprecationWarning, match="as a dict"):
        assert old()[name] is parameter
    with pytest.warns(DeprecationWarning, match="as a dict"):
        assert old().get("no such") is None
    with pytest.warns(DeprecationWarning, match="as a dict"):
        assert name in old()
    with pytest.warns(DeprecationWarning, match="as a dict"):
        assert list({**old()}) == list(named)
    with pytest.warns(DeprecationWarning, match="as a dict"):
        restored = pickle.loads(pickle.dumps(old()))
    assert all(torch.equal(restored[key], value) for key, value in named.items())


def test_parameters_by_group_are_iterated_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    wrapped = voted()
    risk = wrapped.risk_parameters()
    assert iter(risk) is risk
    first = next(risk)
    assert [first, *risk] == list(wrapped.parameters())
    assert list(risk) == []
    assert first in wrapped.risk_parameters()
    assert nn.Parameter(torch.zeros(1)) not in wrapped.risk_parameters()
    torch.optim.SGD(wrapped.risk_parameters(), lr=0.1)
    assert len(recwarn) == 0


def test_values_of_an_object_wrapped_alike_may_come_as_its_risk_parameters() -> None:
    first, second = voted(), voted()
    with torch.no_grad():
        next(first.parameters()).fill_(7)
    with pytest.warns(DeprecationWarning, match="named_risk_parameters"):
        second.set_risk_parameters(first.risk_parameters())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_scale_none_is_unscale() -> None:
    wrapped = voted()
    for remove in ("new", "old"):
        wrapped.scale(y_mean=torch.tensor([1.0]), y_scale=torch.tensor([2.0]))
        assert wrapped.scaling is not None
        if remove == "new":
            wrapped.unscale()
        else:
            with pytest.warns(DeprecationWarning, match=r"unscale\(\)"):
                wrapped.scale(None)
        assert wrapped.scaling is None
    wrapped.unscale()  # nothing to remove is no error
    assert wrapped.scaling is None


def test_location_scale_of_a_wrapped_object_is_private() -> None:
    with pytest.warns(DeprecationWarning, match="location_scale"):
        assert voted().location_scale


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (vote.Wrapper(2), "vote has nothing to fit in closed form"),
        (compose(vote.Wrapper(2), sculpt.Wrapper()), "vote and sculpt have nothing to fit in closed form"),
        (compose(), "compose.. without wrappers has nothing to fit"),
    ],
)
def test_fit_where_nothing_can_be_fitted_names_what_trains(wrapper: Any, message: str) -> None:
    wrapped = wrapper(nn.Linear(3, 1))
    with pytest.raises(ValueError, match=rf"{message}.*workbench\.fit\(wrapped, data\)"):
        wrapped.fit(torch.zeros(4, 3))
    assert not wrapped.needs_fit


def test_fit_of_several_methods_fits_those_that_can_be() -> None:
    wrapped: Any = compose(vote.Wrapper(2), neo.Wrapper())(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)))
    assert wrapped.fit(torch.randn(50, 3)) is wrapped


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("distributions", "FAMILIES"),
        *[("calibration", name) for name in ("conformal_quantile", "cv_plus", "fit_recalibration", "upper_bound")],
        *[("calibration", name) for name in ("fit_temperature", "fit_variance_scale")],
        ("notebook", "run_key"),
    ],
)
def test_names_that_became_private(package: str, name: str) -> None:
    module = importlib.import_module(f"workbench.{package}")
    assert name not in module.__all__
    with pytest.warns(DeprecationWarning, match=rf"workbench\.{package}\.{name} is deprecated"):
        value = getattr(module, name)
    assert callable(value) or sculpt.Normal in value
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


# ---- modules
@pytest.mark.parametrize("old", [*MODULES, "wrappers.vote", "wrappers.densities", "wrappers.densities.flow"])
def test_modules_that_moved_are_imported_under_their_old_names(old: str) -> None:
    for name in [name for name in sys.modules if f"workbench.{old}.".startswith(f"{name}.") and name != "workbench"]:
        del sys.modules[name]  # what imported them before has heard the warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(f"workbench.{old}")
    assert f"workbench.{old} is deprecated" in str(caught[-1].message)
    assert {warning.category for warning in caught} == {DeprecationWarning}
    assert module.__name__ != f"workbench.{old}"
    assert module is importlib.import_module(module.__name__)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("committee", "Committee"),
        ("inner", "show"),
        ("persistence", "_same"),
        ("scaling", "Scaling"),
        ("table", "Alone"),
        ("table", "Record"),
        ("table", "Slot"),
        ("wrapped", "blank"),
        ("wrappers.vote", "Vote"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pickles_of_before_find_what_they_name(module: str, name: str) -> None:
    assert callable(pickle.loads(f"cworkbench.{module}\n{name}\n.".encode()))


@pytest.mark.slow
def test_documented_imports_of_before_give_the_objects_of_today() -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
from workbench.method import Method
from workbench.wrapping import Wrapper
from workbench.wrapped import Wrapped
from workbench.saving import load
from workbench.wrappers.vote import Wrapper as Vote
import workbench.wrappers.sculpt
from workbench import wrapping
import workbench, workbench.core.method, workbench.core.wrapper
assert Method is workbench.core.method.Method and Wrapper is workbench.Wrapper is wrapping.Wrapper
assert Wrapped is workbench.Wrapped and load is workbench.load and Vote is workbench.vote.Wrapper
assert workbench.wrappers.sculpt is workbench.sculpt and workbench.core.method.__spec__.name == "workbench.core.method"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_warning_of_an_old_import_points_at_the_import() -> None:
    sys.modules.pop("workbench.wrapping", None)
    with pytest.warns(DeprecationWarning, match="workbench.core.wrapper") as caught:
        import workbench.wrapping  # type: ignore[import-not-found]  # noqa: F401
    assert caught[0].filename == __file__


def test_what_never_was_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("workbench.nonsense")
    with pytest.raises(AttributeError):
        workbench.nonsense  # noqa: B018
