"""Real architectures: one row for each model type of transformers, tiny and with random weights, built from config classes alone.

Example:
    >>> from zoo import float_leaves
    >>> case = ARCHITECTURES["bert"]
    >>> args, kwargs = case.inputs(seed=0, rows=6)
    >>> float_leaves(case.build()(*args, **kwargs))[0][1].shape
    torch.Size([6, 3])
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from helpers.zoo import Case

Settings = dict[str, Any]
Inputs = Callable[..., tuple[tuple[Any, ...], Settings]]


# ---- inputs ---------------------------------------------------------------------------------------------------------


def keyword_inputs(**make: Any) -> Inputs:
    """Draw inputs by keyword, each by `make(generator, rows)`."""

    def inputs(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], Settings]:
        generator = torch.Generator().manual_seed(seed)
        return (), {name: draw(generator, rows) for name, draw in make.items()}

    return inputs


def ids(length: int, low: int = 3, high: int = 40) -> Any:
    """Token ids [rows, length] without special tokens."""
    return lambda generator, rows: torch.randint(low, high, (rows, length), generator=generator)


def floats(*shape: int) -> Any:
    """Standard normal numbers [rows, *shape]."""
    return lambda generator, rows: torch.randn(rows, *shape, generator=generator)


def mask(length: int) -> Any:
    """An attention mask [rows, length] under which every second row is one token shorter."""

    def draw(generator: torch.Generator, rows: int) -> Tensor:
        attended = torch.ones(rows, length, dtype=torch.int64)
        attended[1::2, -1] = 0
        return attended

    return draw


def choices(draw: Any, number: int) -> Any:
    """Stack a number of draws [rows, number, length]."""
    return lambda generator, rows: draw(generator, rows * number).unflatten(0, (rows, number))


def boxes(length: int) -> Any:
    """Boxes [rows, length, 4] on a page."""
    return lambda generator, rows: torch.randint(0, 9, (rows, length, 1), generator=generator).repeat(1, 1, 4)


def series(length: int) -> Any:
    """A list of series [length], one per row."""
    return lambda generator, rows: list(torch.randn(rows, length, generator=generator))


def ones(length: int) -> Any:
    """Ones [rows, length]."""
    return lambda generator, rows: torch.ones(rows, length)


def steps(length: int) -> Any:
    """0, 1, 2 ... [rows, length]."""
    return lambda generator, rows: torch.arange(length).repeat(rows, 1)


TEXT = keyword_inputs(input_ids=ids(7), attention_mask=mask(7))
LEFT = keyword_inputs(input_ids=ids(7))
PAIR = keyword_inputs(input_ids=ids(7), decoder_input_ids=ids(5))
IMAGE = keyword_inputs(pixel_values=floats(3, 32, 32))
WAVE = keyword_inputs(input_values=floats(600))
BOTH = keyword_inputs(input_ids=ids(7), attention_mask=mask(7), pixel_values=floats(3, 32, 32))


# ---- building -------------------------------------------------------------------------------------------------------

TINY: Settings = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "projection_dim", "decoder_hidden_size"], 16),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"], 1),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_head", "n_heads"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads"], 2),
    **dict.fromkeys(["intermediate_size", "d_ff", "d_inner", "dff", "hidden_dim", "ffn_dim"], 24),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size"], 24),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "image_size"], 32),
    **{"vocab_size": 50, "num_key_value_heads": 1, "patch_size": 16, "head_dim": 8, "num_local_experts": 4},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "context_length": 16},
    **{"use_cache": False, "apply_spec_augment": False, "router_jitter_noise": 0.0},
}
SPECS: dict[str, tuple[str, Settings]] = {}
ARCHITECTURES: dict[str, Case] = {}


def tiny(default: Any) -> Settings:
    """Return settings that make a config small and remove randomness in training mode (dropout, stochastic depth, masked audio),
    since random steps could not be compared.
    """
    reduced: Settings = {}
    for name, value in vars(default).items():
        if isinstance(value, transformers.PreTrainedConfig):
            reduced[name] = tiny(value)
        elif "drop" in name and isinstance(value, float):
            reduced[name] = 0.0
        elif "drop" in name and isinstance(value, list | tuple):
            reduced[name] = [0.0] * len(value)
        elif name in TINY and not isinstance(value, list | tuple):
            reduced[name] = TINY[name]
    return reduced


def settle(model: nn.Module, args: tuple[Any, ...], kwargs: Settings) -> None:
    """Give batch norms the statistics of a batch: with their initial ones, the output of a deep network hardly depends on its input."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        model(*args, **kwargs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@functools.cache
