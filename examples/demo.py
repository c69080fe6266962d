"""Train a byte-level GPT on two ranks with four transforms, and compare it with the plain step.

    torchrun --standalone --nproc-per-node 2 examples/demo.py      # needs the extra `examples`

It trains in bf16, and then for 20 steps in fp32. On a processor that is slow in bf16 it trains in fp32 alone, and
says so. It measures a step first, and trains for as many steps as fit into four minutes together with
everything else, at most 130.

At the end rank 0 prints the program that ran, the bytes that it sends in bf16, its memory at each ZeRO stage, and how
far the losses are from those of the plain step, which it runs in one process on the same batches.
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


def seconds_of(run: Callable[[], object]) -> float:
    """The shorter of two runs, because the first one of a process also allocates."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def steps_that_fit(seconds: float, most: int) -> int:
    """How many steps of `seconds` are trained: at most `most`, and ten at least, in whole tens.

    A step runs twice, on all ranks and alone. Both take up to 150 seconds; the rest of four minutes is for the traces,
    the plans and the tables.

    >>> steps_that_fit(0.5, 130), steps_that_fit(1.0, 130), steps_that_fit(60.0, 130)
    (130, 70, 10)
    """
    fitting = int(150 / (2 * seconds))
    return max(10, min(most, fitting // 10 * 10))


def from_first_rank(value: int) -> int:
    """The number of rank 0. Ranks measure different times, and must decide alike."""
    number = torch.tensor(value)
    dist.broadcast(number, src=0)
    return int(number)


def train(
    name: str, step: Callable, state: dict, batches: Iterable[torch.Tensor], ranks: int
) -> list[float]:
    """Train on this rank's slices of the batches, and return the loss of each step.

    Rank 0 shows a bar. Where the output is not a terminal, it prints every tenth step.
    """
    batches = list(batches)
    losses = []
    start = 0.0
    shows = dist.get_rank() == 0
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
            if count == 1:
                start = time.perf_counter()  # the first step also traces and compiles
            elapsed = time.perf_counter() - start
            rate = ranks * batch[:, 1:].numel() * (count - 1) / elapsed
            progress = f"step {count:>3}/{len(batches)}   loss {losses[-1]:.3f}   "
            progress += f"{rate:>6,.0f} tokens/s"
            bar.update(task, advance=1, description=progress)
            if shows and not console.is_terminal and count % 10 == 0:
                console.print(f"{name:<14} {progress}")
    return losses


def head(program: zt.stages.Lowered, inputs: int = 3, equations: int = 18) -> str:
    """The first lines of a program, with only the first `inputs` of its inputs."""
    lines = str(program).splitlines()
    body = lines.index("):")
    first_inputs = lines[: 2 + inputs]
    first_equations = lines[body : body + 2 + equations]
    more_inputs = f"    ... {body - len(first_inputs)} more"
    more_lines = f"  ... {len(lines) - body - len(first_equations)} more lines"
    return "\n".join([*first_inputs, more_inputs, *first_equations, more_lines])


def size(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n >= 2**16 else f"{n} B"


def wire_table(separate: zt.stages.Lowered, fused: zt.stages.Lowered) -> Table:
    table = Table("role", title="bytes on the wire of one rank in one step in bf16")
    for column in ("without fuse_cast_gather", "with it", "ratio"):
        table.add_column(column, justify="right")
    separate_cost = separate.cost_analysis()
    fused_cost = fused.cost_analysis()
    roles = sorted({role for (_, role), _ in separate_cost.wire})
    for role in (*roles, None):
        wide = separate_cost.over(role=role)
        narrow = fused_cost.over(role=role)
        ratio = f"{narrow / wide:.2f}" if wide else ""
        table.add_row(role or "together", size(wide), size(narrow), ratio)
    return table


def memory_table(stages: dict[int, zt.stages.Lowered]) -> Table:
    table = Table("stage", title="live bytes of one rank, by ZeRO stage")
    for column in ("state between steps", "peak in a step", "where the peak is"):
        table.add_column(column, justify="right")
    for stage, lowered in stages.items():
        memory = lowered.memory_analysis()
        table.add_row(
            str(stage), size(memory.state), size(memory.peak), str(memory.peak_eqn.source)
        )
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


def main(
    config: Config, *, dtype: str, steps: int | None, batch: int, lr: float, out: Path
) -> None:
    torch.set_num_threads(1)
    mesh = zt.make_mesh("cpu", dp=-1)
    rank = mesh.get_rank()
    ranks = mesh.size()
    text = stdlib_bytes()
    torch.manual_seed(0)
    model = GPT(config)

    def transforms(stage: int = 3, fuse: bool = True) -> zt.Transform:
        schedules = [zt.overlap_grads(), zt.prefetch()]
        if fuse:
            schedules.append(zt.fuse_cast_gather())
        return zt.chain(zt.shard_params(mesh, axis="dp", stage=stage), *schedules)

    def global_batch(index: int) -> torch.Tensor:
        return draw(text, index, batch * ranks, config.sequence)

    def plain_seconds(name: str, tokens: torch.Tensor) -> float:
        """The seconds of a plain step in bf16 or fp32."""
        step = make_step(model, bf16=name == "bf16")
        state = init(model, lr)
        return seconds_of(lambda: step(state, tokens))

    def compare(name: str, count: int) -> tuple[zt.Step, list[float], list[float]]:
        """Train sharded on all ranks, then the plain step on rank 0, on the same global batches."""
        plain = make_step(model, bf16=name == "bf16")
        step = transforms()(plain)
        batches = [global_batch(i) for i in range(count)]
        slices = [tokens.chunk(ranks)[rank] for tokens in batches]
        state = step.shard(init(model, lr))
        sharded = train(f"{name}, {ranks} ranks", step, state, slices, ranks)
        expected = []
        if rank == 0:
            expected = train(f"{name}, plain", plain, init(model, lr), batches, 1)
        dist.barrier()  # the other ranks wait for the plain run
        return step, sharded, expected

    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        console.print(f"{ranks} ranks, {count:,} parameters, {len(text):,} bytes of text")
    if dtype == "auto":
        sequence = global_batch(0)[:1]
        slowdown = plain_seconds("bf16", sequence) / plain_seconds("fp32", sequence)
        # With instructions for bf16 a step takes no longer than in fp32; without them, two to fifteen times as long.
        dtype = "bf16" if from_first_rank(slowdown < 1.5) else "fp32"
        if dtype == "fp32" and rank == 0:
            console.print(
                f"A step in bf16 takes {slowdown:.1f} times as long as in fp32 on this processor, so the demo trains "
                f"in fp32. `--dtype bf16` trains in bf16 anyway."
            )
    if steps is None:
        seconds = plain_seconds(dtype, global_batch(0))
        steps = from_first_rank(steps_that_fit(seconds, most=130))
        if rank == 0:
            console.print(f"A plain step takes {seconds:.2f} s: {steps} steps")

    step, sharded, plain = compare(dtype, steps)
    pairs = {dtype: (sharded, plain)}
    if dtype == "bf16":
        pairs["fp32"] = compare("fp32", min(20, steps))[1:]  # without the rounding of bf16
    if rank == 0:
        example = init(model, lr), draw(text, 0, batch, config.sequence)
        lowered = {s: transforms(s)(step.fn).lower(*example) for s in range(4)}
        console.print("\nThe program that ran:\n")
        console.print(head(lowered[3]), markup=False, soft_wrap=True)
        half = make_step(model, bf16=True)
        separate = transforms(fuse=False)(half).lower(*example)
        fused = transforms()(half).lower(*example)
        console.print("", wire_table(separate, fused))
        console.print("", memory_table(lowered), "")
        for name, losses in {f"{ranks} ranks": sharded, "plain": plain}.items():
            console.print(f"{name:<10} loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        for name, (losses, expected) in pairs.items():
            distances = [abs(a - b) / b for a, b in zip(losses, expected)]
            distance = torch.tensor(distances).max().item()
            console.print(
                f"{name}: the losses differ by at most {distance:.1e}, relative to the loss, "
                f"in {len(losses)} steps"
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
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--steps", type=int, help="as many as fit into four minutes, at most 130")
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank in each step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"))
    args = vars(parser.parse_args())
    config = Config(**{key: args.pop(key) for key in ("layers", "width", "heads", "sequence")})
    main(config, **args)
