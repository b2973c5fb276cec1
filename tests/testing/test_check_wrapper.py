"""`check_wrapper` passes correct wrappers, reports refusals, and catches broken ones; the guide's wrapper is correct."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.conformance_table import WRAPPERS, is_due
from helpers.zoo import CASES
from torch import Tensor, nn

import workbench
from workbench import Wrapper, sculpt, vote
from workbench.core.method import Call, Method, spread
from workbench.core.registry import unregister
from workbench.engine import combine
from workbench.engine.plan import Axis, Intervention, Shared, Stacked
from workbench.testing import Case, Outcome, Report, check_wrapper

GUIDE = Path(__file__).parents[2] / "docs" / "adding_a_wrapper.md"


class Members(Wrapper):
    """Passes under noise of learned size on the weights: right, and what the broken ones derive from."""

    def __init__(self, method: type[Method] | None = None, **common: Any) -> None:
        super().__init__(**common)
        self.method = method or Jittered

    def make(self) -> list[Method]:
        return [self.method()]


class Jittered(Method):
    name, kind, order = "jittered", "epistemic", 25

    def attach(self, table: Any) -> None:
        self.slots = [name for name in table.parameters() if table.value(name).requires_grad]
        for name in self.slots:
            value = table.value(name)
            table.register(f"{name}@jittered", torch.rand((), dtype=value.real.dtype), like=value)
            table.record.rules.setdefault(name, Shared(name))

    def axis(self, call: Call) -> Axis | None:
        return None if call.loss or call.dealt else Axis(self.name, 2)

    def intervention(self, table: Any, call: Call) -> Intervention | None:
        return Jitter(self, table)

    def tensor(self, table: Any, name: str, value: Tensor, index: Any) -> Tensor:
        return value * (1 + table.get(f"{name}@jittered") * torch.randn_like(value))

    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        return spread(parts, dim)


class Jitter(Intervention):
    def __init__(self, method: Jittered, table: Any) -> None:
        self.method, self.table, self.taps = method, table, {}

    def tensors(self, installed: dict[str, Tensor], index: Any) -> dict[str, Tensor]:
        new = {name: self.method.tensor(self.table, name, installed[name], index) for name in self.method.slots}
        return {**installed, **new}


# ---- broken in one way each
class WritesTheUsersParameters(Jittered):
    def attach(self, table: Any) -> None:
        super().attach(table)
        with torch.no_grad():
            for name in self.slots:
                table.get(name).mul_(1.01)


class GivesAnotherShape(Jittered):
    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        out = spread(parts, dim)
        return {**out, "epistemic": out["epistemic"].mean(-1)}


class GivesNan(Jittered):
    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        out = spread(parts, dim)
        return {**out, "epistemic": out["epistemic"] * float("nan")}


class KeepsATensorToItself(Jittered):
    def attach(self, table: Any) -> None:
        super().attach(table)
        self.amount = 1 + torch.rand(())

    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        out = spread(parts, dim)
        return {**out, "epistemic": self.amount * out["epistemic"]}


class DrawsFromNumpy(Jittered):
    def attach(self, table: Any) -> None:
        np.random.normal()  # noqa: NPY002 - this is what is wrong with it
        super().attach(table)


class DrawsOutside(Jittered):
    def __init__(self) -> None:
        torch.rand(())


class AnswersByChance(Jittered):
    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        generator = torch.Generator()
        generator.seed()
        out = spread(parts, dim)
        return {**out, "y": out["y"] + torch.rand((), generator=generator)}


class ForgetsTheOthers(Jittered):
    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        out = spread(parts, dim)
        return {"y": out["y"], "epistemic": out["epistemic"]}


class TrainsNothing(Jittered):
    def tensor(self, table: Any, name: str, value: Tensor, index: Any) -> Tensor:
        return super().tensor(table, name, value, index).detach() + 0 * value


class CutsTheGraph(Jittered):
    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        out = spread(parts, dim)
        return {**out, "y": out["y"].detach()}


class ChangesTheMode(Jittered):
    def attach(self, table: Any) -> None:
        super().attach(table)
        table.root.eval()


class HasSettingsThatCannotBeSaved(Jittered):
    def settings(self) -> dict[str, Any]:
        return {"settings": object()}


BROKEN: dict[type[Method], tuple[str, str]] = {
    WritesTheUsersParameters: ("untouched", "of the given model changed"),
    GivesAnotherShape: ("prediction", r"epistemic risk: \(6,\), not \(6, 2\)"),
    GivesNan: ("prediction", "epistemic risk is not finite"),
    KeepsATensorToItself: ("state_dict", "epistemic risk: "),
    DrawsFromNumpy: ("untouched", "wrapping moves the global random state of numpy"),
    DrawsOutside: ("untouched", "wrapping moves the global random state of torch"),
    AnswersByChance: ("prediction", "with the same seed, prediction"),
    ForgetsTheOthers: ("with sculpt", r"\['aleatoric'\] is missing"),
    TrainsNothing: ("loss", "neither loss nor risk has a gradient for 0.weight@jittered"),
    CutsTheGraph: ("loss", "prediction has no gradient"),
    ChangesTheMode: ("untouched", "not in the mode of the given one"),
    HasSettingsThatCannotBeSaved: ("state_dict", "not JSON serializable"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", BROKEN, ids=lambda method: method.__name__)
def test_what_is_broken_is_caught_by_the_check_that_is_meant_for_it(method: type[Method]) -> None:
    check, words = BROKEN[method]
    report = check_wrapper(Members(method), models=["mlp"], on_fail="report")
    messages = {name: message for _, name, message in report.failures}
    assert check in messages, str(report)
    assert re.search(words, messages[check]), messages[check]
    with pytest.raises(AssertionError, match=f"mlp, {check}: "):
        report.raise_for_failures()


@pytest.mark.slow
def test_what_is_right_passes() -> None:
    report = check_wrapper(Members, models=["mlp", "cnn_bn", "counter_attr", "tied", "dropout", "closure"])
    assert not report.failures
    assert {check for _, check, _ in report.refusals} <= {"replay"}  # noise reaches the trunk
    assert {"untouched", "branches", "training", "autocast", "vmap", "with vote", "with neo"} <= set(report.checks)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a rule that is off by one row", "a reduction that is wrong"])
def test_branches_are_held_against_plain_models(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug.startswith("a rule"):
        monkeypatch.setattr(Stacked, "dense", lambda self, bank: (bank.get(self.name).flip(0), (self.axis,)))
    else:
        right = combine._stack
        monkeypatch.setattr(combine, "_stack", lambda items, *rest: right(items[::-1], *rest))
    report = check_wrapper(vote.Wrapper(2), models=["mlp"], on_fail="report")
    failed = {check for _, check, _ in report.failures}
    assert ("vmap" in failed) == bug.startswith("a rule")  # whose branches come stacked already
    assert ("branches" in failed) == bug.startswith("a reduction")


@pytest.mark.slow
def test_a_rule_that_picks_the_row_of_another_branch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a branch is given is known by the names of the keys, not by the rule that is under test."""
    monkeypatch.setattr(Stacked, "pick", lambda self, bank, index: bank.row(self.name, 1 - index.get(self.axis, 0)))
    report = check_wrapper(vote.Wrapper(2), models=["mlp"], on_fail="report")
    assert {"branches", "training"} <= {check for _, check, _ in report.failures}


