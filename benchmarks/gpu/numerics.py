"""Compare the results of the kernels on a GPU with those of their references on the CPU, and updates with PyTorch's."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import torch

from ztrans import ops
from ztrans.ops import symmetric

NUMELS = (1_000_003, 3, 0, 4096 * 25, 1, 65_537)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def checks(device: torch.device, left: Callable[[], float] = lambda: 60.0) -> Iterator[list[dict]]:
    """Compare the kernels with their references on the CPU."""
    lines = []
    for check in (moves, casts, sums, updates, collectives, late):
        try:
            outcome = (
                {"result": check(device)}
                if left() > 5
                else {"failed": "not run: the time was over"}
            )
        except (
            Exception
        ) as error:  # the other checks still run, and show how far the failure reaches
            traceback.print_exc()
            outcome = {"failed": f"{type(error).__name__}: {error}"}
        lines.append({"check": check.__name__} | outcome)
        yield lines


def bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bit patterns, NaN and infinities among them."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=draw, dtype=torch.uint8).view(
        dtype
    )


def same(result: torch.Tensor, true: torch.Tensor, name: str) -> None:
    """Raise an error unless all bits agree, except for the bits of NaNs."""
    a, b = result.cpu(), true.cpu()
    if a.is_floating_point():
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            raise AssertionError(f"{name}: NaN in other places")
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    wrong = int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())
    if wrong:
        raise AssertionError(f"{name}: {wrong} bytes differ from the reference")


def moves(device: torch.device) -> str:
    """unpack, and cast_pack without a cast, keep all bits."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        parts = [bits(n, dtype, seed) for seed, n in enumerate(NUMELS)]
        for ranks in (1, 3):
            sizes = [-(-n // ranks) + k for k, n in enumerate(NUMELS)]
            true = ops.cast_pack(parts, sizes, dtype, ranks=ranks)
            sent = ops.cast_pack([p.to(device) for p in parts], sizes, dtype, ranks=ranks)
            same(sent, true, f"cast_pack {dtype}")
            back = ops.unpack(sent, sizes, [p.shape for p in parts], ranks)
            for value, part in zip(back, parts):
                same(value, part, f"unpack {dtype}")
    return "bit for bit"


def casts(device: torch.device) -> str:
    """cast_pack between floats: all bit patterns round as on the CPU."""
    for src in FLOATS:
        parts = [bits(n, src, seed) for seed, n in enumerate(NUMELS)]
        for dst in FLOATS:
            true = ops.cast_pack(parts, NUMELS, dst)
            same(
                ops.cast_pack([p.to(device) for p in parts], NUMELS, dst),
                true,
                f"cast_pack {src} to {dst}",
            )
    return "bit for bit"


def sums(device: torch.device) -> str:
    """sum_terms of 1, 2, 3 and 8 ranks: all bit patterns, subnormal numbers among them, add up as on the CPU."""
    for ranks in (1, 2, 3, 8):
        sizes = [n + k for k, n in enumerate(NUMELS)]
        for src in FLOATS:
            terms = bits(ranks * sum(sizes), src, ranks).view(ranks, -1)
            for dst in FLOATS:
                for op in ("sum", "mean"):
                    true = [torch.empty(n, dtype=dst) for n in NUMELS]
                    ops.sum_terms(terms, true, sizes, op, ranks)
                    outs = [torch.empty_like(x, device=device) for x in true]
                    ops.sum_terms(terms.to(device), outs, sizes, op, ranks)
                    for out, x in zip(outs, true):
                        same(out, x, f"sum_terms {op} {src} to {dst}")
    return "bit for bit"


STEPS = 20
DECAY = {"weight_decay": 0.1}
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
OPTIMIZERS = (
    ("adamw", ADAM | DECAY),
    ("adamw", ADAM | {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.0}),
    ("adamw", ADAM | DECAY | {"scale": 0.3}),
    ("adam", ADAM | {"weight_decay": 0.0}),
)


def updates(device: torch.device) -> str:
    """fused_adamw_ over 20 steps: the bits of PyTorch's AdamW, and of its Adam, given the gradients as fp32.

    On a CPU PyTorch's have other roundings, so there the two are compared to 1e-3.
    """
    compare = same if device.type == "cuda" else close
    for dtype in FLOATS:
        gradients = [[g.to(dtype) for g in of_many_magnitudes(k, device)] for k in range(STEPS)]
        for name, options in OPTIMIZERS:
            for rate in (torch.tensor(1e-3, device=device), torch.tensor(1e-3)):
                ours, true = trained(name, gradients, options | {"lr": rate}, device)
                for kind, results, wanted in zip(("parameters", "moments", "squares"), ours, true):
                    for k, (a, b) in enumerate(zip(results, wanted)):
                        compare(
                            a, b, f"{name}, {dtype}, {options}, lr on {rate.device}: {kind}[{k}]"
                        )
    return "bits of torch" if device.type == "cuda" else "close to torch"


def of_many_magnitudes(seed: int, device: torch.device) -> list[torch.Tensor]:
    """A random gradient for each parameter."""
    draw = torch.Generator(device).manual_seed(seed)
    place = {"generator": draw, "device": device}
    return [torch.randn(n, **place) * 10.0 ** torch.randint(-9, 2, (n,), **place) for n in NUMELS]


def trained(
    name: str, gradients: list[list[torch.Tensor]], options: dict, device: torch.device
) -> tuple[list, list]:
    """The parameters and the moments after some steps from the same start: by ztrans, and by PyTorch."""
    draw = torch.Generator(device).manual_seed(STEPS)
    params = [torch.randn(n, generator=draw, device=device) for n in NUMELS]
    settings = {key: x for key, x in options.items() if key != "scale"}
    ours = [params, *([torch.zeros_like(p) for p in params] for _ in range(2))]
    true = [[x.clone() for x in tensors] for tensors in ours]
    halves = [torch.empty_like(p, dtype=torch.bfloat16) for p in params]
    for step, grads in enumerate(gradients, 1):
        wide = [g.float() for g in grads]
        scale = {}
        if "scale" in options:
            scale = {"scale": torch.tensor(options["scale"], device=device)}
            wide = [g * scale["scale"] for g in wide]
        steps = [torch.full((), float(step), device=device) for _ in NUMELS]
        torch.ops.ztrans.fused_adamw_(params, grads, *ours[1:], steps, halves, **settings, **scale)
        getattr(torch, f"_fused_{name}_")(
            true[0], wide, *true[1:], [], steps, **settings, maximize=False, amsgrad=False
        )
    for k, (half, p) in enumerate(zip(halves, params)):
        same(half, p.bfloat16(), f"{name}: halves[{k}]")
    return ours, true


def close(result: torch.Tensor, true: torch.Tensor, name: str) -> None:
    """Raise an error unless two results agree to 1e-3."""
    torch.testing.assert_close(result, true, rtol=1e-3, atol=1e-6, msg=name)


def collectives(device: torch.device) -> str:
    """all_gather and reduce_scatter of 2, 3, 4 and 8 ranks, which run one after the other, without their barriers."""
    from ztrans.ops.all_gather import launch as gather
    from ztrans.ops.reduce_scatter import launch as scatter

    for ranks in (2, 3, 4, 8):
        sizes = [-(-n // ranks) + 1 for n in NUMELS]
        total = sum(sizes)
        rows = torch.randn(ranks, ranks, total).bfloat16()
        memories = symmetric.in_one_process(ranks, 2 * ranks * total, device)
        for memory, row in zip(memories, rows):
            memory.mine.copy_(row.view(-1).view(torch.uint8))
        for rank in range(ranks):
            at = memories[rank]
            outs = [torch.empty(n, dtype=torch.bfloat16, device=device) for n in NUMELS]
            tables = (at.buffers, at.pads, at.error)
            gather(*tables, outs, sizes, rank, 8, 1, sync=False)
            sent = rows[:, 0].contiguous()
            for out, true in zip(
                outs, ops.unpack(sent.view(-1), sizes, [(n,) for n in NUMELS], ranks)
            ):
                same(out, true, "all_gather")
            outs = [torch.empty(size, device=device) for size in sizes]
            scatter(*tables, outs, sizes, "mean", torch.bfloat16, rank, 8, 1, sync=False)
            true = ops.reduce(list(rows[:, rank]), "mean", torch.float32)
            same(torch.cat(outs), true, "reduce_scatter")
            same(ops.reduce(list(rows[:, rank].to(device)), "mean", torch.float32), true, "reduce")
    return "bit for bit"


def late(device: torch.device) -> str:
    """A barrier that a rank does not reach ends, and is an error on the host."""
    memory, _ = symmetric.in_one_process(2, 0, device)
    try:
        ops.barrier(memory, spins=1000)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        memory.check()
    except RuntimeError as error:
        if "waited in vain" in str(error):
            return "ends and raises"
        raise
    raise AssertionError("a barrier ended without an error although a rank did not reach it")
