"""What peft cannot do to a wrapped model: refused by name, and the model stays as it was."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import compose, neo, sample, sculpt, snapshot, vote
from workbench.errors import FrozenModelError
from workbench.outputs import Logits

peft = pytest.importorskip("peft")
from helpers.peft_models import (  # noqa: E402  # it needs peft
    IDS,
    N,
    assert_answers,
    bert,
    classes,
    decoder,
    learned,
    llama,
    logits,
    references,
    voting,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOKENS = {"logits": Logits(dim=-1)}
PROMPTS = {
    "PROMPT_TUNING": peft.PromptTuningConfig,
    "PREFIX_TUNING": peft.PrefixTuningConfig,
    "P_TUNING": functools.partial(peft.PromptEncoderConfig, encoder_hidden_size=8),
    "MULTITASK_PROMPT_TUNING": functools.partial(peft.MultitaskPromptTuningConfig, num_tasks=2),
}
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "heads": (
        lambda: compose(vote.Wrapper(2, output={"logits": Logits()}), sculpt.Wrapper())(bert()),
        lambda: peft.LoraConfig(r=2, target_modules=["dense"]),
        "sculpt",
    ),
    "noise": (
        lambda: compose(vote.Wrapper(2, output={"logits": Logits()}), sample.Wrapper(2))(bert()),
        lambda: peft.LoraConfig(r=2, target_modules=["query"]),
        "sample",
    ),
    "prior": (lambda: voting(prior=1.0), classes, "vote"),
    "not the last yet": (lambda: voting(share=1), classes, "call it once"),
    "sets of weights": (
        lambda: snapshot.Wrapper(2, output={"logits": Logits()})(bert()),
        lambda: peft.LoraConfig(r=2, target_modules=["query"]),
        "snapshot",
    ),
    "another kind": (voting, lambda: peft.VeraConfig(target_modules=["query"]), "VERA"),
    "biases": (voting, lambda: classes(bias="all"), "bias='all'"),
    "of the first": (voting, lambda: classes(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
    "tied": (
        lambda: vote.Wrapper(N, output={"logits": Logits(dim=-1)})(decoder()),
        lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["lm_head"]),
        "'transformer.wte.weight' is tied.*copy of 'lm_head' alone",
    ),
    "tied to the first": (
        lambda: vote.Wrapper(N, output={"logits": Logits(dim=-1)})(decoder()),
        lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["wte"]),
        "is tied.*copy of 'transformer.wte' alone",
    ),
    "tokens": (voting, lambda: classes(trainable_token_indices=[1]), "trainable_token_indices"),
    "copies of factors": (
        lambda: voting(share="rank1"),
        classes,
        "'classifier.*weight' is a copy of a weight with factors",
    ),
    "norms": (voting, lambda: peft.LNTuningConfig(target_modules=["LayerNorm"]), "LN_TUNING"),
    "ranks": (
        voting,
        lambda: peft.AdaLoraConfig(init_r=2, target_r=1, total_step=9, target_modules=["query"]),
        "ADALORA",
    ),
    **{
        f"{kind} with {wrapper}": (
            lambda wrap=wrap: wrap(output={"logits": Logits(dim=-1)})(decoder()),
            lambda make=make: make(num_virtual_tokens=3, task_type="CAUSAL_LM"),
            f"{kind}, a prompt outside of the model",
        )
        for kind, make in PROMPTS.items()
        for wrapper, wrap in {"vote": functools.partial(vote.Wrapper, N), "sculpt": sculpt.Wrapper}.items()
    },
    "prompts of classes": (
        voting,
        lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS"),
        "PROMPT_TUNING, a prompt outside of the model",
    ),
    **{
        f"adaption prompts with {name}": (
            lambda wrapper=wrapper: wrapper(llama()),
            lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM"),
            "ADAPTION_PROMPT",
        )
        for name, wrapper in {"vote": vote.Wrapper(N, output=TOKENS), "neo": neo.Wrapper(output=TOKENS)}.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_voters_cannot_have_each_is_refused_by_name_and_changes_nothing(case: str) -> None:
    make, config, says = REFUSED[case]
    wrapped = make().requires_grad_(True).eval()
    expected = wrapped(IDS).logits if case != "not the last yet" else None
    before, modules = dict(wrapped.named_parameters()), [*wrapped.modules()]
    with pytest.raises(TypeError, match=rf"(?s){says}.*wrapper\(peft\.get_peft_model\(model, config\)\)"):
        peft.get_peft_model(wrapped, config())
    assert not hasattr(wrapped, "peft_config")
    assert [*map(id, wrapped.modules())] == [*map(id, modules)]
    assert {name: id(p) for name, p in wrapped.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert all(parameter.requires_grad for parameter in before.values())
    answer = wrapped(IDS).logits
    if expected is not None and case != "noise":
        torch.testing.assert_close(answer, expected)
    answer.sum().backward()
    wrapped.voters(), wrapped.unwrap()


@pytest.mark.parametrize("case", ["tied", "another kind"])
def test_after_a_refusal_other_adapters_are_taken(case: str) -> None:
    wrapped = REFUSED[case][0]()
    with pytest.raises(TypeError, match="can't each have"):
        peft.get_peft_model(wrapped, REFUSED[case][1]())
    plain = wrapped.voters()
    targets = ["c_attn"] if case == "tied" else ["query"]
    adapted = peft.get_peft_model(wrapped, peft.LoraConfig(r=2, target_modules=targets)).eval()
    learned(adapted)
    config = functools.partial(peft.LoraConfig, r=2, target_modules=targets)
    with torch.no_grad():
        assert_answers(adapted, logits(references(plain, adapted, config)))


def test_a_frozen_model_gets_no_adapters() -> None:
    wrapped = voting()
    modules = [*wrapped.modules()]
    with wrapped.frozen(), pytest.raises(FrozenModelError, match="adding layers of peft"):
        peft.get_peft_model(wrapped, classes())
    assert [*map(id, wrapped.modules())] == [*map(id, modules)]


def test_a_second_adapter_is_refused_and_the_first_goes_on() -> None:
    adapted = peft.get_peft_model(voting(), classes()).eval()
    expected = adapted(input_ids=IDS).logits
    with pytest.raises(TypeError, match=r"it has adapters already \('default', 'two'\)"):
        adapted.add_adapter("two", peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    with pytest.raises(TypeError, match=r"it has adapters already \('default'\)"):
        peft.get_peft_model(adapted.get_base_model(), classes())
    torch.testing.assert_close(adapted(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("targets", [["query"], "all-linear"], ids=str)
def test_adapters_inside_a_wrapped_part_are_refused_and_the_remedy_works(targets: Any) -> None:
    at, config = "bert.encoder", functools.partial(peft.LoraConfig, r=2, target_modules=targets)
    whole = vote.Wrapper(N)(bert(), at=at).eval()
    expected, modules = whole(IDS).logits, [*whole.modules()]
    with pytest.raises(
        TypeError, match=r"attention\.self\.query', inside the part 'bert\.encoder'.*base_model\.model\.bert"
    ):
        peft.get_peft_model(whole, config())
    assert [*map(id, whole.modules())] == [*map(id, modules)]
    torch.testing.assert_close(whole(IDS).logits, expected)
    around = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules=["classifier"])).eval()  # outside of it
    torch.testing.assert_close(around(IDS).logits, expected)

    model = peft.get_peft_model(bert(), config(init_lora_weights=False)).eval()
    wrapped = vote.Wrapper(N)(model, at=f"base_model.model.{at}").eval()
    hidden = torch.randn(2, 5, 16)
    with torch.no_grad():
        part = wrapped.get_submodule(f"base_model.model.{at}")
        each = torch.stack([voter(hidden).last_hidden_state for voter in part.voters()])
        torch.testing.assert_close(part(hidden).last_hidden_state, each.mean(0))
        torch.testing.assert_close(part(hidden, return_risk=True)[1].last_hidden_state, each.std(0, correction=0))
        assert bool((each.std(0) > 0).all())


def test_adapters_of_one_plain_model_are_refused_for_voters_and_nothing_is_changed(tmp_path: Path) -> None:
    peft.get_peft_model(bert(), classes(init_lora_weights=False)).save_pretrained(tmp_path)
    wrapped = voting().requires_grad_(True)
    expected, modules = wrapped(IDS).logits, [*wrapped.modules()]
    with pytest.raises(TypeError, match=r"adapters of one plain model.*finetune=True.*wrapped\.voters\(\)"):
        peft.PeftModel.from_pretrained(wrapped, tmp_path)
    assert [*map(id, wrapped.modules())] == [*map(id, modules)]
    assert all(parameter.requires_grad for parameter in wrapped.parameters())
    torch.testing.assert_close(wrapped(IDS).logits, expected)
    expected = torch.stack([peft.PeftModel.from_pretrained(v, tmp_path)(IDS).logits for v in wrapped.voters()])
    assert bool((expected.std(0) > 0).all())  # as the error says

    adapted = peft.get_peft_model(wrapped, classes()).eval()
    learned(adapted)
    before = copy.deepcopy(adapted.state_dict())
    with pytest.raises(TypeError, match="adapters of one plain model"):
        adapted.load_adapter(tmp_path, "default")
    torch.testing.assert_close(adapted.state_dict(), before)
    adapted.save_pretrained(tmp_path / "voters")  # those of all voters are taken
    adapted.load_adapter(tmp_path / "voters", "default")
    torch.testing.assert_close(adapted.state_dict(), before)


def test_all_voters_start_at_the_adapters_of_one_plain_model(tmp_path: Path) -> None:
    base = bert()
    plain = peft.get_peft_model(copy.deepcopy(base), classes(init_lora_weights=False)).eval()
    plain.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    wrapped = vote.Wrapper(N, output={"logits": Logits()}, finetune=True)(loaded).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(wrapped.voters()), logits([plain] * N))
