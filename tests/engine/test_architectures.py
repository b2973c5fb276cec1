"""Real architectures under every wrapper: compared with plain deep copies whose tensors are set by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from helpers.architectures import ARCHITECTURES
from helpers.caches import CACHE
from helpers.conformance_reference import size
from helpers.conformance_table import WRAPPERS, Refusal, Wrapping, is_due
from helpers.default_suite import one_in
from helpers.plain_copies import (
    check_dealing,
    check_evaluation,
    check_noise,
    check_signature,
    check_training,
    dtype_of,
    reference_of,
)
from helpers.zoo import Case, leaves
from torch import Tensor

from workbench import WorkbenchWarning
from workbench.engine.tree import is_float
from workbench.testing.models import build, inputs

COLUMNS = ("vote", "vote_rank1", "vote_share1", "sculpt", "sample_activations", "neo")
COMPOSITIONS = ("vote_sculpt", "sample_sculpt", "vote1_sculpt_neo")
LAST_LAYERS = ("vote_share1", "sculpt", *COMPOSITIONS)  # they take the layers that are registered last
REFUSALS: dict[tuple[str, str], Refusal] = {  # (architecture, wrapper): its error
    ("big_bird_sparse", wrapper): Refusal(RuntimeError, "replaces the layer 'bert.encoder.layer.0")
    for wrapper in COLUMNS + COMPOSITIONS
}
GENERATING = ("vote", "vote_rank1", "vote_share1", "sample_activations", "sculpt", "vote_sculpt")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """One thread, which is fastest for tiny tensors; transformers says much about tiny configs, functorch about slow rules."""
    threads, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_answers_with_numbers_that_depend_on_its_input(name: str) -> None:
    """Or nothing that is compared below would mean anything."""
    case = ARCHITECTURES[name]
    with torch.no_grad():
        one, other = (
            [leaf for _, leaf in leaves(build(case, dtype_of(case))(*args, **kwargs)) if is_float(leaf)]
            for args, kwargs in (inputs(case, dtype_of(case), seed=seed) for seed in (0, 1))
        )
    assert all(leaf.isfinite().all() for leaf in one)
    assert any(size(a - b) > 1e-3 * size(a) > 0 for a, b in zip(one, other, strict=True))


def cells() -> list[Any]:
    """Every architecture with every wrapper, and with one of the compositions in turn."""
    return [
        pytest.param(name, wrapper, id=f"{name}-{wrapper}")
        for row, name in enumerate(ARCHITECTURES)
        for column, wrapper in enumerate(COLUMNS + COMPOSITIONS)
        if wrapper in COLUMNS or is_due(row, column, len(COMPOSITIONS))
    ]


def checks_of(wrapper: str) -> list[Callable[[Case, Wrapping], None]]:
    """What a wrapper owes to an architecture."""
    special = {"vote": [check_dealing], "sample_activations": [check_noise]}
    return [check_evaluation, check_signature if wrapper == "neo" else check_training, *special.get(wrapper, [])]


def checks_due(name: str, wrapper: str) -> list[Callable[[Case, Wrapping], None]]:
    """That of them whose turn it is: neighbours in the table make different ones."""
    row, column, checks = [*ARCHITECTURES].index(name), (COLUMNS + COMPOSITIONS).index(wrapper), checks_of(wrapper)
    # the compositions are taken in turn themselves: one that is due in every third row makes another check there each time
    row = row // len(COMPOSITIONS) if wrapper in COMPOSITIONS else row
    return [check for number, check in enumerate(checks) if is_due(row + number, column, len(checks))]


@pytest.mark.slow
# Gemma's scores, here taken for values
@pytest.mark.filterwarnings("ignore:sculpt. output 'logits' of the model ends in tanh")
@pytest.mark.parametrize(("name", "wrapper"), cells())
def test_wrapper_does_to_architecture_what_plain_copies_do(name: str, wrapper: str) -> None:
    """Each architecture under each wrapper in one of the checks; with WORKBENCH_EXHAUSTIVE=1 in all."""
    case, wrapping = ARCHITECTURES[name], WRAPPERS[wrapper]
    if (name, wrapper) in REFUSALS:
        error, words = REFUSALS[name, wrapper]
        with pytest.raises(error, match=words):
            check_evaluation(case, wrapping)
        return
    for check in checks_due(name, wrapper):
        try:
            check(case, wrapping)
        except (ValueError, WorkbenchWarning) as error:  # of several heads, only an example shows which layers are last
            assert wrapper in LAST_LAYERS and "by the order in which they are registered" in str(error), error  # noqa: PT017, PT018


def test_every_architecture_and_every_wrapper_meets_evaluation_and_training() -> None:
    chosen = [tuple(cell.values) for cell in cells()]
    done = {(name, wrapper): checks_due(str(name), str(wrapper)) for name, wrapper in chosen}
    assert all(done.values())
    for wrapper in COLUMNS + COMPOSITIONS:
        made = [checks for (_, column), checks in done.items() if column == wrapper]
        for check in checks_of(wrapper):
            assert sum(check in checks for checks in made) >= len(made) // len(checks_of(wrapper))
    for name in ARCHITECTURES:
        made = [checks for (row, _), checks in done.items() if row == name]
        assert all(any(check in checks for checks in made) for check in (check_evaluation, check_training))


@pytest.mark.slow
def test_noise_reaches_a_reformer_whose_hashes_are_seeded() -> None:
    check_noise(ARCHITECTURES["reformer"], WRAPPERS["sample_activations"])


# ---- generation -----------------------------------------------------------------------------------------------------


def generated(model: Any, ids: Tensor, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """Five tokens by greedy search: (all ids [rows, length + 5], the scores [rows, vocabulary] of each step)."""
    output = model.generate(
        input_ids=ids,
        max_new_tokens=5,
        eos_token_id=999,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )
    return output.sequences, [step.double() for step in output.logits]


def plainly(models: list[Any], ids: Tensor, *, decoder: bool) -> tuple[Tensor, list[Tensor]]:
    """The same by hand: the mean of all models' scores at each step, computed anew from all tokens."""
    start = ids if decoder else torch.zeros(len(ids), 1, dtype=torch.int64)
    tokens, steps = start, []
    for _ in range(5):
        batch = {"input_ids": tokens} if decoder else {"input_ids": ids, "decoder_input_ids": tokens}
        steps.append(sum(model(**batch).logits[:, -1] for model in models) / len(models))
        tokens = torch.cat([tokens, steps[-1].argmax(-1, keepdim=True)], 1)
    return tokens, steps


