"""Code generation: the program of one rank as Python code that runs.

`to_fx` writes a program as a `torch.fx.GraphModule`, whose generated code drops each value after its last use. With
`donate`, elementwise equations write over values that nothing reads any more, above all over the state; so a step
holds one copy of its state and few temporaries. `fused` compiles a function with Inductor.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..ir.ambient import without_autocast
from ..ir.donation import Donation, donation
from ..ir.graph import Eqn, Graph, Primitive, Var, substitute
from ..ir.layout import localize
from ..ir.user_collectives import by_group
from .cuda.streams import Streams
from .cuda.symmetric_start import side_streams
from .emission import EMITTERS, Emission, Emitter, operation, updates
from .inductor.fusion import Group


@dataclass(frozen=True)
class Kernel:
    """A module that computes a group of equations: it takes the values of `ins` and returns those of `outs`."""

    call: torch.nn.Module
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    writes: bool = False  # whether it writes over the state


def to_fx(
    graph: Graph,
    mesh: DeviceMesh | None = None,
    donate: bool = False,
    groups: Sequence[Group] = (),
    kernels: Mapping[Group, Kernel] = MappingProxyType({}),
    calls: Mapping[Eqn, Callable] = MappingProxyType({}),
    streams: Streams | None = None,
    on_write: Callable[[], None] | None = None,
    emitters: Mapping[Primitive, Emitter] = EMITTERS,
) -> fx.GraphModule:
    """The program of one rank (rank 0 without a mesh) as an FX module of flat inputs and outputs.

    Collectives are submodules that start them and calls of `wait`. Equations of a group stand side by
    side and are one call, of its kernel or of an optimizer; `calls` says what is called instead of an
    equation's operation. Collectives run on `streams`, by default those of the mesh's devices. Node metadata
    carries the region and the user's line, and the equations of a group. The program calls `on_write` before the
    first equation that writes over the state. `emitters` has what emits the calls for each primitive.
    """
    at = {axis: mesh.get_local_rank(axis) if mesh is not None else 0 for axis in graph.axes}
    if mesh is not None:
        graph, streams = by_group(graph, mesh), streams or side_streams(mesh.device_type)
    out = fx.Graph()
    nodes: dict[Var, Any] = {v: out.placeholder(_identifier(v.name)) for v in graph.inputs}
    emission = Emission(out, torch.nn.Module(), nodes, graph.axes, at, mesh, streams)
    donated = donation(graph, {e for group in kernels for e in group.eqns}) if donate else Donation({}, {}, {}, {})
    state = set(graph.inputs[: graph.num_state])
    for unit in _units(graph, groups, kernels, donated.twins):
        if on_write is not None and _writes(unit, donated, state):
            out.call_function(on_write)
            on_write = None
        before = len(out.nodes)
        results = _emit(unit, emission, donated.twins, calls, emitters)
        nodes.update((v, node) for v, node in results if v is not None)
        _describe(unit, islice(reversed(out.nodes), len(out.nodes) - before))
    out.output([substitute(o, nodes.__getitem__) for o in graph.outputs])
    return fx.GraphModule(emission.module, out, graph.name)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


class _Unit(NamedTuple):
    """Equations that run as one call: those of a group, or a single one. Without a kernel a group is of updates."""

    place: int
    eqns: tuple[Eqn, ...]
    kernel: Kernel | None = None


def _units(
    graph: Graph, groups: Sequence[Group], kernels: Mapping[Group, Kernel], twins: Mapping[Eqn, Any]
) -> Iterator[_Unit]:
    """The units of a program, in order. Updates are one call where each of them has an in-place operation."""
    together = {g.eqns[0]: g for g in groups if g in kernels or (g.updates and all(e in twins for e in g.eqns))}
    inside = {e for g in together.values() for e in g.eqns[1:]}
    for place, eqn in enumerate(graph.eqns):
        if eqn not in inside:
            group = together.get(eqn)
            yield _Unit(place, (eqn,)) if group is None else _Unit(place, group.eqns, kernels.get(group))


def _emit(
    unit: _Unit,
    emission: Emission,
    twins: Mapping[Eqn, Any],
    calls: Mapping[Eqn, Callable],
    emitters: Mapping[Primitive, Emitter],
) -> Iterable[tuple[Var | None, Any]]:
    """Emit the calls of a unit. Returns its results with their nodes."""
    out, nodes, eqn = emission.out, emission.nodes, unit.eqns[0]
    if unit.kernel is not None:
        call = emission.call(f"kernel_{unit.place}", unit.kernel.call, *unit.kernel.ins)
        return [(v, out.call_function(operator.getitem, (call, k))) for k, v in enumerate(unit.kernel.outs)]
    if len(unit.eqns) > 1:
        results = updates(out, unit.eqns, twins[eqn], nodes)
        return [pair for e, values in zip(unit.eqns, results) for pair in zip(e.outs, values)]
    if isinstance(eqn.op, Primitive):
        return list(zip(eqn.outs, emitters[eqn.op](emission, eqn, unit.place)))
    local = localize(eqn, emission.sizes, emission.at)
    return list(zip(eqn.outs, operation(out, local, calls.get(eqn) or twins.get(eqn), nodes, emission.module)))


def _describe(unit: _Unit, nodes: Iterable[fx.Node]) -> None:
    """Write into the metadata of a unit's nodes which equations they run, in which region, and the user's line."""
    eqn = unit.eqns[0]
    for node in nodes:
        node.meta.update(eqn=eqn, region=eqn.region, source=str(eqn.source) if eqn.source else "", eqns=unit.eqns)


def _writes(unit: _Unit, donated: Donation, state: Collection[Var]) -> bool:
    """Whether a unit writes over the state."""
    if unit.kernel is not None:
        return unit.kernel.writes
    written = (v for e in unit.eqns if e in donated.twins for v in e.outs)
    return any(donated.owner.get(v) in state for v in written if v is not None)


@dataclass(frozen=True, eq=False)
class Executable:
    """A program of one rank as a function from flat inputs to flat outputs.

    It overwrites the first `num_state` inputs, the state, with the new state. It calls `on_write` before the first
    write. `program` is the FX module that runs.
    """

    program: fx.GraphModule
    num_state: int
    on_write: Callable[[], None] | None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        with torch.no_grad(), without_autocast():
            outputs = self.program(*inputs)
            if self.on_write is not None:
                self.on_write()
            _write_back(inputs[: self.num_state], outputs)
        return outputs


def executable(graph: Graph, mesh: DeviceMesh | None, on_write: Callable[[], None] | None = None) -> Executable:
    """The program of this rank of `mesh`, ready to run eagerly, equation by equation."""
    return bind(graph, to_fx(graph, mesh, donate=True, on_write=on_write), on_write)


def bind(graph: Graph, program: fx.GraphModule, on_write: Callable[[], None] | None = None) -> Executable:
    """An FX module that `to_fx` made of `graph`, ready to run."""
    return Executable(program, graph.num_state, on_write)


def _write_back(state: Sequence[torch.Tensor], outputs: list[Any]) -> None:
    """Put each new state into the storage of the old one, where the program did not do so already."""
    storages = {s.untyped_storage().data_ptr() for s in state if s.numel()}

    def unshared(x: Any) -> Any:
        """`x`, cloned if it shares the state's storage: it must not change when that is written, now or later."""
        is_shared = isinstance(x, torch.Tensor) and x.numel() and x.untyped_storage().data_ptr() in storages
        return x.clone() if is_shared else x

    outputs[len(state) :] = map(unshared, outputs[len(state) :])
    in_place = [new.data_ptr() == old.data_ptr() and new.stride() == old.stride() for old, new in zip(state, outputs)]
    copies = [None if done else unshared(x) for done, x in zip(in_place, outputs)]
    for i, (old, new) in enumerate(zip(state, copies)):
        if new is not None:
            old.copy_(new)
        outputs[i] = old