@pytest.mark.parametrize("name", WRAPPERS)
def test_tensors_of_built_in_wrappers_are_found_by_name(name: str) -> None:
    wrapping, case = WRAPPERS[name], CASES["cnn_bn" if name != "laplace" else "mlp"]
    reference = wrapping.trial(case).reference(wrapping.wrap(case.build()))
    by_rule = {slot: rule for slot, rule in reference.by_rule.items() if "@" not in slot}
    # the rows of swag and snapshot are swapped in by an intervention, so that the rule of the plain slot has nothing to say
    assert all(wrapping.kept and rule == Shared(slot) for slot, rule in by_rule.items())


class Scaled(Jittered):
    """Two branches whose weights are registered as one tensor that the naming convention does not know."""

    def attach(self, table: Any) -> None:
        for name in [name for name in table.parameters() if table.value(name).requires_grad]:
            value = table.value(name)
            table.register(f"{name}@both_scaled", torch.stack([value, self.factor * value]), like=value)
            table.record.rules[name] = Stacked(self.name, f"{name}@both_scaled")

    factor = 2.0
    slots = ()

    def intervention(self, table: Any, call: Call) -> None:
        return None


class ScaledWrongly(Scaled):
    factor = 3.0


@pytest.mark.slow
def test_tensors_of_branches_can_be_said() -> None:
    def tensors(state: Mapping[str, Tensor], place: Mapping[str, int]) -> dict[str, Tensor]:
        first = {key.partition("@")[0]: value[0] for key, value in state.items()}
        return {name: value * 2 if place.get("jittered") else value for name, value in first.items()}

    checks = [check_wrapper(Members(method), ["mlp"], on_fail="report") for method in (Scaled, ScaledWrongly)]
    assert not any("branches" in str(report.failures) for report in checks)  # the wrapper is taken at its word
    right, wrong = (
        {check for _, check, _ in check_wrapper(Members(method), ["mlp"], on_fail="report", tensors=tensors).failures}
        for method in (Scaled, ScaledWrongly)
    )
    assert "branches" not in right
    assert "branches" in wrong


