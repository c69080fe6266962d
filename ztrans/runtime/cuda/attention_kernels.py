"""Attention on a GPU by the fastest of the kernels that PyTorch has for it.

    o, l, ... = flash_attention(q, k, v)                       o, l, ... = cudnn_attention(q, k, v)
    ...                                                 -->    ...
    dq, dk, dv = flash_attention_backward(do, q, k, v,         dq, dk, dv = cudnn_attention_backward(do, q, k, v,
                                          o, l, ...)                                                 o, l, ...)

A trace has the kernel that PyTorch chose, by rules that do not know which one is fastest for these sizes. Here each
kernel is timed once, forward and backward together, on random tensors of the sizes of the step. Another kernel is taken
if it is faster by 2%, with the copies that the strides of its results cost: between projections, the heads of a
position lie next to each other. Where `as_strided` reads what follows from attention, the kernel stays. Kernels round
in other places, so the bits of the step depend on this choice, which another machine, or another run, may make in
another way.

Only attention without dropout and without a bias, whose queries and keys have the same number of heads, is changed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...ir.copies import is_copy
from ...ir.dependencies import grouped
from ...ir.graph import Eqn, Graph, Names, Var, producers, users, variables
from ...ir.op_facts import arguments_by_name
from ...ir.printer import format_seconds
from ...ir.verifier import check

aten = torch.ops.aten
INFINITY = float("inf")
_STATES_STRIDES = (aten.as_strided.default, aten.as_strided_scatter.default)
_FASTER = 0.98  # of the time of the kernel in the trace
_WARM_UP = 3  # runs before those that are timed
_TIMED = 10


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention: its operations, and where its results are what backward reads besides the output."""

    name: str
    forward: Any
    backward: Any
    seed: int
    offset: int


KERNELS = (
    Kernel(
        "flash",
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        seed=6,
        offset=7,
    ),
    Kernel(
        "cudnn",
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        seed=6,
        offset=7,
    ),
    Kernel(
        "efficient",
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        seed=2,
        offset=3,
    ),
)
_OF_FORWARD = {kernel.forward: kernel for kernel in KERNELS}
_OF_BACKWARD = {kernel.backward: kernel for kernel in KERNELS}


@dataclass(frozen=True)
class Attention:
    """What attention computes, by any kernel.

    Attributes:
        shape: [batch, heads, length, size of a head] of the queries.
        keys: the same of the keys; the values have these too.
        differentiated: whether backward is in the program.
    """

    shape: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype
    is_causal: bool
    scale: float | None
    differentiated: bool

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{'causal ' if self.is_causal else ''}attention of {size}"


# The seconds of a kernel for some attention; infinite if it does not compute it.
Clock = Callable[[Kernel, Attention], float]


def fastest_attention(graph: Graph, clock: Clock) -> Graph:
    """The program with the fastest kernel for each attention, which its notes name."""
    sites, notes = _with_free_strides(_sites(graph), graph)
    notes += _notes_on_moved(graph)
    names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
    rewritten: dict[Eqn, Eqn] = {}
    by_attention = grouped((site.attention, site) for site in sites)
    for attention, equal_sites in by_attention.items():
        seconds = {kernel: clock(kernel, attention) for kernel in KERNELS}
        fastest = min(KERNELS, key=seconds.__getitem__)
        # A kernel that is hardly faster may be slower in the next run, and its bits are other ones.
        for site in equal_sites:
            if seconds[fastest] < _FASTER * seconds[site.kernel]:
                rewritten.update(site.by(fastest, names))
        times = []
        for kernel, seconds_of_kernel in seconds.items():
            if seconds_of_kernel < INFINITY:
                times.append(f"{kernel.name} {format_seconds(seconds_of_kernel)}")
        notes.append(f"{attention}: {', '.join(times)}")
    if not notes:
        return graph
    eqns = tuple(rewritten.get(eqn, eqn) for eqn in graph.eqns)
    return check(graph.replace(eqns=eqns, notes=(*graph.notes, *notes)))


