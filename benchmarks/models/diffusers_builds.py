"""Builds of models of diffusers. Each predicts the noise of images, or restores them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .build import SAMPLES, Build, randoms

BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
LATENT = {"sample_size": 8, "in_channels": 4, "out_channels": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}

SIZES: dict[str, dict[str, Any]] = {
    "UNet2DModel": {**LATENT, **BLOCKS, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8},
    "UNet2DConditionModel": {**LATENT, **BLOCKS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                             "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16,
                             "attention_head_dim": 4},
    "PixArtTransformer2DModel": {**LATENT, **HEADS, "patch_size": 2, "cross_attention_dim": 32, "caption_channels": 16,
                                 "norm_num_groups": 4},
    "SD3Transformer2DModel": {**LATENT, **HEADS, "patch_size": 2, "joint_attention_dim": 16, "pos_embed_max_size": 8,
                              "caption_projection_dim": 32, "pooled_projection_dim": 8},
    "AutoencoderKL": {"in_channels": 3, "out_channels": 3, "latent_channels": 4, **BLOCKS, "sample_size": 16,
                      "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
    "VQModel": {"in_channels": 3, "out_channels": 3, "latent_channels": 4, **BLOCKS, "num_vq_embeddings": 16,
                "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
}  # fmt: skip


def _made(name: str) -> nn.Module:
    return getattr(diffusers, name)(**SIZES[name])


def _times(draw: torch.Generator) -> Tensor:
    return torch.randint(100, (SAMPLES,), generator=draw)


def _batch(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """A batch of noise, noisy images and times, and what the model is given besides."""
    return lambda draw: (
        *randoms((4, 8, 8), (4, 8, 8))(draw),
        _times(draw),
        *randoms(*shapes)(draw),
    )


def _plain(model: nn.Module, noise: Tensor, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(model(x, t).sample, noise)


def _on_text(model: nn.Module, noise: Tensor, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
    return F.mse_loss(model(x, t, encoder_hidden_states=text).sample, noise)


def _on_caption(model: nn.Module, noise: Tensor, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
    added = {"resolution": None, "aspect_ratio": None}
    return F.mse_loss(
        model(x, encoder_hidden_states=text, timestep=t, added_cond_kwargs=added).sample, noise
    )


def _on_both(
    model: nn.Module, noise: Tensor, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor
) -> Tensor:
    out = model(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t)
    return F.mse_loss(out.sample, noise)


def _restored(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x).sample, x)


def builds() -> list[Build]:
    """All builds of this library."""
    of = {
        "UNet2DModel": (_batch(), _plain),
        "UNet2DConditionModel": (_batch((5, 16)), _on_text),
        "PixArtTransformer2DModel": (_batch((5, 16)), _on_caption),
        "SD3Transformer2DModel": (_batch((5, 16), (8,)), _on_both),
        "AutoencoderKL": (randoms((3, 16, 16)), _restored),
        "VQModel": (randoms((3, 16, 16)), _restored),
    }
    return [
        Build("diffusers", name, partial(_made, name), batch, loss)
        for name, (batch, loss) in of.items()
    ]