def built(name: str) -> Any:
    """Return the model of a row, built once."""
    class_name, settings = SPECS[name]
    cls: Any = getattr(transformers, class_name)
    settings = copy.deepcopy(settings)
    # transformers 5.17 has no default parts, and takes the type out of the dict of a part
    parts = {key: dict(value) for key, value in settings.items() if isinstance(value, dict) and "model_type" in value}
    arguments = {"num_labels": 3, **tiny(cls.config_class(**parts))}
    for key, value in settings.items():
        merged = isinstance(value, dict) and key in arguments
        arguments[key] = {**arguments[key], **value} if merged else value
    experts = arguments.pop("experts_implementation", None)
    config = cls.config_class(**arguments)
    config._experts_implementation = experts
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = cls(config)
        with torch.no_grad():  # parameters that start at zero would hide differences
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            settle(model.train(), *ARCHITECTURES[name].inputs(seed=2))
    return model


def fresh(name: str) -> Any:
    """Return a copy of the model of a row. All copies share their configs, which take longer to copy than everything else."""
    model = built(name)
    configs = (vars(module).get("config") for module in model.modules())
    return copy.deepcopy(model, {id(config): config for config in configs if config is not None})


def row(name: str, class_name: str, inputs: Inputs, *tags: str, **settings: Any) -> None:
    """Add a row: a model class, its inputs, config settings beyond `TINY`, and "float32" or "float32_inside" if it computes in float32."""
    SPECS[name] = (class_name, settings)
    ARCHITECTURES[name] = Case(name, functools.partial(fresh, name), inputs, frozenset(tags))


EAGER = {"experts_implementation": "eager"}

# ---- text encoders --------------------------------------------------------------------------------------------------

