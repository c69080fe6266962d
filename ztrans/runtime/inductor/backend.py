"""Backend: compile groups of equations of a program to kernels, with Inductor.

Equal groups share a kernel. Groups are compared as text in which values are numbered, so a model of many equal layers
compiles a few kernels. Nothing is sent while a program is compiled. Results are those of the eager backend up to
rounding: a fused sum adds in another order, values inside a kernel are not rounded to half precision, and another
library may compute a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...ir.donation import Donation, donation, is_constant
from ...ir.graph import Eqn, Graph, Var, producers
from ...ir.layout import localize
from ...ir.operations import compute
from ...ir.user_collectives import by_group, is_users
from ...ir.varying import varying
from ...ir.write_order import first_write
from ..codegen import Kernel, coordinates, to_fx
from ..executable import Executable, aliased_outputs
from .compiler import bare, fused
from .fake_layouts import Strided, as_text, infer_layouts
from .fusion import Group, fuse


class KernelCall:
    """A call of a kernel, in as little time as Python needs for one.

    The kernel writes result k over argument `written[k]`, unless that is None, and returns the other results. It needs
    arguments with these `layouts`, which fake tensors do not always predict. An argument with another layout is
    copied. The first call finds out which arguments these are: they are the same in every step.
    """

    def __init__(
        self,
        kernel: Callable[[list], Sequence],
        written: Sequence[int | None],
        layouts: Sequence[Strided],
    ) -> None:
        self.__name__ = "kernel"  # of the function in the code that calls it
        self.kernel, self.written, self.layouts = kernel, written, layouts
        self._copied: list[int] = []
        self._run: Callable[[list], Sequence] | None = None

    def __call__(self, *args: torch.Tensor) -> Sequence[torch.Tensor]:
        given = [*args]
        if self._run is None:
            self._copied = [k for k, layout in enumerate(self.layouts) if not layout.fits(args[k])]
        for k in self._copied:
            given[k] = self.layouts[k].conform(args[k])
        if self._run is None:
            returned, self._run = self.kernel(given), bare(self.kernel)
        else:
            returned = self._run(given)
        if len(returned) == len(self.written):
            return returned
        results = iter(returned)
        return [next(results) if k is None else args[k] for k in self.written]


@dataclass(frozen=True, eq=False)
class InductorExecutable(Executable):
    """A compiled program. A batch with other layouts than `layouts` is copied. `kernels` holds what was compiled, by
    the text of its equations."""

    kernels: Mapping[str, Callable]  # the compiled kernels, by the text of their equations
    layouts: Sequence[Strided]  # of the inputs; an input with another layout is copied

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        n = self.num_state  # all of which is contiguous, as `layouts` say
        batch = (layout.conform(x) for x, layout in zip(inputs[n:], self.layouts[n:]))
        return super().__call__([*inputs[:n], *batch])


@dataclass(frozen=True, eq=False)
class _LaidOut:
    """A program and its groups, with the layouts and the lifetimes of its values on one rank.

    The `compiled` groups become kernels. PyTorch computes the others, each in one call.
    """

    graph: Graph
    groups: Sequence[Group]
    compiled: Sequence[Group]
    at: Mapping[str, int]
    donation: Donation
    layouts: Mapping[Var, Strided]


def executable(
    graph: Graph,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
    on_write: Callable[[], None] | None = None,
) -> tuple[Graph, InductorExecutable]:
    """Compile the program of this rank of `mesh`, for inputs with the layouts of `inputs`.

    Returns the program in the order in which it runs, and a function of flat inputs (see `codegen.Executable`).
    """
    laid_out = _lay_out(*fuse(graph), mesh, coordinates(graph, mesh), inputs)
    kernels, compiled = _compile(laid_out)
    groups = [group.eqns for group in laid_out.groups]
    program = to_fx(laid_out.graph, mesh, True, groups, kernels, on_write=on_write)
    layouts = [laid_out.layouts[v] for v in graph.inputs]
    outputs = aliased_outputs(laid_out.graph)
    return laid_out.graph, InductorExecutable(
        program, graph.num_state, on_write, outputs, compiled, layouts
    )


def _lay_out(
    graph: Graph,
    groups: Sequence[Group],
    mesh: DeviceMesh | None,
    at: Mapping[str, int],
    inputs: Sequence[torch.Tensor],
) -> _LaidOut:
    """Infer layouts, and drop the groups whose values are on several devices.

    The equations of a dropped group run one by one. They may then write over their arguments, so the lifetimes are
    computed again.
    """
    bound = by_group(graph, mesh) if mesh is not None else graph

    # On a GPU PyTorch launches one kernel for many counters, and Inductor one for each. On a CPU Inductor is faster.
    on_gpu = any(x.is_cuda for x in inputs)
    by_torch = [g for g in groups if g.updates or (g.counters and on_gpu)]

    def with_kernels(compiled: Sequence[Group]) -> _LaidOut:
        lifetimes = donation(graph, frozenset(e for g in compiled for e in g.eqns))
        layouts = infer_layouts(bound, at, inputs, lifetimes.twins)
        return _LaidOut(graph, [*by_torch, *compiled], compiled, at, lifetimes, layouts)

    laid_out = with_kernels([g for g in groups if g not in by_torch])
    one_device = lambda g: _on_one_device([laid_out.layouts[v] for v in (*g.ins, *g.outs)])
    kept = [g for g in laid_out.compiled if one_device(g)]
    return laid_out if kept == laid_out.compiled else with_kernels(kept)


def _on_one_device(layouts: Sequence[Strided]) -> bool:
    """Whether values are on one device. A scalar, such as lr, may be on another one."""
    return len({x.device for x in layouts if x.shape} or {x.device for x in layouts}) == 1


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A kernel that is to be compiled for a group.

    The kernel writes result k over argument `written[k]`, unless that is None. It may reuse the memory of the arguments
    `donated`. A `deterministic` kernel is the same on all ranks.
    """

    eqns: Sequence[Eqn]
    ins: Sequence[Var]
    outs: Sequence[Var]
    written: list[int | None]
    donated: list[int]
    deterministic: bool

    def text(self, layouts: Mapping[Var, Strided]) -> str:
        """The kernel as text. Kernels with equal texts are compiled once."""
        eqns = as_text(self.eqns, self.ins, self.outs, layouts)
        return f"{eqns} over {self.written} donated {self.donated}{' deterministic' if self.deterministic else ''}"

    def compile(self, layouts: Mapping[Var, Strided]) -> Callable[[list], Sequence]:
        """Compile the kernel to a function, which returns the results that are not written over an argument."""

        def kernel(*args: torch.Tensor) -> list[torch.Tensor]:
            env = dict(zip(self.ins, args))
            for e in self.eqns:
                env.update((v, x) for v, x in zip(e.outs, compute(e, env)) if v is not None)
            for v, k in zip(self.outs, self.written):
                if k is not None:
                    args[k].copy_(env[v])
            return [env[v] for v, k in zip(self.outs, self.written) if k is None]

        return fused(
            kernel, lambda: [layouts[v].empty() for v in self.ins], self.donated, self.deterministic
        )