def copies_of(name: str, wrapper: str) -> tuple[Any, list[Any], Tensor]:
    """The wrapped architecture in evaluation mode, the plain copies of its branches, and token ids."""
    case, wrapping = ARCHITECTURES[name], WRAPPERS[wrapper]
    wrapped = wrapping.wrap(build(case)).eval()
    models = [branch.model for branch in reference_of(case, wrapping, wrapped).answers() if not branch.place["sculpt"]]
    return wrapped, models, inputs(case)[1]["input_ids"]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("wrapper", GENERATING)
@pytest.mark.parametrize("name", one_in(2, ["gpt2", "llama"]))
def test_generate_is_greedy_search_by_the_mean_of_all_branches(name: str, wrapper: str, use_cache: bool) -> None:
    wrapped, models, ids = copies_of(name, wrapper)
    with torch.no_grad():
        tokens, steps = plainly(models, ids, decoder=True)
        sequences, scores = generated(wrapped, ids, use_cache=use_cache)
    assert_steps(sequences, scores, tokens, steps)


def assert_steps(sequences: Tensor, scores: list[Tensor], tokens: Tensor, steps: list[Tensor]) -> None:
    for score, step in zip(scores, steps, strict=True):
        torch.testing.assert_close(score, step, rtol=1e-5, atol=1e-5)  # generate keeps scores in float32
    assert torch.equal(sequences, tokens)


