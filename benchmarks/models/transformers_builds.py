"""Builds of models of Hugging Face's transformers: language, images, and both."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from .build import Build, images, language_loss, randoms, tokens

WIDE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**WIDE, "num_key_value_heads": 2, "pad_token_id": 0}
HEADS = {**GROUPED, "head_dim": 8}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 32, "pad_token_id": 1,
    "decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0,
      "decoder_start_token_id": 0}  # fmt: skip
IMAGE = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_labels": 4, **STILL}  # fmt: skip
STAGES = {"depths": [1, 1], "num_labels": 4}
SOUND = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
         "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
         "layerdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
         "feat_proj_dropout": 0.0, "final_dropout": 0.0, "feat_extract_norm": "layer"}  # fmt: skip

# Name of the model: name of the configuration, and its sizes.
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", HEADS),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", HEADS),
    "GemmaForCausalLM": ("GemmaConfig", HEADS),
    "Gemma2ForCausalLM": ("Gemma2Config", HEADS),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", HEADS),
    "PhiForCausalLM": ("PhiConfig", {**WIDE, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "StableLmForCausalLM": ("StableLmConfig", GROUPED),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "OlmoForCausalLM": ("OlmoConfig", GROUPED),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED),
    "CohereForCausalLM": ("CohereConfig", GROUPED),
    "GraniteForCausalLM": ("GraniteConfig", GROUPED),
    "GlmForCausalLM": ("GlmConfig", HEADS),
    "HeliumForCausalLM": ("HeliumConfig", HEADS),
    "NemotronForCausalLM": ("NemotronConfig", GROUPED),
    "SmolLM3ForCausalLM": ("SmolLM3Config", GROUPED),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**HEADS, **EXPERTS}),
    "OlmoeForCausalLM": ("OlmoeConfig", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "GptOssForCausalLM": ("GptOssConfig", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
                                       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "GPTNeoForCausalLM": ("GPTNeoConfig", {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                                           "attention_types": [[["global", "local"], 1]],
                                           "max_position_embeddings": 32}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", WIDE),
    "GPTJForCausalLM": ("GPTJConfig", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
                                       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "OPTForCausalLM": ("OPTConfig", {**WIDE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0,
                                     "max_position_embeddings": 32}),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "FalconForCausalLM": ("FalconConfig", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2,
                                           "num_attention_heads": 4}),
    "MptForCausalLM": ("MptConfig", {"vocab_size": 96, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "MambaForCausalLM": ("MambaConfig", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba2ForCausalLM": ("Mamba2Config", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4,
                                           "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    "BertForMaskedLM": ("BertConfig", {**WIDE, **STILL}),
    "RobertaForMaskedLM": ("RobertaConfig", {**WIDE, **STILL}),
    "DistilBertForMaskedLM": ("DistilBertConfig", {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 4,
                                                   "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}),
    "AlbertForMaskedLM": ("AlbertConfig", {**WIDE, **STILL, "embedding_size": 16}),
    "ElectraForMaskedLM": ("ElectraConfig", {**WIDE, **STILL, "embedding_size": 16}),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", {**WIDE, **STILL, "relative_attention": True}),
    "MPNetForMaskedLM": ("MPNetConfig", {**WIDE, **STILL}),
    "ModernBertForMaskedLM": ("ModernBertConfig", {**WIDE, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "FNetForMaskedLM": ("FNetConfig", {**WIDE, "hidden_dropout_prob": 0.0, "tpu_short_seq_length": 12}),
    "RoFormerForMaskedLM": ("RoFormerConfig", {**WIDE, **STILL}),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "MT5ForConditionalGeneration": ("MT5Config", T5),
    "BartForConditionalGeneration": ("BartConfig", BOTH),
    "PegasusForConditionalGeneration": ("PegasusConfig", BOTH),
    "MarianMTModel": ("MarianConfig", {**BOTH, "decoder_vocab_size": 96}),
}  # fmt: skip

IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", IMAGE),
    "DeiTForImageClassification": ("DeiTConfig", IMAGE),
    "BeitForImageClassification": ("BeitConfig", {**IMAGE, "drop_path_rate": 0.0}),
    "Dinov2ForImageClassification": ("Dinov2Config", IMAGE),
    "SwinForImageClassification": ("SwinConfig", {**STAGES, **STILL, "image_size": 32, "patch_size": 4, "embed_dim": 16,
                                                  "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}),
    "ConvNextForImageClassification": ("ConvNextConfig", {"num_stages": 2, "hidden_sizes": [16, 32], **STAGES}),
    "PoolFormerForImageClassification": ("PoolFormerConfig", {
        "depths": [1, 1], "hidden_sizes": [16, 32], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
        "padding": [2, 1], "num_labels": 4, "drop_path_rate": 0.0}),
    "ResNetForImageClassification": ("ResNetConfig", {"hidden_sizes": [16, 32], "embedding_size": 16,
                                                      "layer_type": "basic", **STAGES}),
}  # fmt: skip
APART = {"ResNetForImageClassification"}
MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss")


def _made(name: str, config: str, sizes: dict[str, Any]) -> Any:
    return getattr(hf, name)(getattr(hf, config)(**sizes))


def _classified(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=pixels, labels=labels).loss


def _clip(name: str) -> Any:
    text = {**WIDE, "max_position_embeddings": 12, "projection_dim": 16, "eos_token_id": 4}
    image = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "image_size": 32, "patch_size": 8, "projection_dim": 16}  # fmt: skip
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=image)
    return getattr(hf, f"{name}Model")(config)


def _pairs(draw: Any) -> tuple[Tensor, ...]:
    return *tokens()(draw), images()(draw)[0]


def _contrasted(model: Any, ids: Tensor, pixels: Tensor) -> Tensor:
    return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss


def _heard(model: Any, sound: Tensor, labels: Tensor) -> Tensor:
    return model(input_values=sound, labels=labels).loss


def _sounds(draw: Any) -> tuple[Tensor, ...]:
    return *randoms((400,))(draw), *tokens(4, 32)(draw)


def _whisper() -> Any:
    sizes = {**BOTH, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "suppress_tokens": None,
             "begin_suppress_tokens": None, "median_filter_width": 3}  # fmt: skip
    sizes.pop("max_position_embeddings")
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes))


def _transcribed(model: Any, features: Tensor, labels: Tensor) -> Tensor:
    return model(input_features=features, labels=labels).loss


def _vits() -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16,
             "flow_size": 8, "spectrogram_bins": 9, "prior_encoder_num_flows": 1, "prior_encoder_num_wavenet_layers": 1,
             "posterior_encoder_num_wavenet_layers": 1, "upsample_initial_channel": 16, "upsample_rates": [2],
             "upsample_kernel_sizes": [4], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]],
             "duration_predictor_filter_channels": 16, "use_stochastic_duration_prediction": False, "layerdrop": 0.0,
             "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
             "duration_predictor_dropout": 0.0}  # fmt: skip
    return hf.VitsModel(hf.VitsConfig(**sizes))


def _spoken(model: Any, ids: Tensor, spectrogram: Tensor, sound: Tensor) -> Tensor:
    """The losses of VITS, with the same number of frames for each token.

    The model's own forward has no loss. It makes a sound of the length that it predicts, which no program can have.
    """
    rows, length = ids.shape
    mask = spectrogram.new_ones(rows, 1, spectrogram.shape[-1])
    text_mask = spectrogram.new_ones(rows, length)
    text = model.text_encoder(
        input_ids=ids, padding_mask=text_mask.unsqueeze(-1), attention_mask=text_mask
    )
    _, mean, log_deviation = model.posterior_encoder(spectrogram, mask)
    latents = model.flow(mean, mask).transpose(1, 2)
    frames = spectrogram.shape[-1] // length
    prior = text.prior_means.repeat_interleave(frames, dim=1)
    log_prior = text.prior_log_variances.repeat_interleave(frames, dim=1)
    divergence = log_prior - log_deviation.transpose(1, 2)
    divergence = divergence + (latents - prior).square() * torch.exp(-2 * log_prior)
    durations = model.duration_predictor(
        text.last_hidden_state.transpose(1, 2), text_mask.unsqueeze(1)
    )
    heard = (model.decoder(mean).squeeze(1) - sound).abs().mean()
    return heard + divergence.mean() + (durations - math.log(frames)).square().mean()


def _speech(draw: Any) -> tuple[Tensor, ...]:
    return *tokens(4)(draw), *randoms((9, 12), (24,))(draw)


def builds() -> list[Build]:
    """All builds of this library."""
    built = lambda name, of: partial(_made, name, *of)
    dtype = lambda name: torch.float32 if name.startswith(MIXTURES) else torch.float64
    return [
        *(
            Build("transformers", n, built(n, of), tokens(), language_loss, dtype=dtype(n))
            for n, of in LANGUAGE.items()
        ),
        *(Build("transformers", n, built(n, of), images(), _classified, n in APART) for n, of in IMAGES.items()),
        *(Build("transformers", f"{n}Model", partial(_clip, n), _pairs, _contrasted, True) for n in ("CLIP", "Siglip")),
        *(
            Build("transformers", f"{n}ForCTC", built(f"{n}ForCTC", (f"{n}Config", SOUND)), _sounds, _heard)
            for n in ("Wav2Vec2", "Hubert")
        ),
        Build("transformers", "WhisperForConditionalGeneration", _whisper,
              lambda draw: (*randoms((8, 16))(draw), *tokens(8)(draw)), _transcribed),
        Build("transformers", "VitsModel", _vits, _speech, _spoken),
    ]  # fmt: skip
