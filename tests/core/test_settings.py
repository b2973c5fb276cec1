"""Settings are declared once: a field determines what is checked, shown, saved and parsed from text."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch
from torch import nn

import workbench
from workbench import Wrapper, compose, load, neo, sample, save, sculpt, setting, vote
from workbench.core.method import Axis, Call, Method
from workbench.core.registry import name_of, register, unregister, wrapper_class, wrapper_names
from workbench.core.saving.saved_settings import settings_of as state_settings
from workbench.core.settings import Settings, settings_of
from workbench.core.texts import wrapper_of
from workbench.engine.run import PURITIES, STRATEGIES
from workbench.methods import BUILT_IN
from workbench.methods.densities import DENSITIES, DensityName


class Plain(Settings):
    """Something with settings.

    Example:
        >>> Plain()
    """

    size: int = setting(default=2, least=1, help="how large")
    share: float = setting(default=0.5, least=0, below=1, help="how much of it")
    speed: Literal["slow", "fast"] = setting(default="slow", help="how fast")
    mixed: Literal["all"] | int | None = setting(default=None, least=1, help="which")
    noise: type[sample.Noise] | sample.Noise = setting(
        default=sample.Bernoulli, classes=(sample.Bernoulli, sample.Normal), help="how noisy"
    )


# ---- what is taken
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size must be a whole number of at least 1, not 0"),
        ({"size": True}, "size must be a whole number of at least 1, not True"),
        ({"size": 2.0}, r"size must be a whole number of at least 1, not 2\.0"),
        ({"share": math.nan}, "share must be a number of at least 0 and below 1, not nan"),
        ({"share": 1}, "share must be a number of at least 0 and below 1, not 1"),
        ({"share": False}, "share must be a number"),
        ({"speed": "quick"}, "speed must be one of slow, fast, not 'quick'"),
        ({"mixed": "some"}, "mixed must be \"all\", a whole number of at least 1 or None, not 'some'"),
        ({"noise": 0.1}, r"noise must be Bernoulli, Normal \(a class or an instance\), not 0\.1"),
        ({"noise": sculpt.Normal}, "noise must be Bernoulli, Normal"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError if "noise" in wrong else ValueError, match=message):
        Plain(**wrong)


def test_a_misspelled_setting_is_refused_with_its_nearest() -> None:
    wrong: Any = {"speeed": "fast"}
    with pytest.raises(TypeError, match=r"Plain has no setting 'speeed': did you mean speed\? there are size, share, "):
        Plain(**wrong)
    wrong = {"n_voter": 5}
    with pytest.raises(TypeError, match=r"vote\.Wrapper has no setting 'n_voter': did you mean n_voters"):
        vote.Wrapper(**wrong)


def test_values_are_kept_in_one_form() -> None:
    made = Plain(share=0, noise=sample.Normal, mixed="all")
    assert (type(made.share), made.share, made.mixed) == (float, 0.0, "all")
    assert isinstance(made.noise, sample.Normal)
    assert neo.Wrapper(layers="first").layers == ("first",)
    assert neo.Wrapper(layers=["first", "last"]).layers == ("first", "last")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        vote.Wrapper().n_voters = 4  # type: ignore[misc]
    wrapper = vote.Wrapper(4)
    assert wrapper.with_options(strategy="loop", chunk=2) is not wrapper
    assert (wrapper.strategy, wrapper.chunk) == ("auto", None)
    with pytest.raises(ValueError, match="strategy must be one of auto"):
        wrapper.with_options(strategy="fast")
    with pytest.raises(TypeError, match="n_voters is not a common option of wrappers"):
        wrapper.with_options(n_voters=3)


def test_the_repr_is_the_call_that_makes_it() -> None:
    assert repr(Plain()) == "Plain()"
    assert repr(Plain(3, noise=sample.Normal(0.2))) == "Plain(size=3, noise=Normal(0.2))"
    for wrapper in (
        vote.Wrapper(5, share="rank1", chunk=2),
        sculpt.Wrapper(sculpt.Normal(beta=0.5)),
        neo.Wrapper(layers=["0"], density="knn"),
    ):
        names = {"vote": vote, "sculpt": sculpt, "neo": neo, "Normal": sculpt.Normal}
        assert repr(eval(repr(wrapper), names)) == repr(wrapper)


def test_the_signature_and_the_help_are_made_from_the_fields() -> None:
    assert list(inspect.signature(vote.Wrapper).parameters)[:3] == ["n_voters", "alpha", "use_bias"]
    chunk = inspect.signature(vote.Wrapper).parameters["chunk"]
    assert (chunk.kind, chunk.default) == (chunk.KEYWORD_ONLY, None)
    text = inspect.getdoc(Plain) or ""
    assert text.index("Args:\n    size: how large\n    share: how much") < text.index("Example:")
    for name in wrapper_names():
        settings = [s for s in settings_of(wrapper_class(name)) if s.name not in get_type_hints(Wrapper)]
        assert all(s.help and f"\n    {s.name}: " in (wrapper_class(name).__doc__ or "") for s in settings)


def test_wrappers_are_copied_and_pickled() -> None:
    wrapper = compose(vote.Wrapper(4, alpha=0.5), sculpt.Wrapper(sculpt.StudentT(df=4)))
    for other in (copy.copy(wrapper), copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert repr(other) == repr(wrapper)


def test_the_choices_are_those_that_there_are() -> None:
    options = {s.name: s.choices for s in settings_of(Wrapper)}
    assert options["strategy"] == STRATEGIES
    assert options["purity"] == PURITIES
    assert get_args(DensityName) == tuple(DENSITIES)
    assert set(wrapper_names()) >= set(BUILT_IN)


# ---- states saved before
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: vote.Wrapper(2), {"vote": {"n_voters": 2, "share": None, "use_bias": True}}),
        (
            lambda: sample.Wrapper(4, sample.Normal(0.25), "weights"),
            {"sample": {"n_samples": 4, "distribution": "Normal(0.25)", "where": "weights", "trainable": False}},
        ),
        (
            lambda: sculpt.Wrapper(sculpt.Quantiles((0.1, 0.9))),
            {"sculpt": {"distribution": "Quantiles", "n_layers": None, "levels": [0.1, 0.9]}},
        ),
        (
            lambda: neo.Wrapper(layers="0", density=neo.DENSITIES["knn"](k=3)),
            {"neo": {"layers": ["0"], "density": "knn", "per": None}},
        ),
        (lambda: workbench.laplace.Wrapper(), {"laplace": {"layer": "2", "n_samples": 32}}),
        (lambda: workbench.swag.Wrapper(3, start=0.5), {"swag": {"n_samples": 3, "rank": 20}}),
        (lambda: workbench.snapshot.Wrapper(3), {"snapshot": {"n_voters": 3}}),
    ],
)
def test_a_state_says_its_settings(make: Callable[[], Any], expected: dict[str, Any]) -> None:
    wrapped = make()(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    assert state_settings(wrapped) == expected


# ---- a wrapper of the user's own
class Tilt(Method):
    """Branches that are moved by a fixed amount each."""

    name, kind, order = "tilted", "epistemic", 25

    def attach(self, table: Any) -> None:
        table.register(f"{table.parameters()[0]}@tilted", torch.full((), self.wrapper.amount))

    def axis(self, call: Call) -> Axis | None:
        return None


@pytest.fixture
def tilted() -> Any:
    @register(name="tilted")
    class Tilted(Wrapper):
        """Nothing of use."""

        amount: float = setting(default=1.0, above=0, saved=True, help="how far")

        def make(self) -> list[Method]:
            return [Tilt(self)]

    yield Tilted
    unregister("tilted")


def test_a_registered_wrapper_is_read_from_texts_and_files(tilted: Any, tmp_path: Path) -> None:
    wrapper = wrapper_of("tilted(amount=2.5) + sculpt(StudentT(df=4))")
    assert [repr(method) for method in wrapper.make()] == ["tilted(amount=2.5)", "sculpt(distribution=StudentT)"]
    assert name_of(tilted) == "tilted"
    with pytest.raises(ValueError, match=r"tilted has no argument 'amont': did you mean amount\?"):
        wrapper_of("tilted(amont=2)")
    wrapped = wrapper(nn.Linear(2, 1)).eval()
    save(wrapped, tmp_path / "model")
    other = load(tmp_path / "model", nn.Linear(2, 1)).eval()
    assert other.methods == ("tilted", "sculpt")
    assert other._workbench.methods[0].wrapper.amount == 2.5
    assert torch.equal(other(torch.ones(3, 2)), wrapped(torch.ones(3, 2)))
    unregister("tilted")
    try:
        with pytest.raises(ValueError, match="saved with tilted, which is not part of workbench"):
            load(tmp_path / "model", nn.Linear(2, 1))
    finally:
        register(name="tilted")(tilted)


def test_names_are_taken_once(tilted: Any) -> None:
    assert register(name="tilted")(tilted) is tilted  # a cell that runs again
    with pytest.raises(ValueError, match="there is a wrapper 'vote' already"):
        register(name="vote")(tilted)
    with pytest.raises(ValueError, match="there is a wrapper 'tilted' already"):
        register(name="tilted")(type("Other", (Wrapper,), {}))
    with pytest.raises(ValueError, match="name must be an identifier other than 'plain'"):
        register(name="plain")(tilted)
    with pytest.raises(TypeError, match=r"register takes a subclass of workbench\.Wrapper"):
        register(nn.Linear)  # type: ignore[type-var]


def test_wrappers_of_installed_packages_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from workbench.core import registry

    entry = metadata.EntryPoint("brought", "workbench.methods.vote:Wrapper", registry.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == registry.GROUP else [])
    registry._installed.cache_clear()
    try:
        assert "brought" in wrapper_names()
        assert repr(wrapper_of("brought(n_voters=2)")) == "compose(vote.Wrapper(n_voters=2))"
    finally:
        registry._installed.cache_clear()


def test_a_wrapper_may_write_its_init_itself() -> None:
    class Old(Wrapper):
        def __init__(self, number: int = 3, **common: Any) -> None:
            super().__init__(**common)
            self.number = number

        def make(self) -> list[Method]:
            return [vote.Vote(vote.Wrapper(self.number))]

    class Older(Old):
        pass

    for cls in (Old, Older):
        wrapped = cls(4, strategy="loop")(nn.Linear(2, 1))
        assert len(wrapped.voters()) == 4
        assert wrapped._workbench.strategy == "loop"