def _compile(program: _LaidOut) -> tuple[dict[tuple[Eqn, ...], Kernel], dict[str, Callable]]:
    """Compile the groups. Returns the call of each, and the compiled kernels by their text."""
    graph, layouts = program.graph, program.layouts
    position, writes_from = {e: i for i, e in enumerate(graph.eqns)}, first_write(graph)
    varies, maker, state = (
        _varies(graph),
        producers(graph.eqns),
        set(graph.inputs[: graph.num_state]),
    )
    compiled: dict[str, Callable] = {}
    kernels: dict[tuple[Eqn, ...], Kernel] = {}
    for group in program.compiled:
        begin, end = position[group.eqns[0]], position[group.eqns[-1]]
        old_state = _overwritten(program, group, end) if begin >= writes_from else {}
        ins = tuple(dict.fromkeys((*group.ins, *old_state.values())))
        kernel = _Kernel(
            eqns=[localize(e, graph.axes, program.at) for e in group.eqns],
            ins=ins,
            outs=group.outs,
            written=[ins.index(old_state[v]) if v in old_state else None for v in group.outs],
            donated=[
                k
                for k, v in enumerate(ins)
                if v in maker and _dies(v, maker[v], ins, program.donation, end)
            ],
            deterministic=bool(graph.axes) and not all(varies(maker[v], [v]) for v in group.outs),
        )
        text = kernel.text(layouts)
        if text not in compiled:
            compiled[text] = kernel.compile(layouts)
        call = KernelCall(compiled[text], kernel.written, [layouts[v] for v in ins])
        writes = any(v in state for v in old_state.values())
        kernels[group.eqns] = Kernel(call, ins, group.outs, writes)
    return kernels, compiled


def _varies(graph: Graph) -> Callable[[Eqn, Sequence[Var | None]], bool]:
    """A function that tells whether the results of an equation may differ from rank to rank.

    Results that may not differ must be computed in the same way on all ranks, even if another way is faster on one.
    """
    over = varying(graph, ("batch",))
    return lambda e, outs: e.region != "update" and all(v in over for v in outs if v is not None)


def _overwritten(program: _LaidOut, group: Group, end: int) -> dict[Var, Var]:
    """For each result of a group that may be written over an input, a leaf of the state or a donated one, that input.

    Nothing reads the input after position `end`.
    """
    graph, lifetimes = program.graph, program.donation
    old = dict(reversed([*zip(graph.outputs[: graph.num_state], graph.inputs)]))
    old |= {result: given for given, result in graph.donated}

    def may_overwrite(new: Var) -> bool:
        v = old.get(new)
        if v is None or not v.is_like(new):
            return False
        return lifetimes.owner[new] is new and _is_free(v, group.ins, lifetimes, end)

    return {new: old[new] for new in group.outs if may_overwrite(new)}


def _dies(v: Var, maker: Eqn, ins: Sequence[Var], lifetimes: Donation, end: int) -> bool:
    """Whether a value of its own storage is dead after position `end`, so that a kernel may reuse its memory."""
    if (
        not isinstance(maker.op, torch._ops.OpOverload)
        or is_users(maker)
        or lifetimes.owner[v] is not v
    ):
        return False
    if is_constant(maker):  # it is made once and used by every step
        return False
    return _is_free(v, ins, lifetimes, end)


def _is_free(v: Var, ins: Sequence[Var], lifetimes: Donation, end: int) -> bool:
    """Whether nothing reads a storage after position `end`, and no other argument shares it.

    A kernel does not know that two of its arguments share memory.
    """
    last_read = max(lifetimes.last.get(v, -1), lifetimes.read.get(v, -1))
    return last_read <= end and not any(lifetimes.owner[x] is v for x in ins if x is not v)
