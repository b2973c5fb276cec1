"""Adapters that peft puts into a model whose voters have layers of their own: each voter keeps its base and gets adapters of its own."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench
from workbench import sample, vote
from workbench.outputs import Logits

peft = pytest.importorskip("peft")
from helpers.peft_models import (  # noqa: E402  # it needs peft
    IDS,
    KINDS,
    LABELS,
    N,
    assert_answers,
    bert,
    classes,
    decoder,
    learned,
    logits,
    references,
    voting,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


TYPES: dict[str, Callable[[], Any]] = {
    **KINDS,
    "orthogonal": functools.partial(classes, init_lora_weights="orthogonal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_every_voter_gets_such_adapters_and_keeps_them(kind: str, tmp_path: Path) -> None:
    wrapped = voting(independent=False)
    plain, start = wrapped.voters(), copy.deepcopy(wrapped)
    with torch.no_grad():
        before = logits(plain)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(wrapped, TYPES[kind]()).eval()
    torch.manual_seed(1)
    first = peft.get_peft_model(copy.deepcopy(plain[0]), TYPES[kind]())
    parameters = dict(adapted.named_parameters())
    trained = {name: p for name, p in first.named_parameters() if p.requires_grad}
    assert {name for name, p in parameters.items() if p.requires_grad} == {f"{name}@vote" for name in trained}
    assert all(torch.equal(parameters[f"{name}@vote"][0], p) for name, p in trained.items())
    with torch.no_grad():  # no adapter has an effect at the start, which DoRA's magnitudes depend on
        torch.testing.assert_close(logits(wrapped.voters()), before, rtol=1e-3, atol=1e-4)
    learned(adapted)
    models = references(plain, adapted, TYPES[kind])
    for model in (adapted, *models):
        model(input_ids=IDS, labels=LABELS).loss.backward()
    for name in trained:
        expected = torch.stack([model.get_parameter(name).grad for model in models]) / N
        torch.testing.assert_close(parameters[f"{name}@vote"].grad, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        expected = logits(models)
        assert float((expected - before).abs().amax(dim=(1, 2)).min()) > 1e-4
        assert_answers(adapted, expected)
        with adapted.disable_adapter():
            assert_answers(adapted, before)
        adapted.save_pretrained(tmp_path)
        assert_answers(peft.PeftModel.from_pretrained(start, tmp_path).eval(), expected)
        adapted.merge_adapter()
        assert_answers(adapted, expected)
        adapted.unmerge_adapter()
        assert_answers(adapted, expected)
        assert_answers(copy.deepcopy(adapted).unload(), logits([copy.deepcopy(model).unload() for model in models]))
        merged = adapted.merge_and_unload()
        assert_answers(merged, expected)
        for voter, model in zip(merged.voters(), models, strict=True):
            torch.testing.assert_close(voter.state_dict(), model.merge_and_unload().state_dict())


@pytest.mark.parametrize("kind", ["DoRA", "IA3", "OFT"])
@pytest.mark.parametrize(
    "options", [{"share": 1}, {"use_bias": False}, {"finetune": True}, {"share": "rank1"}], ids=str
)
def test_whatever_voters_share_they_get_such_adapters(options: dict[str, Any], kind: str) -> None:
    def config() -> Any:
        peft_config = TYPES[kind]()
        peft_config.task_type = None
        return peft_config

    wrapped = vote.Wrapper(N, output={"logits": Logits()}, **options)(bert()).eval()
    wrapped(IDS)
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, config()).eval()
    learned(adapted)
    with torch.no_grad():
        expected = logits(references(plain, adapted, config))
        assert_answers(adapted, expected)
        if "finetune" not in options and (kind != "DoRA" or "share" in options):
            with pytest.raises(TypeError, match=r"merge of '.*(query|value)'.*all voters share.*voters\(\)"):
                adapted.merge_adapter()
            assert_answers(adapted, expected)


@pytest.mark.parametrize("called_before", [False, True])
def test_each_voter_keeps_its_base_and_gets_adapters_as_peft_draws_them(called_before: bool) -> None:
    wrapped = voting()
    if called_before:
        wrapped(IDS, return_risk=True)
    plain = wrapped.voters()
    with torch.no_grad():
        before = logits(plain)
    state = torch.get_rng_state()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    drawn = peft.get_peft_model(copy.deepcopy(plain[0]), classes())
    assert torch.equal(torch.get_rng_state(), after)  # the others' are drawn beside
    assert_answers(adapted, before)  # adapters start at no effect
    parameters, first = dict(adapted.named_parameters()), dict(drawn.named_parameters())
    trained = {name.removesuffix("@vote") for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {name for name, parameter in first.items() if parameter.requires_grad}
    assert all(name.removesuffix("@vote") in first for name in parameters)
    for name in trained:
        rows = parameters[f"{name}@vote"]
        if "classifier" in name:  # peft trains a copy
            torch.testing.assert_close(rows[1], plain[1].get_parameter(f"classifier.{name.rpartition('.')[2]}"))
            continue
        assert torch.equal(rows[0], first[name])
        assert bool((rows[1] == rows[2]).all()) == ("lora_B" in name)
        bound = 1 / first[name].shape[1] ** 0.5
        assert bool((rows.abs() <= bound).all())
        assert "lora_B" in name or 0.3 * bound < float(rows[1:].std()) < 0.9 * bound


def test_trained_adapters_answer_as_those_of_plain_models() -> None:
    wrapped = voting()
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    learned(adapted)
    with torch.no_grad():
        assert_answers(adapted, logits(references(plain, adapted)))


def test_training_moves_adapters_alone_as_in_plain_models() -> None:
    wrapped = voting(independent=False)
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    learned(adapted)
    models = references(plain, adapted)
    probs = logits(models).softmax(-1).mean(0)
    nn.functional.nll_loss(probs.log(), LABELS).backward()
    nn.functional.nll_loss(adapted(input_ids=IDS).logits.softmax(-1).log(), LABELS).backward()
    by_voter = [dict(model.named_parameters()) for model in models]
    for name, parameter in adapted.named_parameters():
        single = name.removesuffix("@vote")
        if parameter.requires_grad:
            expected = torch.stack([named[single].grad for named in by_voter])
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)
        else:
            assert parameter.grad is None
    frozen = {name: p.clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(adapted.parameters(), 0.1)
    optimizer.step()
    assert all(torch.equal(value, adapted.get_parameter(name)) for name, value in frozen.items())


def test_a_stock_fit_trains_the_adapters() -> None:
    wrapped = voting()
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes())
    workbench.fit(
        adapted.get_base_model(), (IDS.repeat(4, 1), LABELS.repeat(4)), epochs=2, validation=0, progress=False
    )
    with torch.no_grad():
        expected = logits(references(plain, adapted))
        assert_answers(adapted.eval(), expected)
        assert float((expected - logits(plain)).abs().min(0).values.max()) > 1e-4


def test_adapters_are_disabled_for_all_voters() -> None:
    wrapped = voting()
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    learned(adapted)
    with torch.no_grad(), adapted.disable_adapter():
        assert_answers(adapted, logits(plain))
    with torch.no_grad():
        assert_answers(adapted, logits(references(plain, adapted)))


@pytest.mark.slow
@pytest.mark.parametrize("safe", [False, True])
def test_adapters_are_merged_into_the_weights_of_each_voter(safe: bool) -> None:
    wrapped = voting()
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    learned(adapted)
    with torch.no_grad():
        models = references(plain, adapted)
        expected = logits(models)
        adapted.merge_adapter()
        assert_answers(adapted, expected)
        adapted.unmerge_adapter()
        assert_answers(adapted, expected)
        torch.testing.assert_close(
            adapted.get_base_model().voters()[2].bert.encoder.layer[0].attention.self.query.base_layer.weight,
            plain[2].bert.encoder.layer[0].attention.self.query.weight,
        )
        merged = adapted.merge_and_unload(safe_merge=safe)
        assert merged is wrapped
        assert_answers(merged, expected)
        for i, model in enumerate(models):
            state = model.merge_and_unload().state_dict()
            assert state.keys() == merged.voters()[i].state_dict().keys()
            for name, value in merged.voters()[i].state_dict().items():
                torch.testing.assert_close(value, state[name])
    again = peft.get_peft_model(merged, classes()).eval()  # and once more
    with torch.no_grad():
        assert_answers(again, expected)
    with torch.no_grad():
        torch.testing.assert_close(logits(again.unload().voters()), expected)


def test_merged_weights_without_numbers_are_refused_whole() -> None:
    adapted = peft.get_peft_model(voting(), classes()).eval()
    learned(adapted)
    with torch.no_grad():
        name = next(name for name, _ in adapted.named_parameters() if "lora_B" in name)
        adapted.get_parameter(name)[2].fill_(float("nan"))
        before = {name: value.clone() for name, value in adapted.state_dict().items()}
        with pytest.raises(ValueError, match="NaN"):
            adapted.merge_adapter(safe_merge=True)
        for name, value in adapted.state_dict().items():
            torch.testing.assert_close(value, before[name], equal_nan=True)


@pytest.mark.slow
def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    wrapped = voting()
    start = copy.deepcopy(wrapped)
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    learned(adapted)
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = logits(references(plain, adapted))
        again = peft.PeftModel.from_pretrained(copy.deepcopy(start), tmp_path)
        assert not any(parameter.requires_grad for parameter in again.parameters())
        assert_answers(again.eval(), expected)
        other = peft.get_peft_model(copy.deepcopy(start), classes()).eval()
        other.load_adapter(tmp_path, "default")
        assert_answers(other, expected)
        small = vote.Wrapper(2, output={"logits": Logits()})(bert())
        with pytest.raises(RuntimeError, match="size mismatch"):
            peft.PeftModel.from_pretrained(small, tmp_path)
    workbench.save(adapted, tmp_path / "model.safetensors")
    loaded = workbench.load(tmp_path / "model.safetensors", peft.get_peft_model(bert(), classes())).eval()
    assert_answers(loaded, expected)
    placed = workbench.load(tmp_path / "model.safetensors", peft.get_peft_model(voting(), classes())).eval()
    assert_answers(placed, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_merge_their_own(copied: Callable[[Any], Any]) -> None:
    wrapped = voting()
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    learned(adapted)
    with torch.no_grad():
        expected, before = logits(references(plain, adapted)), copy.deepcopy(adapted.state_dict())
        new = copied(adapted)
        assert_answers(new.merge_and_unload(), expected)
        assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
        assert_answers(adapted, expected)


@pytest.mark.parametrize(
    "options", [{"share": 1}, {"use_bias": False}, {"finetune": True}, {"share": "rank1"}], ids=str
)
def test_whatever_voters_share_they_get_adapters_of_their_own(options: dict[str, Any]) -> None:
    wrapped = vote.Wrapper(N, output={"logits": Logits()}, **options)(bert()).eval()
    wrapped(IDS)
    plain = wrapped.voters()
    config = classes() if options.get("share") != "rank1" else peft.LoraConfig(r=2, target_modules=["query", "value"])
    adapted = peft.get_peft_model(wrapped, config).eval()
    learned(adapted)
    with torch.no_grad():
        expected = logits(references(plain, adapted, lambda: copy.deepcopy(config)))
        assert_answers(adapted, expected)
        if "share" in options:
            with pytest.raises(TypeError, match=r"merge of '.*query'.*all voters share.*voters\(\)"):
                adapted.merge_adapter()
            assert_answers(adapted, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["c_attn"]},
        {"target_modules": ["c_attn", "wte"]},
        {"target_modules": ["c_fc"], "init_lora_weights": "gaussian"},
        {"target_modules": ["wte"], "init_lora_weights": False},
        {"target_modules": ["c_attn"], "lora_bias": True, "use_rslora": True},
    ],
    ids=str,
)
def test_decoders_with_tied_and_embedded_adapters(options: dict[str, Any]) -> None:
    def config() -> Any:
        return peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options)

    wrapped = vote.Wrapper(N, output={"logits": Logits(dim=-1)})(decoder()).eval()
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, config()).eval()
    drawn = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
    first = [name for name in drawn if "_A" in name and "embedding" not in name] or [
        n for n in drawn if "embedding_B" in n
    ]
    assert all(not torch.equal(drawn[name][1], drawn[name][2]) for name in first)
    learned(adapted)
    with torch.no_grad():
        expected = logits(references(plain, adapted, config))
        assert_answers(adapted, expected)


@pytest.mark.parametrize("targets", [["lm_head"], ["wte"], ["c_attn", "c_proj"], ["lm_head", "wte"]], ids=str)
def test_tied_embedded_and_transposed_layers_are_merged_as_peft_does(targets: list[str]) -> None:
    def config() -> Any:
        return peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=targets)

    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(decoder()).eval()
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, config()).eval()
    learned(adapted)
    with torch.no_grad():
        expected = [model.merge_and_unload() for model in references(plain, adapted, config)]
        merged = adapted.merge_and_unload()
        for voter, model in zip(merged.voters(), expected, strict=True):
            torch.testing.assert_close(voter.state_dict(), model.state_dict())
        assert_answers(merged, logits(expected))


def test_norms_and_convolutions_get_adapters_and_copies_of_each_voters_own() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    x = torch.randn(4, 1, 8, 8)
    wrapped = vote.Wrapper(N)(network).eval()
    with torch.no_grad():
        for voter in range(N):  # as after a training
            wrapped.get_buffer("1.running_mean@vote")[voter] += 0.1 * voter
    plain = wrapped.voters()

    def config() -> Any:
        return peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1", "4"])

    adapted = peft.get_peft_model(wrapped, config()).eval()
    learned(adapted)
    with torch.no_grad():
        answers = torch.stack([model(x) for model in references(plain, adapted, config)])
        torch.testing.assert_close(adapted(x), answers.mean(0))
        torch.testing.assert_close(adapted(x, return_risk=True)[1], answers.std(0, correction=0))
        torch.testing.assert_close(adapted.merge_and_unload()(x), answers.mean(0))


@pytest.mark.parametrize("kept", [["4"], ["1", "4"]], ids=str)
def test_norms_whose_layers_all_branches_share_count_each_call_once(kept: list[str]) -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    x = torch.randn(4, 1, 8, 8)
    config = functools.partial(peft.LoraConfig, r=2, target_modules=["0"], modules_to_save=kept)
    plain = peft.get_peft_model(copy.deepcopy(network), config())
    adapted = peft.get_peft_model(sample.Wrapper(3)(network), config())
    plain(x), adapted(x, return_risk=True)
    buffers = dict(plain.named_buffers())
    assert buffers
    for name, buffer in adapted.named_buffers():
        torch.testing.assert_close(buffer, buffers[name])


def test_adapters_of_half_precision_models_are_cast_as_peft_does() -> None:
    wrapped = voting().to(torch.bfloat16)
    plain = wrapped.voters()
    adapted = peft.get_peft_model(wrapped, classes()).eval()
    assert {p.dtype for n, p in adapted.named_parameters() if "lora" in n} == {torch.float32}
    learned(adapted)
    with torch.no_grad():
        expected = logits(references(plain, adapted)).float().softmax(-1).mean(0)
        probs = adapted(input_ids=IDS).logits.float().softmax(-1)
    torch.testing.assert_close(probs, expected, atol=0.02, rtol=0.02)


def test_what_takes_a_wrapped_model_names_the_part_of_a_model_of_peft() -> None:
    adapted = peft.get_peft_model(voting(), classes())
    for call in (workbench.fit, workbench.calibrate):
        with pytest.raises(TypeError, match=r"not wrapped as a whole.*get_submodule\('base_model\.model'\)"):
            call(adapted, (IDS, LABELS))


def test_copies_of_a_layer_are_refused() -> None:
    with pytest.raises(TypeError, match=r"is being copied.*'classifier\.weight'"):
        copy.deepcopy(voting().classifier)