@dataclass(frozen=True)
class _Site:
    """An equation of attention, and those of its backward."""

    kernel: Kernel
    forward: Eqn
    backward: Sequence[Eqn]
    attention: Attention

    @property
    def results(self) -> list[Var]:
        """The output and the gradients."""
        values = [self.forward.results[0]]
        for eqn in self.backward:
            values += eqn.results
        return values

    def by(self, kernel: Kernel, names: Names) -> dict[Eqn, Eqn]:
        """The same equations by another kernel."""
        q, k, v = self.forward.args[:3]
        outs = _results(kernel, self.attention, names)
        outs[0] = self.forward.outs[0]
        values: dict[str, Any] = {
            "query": q,
            "key": k,
            "value": v,
            "is_causal": self.attention.is_causal,
            "scale": self.attention.scale,
        }
        forward = self.forward.replace(outs=tuple(outs), **_call(kernel.forward, values))
        rewritten = {self.forward: forward}

        of_forward = {
            "logsumexp": outs[1],
            "philox_seed": outs[kernel.seed],
            "philox_offset": outs[kernel.offset],
            "max_q": q.shape[-2],
            "max_k": k.shape[-2],
        }
        for eqn in self.backward:
            bound = _bound(eqn)
            # They may have been moved to the host in between, or recomputed.
            saved = {name: bound[name] for name in ("query", "key", "value", "out")}
            gradient = {"grad_out": eqn.args[0], "grad_out_": eqn.args[0]}
            call = _call(kernel.backward, values | of_forward | saved | gradient)
            results = eqn.outs[:3]
            missing = len(kernel.backward._schema.returns) - len(results)
            rewritten[eqn] = eqn.replace(outs=(*results, *[None] * missing), **call)
        return rewritten


# The arguments that all kernels get alike.
_DEFAULTS: Mapping[str, Any] = {
    "attn_bias": None,
    "compute_log_sumexp": True,
    "cum_seq_q": None,
    "cum_seq_k": None,
    "dropout_p": 0.0,
    "grad_input_mask": [True, True, True, False],
    "return_debug_mask": False,
}


