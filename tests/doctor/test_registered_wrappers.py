"""`diagnose` covers every registered wrapper, including users' own, by what its methods do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.troubled_models import Base, If, Scalar, Tied, x
from torch import Tensor, nn

import workbench
from workbench import diagnose, vote
from workbench.core.method import Method
from workbench.core.registry import unregister, wrapper_names
from workbench.core.settings import setting
from workbench.errors import SettingsNeededError
from workbench.methods.vote import Vote

BUILT_IN = wrapper_names()
MADE: list[int] = []


class Crowd(vote.Wrapper):
    """Voters of another name."""

    n_voters: int = setting(default=50, least=2, help="how many.")

    def make(self) -> list[Method]:
        MADE.append(self.n_voters)
        return [_Crowd(self)]


class _Crowd(Vote):
    name = "crowd"


class Watcher(workbench.Wrapper):
    """A risk of its own pass."""

    def make(self) -> list[Method]:
        return [_Watching(self)]


class _Watching(Method):
    name, kind, order, own_pass = "watcher", "vacuitic", 41, True

    def measure(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        y = type(wrapped)._plain_class.forward(wrapped, *args, **kwargs)
        return y, y.sum(1)


class Picky(workbench.Wrapper):
    """Refuses every model, or asks for a setting."""

    rings: int | None = setting(default=None, least=1, help="how many.")

    def make(self) -> list[Method]:
        return [_Picky(self)]


class _Picky(Method):
    name, kind, order = "picky", "epistemic", 21

    def attach(self, table: Any) -> None:
        if isinstance(table.root, Tied):
            raise SettingsNeededError("picky has no default for tied models; give Picky(rings=3)", "rings")
        raise ValueError("picky takes no model; use vote")


class Needy(vote.Wrapper):
    """Has no defaults."""

    def __init__(self, prior: float) -> None:
        super().__init__(2)


@pytest.fixture(autouse=True)
def own_wrappers() -> Iterator[None]:
    classes = (Crowd, Watcher, Picky, Needy)
    for cls in classes:
        workbench.register(cls)
    yield
    for cls in classes:
        unregister(cls.__name__.lower())


def test_every_registered_wrapper_has_a_verdict() -> None:
    diagnosis = diagnose(Base(), x())
    assert set(diagnosis.verdicts) == {*BUILT_IN, "crowd", "watcher", "picky", "needy"}
    assert [diagnosis.verdicts[name] for name in ("crowd", "watcher")] == ["ok", "ok"]
    assert all(set(each.means) == set(diagnosis.verdicts) for each in diagnosis.findings)
    (refusal,) = diagnosis.find("refused")
    assert refusal.means["picky"] == diagnosis.verdicts["picky"] == "refused"
    assert refusal.what == "picky takes no model; use vote"
    assert "picky" in str(diagnosis)
    assert "picky: refused" in diagnosis._repr_html_()


@pytest.mark.slow
def test_a_wrapper_without_defaults_needs_settings() -> None:
    diagnosis = diagnose(Base(), x())
    assert diagnosis.verdicts["needy"] == "needs settings"
    assert any(remark.startswith("needy needs settings: ") and "prior" in remark for remark in diagnosis.remarks)
    assert diagnose(Tied(), x()).verdicts["picky"] == "needs settings"
    assert "picky needs rings=...: picky has no default" in " ".join(str(diagnose(Tied(), x())).split())


def test_it_is_tried_with_small_sizes() -> None:
    MADE.clear()
    diagnose(Base(), x())
    assert MADE[-1] == 2


@pytest.mark.slow
def test_what_a_finding_means_follows_from_the_kind_of_method() -> None:
    slow = diagnose(If(), x())
    assert slow.verdicts["crowd"] == slow.verdicts["vote"] == "slower"
    assert slow.verdicts["watcher"] == slow.verdicts["neo"] == "ok"
    rowless = diagnose(Scalar(), x())
    assert rowless.find("no_rows")[0].means["watcher"] == "refused"
    assert rowless.find("no_rows")[0].means["crowd"] == rowless.find("no_rows")[0].means["vote"] == "note"


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def test_a_built_in_wrapper_that_refuses_is_named_with_its_reason() -> None:
    unregister("picky")
    diagnosis = diagnose(Convolutions(), torch.randn(2, 1, 8, 8))
    workbench.register(Picky)
    assert diagnosis.verdicts["laplace"] == "refused"
    assert "laplace refuses it" in diagnosis.headline()
    assert "'b', taken as the last layer, is a Conv2d" in " ".join(str(diagnosis).split())
    assert diagnosis.verdicts["augment"] == "needs settings"  # a map, but not of the input's height and width
    assert any(remark.startswith("augment needs maps=...") for remark in diagnosis.remarks)
