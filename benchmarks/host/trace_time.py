"""Measure how long a trace takes, beside bare `make_fx` of the same step, and how long lowering takes.

    OMP_NUM_THREADS=1 python -m benchmarks.host.trace_time                # from the project's root; 5 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.host.trace_time --repeats 1 GPT-12

The steps are plain functions: forward, backward by `torch.func`, and AdamW. GPT-12 is the GPT of the examples with 12
layers. GPT-2 (124 M parameters) and Llama-3-8B are models of transformers, made from their configurations (extra
`models`), with the fused AdamW of PyTorch. Parameters are on the meta device, so no step needs memory. Bare `make_fx`
gets the same flat function, on the same fake tensors.

Each model runs in a fresh process on one core, after one trace that is not counted. The two traces take turns. Prints
processor seconds, medians of `--repeats` runs, and writes benchmarks/results/trace_time.md if all models ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import ztrans as zt

from .. import RESULTS

PAGE = RESULTS / "trace_time.md"
LIMIT = 1 << 37  # bytes: the activations of Llama-3-8B do not fit an H100, and nothing runs here
TRANSFORMS = (
    zt.shard_params(zt.AbstractMesh(dp=64)),
    zt.overlap_grads(),
    zt.prefetch(memory=LIMIT),
    zt.fuse_cast_gather(),
)


def gpt() -> tuple[Callable, Any, torch.Tensor]:
    sys.path.insert(0, str(RESULTS.parents[1] / "examples"))
    from gpt import init, make_step
    from model import GPT, Config

    with torch.device("meta"):
        model = GPT(Config(layers=12, width=768, heads=12, sequence=1024))
        state = init(model, 1e-3)
        tokens = torch.empty(1, 1025, dtype=torch.int64)
    return make_step(model, bf16=True), state, tokens


def with_fused_adamw(
    model: torch.nn.Module, tokens: torch.Tensor
) -> tuple[Callable, Any, torch.Tensor]:
    """A step of a model of transformers with PyTorch's fused AdamW."""

    def loss_of(params: dict, buffers: dict, tokens: torch.Tensor) -> torch.Tensor:
        return functional_call(
            model, {**params, **buffers}, (), {"input_ids": tokens, "labels": tokens}
        ).loss

    def step(state: dict, tokens: torch.Tensor) -> tuple[dict, torch.Tensor]:
        grads, loss = grad_and_value(loss_of)(state["params"], state["buffers"], tokens)
        new = {key: {k: x.clone() for k, x in state[key].items()} for key in state}
        lists = [[*values.values()] for values in (new["params"], grads, new["m"], new["v"])]
        settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_(
            *lists, [], [*new["step"].values()], amsgrad=False, maximize=False, **settings
        )
        return new, loss

    params = {k: p.detach() for k, p in model.named_parameters()}
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    counts = {k: torch.zeros((), device="meta") for k in params}
    state = {"params": params, "m": zeros, "v": dict(zeros), "step": counts}
    return step, {**state, "buffers": dict(model.named_buffers())}, tokens


def gpt2() -> tuple[Callable, Any, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return with_fused_adamw(
            GPT2LMHeadModel(GPT2Config()), torch.empty(4, 512, dtype=torch.int64)
        )


def llama() -> tuple[Callable, Any, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train()
        return with_fused_adamw(model, torch.empty(2, 4096, dtype=torch.int64))


MODELS: dict[str, Callable] = {"GPT-12": gpt, "GPT-2": gpt2, "Llama-3-8B": llama}


def bare_trace(step: Callable, state: Any, tokens: torch.Tensor) -> torch.fx.GraphModule:
    """The FX graph of `make_fx` alone."""
    leaves, tree = pytree.tree_flatten((state, tokens))

    def flat(*tensors: torch.Tensor) -> list:
        return pytree.tree_leaves(step(*pytree.tree_unflatten(tensors, tree)))

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in leaves]
    return make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Processor seconds of each run, and the sizes of the graphs."""
    torch.set_num_threads(1)
    plain, state, tokens = MODELS[name]()
    step = zt.chain(*TRANSFORMS)(plain)
    trace = lambda: step.trace(state, tokens)
    bare = lambda: bare_trace(plain, state, tokens)
    bare(), trace()
    runs: dict[str, Any] = {"bare": [], "trace": [], "lower": []}
    for _ in range(repeats):
        taken, module = seconds(bare)
        runs["bare"].append(taken)
        nodes = len(module.graph.nodes)
        taken, traced = seconds(trace)
        runs["trace"].append(taken)
        taken, lowered = seconds(traced.lower)
        runs["lower"].append(taken)
    return {**runs, "nodes": nodes, "equations": len(lowered.graph.eqns)}


def main(names: Sequence[str], repeats: int) -> None:
    rows = [
        "| step | nodes of make_fx | equations | bare make_fx s | trace s | trace / bare | lower s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        command = [
            sys.executable,
            "-m",
            "benchmarks.host.trace_time",
            "--one",
            name,
            "--repeats",
            str(repeats),
        ]
        shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        runs = json.loads(shown.splitlines()[-1])
        bare, trace, lower = (statistics.median(runs[key]) for key in ("bare", "trace", "lower"))
        sizes = f"{runs['nodes']} | {runs['equations']}"
        rows.append(
            f"| {name} | {sizes} | {bare:.2f} | {trace:.2f} | {trace / bare:.2f} | {lower:.2f} |"
        )
        print(rows[-1], flush=True)
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    title = f"# Tracing a step, beside bare make_fx\n\n{where}; processor seconds, medians of {repeats} runs in turns."
    text = "\n".join([title, "", *rows, ""])
    if [*names] == [*MODELS]:
        PAGE.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="the steps to trace, by default all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=[*MODELS])
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.repeats)))
    else:
        main(options.names or [*MODELS], options.repeats)
