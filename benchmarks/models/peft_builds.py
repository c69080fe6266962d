"""Builds of adapters of peft, on a small Llama whose own weights are frozen."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import transformers as hf
from torch import nn

from .build import Build, language_loss, tokens
from .transformers_builds import GROUPED

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
PROMPT = {"num_virtual_tokens": 4}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, **TARGETS}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, **TARGETS}),
    "LoHa": ("LoHaConfig", {"r": 4, **TARGETS}),
    "LoKr": ("LoKrConfig", {"r": 4, **TARGETS}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "OFT": ("OFTConfig", {"oft_block_size": 4, **TARGETS}),
    "prompt tuning": ("PromptTuningConfig", PROMPT),
    "prefix tuning": ("PrefixTuningConfig", PROMPT),
}


def _made(config: str, sizes: dict[str, Any]) -> nn.Module:
    base = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))
    return peft.get_peft_model(base, getattr(peft, config)(task_type="CAUSAL_LM", **sizes))


def builds() -> list[Build]:
    """All builds of this library."""
    return [
        Build("peft", name, partial(_made, *of), tokens(), language_loss)
        for name, of in ADAPTERS.items()
    ]
