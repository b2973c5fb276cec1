"""Models with peft adapters: each voter has its own adapters on shared weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.default_suite import one_in
from torch import nn

import workbench
from workbench import compose, neo, sample, sculpt, vote
from workbench.outputs import Logits

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from helpers.peft_models import ATTENTION, KINDS, bert, classes, learned, llama  # noqa: E402  # it needs peft

INPUTS = {"input_ids": torch.arange(32).reshape(4, 8)}


@pytest.fixture(scope="module")
def plain() -> Any:
    """A classifier with a frozen base and adapters that have learned something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(bert(), classes()).eval()


def _trained(plain: Any) -> Any:
    wrapped = vote.Wrapper(3, output={"logits": Logits()})(plain).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return wrapped


def _numbers(model: torch.nn.Module, trainable: bool) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad == trainable)


def test_voters_cost_their_adapters_and_answer_as_plain_ones(plain: Any) -> None:
    wrapped = _trained(plain)
    assert _numbers(wrapped, trainable=True) == 3 * _numbers(plain, trainable=True)
    assert _numbers(wrapped, trainable=False) == _numbers(plain, trainable=False)
    with torch.no_grad():
        output, risk = wrapped(**INPUTS, return_risk=True)
        probs = torch.stack([voter(**INPUTS).logits.softmax(-1) for voter in wrapped.voters()])
    torch.testing.assert_close(output.logits.softmax(-1), probs.mean(0))
    torch.testing.assert_close(risk.total.logits, torch.special.entr(probs.mean(0)).sum(-1))
    torch.testing.assert_close(risk.aleatoric.logits, torch.special.entr(probs).sum(-1).mean(0))
    assert bool((risk.epistemic.logits > 1e-6).all())


TYPES: dict[str, Callable[[], Any]] = {
    **KINDS,
    "rsLoRA and biases": lambda: peft.LoraConfig(r=2, use_rslora=True, bias="lora_only", **ATTENTION),
    "PiSSA": lambda: peft.LoraConfig(r=2, init_lora_weights="pissa", **ATTENTION),
    "OLoRA": lambda: peft.LoraConfig(r=2, init_lora_weights="olora", **ATTENTION),
    "norms to save": lambda: peft.LoraConfig(r=2, modules_to_save=["LayerNorm"], **ATTENTION),
    "LoRA and tokens": lambda: peft.LoraConfig(r=2, trainable_token_indices={"word_embeddings": [1, 2]}, **ATTENTION),
    "VeRA": lambda: peft.VeraConfig(r=2, **ATTENTION),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["LayerNorm"], task_type="SEQ_CLS"),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=2, target_r=1, total_step=9, **ATTENTION),
    "prompts": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS"),
    "P-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="SEQ_CLS"),
    "prefixes": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "adaption prompts": lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", one_in(4, TYPES))
def test_every_kind_of_adapter_votes(kind: str) -> None:
    config = TYPES[kind]()
    torch.manual_seed(0)
    decodes = config.task_type == "CAUSAL_LM"
    model = peft.get_peft_model(llama() if decodes else bert(), config).eval()
    output = {"logits": Logits(dim=-1 if decodes else None)}
    wrapped = vote.Wrapper(2, output=output, independent=False)(model).eval()
    learned(wrapped)
    voters = wrapped.voters()
    with torch.no_grad():
        probs = torch.stack([voter(**INPUTS).logits.softmax(-1) for voter in voters])
        y, risk = wrapped(**INPUTS, return_risk=True)
        torch.testing.assert_close(y.logits.softmax(-1), probs.mean(0))
        torch.testing.assert_close(risk.total.logits, torch.special.entr(probs.mean(0)).sum(-1))
        assert float((probs[0] - probs[1]).abs().max()) > 1e-6
        for other in (neo.Wrapper(output=output), sculpt.Wrapper(output=output)):
            torch.testing.assert_close(other(model).eval()(**INPUTS).logits, model(**INPUTS).logits)
    labels = INPUTS["input_ids"] if decodes else torch.tensor([0, 1, 2, 0])
    for each in (wrapped, *voters):
        each(**INPUTS, labels=labels).loss.backward()
    trained = {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}
    assert trained.keys() == {f"{name}@vote" for name, p in model.named_parameters() if p.requires_grad}
    for name, gradient in trained.items():
        expected = torch.stack([voter.get_parameter(name.removesuffix("@vote")).grad for voter in voters]) / 2
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def test_adapters_are_disabled_for_all_voters(plain: Any) -> None:
    wrapped, base = _trained(plain), copy.deepcopy(plain)
    with torch.no_grad():
        wrapped(**INPUTS)  # a first call without them would say that no output depends on what should differ
    with torch.no_grad(), wrapped.disable_adapter(), base.disable_adapter():
        torch.testing.assert_close(wrapped(**INPUTS).logits.softmax(-1), base(**INPUTS).logits.softmax(-1))