@pytest.mark.parametrize("wrapper", GENERATING)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cache_of_keys_and_values_that_is_passed_by_hand_is_that_of_every_branch(name: str, wrapper: str) -> None:
    wrapped, models, ids = copies_of(name, wrapper)
    with torch.no_grad():
        expected = sum(model(ids).logits for model in models) / len(models)
        _, risk = wrapped(ids, return_risk=True)
        for return_risk in (False, True):
            answers: list[Any] = []
            cache: Any = None
            for part in ids.split([3, 3, 1], 1):
                y = wrapped(part, **{CACHE: cache}, use_cache=True, return_risk=return_risk)
                answers.append(y if return_risk else (y, None))
                cache = answers[-1][0][CACHE]
            torch.testing.assert_close(torch.cat([y.logits for y, _ in answers], 1), expected, rtol=1e-6, atol=1e-6)
            for kind in WRAPPERS[wrapper].variances if return_risk else ():
                parts = [r if WRAPPERS[wrapper].single else r[kind] for _, r in answers]
                whole = risk if WRAPPERS[wrapper].single else risk[kind]
                torch.testing.assert_close(torch.cat([r.logits for r in parts], 1), whole.logits, rtol=1e-6, atol=1e-6)


def test_beam_search_sorts_the_cache_of_the_first_branch_only_so_it_is_refused_with_one() -> None:
    wrapped, _, ids = copies_of("gpt2", "vote")
    with pytest.raises(RuntimeError, match="use_cache=False"):
        generated(wrapped, ids, num_beams=3, use_cache=True)
    sequences, _ = generated(wrapped, ids, num_beams=3, use_cache=False)
    assert sequences.shape == (len(ids), ids.shape[1] + 5)


@pytest.mark.parametrize("wrapper", GENERATING)
@pytest.mark.parametrize("name", one_in(2, ["t5", "m2m_100"]))
def test_generate_of_an_encoder_and_a_decoder_encodes_in_each_branch(name: str, wrapper: str) -> None:
    """`generate` calls the encoder by itself, before its first step."""
    wrapped, models, ids = copies_of(name, wrapper)
    with torch.no_grad():
        sequences, scores = generated(wrapped, ids, use_cache=False, decoder_start_token_id=0)
        assert_steps(sequences, scores, *plainly(models, ids, decoder=False))


@pytest.mark.parametrize("name", ["t5", "m2m_100"])
def test_encoder_that_is_called_by_itself_says_that_it_is_the_first_voters(name: str) -> None:
    wrapped, _, ids = copies_of(name, "vote")
    with pytest.warns(WorkbenchWarning, match=r"answers as the first voter only.*voters\(\)"):
        wrapped.get_encoder()(ids)


@pytest.mark.parametrize("wrapper", ["vote", "vote_share1", "sculpt", "sample_activations"])
def test_forward_that_divides_its_weights_in_place_is_refused_where_branches_share_them(wrapper: str) -> None:
    """RWKV does so in evaluation mode, once; every branch would do it again."""
    case = rescaled()
    if wrapper == "vote":
        check_evaluation(case, WRAPPERS[wrapper])  # every voter has weights of its own
        return
    with pytest.raises(RuntimeError, match=r"writes into its parameter.*output\.weight"):
        check_evaluation(case, WRAPPERS[wrapper])


def rescaled() -> Case:
    """RWKV as it is by default, which row "rwkv" is not; by default it rescales from its seventh layer on."""
    case = ARCHITECTURES["rwkv"]

    def build() -> Any:
        model: Any = case.build()
        model.rwkv.config = copy.copy(model.rwkv.config)  # which all copies share
        model.rwkv.config.rescale_every = 1
        return model

    return Case("rwkv_rescaled", build, case.inputs, case.tags)
