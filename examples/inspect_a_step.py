"""Inspect a step for eight ranks in one process: what each transform changes, its cost, and its memory.

python examples/inspect_a_step.py
"""

from itertools import pairwise

import torch
from gpt import GPT, Config, init, make_step

import ztrans as zt

BIG = Config(layers=4, width=1024, heads=16, sequence=256)


def head(program: object, lines: int, start: str = "  # forward") -> str:
    """The first lines of a program's body."""
    text = str(program).splitlines()
    begin = text.index(start)
    rest = len(text) - begin - lines
    return "\n".join([*text[begin : begin + lines], f"  ... {rest} more lines"])


def changes(before: object, after: object, of: str, most: int) -> str:
    """The changed lines that name the parameter `of`, at most `most` of them, and the number of all others."""
    lines = zt.ir.diff(before, after, context=0, full=True).splitlines()
    changed = [line for line in lines if line.startswith(("+ ", "- "))]
    about = [line for line in changed if of in line][:most]
    if not changed:
        return "  no line: the transform only adds hints about the order, which `lower` follows"
    return "\n".join([*about, f"  ... {len(changed) - len(about)} more lines"])


def main(config: Config = BIG, *, batch: int = 1, ranks: int = 8, lines: int = 12) -> None:
    mesh = zt.AbstractMesh(dp=ranks)
    with torch.device("meta"):  # parameters without memory, so the model may have any size
        model = GPT(config)
        tokens = torch.zeros(batch, config.sequence + 1, dtype=torch.int64)
    state = init(model, lr=1e-3)
    plain = make_step(model, bf16=True)

    def lower(stage: int) -> zt.stages.Lowered:
        fsdp = zt.chain(
            zt.shard_params(mesh, stage=stage),
            zt.overlap_grads(),
            zt.prefetch(),
            zt.fuse_cast_gather(),
        )
        return fsdp(plain).lower(state, tokens)

    lowered = lower(stage=3)
    parameter = "params.blocks.0.mlp.0.weight"

    (_, traced), (_, written), *_ = lowered.history
    code = traced.code.strip().splitlines()
    print("The FX graph of make_fx:\n")
    print("\n".join(code[1 : lines + 1]))  # the first line names all inputs
    print("\nThe program as written:\n")
    print(head(written, lines))
    print(f"\nThe changes that concern {parameter}:")
    for (_, before), (name, after) in pairwise(lowered.history[1:]):
        print(f"\n---- {name}\n{changes(before, after, parameter, lines)}")
    print("\nThe program that each rank runs:\n")
    print(head(lowered, lines))
    print("\nIts cost:\n")
    print(lowered.cost_analysis())
    print("\nThe live bytes of one rank, by ZeRO stage:\n")
    for stage in range(4):
        memory = lower(stage).memory_analysis()
        figures = f"state {memory.state:>12,}   peak {memory.peak:>12,}"
        print(f"stage {stage}   {figures}   at {memory.peak_eqn.source}")


if __name__ == "__main__":
    main()
