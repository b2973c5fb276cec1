"""What can be compared and set follows from the wrappers: names, settings and help."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

import workbench
from workbench import Wrapper, compose, neo, sample, sculpt, vote
from workbench.core.registry import unregister
from workbench.widgets import Comparison
from workbench.widgets.comparison.forms import CandidateForm, Form
from workbench.widgets.comparison.settings import (
    Candidate,
    Part,
    Unwritable,
    candidates,
    fitting,
    part_of,
    settings_of,
    summary,
    wrapper_classes,
)


def by_name(cls, task=None):
    return {setting.name: setting for setting in settings_of(cls, task)}


def test_every_wrapper_of_the_package_is_found():
    assert set(wrapper_classes()) == {"augment", "laplace", "neo", "sample", "sculpt", "snapshot", "swag", "vote"}
    for name, cls in wrapper_classes().items():
        assert cls is getattr(workbench, name).Wrapper
        assert summary(cls).endswith(".")


def test_a_registered_wrapper_appears_by_itself():
    @workbench.register(name="brandnew")
    class Brandnew(Wrapper):
        """Nothing at all."""

        size: int = workbench.setting(default=4, least=2, help="how much")
        mode: Literal["slow", "fast"] = "slow"

        def make(self):
            return []

    try:
        settings = by_name(wrapper_classes()["brandnew"])
        (candidate,) = candidates(["brandnew(size=3, mode='fast') + vote"])
        with pytest.raises(ValueError, match=r"size must be a whole number of at least 2, not 1"):
            candidates(["brandnew(size=1)"])
    finally:
        unregister("brandnew")
    assert (settings["size"].number, settings["size"].least, settings["size"].default) == (int, 2, 4)
    assert settings["mode"].menu == ("slow", "fast")
    assert settings["size"].help == "how much"
    assert candidate.parts == [Part(Brandnew, {"size": 3, "mode": "fast"}), Part(vote.Wrapper)]
    assert Form(candidate.parts[0]).controls["size"].value == 3


def test_settings_come_from_fields():
    settings = by_name(vote.Wrapper)
    assert (settings["n_voters"].number, settings["n_voters"].least, settings["n_voters"].default) == (int, 1, 3)
    assert settings["alpha"].number is float
    assert settings["use_bias"].menu == (True, False)
    assert (settings["share"].menu, settings["share"].number) == ((None, "rank1"), int)
    assert "strategy" not in settings
    assert "output" not in settings
    assert by_name(sample.Wrapper)["distribution"].menu == (sample.Bernoulli, sample.Normal)
    assert set(by_name(neo.Wrapper)["density"].menu) >= {"signature", "knn", "flow"}
    for cls in wrapper_classes().values():
        assert all(setting.help for setting in settings_of(cls)), cls


def test_output_distributions_are_those_of_the_task():
    values, classes = (by_name(sculpt.Wrapper, task)["distribution"] for task in ("regression", "classification"))
    assert sculpt.Normal in values.menu
    assert sculpt.LogitNormal not in values.menu
    assert classes.menu == (sculpt.LogitNormal,)
    assert fitting(Part(sculpt.Wrapper), "regression").values == {}
    assert fitting(Part(sculpt.Wrapper), "classification").values == {"distribution": sculpt.LogitNormal}


@pytest.mark.parametrize(
    "wrapper",
    [
        vote.Wrapper(5),
        vote.Wrapper(n_voters=2, share="rank1", chunk=1),
        sculpt.Wrapper(sculpt.Normal(beta=0.5), n_layers=1),
        sculpt.Wrapper(sculpt.StudentT),
        sample.Wrapper(4, distribution=sample.Normal(0.3), where="weights"),
        neo.Wrapper(layers=["0"], density="gaussian"),
        compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper()),
        compose(),
    ],
    ids=repr,
)
def test_what_is_written_builds_the_same_wrapper(wrapper):
    candidate = candidates({"it": wrapper})[0]
    assert repr(candidate.build()) == repr(wrapper)
    imports: set[str] = set()
    source = candidate.source(imports)
    names: dict[str, object] = {}
    exec("\n".join(imports), names)
    assert repr(eval(source, names)) == repr(wrapper)
    assert ("beta=0.5" in source) == ("sculpt.Normal(beta" in source) == ("n_layers=1" in source)
    form = CandidateForm(candidate.parts, "regression")
    again = Candidate("it", form.parts())
    assert repr(again.build()) == repr(wrapper)
    for part, entered in zip(candidate.parts, again.parts, strict=True):
        ours, theirs = vars(part.build()), vars(entered.build())
        for name in ours:
            assert repr(ours[name]) == repr(theirs[name]), name  # of a distribution with all its options


def test_what_has_no_source_says_so():
    class Own(Wrapper):
        pass

    with pytest.raises(Unwritable, match="Own is not defined in a module"):
        Part(Own).source(set())
    odd = Part(neo.Wrapper, {"layers": [object()]})
    with pytest.raises(Unwritable, match="can't be written"):
        odd.source(set())


def test_the_class_output_is_told_to_wrappers_that_say_nothing():
    assert Part(vote.Wrapper).build("logits").output == "logits"
    assert Part(vote.Wrapper, {"output": "probs"}).build("logits").output == "probs"
    assert Part(vote.Wrapper).source(set(), "logits") == "vote.Wrapper(output='logits')"


def test_names_and_wrappers_become_candidates():
    parsed = candidates(["vote", "vote+neo", vote.Wrapper(7), sculpt.Wrapper, "plain", "vote(n_voters=5)"])
    assert [c.name for c in parsed] == ["vote", "vote+neo", "vote 2", "sculpt", "plain", "vote(n_voters=5)"]
    assert [len(c.parts) for c in parsed] == [1, 2, 1, 1, 0, 1]
    assert parsed[2].parts[0].values == {"n_voters": 7}
    assert parsed[5].parts[0].values == {"n_voters": 5}
    with pytest.raises(ValueError, match="there is no wrapper 'votes': did you mean vote"):
        candidates(["votes"])
    with pytest.raises(TypeError, match="found 3"):
        candidates([3])
    with pytest.raises(TypeError, match="a name must be a text"):
        candidates({1: vote.Wrapper()})
    with pytest.raises(TypeError, match="wrappers: found int"):
        candidates(3)


def test_wrappers_remember_what_they_were_made_of_through_copies():
    import copy
    import pickle

    wrapper = vote.Wrapper(4, alpha=0.5)
    for again in (wrapper, copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert part_of(again).values == {"n_voters": 4, "alpha": 0.5}


# ---- forms
def test_a_form_starts_at_the_defaults_and_says_only_what_differs():
    for cls in wrapper_classes().values():
        assert Form(Part(cls)).part() == Part(cls), cls
    form = Form(Part(vote.Wrapper))
    form.controls["n_voters"].value = 9
    form.controls["finetune"].value = True
    assert form.part().values == {"n_voters": 9, "finetune": True}


def test_a_number_or_a_choice():
    form = Form(Part(vote.Wrapper))
    share = form.controls["share"]
    assert [label for label, _ in share.options] == ["the default", "rank1", "a number"]
    assert share.label == "the default"  # None itself would be shown as nothing
    share.value = "rank1"
    assert form.part().values == {"share": "rank1"}
    share.value = "a number"
    form._numbers["share"].value = 2
    assert form._numbers["share"] in form.box.children
    assert form.part().values == {"share": 2}
    share.value = "the default"
    assert form.part().values == {}


def test_a_class_among_the_choices_has_settings_of_its_own():
    form = Form(Part(sample.Wrapper))
    assert form.part().values == {}
    form._inside["distribution"].controls["p"].value = 0.25
    assert repr(form.part().build()) == repr(sample.Wrapper(distribution=sample.Bernoulli(0.25)))
    form.controls["distribution"].value = sample.Normal
    form._inside["distribution"].controls["scale"].value = 0.5
    assert repr(form.part().build()) == repr(sample.Wrapper(distribution=sample.Normal(0.5)))


def test_names_are_entered_as_text():
    form = Form(Part(neo.Wrapper, {"layers": ["0", "2"]}))
    assert form.controls["layers"].value == "0, 2"
    form.controls["layers"].value = "1"
    assert form.part().values == {"layers": ["1"]}
    form.controls["layers"].value = ""
    assert form.part().values == {}


def test_a_value_that_no_control_can_show_is_kept():
    density = neo.DENSITIES["gaussian"]()
    form = Form(Part(neo.Wrapper, {"density": density}))
    assert form.controls["density"].disabled
    assert form.part().values["density"] is density
    wrapped = form.part().build()(nn.Linear(2, 1)).eval().fit(torch.randn(50, 2))
    assert wrapped.methods == ("neo",)


def test_every_control_has_a_tooltip():
    for cls in wrapper_classes().values():
        form, described = Form(Part(cls)), by_name(cls)
        for name, control in form.controls.items():
            assert control.tooltip == f"{name}: {described[name].help}", (cls, name)


@pytest.mark.slow
def test_a_blocking_start_trains_the_others_and_names_the_model_that_failed():
    wrappers = {"odd": neo.Wrapper(layers="nowhere"), "vote": vote.Wrapper()}
    comparison = Comparison(lambda: nn.Linear(3, 1), (torch.randn(80, 3), torch.randn(80, 1)), wrappers, epochs=1)
    with pytest.raises(ValueError, match="nowhere") as raised:
        comparison.start(block=True)
    assert raised.value.__notes__ == ["while training odd; the other models were trained all the same"]
    assert comparison.results.index.tolist() == ["plain", "vote"]
    assert list(comparison.errors) == ["odd"]
