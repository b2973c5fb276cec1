"""Caches of transformers: each voter keeps its own, also in beam search and assisted generation."""

import copy

import pytest
import torch
from helpers.caches import CACHE
from helpers.streams import close

from workbench import neo, sculpt, vote
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TOKENS = torch.randint(1, 20, (3, 4), generator=torch.Generator().manual_seed(0))


def gpt():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=32, **SIZES)
    ).eval()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=32, **SIZES)).eval()


def phi():
    """Asks `if past_key_values`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, max_position_embeddings=32, **SIZES)).eval()


def wrapped_as(build, **settings):
    return vote.Wrapper(3, output={"logits": Logits(dim=-1)}, **settings)(build()).eval()


def averaged(wrapped):
    """A plain model whose scores are the mean probabilities of all voters, each of which reads all tokens anew."""
    voters = [voter.eval() for voter in wrapped.voters()]
    plain = copy.deepcopy(voters[0])

    class Averaged(type(plain)):
        def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
            logits = [v(input_ids, attention_mask=attention_mask, use_cache=False).logits for v in voters]
            mean = torch.stack([scores.log_softmax(-1) for scores in logits]).logsumexp(0) - torch.tensor(3.0).log()
            return transformers.modeling_outputs.CausalLMOutput(logits=mean)

    plain.__class__ = Averaged
    return plain


@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.parametrize("asked", [{}, {"num_beams": 3}, {"num_beams": 4, "do_sample": True}])
@pytest.mark.parametrize("build", [gpt, llama, phi])
def test_generation_is_that_of_the_averaged_voters(build, asked, share):
    wrapped = wrapped_as(build, state="past_key_values", share=share)
    generated = []
    for model, cached in ((wrapped, True), (averaged(wrapped), False)):
        torch.manual_seed(0)
        generated.append(model.generate(TOKENS, max_new_tokens=6, use_cache=cached, **asked))
    assert torch.equal(*generated)


@pytest.mark.parametrize("build", [gpt, llama])
def test_an_assistant_whose_tokens_are_cropped(build):
    wrapped = wrapped_as(build, state="past_key_values")
    ours = wrapped.generate(TOKENS[:1], max_new_tokens=8, assistant_model=build())
    assert torch.equal(ours, averaged(wrapped).generate(TOKENS[:1], max_new_tokens=8, use_cache=False))


CHANGES = {
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([1, 2])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("build", [gpt, llama])
def test_a_changed_cache_is_that_of_each_voter(build, change, share):
    wrapped = wrapped_as(build, state="past_key_values", share=share)
    with torch.no_grad():
        rows = {"batch_select_indices": [1, 2], "batch_repeat_interleave": [0, 0, 1, 1, 2, 2]}.get(change, [2, 0, 0])
        expected = []
        for voter in wrapped.voters():
            cache = voter.eval()(TOKENS)[CACHE]
            cache = CHANGES[change](cache) or cache
            expected.append(voter(TOKENS[rows, :1], **{CACHE: cache}).logits.softmax(-1))
        for way in (lambda state: CHANGES[change](state) or state, lambda state: state.map(CHANGES[change])):
            cache = way(wrapped(TOKENS)[CACHE])
            assert cache.get_seq_length() == 4
            logits = wrapped(TOKENS[rows, :1], **{CACHE: cache}).logits
            assert close(logits.softmax(-1), torch.stack(expected).mean(0))


def test_a_trunk_stays_shared_after_beams_were_reordered():
    wrapped = wrapped_as(gpt, state="past_key_values", share=1)
    with torch.no_grad():
        state = wrapped(TOKENS)[CACHE]
        n_tensors = len({id(tensor) for tensor in state.tensors()})
        state.reorder_cache(torch.tensor([2, 0, 0]))
        assert len({id(tensor) for tensor in state.tensors()}) == n_tensors == 4  # keys and values of two layers


def test_what_differs_between_the_caches_is_refused():
    wrapped = wrapped_as(gpt, state="past_key_values")
    with torch.no_grad():
        state = wrapped(TOKENS)[CACHE]
    with pytest.raises(TypeError, match=r"state\.map"):
        state.update(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4), 0)
    with pytest.raises(AttributeError, match=r"state\.map"):
        _ = state.layers


def test_beams_without_state_are_refused_with_the_line_to_write():
    with pytest.raises(RuntimeError, match="state='past_key_values'"):
        wrapped_as(gpt).generate(TOKENS, max_new_tokens=4, num_beams=2)


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=None, decoder_start_token_id=1)
    return sharper(transformers.T5ForConditionalGeneration(config))


def bart():
    torch.manual_seed(0)
    sides = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in zip(sides, (1, 2, 8), strict=True)}
    config = transformers.BartConfig(
        **{
            **sizes,
            **SIZES,
            "d_model": 8,
            "max_position_embeddings": 16,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
        }
    )
    return sharper(transformers.BartForConditionalGeneration(config))


def sharper(model):
    """With scores that differ: untrained, all of them are next to equal."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.eval()