def test_saved_adapters_come_back(plain: Any, tmp_path: Path) -> None:
    wrapped = _trained(plain)
    workbench.save(wrapped, tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(workbench.load(tmp_path / "model", plain).eval()(**INPUTS).logits, wrapped(**INPUTS).logits)


def test_each_voter_can_be_merged_and_the_wrapped_model_cannot(plain: Any) -> None:
    wrapped = _trained(plain)
    with torch.no_grad():
        before = wrapped(**INPUTS).logits
        for voter in wrapped.voters():
            answer = voter(**INPUTS).logits
            torch.testing.assert_close(voter.merge_and_unload()(**INPUTS).logits, answer)
        for name in ("merge_adapter", "merge_and_unload", "unload"):
            with pytest.raises(TypeError, match=rf"{name} of this wrapped .* of the first branch"):
                getattr(wrapped, name)()
        with pytest.raises(TypeError, match=r"unwrap\(\)"):
            wrapped.delete_adapter("default")
        for merge in (wrapped.base_model.merge_and_unload, wrapped.base_model.merge_adapter):
            with pytest.raises(TypeError, match=r"merge of '.*query'.*weights that all voters share"):
                merge()
        assert torch.equal(wrapped(**INPUTS).logits, before)


def test_adapters_are_put_into_a_model_whose_layers_all_branches_share(plain: Any) -> None:
    adapters = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", init_lora_weights=False)
    for wrapper in (sample.Wrapper(2, output={"logits": Logits()}), neo.Wrapper(output={"logits": Logits()})):
        wrapped = wrapper(copy.deepcopy(plain).unload())
        model = peft.get_peft_model(wrapped, adapters).train()
        model(**INPUTS, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        learned = {name: p for name, p in model.named_parameters() if "lora" in name}
        assert learned
        assert all(bool(p.grad.any()) for p in learned.values())
    with torch.no_grad():  # neo gives the model's own prediction
        expected = model.get_base_model().unwrap().eval()(**INPUTS).logits
        torch.testing.assert_close(model.eval()(**INPUTS).logits, expected)
    copied = copy.deepcopy(model)  # peft looks for what makes copies in the model inside
    assert type(copied) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(copied(**INPUTS).logits, expected)
        learned["base_model.model.classifier.modules_to_save.default.weight"] = model.get_base_model().classifier.weight
    assert all(p is not copied.get_parameter(name) for name, p in learned.items())
    headed = sculpt.Wrapper(output={"logits": Logits()})(copy.deepcopy(plain).unload())
    with pytest.raises(TypeError, match=r"sculpt\(.*depends on the layers.*wrapper\(peft\.get_peft_model"):
        peft.get_peft_model(headed, peft.LoraConfig(r=2, target_modules=["dense"], task_type="SEQ_CLS"))
    with torch.no_grad():  # nothing has changed
        torch.testing.assert_close(headed.eval()(**INPUTS).logits, headed.unwrap().eval()(**INPUTS).logits)


def test_adapters_next_to_risk_heads_are_not_merged() -> None:
    base = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["2"])).requires_grad_(True)
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=3))(model)
    assert any("base_layer.weight@sculpt" in name for name, _ in wrapped.named_parameters())
    with pytest.raises(TypeError, match=r"merge of 'base_model\.model\.2'.*risk heads"):
        wrapped.base_model.merge_adapter()