def _call(op: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation, from values by name."""
    values = {**_DEFAULTS, **values}
    declared = op._schema.arguments
    args = tuple(values[a.name] for a in declared if not a.kwarg_only)
    scale = values["scale"]
    return {"op": op, "args": args, "kwargs": {} if scale is None else {"scale": scale}}


def _results(kernel: Kernel, attention: Attention, names: Names) -> list[Var | None]:
    """Values for the results of a kernel; None for those that are no tensors."""
    q, k, v = (torch.empty(s, dtype=attention.dtype, device="meta") for s in _shapes(attention))
    outs: list[Var | None] = []
    for x in _run_forward(kernel, attention, q, k, v):
        if isinstance(x, torch.Tensor):
            name = names.fresh(f"{kernel.name}_attention.{len(outs)}")
            outs.append(Var(name, x.dtype, tuple(x.shape)))
        else:
            outs.append(None)
    return outs


def _run_forward(
    kernel: Kernel, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Sequence[Any]:
    """The results of a kernel."""
    values = {"query": q, "key": k, "value": v, "is_causal": attention.is_causal}
    call = _call(kernel.forward, values | {"scale": attention.scale})
    return kernel.forward(*call["args"], **call["kwargs"])


def _shapes(attention: Attention) -> tuple[tuple[int, ...], ...]:
    """The shapes of queries, keys and values."""
    return attention.shape, attention.keys, attention.keys


def _sites(graph: Graph) -> list[_Site]:
    """The equations of attention that any kernel can compute."""
    readers = users(graph)
    outputs = set(variables(graph.outputs))
    sites = []
    for eqn in graph.eqns:
        kernel = _OF_FORWARD.get(eqn.op)
        if kernel is None or not _is_plain(eqn):
            continue
        # Results besides the output have a meaning for the backward of this kernel alone.
        private = [v for v in eqn.outs[1:] if v is not None]
        reading: dict[Eqn, None] = {}
        for v in private:
            reading.update(dict.fromkeys(readers.get(v, ())))
        backward = [reader for reader in reading if _OF_BACKWARD.get(reader.op) is kernel]
        if len(backward) == len(reading) and outputs.isdisjoint(private):
            sites.append(_Site(kernel, eqn, backward, _attention(eqn, bool(backward))))
    return sites


def _notes_on_moved(graph: Graph) -> list[str]:
    """Notes on attention whose kernel stays, because what only its own backward can read is moved to the host."""
    makers = producers(graph.eqns)
    notes = []
    for copy in filter(is_copy, graph.eqns):
        v = copy.ins[0]
        eqn = makers.get(v)
        kernel = _OF_FORWARD.get(eqn.op) if eqn is not None else None
        if eqn is None or kernel is None or v is eqn.outs[0]:
            continue
        if _is_plain(eqn):
            attention = _attention(eqn, True)
            notes.append(f"{attention}: {kernel.name}, because {v.name} is on the host meanwhile")
    return notes


def _with_free_strides(sites: Sequence[_Site], graph: Graph) -> tuple[list[_Site], list[str]]:
    """The attention whose results may have other strides, and notes on the other attention, whose kernel stays."""
    strided = _read_by_strides(graph)
    free = []
    notes = []
    for site in sites:
        if strided.isdisjoint(site.results):
            free.append(site)
        else:
            reason = "because as_strided reads what follows from it"
            notes.append(f"{site.attention}: {site.kernel.name}, {reason}")
    return free, notes


def _read_by_strides(graph: Graph) -> set[Var]:
    """The values from which `as_strided` reads, directly or after other equations.

    It states strides, and other results follow those of their arguments.
    """
    read: set[Var] = set()
    for eqn in reversed(graph.eqns):
        if eqn.op in _STATES_STRIDES or not read.isdisjoint(eqn.results):
            read.update(eqn.ins)
    return read


def _bound(eqn: Eqn) -> dict[str, Any]:
    """The arguments of an equation by name."""
    op: Any = eqn.op
    defaults = {a.name: a.default_value for a in op._schema.arguments}
    return defaults | arguments_by_name(op, eqn.args, eqn.kwargs)


def _is_plain(eqn: Eqn) -> bool:
    """Whether attention has no dropout and no bias, and as many heads of keys as of queries.

    With queries and keys of different numbers, causal masks of the kernels begin in different corners.
    """
    bound = _bound(eqn)
    q, k, v = (bound[name] for name in ("query", "key", "value"))
    if bound["dropout_p"] != 0.0 or bound.get("attn_bias") is not None:
        return False
    if bound.get("return_debug_mask") or eqn.outs[0] is None:
        return False
    if bound["is_causal"] and q.shape[2] != k.shape[2]:
        return False
    has_equal_heads = q.shape[:2] == k.shape[:2] and k.shape == v.shape
    return has_equal_heads and not q.layout


def _attention(eqn: Eqn, differentiated: bool) -> Attention:
    bound = _bound(eqn)
    q, k = bound["query"], bound["key"]
    scale = bound["scale"]
    return Attention(q.shape, k.shape, q.dtype, bound["is_causal"], scale, differentiated)


def random_inputs(attention: Attention, device: str) -> list[torch.Tensor]:
    """Queries, keys and values in the layout of projections. PyTorch's own generators draw nothing."""
    draw = torch.Generator(device)
    inputs = []
    for batch, heads, length, size in _shapes(attention):
        shape = (batch, length, heads, size)
        x = torch.randn(shape, generator=draw, dtype=attention.dtype, device=device)
        inputs.append(x.transpose(1, 2).requires_grad_(attention.differentiated))
    return inputs


def seconds_by_events(kernel: Kernel, attention: Attention) -> float:
    """The median seconds of a kernel on this GPU, between projections."""
    inputs = random_inputs(attention, "cuda")

    def run() -> None:
        between_projections(kernel, attention, inputs)

    try:
        with torch.enable_grad():
            return _median(run)
    except RuntimeError:  # it does not compute this attention
        return INFINITY


def between_projections(
    kernel: Kernel, attention: Attention, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The output of a kernel, and the gradients of its inputs, as projections read them.

    The heads of a position lie next to each other. A kernel that returns other strides is followed by copies.
    """
    q, k, v = inputs
    out = _run_forward(kernel, attention, q, k, v)[0]
    results = [out]
    if attention.differentiated:
        results += torch.autograd.grad(out, inputs, torch.ones_like(q))
    return [x.transpose(1, 2).contiguous() for x in results]


def check_attention(attention: str, mesh: object) -> None:
    """Check that `compile(attention=...)` can be done.

    Raises: ValueError if it is unknown, or if there is no GPU, or if there are several ranks.
    """
    if attention not in ("traced", "fastest"):
        raise ValueError(
            f"compile: unknown attention {attention!r}; there are 'traced' and 'fastest'."
        )
    if attention == "traced":
        return
    if not torch.cuda.is_available():
        raise ValueError(
            "compile: attention='fastest' times kernels on a CUDA device, and torch sees none here.\n"
            "Compile without it."
        )
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:
        raise ValueError(
            f"compile: attention='fastest' is for a single rank, and this mesh has {mesh.size()}: each could choose "
            f"another kernel.\nChoose one for all in the step: "
            f"with torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION): ..."
        )


def _median(run: Callable[[], None]) -> float:
    for _ in range(_WARM_UP):
        run()
    times = []
    for _ in range(_TIMED):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