# ---- arguments and the report
@pytest.mark.slow
def test_a_refusal_is_no_failure() -> None:
    report = check_wrapper(vote.Wrapper(2), models=["scripted", "lstm", "mlp"])
    assert not report.failures
    refused = {(model, check): message for model, check, message in report.refusals}
    assert "is scripted (torch.jit)" in refused["scripted", "prediction"]
    assert "lstm" in refused["lstm", "vmap"]
    assert not any(model == "mlp" for model, _ in refused)


@pytest.mark.slow
def test_a_method_that_asks_for_the_place_of_a_branch_is_refused_by_the_strategies_that_run_all_at_once() -> None:
    class Signed(Jittered):
        def tensor(self, table: Any, name: str, value: Tensor, index: Any) -> Tensor:
            return value * (1 + table.get(f"{name}@jittered") * index.get(self.name, 0))

    report = check_wrapper(Members(Signed), models=["mlp"])
    refused = {check: message for _, check, message in report.refusals}
    assert set(refused) == {"vmap", "rescue", "replay"}
    assert "reads the branch's position along 'jittered'" in refused["vmap"]


def test_an_error_that_nobody_raised_on_purpose_is_a_failure() -> None:
    class Trips(Jittered):
        def attach(self, table: Any) -> None:
            torch.ones(2) @ torch.ones(3)

    class Refuses(Jittered):
        def attach(self, table: Any) -> None:
            raise ValueError("this model is too small")

    with pytest.raises(AssertionError, match="mlp, untouched: RuntimeError"):
        check_wrapper(Members(Trips), models=["mlp"])
    report = check_wrapper(Members(Refuses), models=["mlp"])
    assert {message for _, _, message in report.refusals} == {"ValueError: this model is too small"}


@pytest.mark.slow
def test_models_of_ones_own_are_checked_and_composed() -> None:
    def inputs(seed: int = 0, rows: int = 6) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)),), {}

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    report = check_wrapper(Members, models=[Case("mine", build, inputs, frozenset())])
    assert report.models == ["mine"]
    assert "with sculpt" in report.checks


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="check_wrapper takes a Wrapper, such as"):
        check_wrapper(sculpt)
    with pytest.raises(TypeError, match=r"which is no workbench.Wrapper"):
        check_wrapper(lambda: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="'mpl' is no model of the zoo; nearest: mlp"):
        check_wrapper(Members, models=["mpl"])
    with pytest.raises(ValueError, match='on_fail must be "raise" or "report"'):
        check_wrapper(Members, on_fail="ignore")


