"""Compile groups of equations of a program into kernels with Inductor.

Equal groups share a kernel, so a model of many equal layers compiles only a few kernels. Ranks exchange nothing while
they compile. Results equal those of the eager backend up to rounding: a fused sum adds in another order, and values
inside a kernel are not rounded to half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...calling.inputs import device_of
from ...ir.donation import Donation, donation, first_write, is_constant
from ...ir.graph import Eqn, Graph, Var, producers
from ...ir.layout import localize
from ...ir.operations import compute
from ...ir.structure import structures
from ...ir.user_collectives import by_group, is_user_collective
from ..codegen import Kernel, coordinates, to_fx
from ..executable import Executable, aliased_outputs
from ..transports import Transports, transports_of
from .codec import arrival_kernels, compiled_formats
from .compiler import Strided, fused, infer_layouts, inner_callable
from .fusion import FusedGroup, computed_alike


class KernelCall:
    """Calls a compiled kernel with as little overhead in Python as possible.

    The kernel writes result k over argument `destinations[k]`, unless that is None, and returns the other results. It
    needs arguments with these `layouts`, which fake tensors do not always predict. An argument with another layout is
    copied. The first call finds these arguments, which are the same in every step.
    """

    def __init__(
        self,
        kernel: Callable[[list], Sequence],
        destinations: Sequence[int | None],
        layouts: Sequence[Strided],
    ) -> None:
        self.__name__ = "kernel"  # its name in generated code
        self.kernel = kernel
        self.destinations = destinations
        self.layouts = layouts
        self._copied_args: list[int] = []
        self._run: Callable[[list], Sequence] | None = None

    def __call__(self, *args: torch.Tensor) -> Sequence[torch.Tensor]:
        run = self._run
        if run is None:
            self._copied_args = [
                k for k, layout in enumerate(self.layouts) if not layout.fits(args[k])
            ]
        inputs = [*args]
        for k in self._copied_args:
            inputs[k] = self.layouts[k].conform(args[k])
        if run is None:
            returned = self.kernel(inputs)
            self._run = inner_callable(self.kernel)
        else:
            returned = run(inputs)
        if len(returned) == len(self.destinations):
            return returned
        results = iter(returned)
        return [next(results) if k is None else args[k] for k in self.destinations]


@dataclass(frozen=True, eq=False)
class InductorExecutable(Executable):
    """A compiled program.

    Attributes:
        kernels: the compiled kernels, by what they compute.
        layouts: the layouts of the arguments. An argument with another layout is copied.
    """

    kernels: Mapping[Hashable, Callable]
    layouts: Sequence[Strided]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        begin = self.num_state  # the state is always contiguous
        end = begin + len(self.layouts)
        arguments = (layout.conform(x) for x, layout in zip(inputs[begin:end], self.layouts))
        return super().__call__([*inputs[:begin], *arguments, *inputs[end:]])


def executable(
    graph: Graph,
    groups: Sequence[FusedGroup],
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
    on_write: Callable[[], None] | None = None,
) -> InductorExecutable:
    """Compile this rank's program, for inputs with the layouts of `inputs`.

    The equations of each group must be next to each other. Returns a function of flat inputs (see
    `executable.Executable`).
    """
    program = _rank_program(graph, groups, mesh, inputs)
    kernels, compiled = _compile(program)
    eqn_groups = [group.eqns for group in program.groups]
    device = device_of(inputs)
    transports = transports_of(mesh, device)
    if not transports.are_beside_compute:
        transports = Transports(compiled_formats(graph))
        arrivals = arrival_kernels(graph)
        kernels.update(arrivals)
        eqn_groups += arrivals
    code = to_fx(graph, mesh, True, eqn_groups, kernels, transports, on_write, device)
    layouts = [program.layouts[v] for v in graph.arguments]
    outputs = aliased_outputs(graph)
    return InductorExecutable(code, graph.num_state, on_write, outputs, compiled, layouts)


@dataclass(frozen=True, eq=False)
class _RankProgram:
    """A program and its groups, with the layouts and the lifetimes of its values on one rank."""

    graph: Graph
    groups: Sequence[FusedGroup]
    coordinates: Mapping[str, int]
    donation: Donation
    layouts: Mapping[Var, Strided]


def _rank_program(
    graph: Graph,
    groups: Sequence[FusedGroup],
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
) -> _RankProgram:
    """Infer layouts and lifetimes, and drop the groups whose values are on several devices.

    The equations of a dropped group run one by one, and may then write over their arguments. So layouts and lifetimes
    are computed again without it.
    """
    rank = coordinates(graph, mesh)
    bound = by_group(graph, mesh) if mesh is not None else graph

    def with_groups(groups: Sequence[FusedGroup]) -> _RankProgram:
        in_kernels: set[Eqn] = set()
        for group in groups:
            if not group.is_update:
                in_kernels.update(group.eqns)
        lifetimes = donation(graph, frozenset(in_kernels))
        layouts = infer_layouts(bound, rank, inputs, lifetimes.in_place_ops)
        return _RankProgram(graph, groups, rank, lifetimes, layouts)

    program = with_groups(groups)
    on_one_device = []
    for group in groups:
        if group.is_update or _is_on_one_device(group, program.layouts):
            on_one_device.append(group)
    if len(on_one_device) == len(groups):
        return program
    return with_groups(on_one_device)


def _is_on_one_device(group: FusedGroup, layouts: Mapping[Var, Strided]) -> bool:
    """Whether all values of a group are on one device. A scalar, such as lr, may be on another one."""
    group_layouts = [layouts[v] for v in (*group.ins, *group.outs)]
    devices = {x.device for x in group_layouts if x.shape}
    if not devices:
        devices = {x.device for x in group_layouts}
    return len(devices) == 1


@dataclass(frozen=True, eq=False)
class _KernelSource:
    """The kernel of a group before it is compiled.

    It writes result k over argument `destinations[k]`, unless that is None. It may reuse the memory of the arguments
    `donated`. A `deterministic` kernel is the same on all ranks.
    """

    eqns: Sequence[Eqn]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    destinations: tuple[int | None, ...]
    donated: tuple[int, ...]
    deterministic: bool

    def structure(self, layouts: Mapping[Var, Strided]) -> Hashable:
        """A key for what the kernel computes. Kernels with equal keys are compiled once."""
        eqn_structures = structures(self.eqns, self.ins, self.outs, layouts.__getitem__)
        return eqn_structures, self.destinations, self.donated, self.deterministic

    def compile(self, layouts: Mapping[Var, Strided]) -> Callable[[list], Sequence]:
        """Compile the kernel. The function returns the results that it does not write over an argument."""

        def kernel(*args: torch.Tensor) -> list[torch.Tensor]:
            env = dict(zip(self.ins, args))
            for eqn in self.eqns:
                for v, x in zip(eqn.outs, compute(eqn, env)):
                    if v is not None:
                        env[v] = x
            returned = []
            for v, k in zip(self.outs, self.destinations):
                if k is None:
                    returned.append(env[v])
                else:
                    args[k].copy_(env[v])
            return returned

        like = [layouts[v] for v in self.ins]
        return fused(kernel, like, self.donated, self.deterministic)


def _compile(
    program: _RankProgram,
) -> tuple[dict[tuple[Eqn, ...], Kernel], dict[Hashable, Callable]]:
    """Compile the groups. Returns the kernel of each group, and the compiled functions by what they compute."""
    layouts = program.layouts
    state = set(program.graph.state)
    compiled: dict[Hashable, Callable] = {}
    kernels: dict[tuple[Eqn, ...], Kernel] = {}
    for group, source in _kernel_sources(program):
        key = source.structure(layouts)
        if key not in compiled:
            compiled[key] = source.compile(layouts)
        call = KernelCall(compiled[key], source.destinations, [layouts[v] for v in source.ins])
        writes_state = any(source.ins[k] in state for k in source.destinations if k is not None)
        kernels[group.eqns] = Kernel(call, source.ins, group.outs, writes_state)
    return kernels, compiled


def _kernel_sources(program: _RankProgram) -> Iterator[tuple[FusedGroup, _KernelSource]]:
    """The groups to compile, each with the source of its kernel."""
    graph = program.graph
    position = {eqn: i for i, eqn in enumerate(graph.eqns)}
    writes_from = first_write(graph)
    maker = producers(graph.eqns)
    same_on_all_ranks = computed_alike(graph)
    old_by_new = _old_values(graph)
    for group in program.groups:
        if group.is_update:
            continue
        end = position[group.eqns[-1]]
        old_state: dict[Var, Var] = {}
        # A kernel before the first write of the program must not write over the state: a step that fails there leaves
        # the old state intact.
        if position[group.eqns[0]] >= writes_from:
            old_state = _overwritable(program, group, old_by_new, end)
        ins = tuple(dict.fromkeys((*group.ins, *old_state.values())))
        destinations = [ins.index(old_state[v]) if v in old_state else None for v in group.outs]
        source = _KernelSource(
            eqns=[localize(eqn, graph.axes, program.coordinates) for eqn in group.eqns],
            ins=ins,
            outs=group.outs,
            destinations=tuple(destinations),
            donated=_donated_args(program, ins, maker, end),
            # All ranks use the same kernel for results that must be equal on them, even if another one is faster.
            deterministic=any(maker[v] in same_on_all_ranks for v in group.outs),
        )
        yield group, source


def _old_values(graph: Graph) -> dict[Var, Var]:
    """The state leaf or donated input that each new value replaces: the first leaf, if it replaces several."""
    old_by_new: dict[Var, Var] = {}
    for old, new in graph.leaves:
        old_by_new.setdefault(new, old)
    for old, new in graph.donated:
        old_by_new[new] = old
    return old_by_new


def _overwritable(
    program: _RankProgram, group: FusedGroup, old_by_new: Mapping[Var, Var], end: int
) -> dict[Var, Var]:
    """The inputs that results of a group may be written over, by result.

    Each is a leaf of the state or a donated value, which nothing reads after position `end`.
    """
    owner = program.donation.owner
    old_values = {}
    for new in group.outs:
        old_value = old_by_new.get(new)
        if old_value is None or not old_value.is_like(new) or owner[new] is not new:
            continue
        if _is_free(old_value, group.ins, program.donation, end):
            old_values[new] = old_value
    return old_values


def _donated_args(
    program: _RankProgram, ins: Sequence[Var], maker: Mapping[Var, Eqn], end: int
) -> tuple[int, ...]:
    """The positions of the arguments whose memory a kernel may reuse.

    They own their storage, and nothing reads them after position `end`. A constant is never donated, because it is made
    once and used by every step.
    """
    positions = []
    for k, v in enumerate(ins):
        eqn = maker.get(v)
        if eqn is None or not isinstance(eqn.op, torch._ops.OpOverload) or is_user_collective(eqn):
            continue
        is_owner = program.donation.owner[v] is v
        if is_owner and not is_constant(eqn) and _is_free(v, ins, program.donation, end):
            positions.append(k)
    return tuple(positions)


def _is_free(v: Var, ins: Sequence[Var], lifetimes: Donation, end: int) -> bool:
    """Whether nothing reads a storage after position `end`, and no other argument shares it.

    A kernel assumes that its arguments share no memory.
    """
    last_read = max(lifetimes.last.get(v, -1), lifetimes.read_until.get(v, -1))
    is_shared = any(lifetimes.owner[x] is v for x in ins if x is not v)
    return last_read <= end and not is_shared