row("bert", "BertForSequenceClassification", TEXT)
row("roberta", "RobertaForSequenceClassification", TEXT)
row("distilbert", "DistilBertForSequenceClassification", TEXT)
row("albert", "AlbertForSequenceClassification", TEXT, embedding_size=8)
row("electra", "ElectraForTokenClassification", TEXT, embedding_size=8)
row("deberta_v2", "DebertaV2ForSequenceClassification", TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"])
row("mpnet", "MPNetForSequenceClassification", TEXT)
row("xlnet", "XLNetForSequenceClassification", TEXT, use_mems_eval=False)
row("funnel", "FunnelForSequenceClassification", TEXT, block_sizes=[1, 1], num_decoder_layers=1, d_head=8)
row("convbert", "ConvBertForSequenceClassification", TEXT, embedding_size=16)
row("longformer", "LongformerForSequenceClassification", TEXT, attention_window=4)
row("big_bird", "BigBirdForSequenceClassification", TEXT, attention_type="original_full")
row("big_bird_sparse", "BigBirdForSequenceClassification", TEXT)  # replaces its attention for short inputs
row("modernbert", "ModernBertForSequenceClassification", TEXT, pad_token_id=0)
row("mobilebert", "MobileBertForSequenceClassification", TEXT, embedding_size=16, intra_bottleneck_size=16)
row("fnet", "FNetForSequenceClassification", LEFT)
REFORMER = {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [8, 8], "max_position_embeddings": 16, "hash_seed": 0}
HASHES = {"num_buckets": 2, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "attn_layers": ["local", "lsh"]}
LONG = keyword_inputs(input_ids=ids(16))
row("reformer", "ReformerForSequenceClassification", LONG, attention_head_size=8, **REFORMER, **HASHES)
LATENTS = {"num_latents": 4, "d_latents": 16, "num_self_attends_per_block": 1, "num_self_attention_heads": 2}
row(
    "perceiver",
    "PerceiverForSequenceClassification",
    keyword_inputs(inputs=ids(7)),
    num_cross_attention_heads=2,
    **LATENTS,
)
row("esm", "EsmForSequenceClassification", TEXT, pad_token_id=1, position_embedding_type="rotary")
row("layoutlm", "LayoutLMForTokenClassification", keyword_inputs(input_ids=ids(7), bbox=boxes(7)))

# ---- other heads of text encoders -----------------------------------------------------------------------------------

ENCODERS: dict[str, tuple[str, Settings]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
    "distilbert": ("DistilBert", {}),
    "electra": ("Electra", {"embedding_size": 8}),
    "deberta_v2": ("DebertaV2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
}
CHOICES = keyword_inputs(input_ids=choices(ids(7), 2), attention_mask=choices(mask(7), 2))
HEADS: dict[str, tuple[str, Inputs, Settings]] = {
    "masked": ("MaskedLM", TEXT, {}),
    "tokens": ("TokenClassification", TEXT, {}),
    "choices": ("MultipleChoice", CHOICES, {}),
    "answers": ("QuestionAnswering", TEXT, {"num_labels": 2}),
}
for encoder, (prefix, options) in ENCODERS.items():
    for head, (task, given_inputs, more) in HEADS.items():
        row(f"{encoder}_{head}", f"{prefix}For{task}", given_inputs, **options, **more)

# ---- decoders -------------------------------------------------------------------------------------------------------

row("gpt2", "GPT2LMHeadModel", LEFT)
row("gpt_neo", "GPTNeoForCausalLM", LEFT, attention_types=[[["global", "local"], 1]], window_size=4)
row("gpt_neox", "GPTNeoXForCausalLM", LEFT)
row("opt", "OPTForCausalLM", LEFT, word_embed_proj_dim=16)
row("bloom", "BloomForSequenceClassification", LEFT, pad_token_id=0)
row("llama", "LlamaForCausalLM", LEFT)
row("mistral", "MistralForCausalLM", LEFT, sliding_window=4)
row("qwen2", "Qwen2ForSequenceClassification", LEFT, pad_token_id=0)
row("qwen3", "Qwen3ForCausalLM", LEFT)
row("phi", "PhiForCausalLM", LEFT, num_key_value_heads=2)
row("phi3", "Phi3ForCausalLM", LEFT, pad_token_id=0)
row("gemma", "GemmaForCausalLM", LEFT)
row("gemma2", "Gemma2ForCausalLM", LEFT, sliding_window=4)
row("gemma3", "Gemma3ForCausalLM", LEFT, sliding_window=4)
row("falcon", "FalconForCausalLM", LEFT)
row("codegen", "CodeGenForCausalLM", LEFT, n_ctx=32, rotary_dim=4, n_head=4)
row("mpt", "MptForCausalLM", LEFT)

# ---- encoder-decoder ------------------------------------------------------------------------------------------------

row("t5", "T5ForConditionalGeneration", PAIR, d_kv=8, decoder_start_token_id=0)
row("bart", "BartForConditionalGeneration", PAIR)
row("mbart", "MBartForConditionalGeneration", PAIR)
row("pegasus", "PegasusForConditionalGeneration", PAIR)
row("marian", "MarianMTModel", PAIR, pad_token_id=1, decoder_start_token_id=2)
row("m2m_100", "M2M100ForConditionalGeneration", PAIR)
row("prophetnet", "ProphetNetForConditionalGeneration", PAIR)

# ---- vision ---------------------------------------------------------------------------------------------------------

STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
FOUR = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
row("vit", "ViTForImageClassification", IMAGE)
row("deit", "DeiTForImageClassification", IMAGE)
row("beit", "BeitForImageClassification", IMAGE)
row("dinov2", "Dinov2ForImageClassification", IMAGE)
WINDOWS = {"patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
row("swin", "SwinForImageClassification", IMAGE, **WINDOWS)
row("convnext", "ConvNextForImageClassification", IMAGE, patch_size=4, num_stages=2, **STAGES)
row("resnet", "ResNetForImageClassification", IMAGE, embedding_size=8, layer_type="basic", **STAGES)
row("regnet", "RegNetForImageClassification", IMAGE, embedding_size=8, groups_width=8, **STAGES)
THIN = {"depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4}
row("mobilenet_v2", "MobileNetV2ForImageClassification", IMAGE, **THIN)
BLOCKS = {"in_channels": [32, 16], "out_channels": [16, 32], "kernel_sizes": [3, 3], "strides": [1, 2]}
REPEATS = {"num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": [], "hidden_dim": 640}
WIDTH = {"width_coefficient": 0.5, "depth_coefficient": 1.0}
row("efficientnet", "EfficientNetForImageClassification", IMAGE, **BLOCKS, **REPEATS, **WIDTH)
REDUCED = {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
row("segformer", "SegformerForSemanticSegmentation", IMAGE, num_attention_heads=[1, 2], **REDUCED, **STAGES)
row("poolformer", "PoolFormerForImageClassification", IMAGE, **FOUR)
NECK = {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 8, 8, 12, 16, 16, 24], "patch_size": 2}
row("mobilevit", "MobileViTForImageClassification", IMAGE, **NECK)
LEVELS = {"hidden_sizes": [8, 16, 16], "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}
row("levit", "LevitForImageClassification", IMAGE, **LEVELS)
BACKBONE: Any = {"model_type": "resnet", "embedding_size": 8, "out_features": ["stage2"], **STAGES}
row("detr", "DetrForObjectDetection", IMAGE, use_timm_backbone=False, backbone_config=BACKBONE, num_queries=3)

# ---- audio ----------------------------------------------------------------------------------------------------------

SPEECH = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
SOUND = {"max_source_positions": 20, "max_target_positions": 16}
row("wav2vec2", "Wav2Vec2ForSequenceClassification", WAVE, classifier_proj_size=8, **SPEECH)
row("hubert", "HubertForCTC", WAVE, **SPEECH)
row("wavlm", "WavLMForSequenceClassification", WAVE, classifier_proj_size=8, **SPEECH)
row("unispeech", "UniSpeechForSequenceClassification", WAVE, classifier_proj_size=8, **SPEECH)
SPECTRUM = keyword_inputs(input_features=floats(8, 40), decoder_input_ids=ids(5))
row("whisper", "WhisperForConditionalGeneration", SPECTRUM, num_mel_bins=8, pad_token_id=1, **SOUND)
FRAMES = keyword_inputs(input_features=floats(16, 8), decoder_input_ids=ids(5))
row(
    "speech_to_text", "Speech2TextForConditionalGeneration", FRAMES, input_feat_per_channel=8, conv_channels=16, **SOUND
)
STRIDES = {"num_mel_bins": 16, "max_length": 24, "frequency_stride": 8, "time_stride": 8, "patch_size": 8}
row("ast", "ASTForAudioClassification", keyword_inputs(input_values=floats(24, 16)), **STRIDES)
MEL: Settings = {"spec_size": 16, "num_mel_bins": 4, "patch_size": 2, "patch_stride": 2, "window_size": 4}
MEL |= {"patch_embeds_hidden_size": 8, "depths": [1, 1], "num_attention_heads": [1, 2]}
row("clap", "ClapAudioModel", keyword_inputs(input_features=floats(1, 60, 4)), **MEL)

# ---- several kinds of input -----------------------------------------------------------------------------------------

ENDS = {"eos_token_id": 49, "bos_token_id": 48, "pad_token_id": 1}
TEXT_AND_REGIONS = keyword_inputs(input_ids=ids(7), attention_mask=mask(7), visual_embeds=floats(3, 12))
REGIONS = keyword_inputs(input_ids=ids(7), visual_feats=floats(3, 12), visual_pos=floats(3, 4))
row("clip", "CLIPModel", BOTH, text_config=ENDS)
row("siglip", "SiglipModel", BOTH, text_config=ENDS)
row(
    "blip", "BlipForImageTextRetrieval", BOTH, text_config={**ENDS, "encoder_hidden_size": 16}, image_text_hidden_size=8
)
row("vilt", "ViltForQuestionAnswering", BOTH, max_image_length=-1)
row("visual_bert", "VisualBertForQuestionAnswering", TEXT_AND_REGIONS, visual_embedding_dim=12)
LXMERT = {"visual_feat_dim": 12, "l_layers": 1, "x_layers": 1, "r_layers": 1, "num_qa_labels": 3}
row("lxmert", "LxmertForQuestionAnswering", REGIONS, **LXMERT)
DUAL: Settings = {"text_config": {"model_type": "bert"}, "vision_config": {"model_type": "vit"}}
row("vision_text_dual_encoder", "VisionTextDualEncoderModel", BOTH, **DUAL)

# ---- mixtures of experts --------------------------------------------------------------------------------------------

# its default experts implementation, grouped_mm, does not support float64
row("mixtral", "MixtralForCausalLM", LEFT, "float32")
row("qwen2_moe", "Qwen2MoeForCausalLM", LEFT, shared_expert_intermediate_size=12, **EAGER)
row("gpt_oss", "GptOssForCausalLM", LEFT, **EAGER)
SPARSE = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
row("switch", "SwitchTransformersForConditionalGeneration", PAIR, d_kv=8, decoder_start_token_id=0, **SPARSE)

# ---- state spaces, linear attention ---------------------------------------------------------------------------------

STATES = {"state_size": 4, "time_step_rank": 2}
row("mamba", "MambaForCausalLM", LEFT, "float32_inside", **STATES)
row("mamba2", "Mamba2ForCausalLM", LEFT, "float32_inside", state_size=4, num_heads=4, n_groups=1, chunk_size=4)
row("rwkv", "RwkvForCausalLM", LEFT, rescale_every=0, attention_hidden_size=16)
row("recurrent_gemma", "RecurrentGemmaForCausalLM", LEFT, num_hidden_layers=3, lru_width=16, attention_window_size=8)
MIXED = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
row("bamba", "BambaForCausalLM", LEFT, attn_layer_indices=[1], **MIXED)
PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
row("jamba", "JambaForCausalLM", LEFT, mamba_d_state=4, pad_token_id=0, **PERIODS, **EAGER)

# ---- time series ----------------------------------------------------------------------------------------------------

PAST = keyword_inputs(past_values=floats(16, 2))
PATCHES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4}
row("patchtst", "PatchTSTForPrediction", PAST, **PATCHES)
row("patchtsmixer", "PatchTSMixerForPrediction", PAST, **PATCHES)
KNOWN = {"past_time_features": floats(14, 1), "past_observed_mask": ones(14), "future_time_features": floats(4, 1)}
SERIES = keyword_inputs(past_values=floats(14), future_values=floats(4), **KNOWN)
FORECAST = {"prediction_length": 4, "context_length": 10, "lags_sequence": [1, 2, 3, 4], "num_time_features": 1}
row("informer", "InformerForPrediction", SERIES, **FORECAST)
row("autoformer", "AutoformerForPrediction", SERIES, "float32", **FORECAST)
row("time_series_transformer", "TimeSeriesTransformerForPrediction", SERIES, **FORECAST)
row("timesfm", "TimesFmModelForPrediction", keyword_inputs(past_values=series(16)), patch_length=4, horizon_length=4)
STEPS = {"states": floats(4, 5), "actions": floats(4, 2), "rewards": floats(4, 1), "returns_to_go": floats(4, 1)}
DECISIONS = keyword_inputs(timesteps=steps(4), **STEPS)
row("decision_transformer", "DecisionTransformerModel", DECISIONS, state_dim=5, act_dim=2, max_ep_len=16, n_inner=24)