def test_ranks_are_not_allocated_over_all_voters_together() -> None:
    config = peft.AdaLoraConfig(init_r=2, target_r=1, tinit=0, tfinal=1, total_step=9, target_modules=["0", "2"])
    model = peft.get_peft_model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), config)
    wrapped, x = vote.Wrapper(2)(model), torch.randn(4, 2)
    wrapped(x).sum().backward()
    for call in (wrapped.base_model.update_and_allocate, copy.deepcopy(wrapped).base_model.update_and_allocate):
        with pytest.raises(TypeError, match=r"update_and_allocate of 'base_model'.*all voters together.*voters\(\)"):
            call(1)
    (voter, _), neighbour = wrapped.voters(), neo.Wrapper()(model)
    for each in (voter, neighbour):  # by itself, or where all branches share the adapters
        each(x).sum().backward()
        each.base_model.update_and_allocate(1)
        assert sum(int((p == 0).sum()) for name, p in each.named_parameters() if "lora_E" in name) > 0


def test_adapters_of_parameters_are_refused() -> None:
    def config() -> Any:
        return peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.weight"])

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    model = peft.get_peft_model(network(), config())
    for wrapper in (vote.Wrapper(2), sample.Wrapper(2), sculpt.Wrapper(), neo.Wrapper()):
        with pytest.raises(TypeError, match=r"'base_model\.model\.0' adds an adapter.*target_modules"):
            wrapper(model)
        with pytest.raises(TypeError, match=r"target_parameters|depends on the layers"):
            peft.get_peft_model(wrapper(network()), config())


