"""Architectures of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from architecture import LENGTH, WORDS, Architecture, images, loss_of, tokens
from torch import Tensor, nn

Options = dict[str, Any]
Inputs = Callable[[], Options]
Prepare = Callable[[Any], object]

_ENDS: Options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: Options = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_GPT2: Options = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "eos_token_id": 2}
_GROUPED: Options = _SIZES | _ENDS | {"num_key_value_heads": 2}
_HEADS_OF_8: Options = _GROUPED | {"head_dim": 8}
_BERT: Options = _SIZES | {"pad_token_id": 0}
_DEBERTA: Options = _SIZES | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_T5: Options = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 4,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_BART: Options = _ENDS | {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_WHISPER: Options = _BART | {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 40,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_SPEECH: Options = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.2,
    "mask_time_prob": 0.0,
}
_VISION: Options = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_TWO: Options = {"text_config": _SIZES | _ENDS, "vision_config": _VISION}
_STAGES: Options = {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 2, 3, 2]}
_SWIN: Options = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2, 3], "num_heads": [2, 2, 4]}
_PYRAMID: Options = {
    "image_size": 32,
    "depths": [2, 2, 2, 2],
    "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4],
}
_MAMBA: Options = _ENDS | {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4}


def _words() -> Options:
    return {"input_ids": tokens(), "labels": tokens()}


def _masked() -> Options:
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3]])
    return _words() | {"attention_mask": mask.long()}


def _pixels() -> Options:
    return {"pixel_values": images(32)}


def _pairs() -> Options:
    return {"input_ids": tokens(), "pixel_values": images(32), "return_loss": True}


def _sound() -> Options:
    return {"input_values": torch.linspace(-30, 30, 3200, dtype=torch.float64).sin().reshape(2, 1600)}


def _spectra() -> Options:
    return {"input_features": images(32).flatten()[:640].reshape(2, 8, 40), "labels": tokens()}


def _checkpoints(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()


def _eager_experts(model: Any) -> None:
    """Use eager experts: the default, grouped matrix products, does not support double precision."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


