"""Measure what the first call of a lifted step takes before it runs, and the first call with another batch.

    OMP_NUM_THREADS=1 python -m benchmarks.host.first_call                          # from the project's root; 2 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.host.first_call --repeats 1 GPT-2

GPT-2 (124 M parameters) trains on one rank; Llama-3-8B on 64, on the meta device, in bf16 autocast, with four
transforms. Both are models of transformers, made from their configurations, and lifted with AdamW. The second batch
has fewer rows.

Needs the extra `models`. Each run is a fresh process on one core. Prints processor seconds, the medians of `--repeats`
runs, and writes benchmarks/results/first_call.md if all models were measured.
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
from torch import nn

import ztrans as zt

from .. import RESULTS

PAGE = RESULTS / "first_call.md"
STAGES = (
    "lift",
    "trace",
    "lower",
    "trace, second batch",
    "lower, second batch",
    "trace, first batch again",
)


def gpt2() -> tuple[nn.Module, list[torch.Tensor], tuple]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return (
        GPT2LMHeadModel(GPT2Config()),
        [torch.zeros(rows, 512, dtype=torch.int64) for rows in (4, 3)],
        (),
    )


def llama() -> tuple[nn.Module, list[torch.Tensor], tuple]:
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
        batches = [torch.empty(rows, 4096, dtype=torch.int64) for rows in (2, 1)]
    mesh = zt.AbstractMesh(dp=64)
    return (
        model,
        batches,
        (zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()),
    )


MODELS: dict[str, Callable] = {"GPT-2": gpt2, "Llama-3-8B": llama}


def seconds(name: str) -> dict[str, float]:
    """Processor seconds of each stage, and the number of equations of the lowered program."""
    model, batches, transforms = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loop_step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "Llama-3-8B"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    times = [time.process_time()]

    def done(result: Any) -> Any:
        times.append(time.process_time())
        return result

    fn, state = done(zt.lift(loop_step, model, optimizer))
    step: zt.Step = zt.chain(*transforms)(fn) if transforms else zt.Step.of(fn)
    lowered = done(done(step.trace(state, batches[0])).lower())
    done(
        done(step.trace(state, batches[1])).lower(
            cluster=lowered.cluster, plan=lowered.plan, follow=True
        )
    )
    done(step.trace(state, batches[0]))
    return {
        **{stage: after - before for stage, before, after in zip(STAGES, times, times[1:])},
        "equations": len(lowered.graph.eqns),
    }


def measured(name: str, repeats: int) -> dict[str, float]:
    """Medians over fresh processes."""
    command = [sys.executable, "-m", "benchmarks.host.first_call", "--one", name]
    runs = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
            for _ in range(repeats)]  # fmt: skip
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main(names: Sequence[str], repeats: int) -> None:
    rows = [
        f"| model | equations | {' | '.join(f'{stage} s' for stage in STAGES)} | second / first | from lift |"
    ]
    rows.append("|---" * (len(STAGES) + 4) + "|")
    for name in names:
        s = measured(name, repeats)
        second, first = s[STAGES[3]] + s[STAGES[4]], s[STAGES[1]] + s[STAGES[2]]
        ratios = second / first, second / (s[STAGES[0]] + first)
        figures = " | ".join(f"{figure:.2f}" for figure in (*map(s.__getitem__, STAGES), *ratios))
        rows.append(f"| {name} | {s['equations']:.0f} | {figures} |")
        print(rows[-1], flush=True)
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    title = (
        "# The first call of a lifted step, before it runs\n\n"
        f"{where}; processor seconds, medians of {repeats} runs."
    )
    once = (
        "The first trace of a process includes what PyTorch prepares once; the last column of seconds does not.\n"
        "The last two columns are trace and lower of the second batch over those of the first, without and with lift."
    )
    text = "\n".join([title, "", once, "", *rows, ""])
    print(text)
    if [*names] == [*MODELS]:
        PAGE.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        print(json.dumps(seconds(arguments.one)))
    else:
        main(arguments.models or [*MODELS], arguments.repeats)
