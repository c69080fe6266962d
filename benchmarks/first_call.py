"""Measure what the first call of a lifted step costs before it runs: tracing and lowering, on one core.

    OMP_NUM_THREADS=1 python benchmarks/first_call.py                # from the project's root; about two minutes
    OMP_NUM_THREADS=1 python benchmarks/first_call.py gpt2 --repeats 1

GPT-2 (124 M parameters) trains on one rank, Llama-3-8B on 64, on the meta device, in bf16 autocast. Both are models of
transformers, built from a configuration, lifted with AdamW. Then the same step gets a batch of another shape.

Needs the extra `models`. Prints processor seconds, the medians of `--repeats` fresh processes, and writes
benchmarks/results/first_call.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ztrans as zt

RESULTS = Path(__file__).parent / "results" / "first_call.md"
STAGES = ("lift", "trace", "lower", "trace again", "lower again")


def gpt2() -> tuple[Any, Callable, list[torch.Tensor], tuple]:
    """GPT-2 on one rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    batches = [torch.zeros(rows, 512, dtype=torch.int64) for rows in (4, 3)]
    return model, torch.no_grad, batches, ()


def llama() -> tuple[Any, Callable, list[torch.Tensor], tuple]:
    """Llama-3-8B on 64 ranks, on the meta device, in bf16 autocast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    batches = [torch.empty(rows, 4096, dtype=torch.int64, device="meta") for rows in (2, 1)]
    transforms = zt.shard_params(zt.AbstractMesh(dp=64)), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
    return model, torch.no_grad, batches, transforms
