"""Train a byte-level GPT on two ranks with four transforms and bf16 on the wire, and compare it with the plain step.

    torchrun --standalone --nproc-per-node 2 examples/demo.py      # needs the extra `examples`

At the end rank 0 prints the program that ran, its bytes on the wire, its memory by ZeRO stage, and how far the losses
are from those of the plain step, which it runs in one process on the same batches.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import init, make_step
from matplotlib.figure import Figure
from model import GPT, Config
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from text import draw, stdlib_bytes

import ztrans as zt

console = Console(width=None if Console().is_terminal else 120, highlight=False)


def train(
    name: str, step: Callable, state: dict, batches: Iterable[torch.Tensor], ranks: int
) -> list[float]:
    """Train on this rank's slices of the batches, and return the loss of each step.

    Rank 0 shows a bar, or prints ten lines where the output is no terminal.
    """
    batches, losses, start, shows = list(batches), [], 0.0, dist.get_rank() == 0
    columns = (
        TextColumn(f"{name:<14}"),
        BarColumn(30),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not (shows and console.is_terminal)) as bar:
        task = bar.add_task("", total=len(batches))
        for count, batch in enumerate(batches, 1):
            state, loss = step(state, batch)
            losses.append(loss.item())
            start = (
                start or time.perf_counter()
            )  # after the first step, which also traces and compiles
            rate = ranks * batch[:, 1:].numel() * (count - 1) / (time.perf_counter() - start)
            progress = (
                f"step {count:>3}/{len(batches)}   loss {losses[-1]:.3f}   {rate:>6,.0f} tokens/s"
            )
            bar.update(task, advance=1, description=progress)
            if (
                shows
                and not console.is_terminal
                and count * 10 // len(batches) > (count - 1) * 10 // len(batches)
            ):
                console.print(f"{name:<14} {progress}")
    return losses


def head(program: zt.Lowered, inputs: int = 3, equations: int = 18) -> str:
    """The first lines of a program, with only the first `inputs` of its inputs."""
    lines = str(program).splitlines()
    body = lines.index("):")
    start = [
        *lines[: 2 + inputs],
        f"    ... {body - 2 - inputs} more",
        *lines[body : body + 2 + equations],
    ]
    return "\n".join([*start, f"  ... {len(lines) - body - 2 - equations} more lines"])


def size(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n >= 2**16 else f"{n} B"


def wire_table(separate: zt.Lowered, fused: zt.Lowered) -> Table:
    table = Table("role", title="bytes on the wire of one rank in one step")
    for column in ("without fuse_cast_gather", "with it", "ratio"):
        table.add_column(column, justify="right")
    before, after = separate.cost_analysis(), fused.cost_analysis()
    for role in (*sorted({role for (_, role), _ in before.wire}), None):
        wide, half = before.over(role=role), after.over(role=role)
        ratio = f"{half / wide:.2f}" if wide else ""
        table.add_row(role or "together", size(wide), size(half), ratio)
    return table


def memory_table(stages: dict[int, zt.Lowered]) -> Table:
    table = Table("stage", title="live bytes of one rank, by ZeRO stage")
    for column in ("state between steps", "peak in a step", "where the peak is"):
        table.add_column(column, justify="right")
    for stage, lowered in stages.items():
        memory = lowered.memory_analysis()
        table.add_row(str(stage), size(memory.state), size(memory.peak), str(memory.at.source))
    return table


def picture(sharded: list[float], plain: list[float], ranks: int, path: Path) -> None:
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = range(1, len(plain) + 1)
    top.plot(steps, plain, color="black", linewidth=3, alpha=0.3, label="plain step, one process")
    top.plot(steps, sharded, color="tab:blue", linewidth=1.2, label=f"sharded step, {ranks} ranks")
    top.set(
        ylabel="loss (nats per byte)", title="A byte-level GPT on the standard library's source"
    )
    top.legend(frameon=False)
    bottom.plot(steps, [abs(a - b) for a, b in zip(sharded, plain)], color="tab:red", linewidth=1)
    bottom.set(
        ylabel="|sharded − plain|", xlabel="step", ylim=(0, None), xlim=(1, max(len(plain), 2))
    )
    bottom.xaxis.get_major_locator().set_params(integer=True)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(config: Config, *, steps: int, fp32_steps: int, batch: int, lr: float, out: Path) -> None:
    torch.set_num_threads(1)
    mesh = zt.make_mesh("cpu", dp=-1)
    rank, ranks = mesh.get_rank(), mesh.size()
    text = stdlib_bytes()
    torch.manual_seed(0)
    model = GPT(config)

    def transforms(stage: int = 3, fuse: bool = True) -> zt.Transform:
        rest = (zt.overlap_grads(), zt.prefetch(), *([zt.fuse_cast_gather()] if fuse else ()))
        return zt.chain(zt.shard_params(mesh, axis="dp", stage=stage), *rest)

    def compare(n: int, bf16: bool) -> tuple[zt.Step, list[float], list[float]]:
        """Train `n` steps sharded on all ranks, then `n` plain steps on rank 0, on the same global batches."""
        plain, dtype = make_step(model, bf16=bf16), "bf16" if bf16 else "fp32"
        step = transforms()(plain)
        whole = [draw(text, i, batch * ranks, config.sequence) for i in range(n)]
        mine = (b.chunk(ranks)[rank] for b in whole)
        sharded = train(f"{dtype}, {ranks} ranks", step, step.shard(init(model, lr)), mine, ranks)
        alone = train(f"{dtype}, plain", plain, init(model, lr), whole, 1) if rank == 0 else []
        dist.barrier()  # the other ranks wait for the plain run
        return step, sharded, alone

    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        console.print(f"{ranks} ranks, {count:,} parameters, {len(text):,} bytes of text")
    step, sharded, plain = compare(steps, bf16=True)
    _, sharded32, plain32 = compare(fp32_steps, bf16=False)
    if rank == 0:
        example = init(model, lr), draw(text, 0, batch, config.sequence)
        lowered = {s: transforms(s)(step.fn).lower(*example) for s in range(4)}
        console.print("\nThe program that ran:\n")
        console.print(head(lowered[3]), markup=False, soft_wrap=True)
        console.print("", wire_table(transforms(fuse=False)(step.fn).lower(*example), lowered[3]))
        console.print("", memory_table(lowered), "")
        absolute = max(abs(a - b) for a, b in zip(sharded, plain))
        relative = max(abs(a - b) / b for a, b in zip(sharded32, plain32))
        for name, losses in {f"{ranks} ranks": sharded, "plain": plain}.items():
            console.print(f"{name:<10} loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        console.print(f"bf16: the losses differ by at most {absolute:.1e}, in {steps} steps")
        console.print(
            f"fp32: the losses differ by at most {relative:.1e}, relative to the loss, in {fp32_steps} steps"
        )
        picture(sharded, plain, ranks, out)
        console.print(f"loss curves: {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field, default in {"layers": 4, "width": 256, "heads": 4, "sequence": 128}.items():
        parser.add_argument(f"--{field}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--fp32-steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank in each step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"))
    args = vars(parser.parse_args())
    config = Config(**{key: args.pop(key) for key in ("layers", "width", "heads", "sequence")})
    main(config, **args)