@pytest.mark.slow
def test_checking_leaves_global_state_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state(), repr(np.random.get_state()), torch.get_num_threads()  # noqa: NPY002
    check_wrapper(Members, models=["numpy_randomness", "numpy_print"], verbose=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (repr(np.random.get_state()), torch.get_num_threads())  # noqa: NPY002
    printed = capsys.readouterr().out
    assert re.search(r"^numpy_print: \d+ passed", printed, re.MULTILINE)
    assert "mean activation" not in printed


def test_report_is_a_table_as_text_and_as_html() -> None:
    report = Report(
        "mine()",
        {
            ("mlp", "training"): Outcome("passed"),
            ("mlp", "pickle"): Outcome("FAILED", "a < b\nand more"),
            ("lstm", "training"): Outcome("refused", "no rule"),
        },
    )
    assert report.models == ["mlp", "lstm"]
    assert report.checks == ["training", "pickle"]
    assert report.summary() == "mine() on 2 models: 1 passed, 1 refused, 1 FAILED"
    text = str(report).splitlines()
    assert text[3:5] == ["mlp   . F", "lstm  r"]
    assert "FAILED mlp, pickle: a < b and more" in text
    page = report._repr_html_()
    assert page.count("<tr>") == 3
    assert "a &lt; b and more" in page
    assert "a < b" not in page
    with pytest.raises(AssertionError, match="1 FAILED\n  mlp, pickle: a < b and more"):
        report.raise_for_failures()
    Report("mine()", {("mlp", "training"): Outcome("passed")}).raise_for_failures()


def test_importing_the_package_does_not_import_the_zoo() -> None:
    import subprocess

    code = "import sys, workbench; workbench.vote.Wrapper; print([m for m in sys.modules if 'testing' in m and 'workbench' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- the guide
@pytest.fixture(scope="module")
def guide() -> Any:
    """The example of the guide as a module."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    module = ModuleType("guide_to_wrappers")
    sys.modules[module.__name__] = module
    exec(compile(blocks[0], str(GUIDE), "exec"), vars(module))
    yield module
    unregister("bayes")
    del sys.modules[module.__name__]


@pytest.mark.slow
def test_the_wrapper_of_the_guide_does_what_every_wrapper_does(guide: Any) -> None:
    refused = {"scripted", "generator_out"}
    models = [name for row, name in enumerate(CASES) if name in refused or is_due(row, 0, 6)]
    report = check_wrapper(guide.Bayes(n_samples=3), models)
    assert len(report.models) == len(models) > 15
    assert {model for model, check, _ in report.refusals if check == "prediction"} == refused


def test_the_wrapper_of_the_guide_adds_the_divergence_of_its_weights(guide: Any) -> None:
    wrapped = guide.Bayes(scale=0.2, prior=0.5)(nn.Linear(3, 1))
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    losses = []
    for rows in (None, 10):
        wrapped._workbench.rows = rows
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            losses.append(wrapped.loss(nn.MSELoss(), x, y))
    prior = torch.distributions.Normal(0.0, 0.5)
    weights = torch.cat([wrapped.weight.flatten(), wrapped.bias])
    expected = torch.distributions.kl_divergence(torch.distributions.Normal(weights, 0.2), prior).sum() / 10
    torch.testing.assert_close(losses[1] - losses[0], expected)


def test_the_wrapper_of_the_guide_fits_in_sixty_lines(guide: Any) -> None:
    block = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    assert sum(bool(line.strip()) for line in block[1].splitlines()) <= 60
    assert workbench.is_wrapped(guide.Bayes(nn.Linear(2, 1)))


@pytest.mark.slow
def test_python_without_assert_statements_is_refused() -> None:
    code = (
        "from workbench import vote; from workbench.testing import check_wrapper; check_wrapper(vote.Wrapper(2), 'mlp')"
    )
    ended = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert "RuntimeError: check_wrapper checks by assert statements, which python -O leaves out" in ended.stderr