WRITING = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("asked", WRITING)
@pytest.mark.parametrize("build", [t5, bart])
def test_every_voter_has_an_encoder_of_its_own(build, asked):
    wrapped = wrapped_as(build, state="past_key_values")
    voters = [voter.eval() for voter in wrapped.voters()]
    plain = copy.deepcopy(voters[0])

    class Averaged(type(plain)):
        def forward(self, encoder_outputs=None, attention_mask=None, decoder_input_ids=None, **kwargs):
            rows = self.given.repeat_interleave(len(decoder_input_ids) // len(self.given), 0)
            logits = [v(rows, attention_mask, decoder_input_ids, use_cache=False).logits for v in voters]
            mean = torch.stack([scores.log_softmax(-1) for scores in logits]).logsumexp(0) - torch.tensor(3.0).log()
            return transformers.modeling_outputs.Seq2SeqLMOutput(logits=mean)

    plain.__class__, plain.given = Averaged, TOKENS
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    written = []
    for model, cached in ((wrapped, True), (plain, False)):
        torch.manual_seed(0)
        written.append(
            model.generate(TOKENS, attention_mask=mask, max_new_tokens=5, use_cache=cached, **WRITING[asked])
        )
    assert torch.equal(*written)


@pytest.mark.parametrize("wrapper", [sculpt.Wrapper, neo.Wrapper], ids=["sculpt", "neo"])
def test_one_encoder_is_the_models_own(wrapper):
    plain = t5()
    wrapped = wrapper(output={"logits": Logits(dim=-1)}, state="past_key_values")(plain).eval()
    asked = {"max_new_tokens": 5, "num_beams": 2, "return_dict_in_generate": True, "output_hidden_states": True}
    ours, theirs = wrapped.generate(TOKENS, **asked), plain.generate(TOKENS, **asked)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.encoder_hidden_states, theirs.encoder_hidden_states)


@pytest.mark.parametrize("state", ["past_key_values", None])
def test_a_cache_that_the_caller_made(state):
    wrapped = wrapped_as(llama, state=state) if state else wrapped_as(llama)
    with torch.no_grad():
        expected = torch.stack([voter.eval()(TOKENS).logits[:, -1:].softmax(-1) for voter in wrapped.voters()]).mean(0)
        cache = transformers.DynamicCache()
        for i in range(4):
            out = wrapped(TOKENS[:, i : i + 1], **{CACHE: cache})
            cache = out[CACHE]
    assert close(out.logits.softmax(-1), expected)


@pytest.mark.parametrize("build", [gpt, llama])
def test_embeddings_of_voters_are_resized_before_wrapping(build):
    wrapped = wrapped_as(build)
    assert wrapped.resize_token_embeddings(20).weight.shape[0] == 20  # as many as there are
    with pytest.raises(
        TypeError, match=r"20 embeddings of the first branch only.*model\.resize_token_embeddings\(24\)"
    ):
        wrapped.resize_token_embeddings(24)
    shared = neo.Wrapper(output={"logits": Logits(dim=-1)})(build()).eval()
    shared.resize_token_embeddings(24)
    with torch.no_grad():
        assert shared(TOKENS).logits.shape == (3, 4, 24)
        assert wrapped(TOKENS).logits.shape == (3, 4, 20)