@pytest.mark.slow
def test_where_peft_is_imported_wrapped_models_are_still_one_graph() -> None:
    torch._dynamo.reset()
    wrapped = vote.Wrapper(2)(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.randn(4, 2)
    wrapped(x)
    rows = torch.compile(wrapped, backend="eager", fullgraph=True)(x)  # dealt to the voters
    each = torch.stack([voter(x) for voter in wrapped.voters()])
    assert float((each - rows).detach().abs().min(0).values.max()) < 1e-6


def test_layers_that_peft_puts_into_the_first_voter_alone_are_refused(plain: Any) -> None:
    wrapped = _trained(plain)
    wrapped(**INPUTS)
    wrapped.base_model.peft_config["two"] = plain.peft_config["default"]
    wrapped.base_model.inject_adapter(wrapped.base_model.model, "two")
    with pytest.raises(RuntimeError, match=r"'.*\.two\..*' to this wrapped PeftModel.* after wrapping"):
        wrapped(**INPUTS)


@pytest.mark.parametrize("below", [False, True])
def test_an_adapter_that_was_inactive_when_wrapped_is_no_ones_own(below: bool, plain: Any) -> None:
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = copy.deepcopy(plain)
    model.add_adapter("two", config)
    wrapped = vote.Wrapper(2, output={"logits": Logits()})(model).eval()
    expected = wrapped(**INPUTS).logits
    (wrapped.base_model if below else wrapped).set_adapter("two")
    with pytest.raises(RuntimeError, match=r"'two' was not active when .*set_adapter\('two'\) before you wrap"):
        wrapped(**INPUTS)
    (wrapped.base_model if below else wrapped).set_adapter("default")
    torch.testing.assert_close(wrapped(**INPUTS).logits, expected)
    model.set_adapter("two")
    active = vote.Wrapper(2, output={"logits": Logits()})(model)
    learned = {name for name, parameter in active.named_parameters() if parameter.requires_grad}
    assert learned
    assert all(".two." in name and name.endswith("@vote") for name in learned)


def test_frozen_adapters_are_told_how_to_be_trained(plain: Any, tmp_path: Path) -> None:
    plain.save_pretrained(tmp_path)
    base = copy.deepcopy(plain).unload()
    with pytest.raises(ValueError, match=r"is_trainable=True"):
        vote.Wrapper(2)(peft.PeftModel.from_pretrained(base, tmp_path))


def test_what_all_voters_would_share_is_refused(plain: Any, tmp_path: Path) -> None:
    wrapped = _trained(plain)
    plain.save_pretrained(tmp_path)
    calls = {
        "add_adapter": lambda: wrapped.add_adapter("two", plain.peft_config["default"]),
        "add_weighted_adapter": lambda: wrapped.add_weighted_adapter(["default"], [1.0], "two"),
        "load_adapter": lambda: wrapped.load_adapter(tmp_path, "default"),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name} of this wrapped Peft.* and wrap"):
            call()
    sampled = sample.Wrapper(2, output={"logits": Logits()})(copy.deepcopy(plain))
    sampled.load_adapter(tmp_path, "default")  # all share them anyway


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_folder_gives_the_adapters_of_all_voters_and_to_peft_those_of_the_first(plain: Any, tmp_path: Path) -> None:
    wrapped, other = _trained(plain), vote.Wrapper(3, output={"logits": Logits()})(plain).eval()
    wrapped.save_pretrained(tmp_path, state_dict=None)
    wrapped.save_pretrained(tmp_path)  # again, beside what peft reads
    other.load_adapter(tmp_path, "default")
    first = peft.PeftModel.from_pretrained(copy.deepcopy(plain).unload(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(other(**INPUTS).logits, wrapped(**INPUTS).logits)
        torch.testing.assert_close(first(**INPUTS).logits, wrapped.voters()[0](**INPUTS).logits)
    with pytest.raises(ValueError, match="n_voters"):
        vote.Wrapper(2, output={"logits": Logits()})(plain).load_adapter(tmp_path, "default")


def test_plain_models_of_a_wrapped_class_merge_as_peft_does(plain: Any) -> None:
    unwrapped = sample.Wrapper(2)(plain).unwrap()
    with torch.no_grad():
        answer = unwrapped(**INPUTS).logits
        unwrapped.merge_adapter()
        torch.testing.assert_close(unwrapped(**INPUTS).logits, answer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_adapters_are_reached_through_reentrant_checkpoints() -> None:
    """Their graph does not show the layers, which run again in the backward pass."""
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, attn_pdrop=0.0)
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0})
    adapters = peft.LoraConfig(
        r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, init_lora_weights=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)}, independent=False)(model).train()
    wrapped.gradient_checkpointing_enable({"use_reentrant": True})
    wrapped.enable_input_require_grads()
    ids = torch.arange(10).reshape(2, 5)
    plain = [voter.train() for voter in wrapped.voters()]
    for each in plain:
        each.gradient_checkpointing_disable()
    wrapped(input_ids=ids).logits.softmax(-1).square().sum().backward()
    probs = torch.stack([voter(input_ids=ids).logits.softmax(-1) for voter in plain]).mean(0)
    probs.square().sum().backward()
    learned = [(name, parameter) for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert learned
    for name, parameter in learned:
        expected = torch.stack([voter.get_parameter(name.removesuffix("@vote")).grad for voter in plain])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-7)


def test_text_is_generated_by_the_model_inside() -> None:
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters).eval()
    ids = torch.tensor([[2, 3, 4]])
    outputs = {"logits": Logits(dim=-1)}
    with pytest.raises(TypeError, match=r"get_base_model\(\)"):
        vote.Wrapper(2, output=outputs)(model).generate(input_ids=ids, max_new_tokens=2)
    wrapped = vote.Wrapper(2, output=outputs)(model.get_base_model()).eval()
    written = workbench.text.generate(wrapped, ids, max_new_tokens=3)
    with torch.no_grad():
        probs = torch.stack([v(input_ids=written.sequences).logits.softmax(-1) for v in wrapped.voters()]).mean(0)
    torch.testing.assert_close(written.risk.total[0], torch.special.entr(probs[0, 2:-1]).sum(-1))