_CAUSAL = ("Mistral", "Qwen2", "Phi3", "Olmo", "Olmo2", "StableLm", "Starcoder2", "Cohere", "Granite", "SmolLM3")
_ROWS: list[tuple[str, str, Inputs, Options]] = [
    (
        "GPTNeoForCausalLM",
        "GPTNeo",
        _words,
        _SIZES | {"num_layers": 4, "num_heads": 4, "window_size": 4} | {"attention_types": [[["global", "local"], 2]]},
    ),
    ("GPTNeoXForCausalLM", "GPTNeoX", _words, _SIZES | _ENDS),
    ("GPTJForCausalLM", "GPTJ", _words, _GPT2 | {"rotary_dim": 4}),
    ("CodeGenForCausalLM", "CodeGen", _words, _GPT2 | {"rotary_dim": 4}),
    ("BloomForCausalLM", "Bloom", _words, _ENDS | {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    ("MptForCausalLM", "Mpt", _words, {"vocab_size": WORDS, "d_model": 32, "n_layers": 4, "n_heads": 4}),
    ("FalconForCausalLM", "Falcon", _words, _SIZES | _ENDS),
    ("OPTForCausalLM", "OPT", _words, _SIZES | _ENDS | {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.3}),
    *((f"{family}ForCausalLM", family, _masked, _GROUPED) for family in _CAUSAL),
    *(
        (f"{family}ForCausalLM", family, _masked, _HEADS_OF_8)
        for family in ("Qwen3", "Gemma", "Gemma2", "Helium", "Glm")
    ),
    ("NemotronForCausalLM", "Nemotron", _masked, _GROUPED),
    ("PhiForCausalLM", "Phi", _words, _GROUPED),
    (
        "Mamba2ForCausalLM",
        "Mamba2",
        _words,
        _MAMBA | {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1} | {"chunk_size": 4},
    ),
    ("RwkvForCausalLM", "Rwkv", _words, _MAMBA | {"context_length": 32}),
    *((f"{f}ForMaskedLM", f, _masked, _BERT) for f in ("Roberta", "MPNet", "Camembert", "XLMRoberta", "MegatronBert")),
    ("ElectraForMaskedLM", "Electra", _masked, _BERT | {"embedding_size": 32}),
    (
        "DistilBertForMaskedLM",
        "DistilBert",
        _masked,
        {"vocab_size": WORDS, "dim": 32, "n_layers": 4, "n_heads": 4}
        | {"hidden_dim": 64, "max_position_embeddings": 64},
    ),
    ("DebertaForMaskedLM", "Deberta", _masked, _DEBERTA),
    ("DebertaV2ForMaskedLM", "DebertaV2", _masked, _DEBERTA),
    ("ConvBertForMaskedLM", "ConvBert", _masked, _SIZES | {"embedding_size": 32}),
    ("SqueezeBertForMaskedLM", "SqueezeBert", _masked, _SIZES | {"embedding_size": 32}),
    ("ModernBertForMaskedLM", "ModernBert", _masked, _SIZES | _ENDS | {"cls_token_id": 1, "sep_token_id": 2}),
    ("MT5ForConditionalGeneration", "MT5", _words, _T5),
    *((f"{f}ForConditionalGeneration", f, _words, _BART) for f in ("MBart", "Pegasus", "Blenderbot", "M2M100")),
    ("MarianMTModel", "Marian", _words, _BART),
    ("WhisperForConditionalGeneration", "Whisper", _spectra, _WHISPER),
    *((f"{family}Model", family, _sound, _SPEECH) for family in ("Wav2Vec2", "Hubert", "WavLM")),
    *((f"{family}ForImageClassification", family, _pixels, _VISION) for family in ("DeiT", "Dinov2", "ViTMSN")),
    ("BeitForImageClassification", "Beit", _pixels, _VISION | {"use_relative_position_bias": True}),
    (
        "YolosModel",
        "Yolos",
        _pixels,
        _VISION | {"image_size": [32, 32], "num_detection_tokens": 4} | {"use_mid_position_embeddings": True},
    ),
    ("CLIPModel", "CLIP", _pairs, _TWO),
    ("SiglipModel", "Siglip", _pairs, _TWO),
    ("ConvNextV2ForImageClassification", "ConvNextV2", _pixels, _STAGES),
    ("ResNetForImageClassification", "ResNet", _pixels, _STAGES | {"embedding_size": 8, "layer_type": "basic"}),
    ("BitForImageClassification", "Bit", _pixels, _STAGES | {"embedding_size": 8, "num_groups": 4}),
    ("RegNetForImageClassification", "RegNet", _pixels, _STAGES | {"embedding_size": 8, "groups_width": 8}),
    ("Swinv2ForImageClassification", "Swinv2", _pixels, _SWIN | {"window_size": 4}),
    ("SegformerForImageClassification", "Segformer", _pixels, _PYRAMID),
    ("PvtForImageClassification", "Pvt", _pixels, _PYRAMID),
    ("PoolFormerForImageClassification", "PoolFormer", _pixels, _PYRAMID),
    ("MobileNetV2ForImageClassification", "MobileNetV2", _pixels, {"image_size": 32, "depth_multiplier": 0.25}),
]

_QUICK: list[tuple[str, str, Inputs, Options]] = [
    ("GPT2LMHeadModel", "GPT2", _masked, _GPT2),
    ("LlamaForCausalLM", "Llama", _masked, _GROUPED),
    ("BertForMaskedLM", "Bert", _masked, _BERT),
    ("T5ForConditionalGeneration", "T5", _words, _T5),
    ("BartForConditionalGeneration", "Bart", _words, _BART | {"encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}),
    ("ViTForImageClassification", "ViT", _pixels, _VISION),
    ("ConvNextForImageClassification", "ConvNext", _pixels, _STAGES),
    ("SwinForImageClassification", "Swin", _pixels, _SWIN | {"window_size": 4}),
    ("MambaForCausalLM", "Mamba", _words, _MAMBA | {"state_size": 4}),
]

_MOE: Options = _GROUPED | {"num_experts_per_tok": 2}
_PREPARED: list[tuple[str, str, Options, Prepare, str]] = [
    ("GPT2LMHeadModel", "GPT2", _GPT2, partial(_checkpoints, reentrant=False), ", checkpoints"),
    ("GPT2LMHeadModel", "GPT2", _GPT2, partial(_checkpoints, reentrant=True), ", reentrant checkpoints"),
    ("MixtralForCausalLM", "Mixtral", _MOE | {"num_local_experts": 4}, _eager_experts, ""),
    (
        "MixtralForCausalLM",
        "Mixtral",
        _MOE | {"num_local_experts": 4, "output_router_logits": True},
        _eager_experts,
        ", router loss",
    ),
    ("Qwen2MoeForCausalLM", "Qwen2Moe", _MOE | {"num_experts": 4, "moe_intermediate_size": 16}, _eager_experts, ""),
    ("OlmoeForCausalLM", "Olmoe", _MOE | {"num_experts": 4}, _eager_experts, ""),
    ("SwitchTransformersForConditionalGeneration", "SwitchTransformers", _T5 | {"num_experts": 2}, _eager_experts, ""),
]


def _nothing(model: Any) -> None:
    """Do not change the model."""


def _architecture(
    model: str, config: str, inputs: Inputs, options: Options, prepare: Prepare = _nothing, more: str = "", **own: Any
) -> Architecture:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**options))
        prepare(made)
        return made

    def loss(made: nn.Module) -> Tensor:
        return loss_of(made(**inputs()))

    return Architecture(model + more, "transformers", build, loss, **own)


def transformers_models() -> list[Architecture]:
    """Return the architectures of transformers."""
    albert = "albert.encoder.albert_layer_groups"
    return [
        *(_architecture(*row, quick=True) for row in _QUICK),
        *(_architecture(*row) for row in _ROWS),
        *(
            _architecture(m, config, _words, options, how, more, quick=m + more == "MixtralForCausalLM")
            for m, config, options, how, more in _PREPARED
        ),
        _architecture("AlbertForMaskedLM", "Albert", _masked, _BERT | {"embedding_size": 16}, chains=[albert]),
    ]