@contextlib.contextmanager
def fake() -> Iterator[FakeTensorMode]:
    """Tensors created inside have types and strides, and no elements."""
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode, torch.no_grad():
        yield mode


def fused(
    function: Callable, like: Callable[[], list[torch.Tensor]], donated: Sequence[int] = (), deterministic: bool = False
) -> Callable[[list], Sequence]:
    """Compile `function` with Inductor, as one kernel if possible.

    The kernel takes a list of tensors with the dtypes, shapes and strides of those that `like` creates. It may write
    over the arguments whose positions are in `donated`. With `deterministic` no timing decides how it computes, so
    that all ranks have the same kernel.
    """
    from torch._inductor import config  # imported here, because that takes a second
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with fake() as mode:
        fakes = like()
        module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
        # Constant folding would replace x * 1 by x, whose storage the result must not share.
        with config.patch(joint_graph_constant_folding=False):
            module = joint_graph_passes(module)
    (output,) = module.graph.find_nodes(op="output")
    result_strides = [x.meta["val"].stride() for x in output.args[0]]
    output.meta.update(
        user_visible_output_idxs=[*range(len(result_strides))], original_output_strides=result_strides
    )
    for k, node in enumerate(module.graph.find_nodes(op="placeholder")):
        # The names of the arguments are the only part of Inductor's cache key that shows which are donated.
        node.target = f"donated_{k}" if k in donated else f"given_{k}"
    module.recompile()
    # Inductor donates buffers to the backward pass of a compiled model only, so this is compiled as one. Of the
    # metadata of such a pass it reads these two fields.
    context = TracingContext(mode)
    metadata: Any = SimpleNamespace(static_input_indices=[], bw_donated_idxs=[*donated])
    context.fw_metadata = metadata
    with torch.no_grad(), tracing(context), config.patch(deterministic=deterministic):
        return compile_fx_inner(module, fakes, is_backward=True)


def check_compiler() -> None:
    """Raises: ValueError when Inductor finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "compile: backend 'inductor' needs a C++ compiler, and there is none.\n"
            "Install g++ or clang, or name one in the environment variable CXX; or compile(backend='eager')."
        ) from None
