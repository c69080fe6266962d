"""Builds of models of timm."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor, nn

from .build import Build, images

SMALL = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 8}
MIXED = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}

# Name of the model or of its class: its sizes.
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "deit_tiny_patch16_224": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4),
        "drop_path_rate": 0.0},
    "MlpMixer": MIXED,
    "ConvNeXt": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "resnet10t": {},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "mnasnet_small": {},
}  # fmt: skip
NORMED = {
    "resnet10t",
    "mobilenetv2_035",
    "mobilenetv3_small_050",
    "mnasnet_small",
}  # by batch norms


def _made(name: str, sizes: dict[str, Any]) -> nn.Module:
    if name in timm.list_models():
        return timm.create_model(name, num_classes=4, drop_rate=0.0, **sizes)
    return getattr(timm.models, name)(num_classes=4, **sizes)


def _loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def builds() -> list[Build]:
    """All builds of this library."""
    return [
        Build("timm", name, partial(_made, name, sizes), images(), _loss, name in NORMED)
        for name, sizes in MODELS.items()
    ]
