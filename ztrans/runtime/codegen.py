"""Turn the program of one rank into Python code.

`to_fx` writes a program as a `torch.fx.GraphModule`, whose generated code drops each value after its last use. With
`donate`, elementwise equations write over values that nothing reads any more, the state above all. So a step holds one
copy of its state, and few temporaries.

To add a collective, add the function that emits its calls to `EMITTERS`; docs/architecture.md lists all its places.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import with_joint_indices
from ..ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SHARD, WAIT, lane
from ..ir.copies import COPY_WAIT, TO_DEVICE, TO_HOST, is_copy
from ..ir.donation import Donation, donation, is_constant
from ..ir.flex_attention import is_attention
from ..ir.graph import Eqn, Graph, Primitive, Var, substitute
from ..ir.higher_order import Function
from ..ir.layout import local_shape, localize, part
from ..ir.marks import GRADIENT, PMEAN, PSUM
from ..ir.number_operands import ARITHMETIC, ITEM, Number
from ..ir.op_facts import CAST, arguments_by_name
from ..ir.operations import bound_results, call_operator, direct, stride_safe
from ..ir.printer import op_name
from ..ir.triton_launch import Launch
from ..ir.update_groups import (
    EqnGroup,
    is_fused_update,
    is_read_of_host,
    is_scalar_arithmetic,
    list_call,
    overwriting_first,
)
from ..ir.user_collectives import by_group
from . import transport
from .collectives import channel_of, wait
from .cuda.host_copies import StreamedHostCopy
from .cuda.streams import Streams
from .cuda.transport import inside_channel_of
from .flex_attention import FlexAttention, structure_of
from .host_copies import CarriedCopies, HostCopy, carried_copies

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """A function that computes a group of equations: it takes the values of `ins` and returns those of `outs`."""

    call: Callable
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    writes: bool = False  # whether it writes over the state


@dataclass(frozen=True)
class Emission:
    """The FX program of one rank while it is written: its code, its submodules, and the node of each value."""

    out: fx.Graph
    module: torch.nn.Module
    nodes: dict[Var, Any]
    sizes: Mapping[str, int]  # of the mesh axes
    coordinates: Mapping[str, int]  # this rank's index along each of them
    mesh: DeviceMesh | None
    streams: Streams | None
    lanes: int = 0  # of the collectives of the program
    device: torch.device | None = None  # on which values from the host are computed with
    in_place: Collection[Eqn] = ()  # the equations that write over an argument
    inputs: Collection[Var] = ()  # of the program
    numbers: Iterator[int] = field(default_factory=itertools.count)  # for the names of attributes
    # The submodules of attention and their names, by structure.
    attentions: dict[Hashable, tuple[str, FlexAttention]] = field(default_factory=dict)
    # The vectors of scalars, by these scalars, and the nodes that unpack the vectors.
    vectors: dict[tuple[Var, ...], fx.Node] = field(default_factory=dict)
    elements: list[fx.Node] = field(default_factory=list)
    hoists: bool = True  # make small constants once; a function returns fresh ones, to write over

    def bind(self, outs: Sequence[Var | None], nodes: Sequence[Any]) -> None:
        """Note the nodes of results; None stands for a result that is not bound."""
        for v, node in zip(outs, nodes):
            if v is not None:
                self.nodes[v] = node

    def call(self, name: str, module: torch.nn.Module, *members: Var) -> fx.Node:
        """Add `module` as the submodule `name`, and emit a call of it with the values of `members`."""
        self.module.add_module(name, module)
        return self.out.call_module(name, tuple(self.nodes[v] for v in members))

    def emit(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        """Emit a call of an operation of PyTorch, or of a function in its place."""
        function = direct(stride_safe(op))
        kwargs = {name: self.operand(x) for name, x in kwargs.items()}
        return self.out.call_function(function, self.operand(tuple(args)), kwargs)

    def constant(self, x: torch.Tensor) -> fx.Node:
        """A constant of the program, as an attribute of its module."""
        name = f"constant_{next(self.numbers)}"
        self.module.register_buffer(name, x)
        return self.out.get_attr(name)

    def operand(self, x: Any) -> Any:
        """An argument, with the nodes of its values."""
        if isinstance(x, torch.Tensor):  # a literal: torch.tensor(...) inside the step
            return self.constant(x)
        if isinstance(x, Function):
            return self.function(x)
        if isinstance(x, (list, tuple)):
            return type(x)([self.operand(item) for item in x])
        return substitute(x, self.nodes.__getitem__)

    def listed(self, x: Any) -> Any:
        """An argument of an operation over lists. If its numbers were read at once, it is the node of that list."""
        return (
            self.vectors.get(tuple(x), x) if isinstance(x, list) and isinstance(x[0], Number) else x
        )

    def output(self, x: Any) -> Any:
        """An output: the node of a value, or a constant. One that code cannot write is an attribute of the module."""
        if isinstance(x, Var):
            return self.nodes[x]
        if x is None or type(x) in (bool, int, float, complex, str, bytes):
            return x
        name = f"object_{len(self.out.nodes)}"
        setattr(self.module, name, x)
        return self.out.get_attr(name)

    def function(self, function: Function) -> fx.Node:
        """A function that an operation calls, as a submodule with code of its own."""
        name = f"{function.graph.name}_{next(self.numbers)}"
        self.module.add_module(name, nested(function))
        return self.out.get_attr(name)


# A function of the program, an equation and its index; it emits calls and returns the nodes of the results.
Emitter = Callable[[Emission, Eqn, int], list[Any]]


def emit_start(emission: Emission, eqn: Eqn, index: int) -> list[fx.Node]:
    """Emit a submodule that starts the collective, and a future for each member."""
    sizes = emission.sizes
    streams = emission.streams
    channel = inside = None
    if emission.mesh is not None:
        channel = channel_of(emission.mesh, eqn)
        if streams is not None:
            inside = inside_channel_of(emission.mesh, eqn, sizes)
    module = transport.start_module(
        eqn, sizes, emission.coordinates, channel, streams, emission.lanes, inside
    )
    call = emission.call(f"{eqn.op}_{index}", module, *eqn.ins)
    return unpacked(emission.out, call, eqn.outs)


def emit_wait(emission: Emission, eqn: Eqn, index: int) -> list[fx.Node]:
    """Emit a call of `collectives.wait`, which returns the value of a future."""
    return [emission.out.call_function(wait, (emission.nodes[eqn.args[0]],))]


def emit_copy(emission: Emission, eqn: Eqn, index: int) -> list[fx.Node]:
    """Emit a submodule that starts a copy to the other memory, and returns its future.

    Raises: ValueError for a copy on a GPU that was to write over a leaf of the state which something still reads.
    """
    module = HostCopy()
    if emission.streams is not None:
        if "over" in eqn.kwargs and eqn not in emission.in_place:
            raise ValueError(
                f"offload: {eqn.kwargs['over'].name} is still read when its new value, {eqn.ins[0].name}, is copied to "
                f"the host.\nLet `where` leave it out."
            )
        device = emission.device if eqn.out.memory == "device" else None
        module = StreamedHostCopy(lane(eqn), emission.streams, device)
    members = eqn.ins if eqn in emission.in_place else eqn.ins[:1]
    return [emission.call(f"{eqn.op}_{index}", module, *members)]


def emit_shard(emission: Emission, eqn: Eqn, index: int) -> list[fx.Node]:
    """Emit a call that returns this rank's part of a whole value, as a view."""
    value, dim = eqn.args
    axis = eqn.kwargs["axis"]
    rows = local_shape(value, emission.sizes, emission.coordinates)[dim]
    begin, length = part(rows, emission.sizes[axis], emission.coordinates[axis])
    return [emission.out.call_function(torch.narrow, (emission.nodes[value], dim, begin, length))]


def emit_nothing(emission: Emission, eqn: Eqn, index: int) -> list[Any]:
    """Emit no call: a mark that no transform has replaced is its first argument."""
    return [emission.nodes[eqn.args[0]]]


EMITTERS: Mapping[Primitive, Emitter] = {
    ALL_GATHER: emit_start,
    REDUCE_SCATTER: emit_start,
    ALL_REDUCE: emit_start,
    WAIT: emit_wait,
    TO_HOST: emit_copy,
    TO_DEVICE: emit_copy,
    COPY_WAIT: emit_wait,
    SHARD: emit_shard,
    GRADIENT: emit_nothing,
    PMEAN: emit_nothing,
    PSUM: emit_nothing,
}


def to_fx(
    graph: Graph,
    mesh: DeviceMesh | None = None,
    donate: bool = False,
    groups: Sequence[EqnGroup] = (),
    kernels: Mapping[EqnGroup, Kernel] = MappingProxyType({}),
    streams: Streams | None = None,
    on_write: Callable[[], None] | None = None,
    device: torch.device | None = None,
) -> fx.GraphModule:
    """The program of one rank (rank 0 without a mesh) as an FX module with flat inputs and outputs.

    A collective becomes a submodule, which starts it, and calls of `wait`. `meta["eqn"]` of a node is the first
    equation that it runs.

    Args:
        graph: the program.
        mesh: the mesh whose process groups carry the collectives. All of its ranks must call this together the first
            time, which opens the groups. Without it the module can be printed, not run.
        donate: write over values that nothing reads any more.
        groups: equations next to each other that become a single call, of a kernel, of a fused optimizer or of an
            operation over lists.
        kernels: the kernels of groups.
        streams: the streams of the collectives; by default those of the mesh's devices. Nothing is sent or timed
            here: `transport.reserve` has decided what carries the messages.
        on_write: a function that the program calls before the first equation that writes over the state.
        device: the device of the program; by default a CPU, or that of the mesh.
    """
    if graph.micro > 1:
        raise ValueError(
            f"to_fx: {graph.name} runs for {graph.micro} micro-batches, in up to three programs.\n"
            f"Write each of them: to_fx(zt.ir.micro_batch_programs(graph).last), and so first and middle."
        )
    rank = coordinates(graph, mesh)
    streams = streams or _streams(graph, mesh, device)
    # Before `by_group`, which puts process groups in place of the axes of the step's own collectives.
    lanes = transport.lane_count(graph, mesh, streams)
    if mesh is not None:
        graph = by_group(graph, mesh)
        device = device or torch.device(mesh.device_type)
    in_kernels = frozenset(chain.from_iterable(kernels))
    donated = donation(graph, in_kernels) if donate else Donation({}, {}, {}, {})
    units = list(_units(graph, groups, kernels, donated))
    first_write = _first_write(units, kernels, donated, graph.inputs[: graph.num_state])

    out = fx.Graph()
    emission = Emission(
        out=out,
        module=torch.nn.Module(),
        nodes={v: _placeholder(out, v) for v in graph.inputs},
        sizes=graph.axes,
        coordinates=rank,
        mesh=mesh,
        streams=streams,
        lanes=lanes,
        device=device,
        in_place=donated.in_place_ops,
        inputs=set(graph.inputs),
    )
    copies = _carried_copies(streams)
    _take_copies(emission, graph, copies)
    ends = [len(out.nodes)]  # by unit, how many nodes there are after it
    for unit in units:
        if on_write is not None and unit is first_write:
            out.call_function(on_write)
        _emit(unit, emission, kernels, donated)
        ends.append(len(out.nodes))
    nodes = list(out.nodes)
    _put_copies(emission, graph, copies)
    out.output([emission.output(x) for x in graph.outputs])
    _add_metadata(units, [nodes[begin:end] for begin, end in pairwise(ends)])
    for node in reversed(emission.elements):
        if not node.users:
            out.erase_node(node)
    return fx.GraphModule(emission.module, out, graph.name)


def _streams(graph: Graph, mesh: DeviceMesh | None, device: torch.device | None) -> Streams | None:
    """The streams of a program on GPUs: for the collectives of its mesh, or for copies between GPU and host."""
    if mesh is not None:
        return transport.side_streams(mesh)
    is_on_gpu = device is not None and device.type == "cuda"
    return Streams() if is_on_gpu and any(map(is_copy, graph.eqns)) else None


def _carried_copies(streams: Streams | None) -> CarriedCopies:
    """The copies that steps on the device of a program leave to each other; on a CPU, where they end at once, none."""
    if streams is None:
        return CarriedCopies()
    return carried_copies(streams.cuda, streams.cuda.current_device())


def _take_copies(emission: Emission, graph: Graph, copies: CarriedCopies) -> None:
    """Emit the call that takes the copies to the host with which the step before has ended."""
    leaves = [v for v in graph.inputs[: graph.num_state] if v.future]
    is_streamed = emission.streams is not None and any(map(is_copy, graph.eqns))
    if leaves or is_streamed:
        call = emission.out.call_function(copies.take, tuple(emission.nodes[v] for v in leaves))
        emission.bind(leaves, unpacked(emission.out, call, leaves))


def _put_copies(emission: Emission, graph: Graph, copies: CarriedCopies) -> None:
    """Emit the call that leaves copies to the host to the next step. It returns the new leaves."""
    leaves = [v for v in graph.outputs[: graph.num_state] if v.future]
    if leaves:
        call = emission.out.call_function(copies.put, tuple(emission.nodes[v] for v in leaves))
        emission.bind(leaves, unpacked(emission.out, call, leaves))


def coordinates(graph: Graph, mesh: DeviceMesh | None) -> dict[str, int]:
    """The index of this rank along each axis of a program; 0 without a mesh."""
    sizes = dict(graph.mesh)
    indices = dict.fromkeys(sizes, 0)
    if mesh is not None:
        indices = {axis: mesh.get_local_rank(axis) for axis in sizes}
    return with_joint_indices(indices, sizes, graph.joint)


def nested(function: Function) -> fx.GraphModule:
    """The code of a function that an operation calls."""
    graph = function.graph
    out = fx.Graph()
    inputs: dict[Var, Any] = {v: out.placeholder(v.name) for v in graph.inputs}
    emission = Emission(out, torch.nn.Module(), inputs, {}, {}, None, None, hoists=False)
    for eqn in graph.eqns:
        emission.bind(eqn.outs, _operation(emission, eqn))
    out.output(function.returned(substitute(graph.outputs, emission.nodes.__getitem__)))
    return fx.GraphModule(emission.module, out, graph.name)


def _placeholder(out: fx.Graph, v: Var) -> fx.Node:
    """A parameter of the code for an input, with a name that nothing else in the code has."""
    name = "".join(c if c.isalnum() else "_" for c in v.name)
    node = out.placeholder(name if name != "self" else "self_")
    node.target = node.name
    return node


class _Unit(NamedTuple):
    """Equations that run as one call, or a single one, and the position of the first of them."""

    position: int
    eqns: EqnGroup


def _units(
    graph: Graph, groups: Sequence[EqnGroup], kernels: Mapping[EqnGroup, Kernel], donated: Donation
) -> Iterator[_Unit]:
    """The units of a program, in order: the groups that have a kernel, or that one call computes, are one unit each."""
    by_first: dict[Eqn, EqnGroup] = {}
    inside: set[Eqn] = set()
    inputs = set(graph.inputs)
    for group in groups:
        if group in kernels or _is_vector(group, donated, inputs) or _is_one_call(group, donated):
            by_first[group[0]] = group
            inside.update(group[1:])
    for index, eqn in enumerate(graph.eqns):
        if eqn not in inside:
            yield _Unit(index, by_first.get(eqn, (eqn,)))


def _is_vector(group: EqnGroup, donated: Donation, inputs: Collection[Var]) -> bool:
    """Whether equal equations of scalars become one of a vector: not if one of them writes over an input."""
    if is_read_of_host(group[0]):
        return True
    if not is_scalar_arithmetic(group[0]):
        return False
    return not any(donated.owner.get(eqn.out) in inputs for eqn in group)


def _is_one_call(group: EqnGroup, donated: Donation) -> bool:
    """Whether a fused optimizer, or an operation over lists, can compute equal equations at once.

    All of them write in place, or none does. What one of them writes no other may read, for one kernel may compute
    them in any order.
    """
    in_place_ops = [donated.in_place_ops.get(eqn) for eqn in group]
    if is_fused_update(group[0]):
        return None not in in_place_ops
    if not any(in_place_ops):
        return list_call(group, in_place=False) is not None
    in_place_eqns = _in_place_eqns(group, donated)
    if in_place_eqns is None:
        return False
    overwritten: set[Var] = set()
    other_inputs: set[Var] = set()
    for eqn in in_place_eqns:
        first, *others = eqn.ins
        overwritten.add(donated.owner[first])
        other_inputs.update(donated.owner[v] for v in others)
    is_apart = len(overwritten) == len(group) and not overwritten & other_inputs
    return is_apart and list_call(in_place_eqns, in_place=True) is not None


def _in_place_eqns(group: EqnGroup, donated: Donation) -> list[Eqn] | None:
    """Equal in-place equations, each with its overwritten argument first; None if that is not possible for one."""
    in_place_eqns = []
    for eqn in group:
        in_place = donated.in_place_ops.get(eqn)
        first = overwriting_first(eqn, in_place) if in_place is not None else None
        if first is None:
            return None
        in_place_eqns.append(first)
    return in_place_eqns


def _first_write(
    units: Sequence[_Unit],
    kernels: Mapping[EqnGroup, Kernel],
    donated: Donation,
    state: Sequence[Var],
) -> _Unit | None:
    """The first unit that writes over the state."""
    of_state = set(state)
    for unit in units:
        if unit.eqns in kernels:
            if kernels[unit.eqns].writes:
                return unit
            continue
        for eqn in unit.eqns:
            overwrites = eqn in donated.in_place_ops
            if overwrites and any(donated.owner.get(v) in of_state for v in eqn.results):
                return unit
    return None


def _emit(
    unit: _Unit,
    emission: Emission,
    kernels: Mapping[EqnGroup, Kernel],
    donated: Donation,
) -> None:
    """Emit the calls of a unit."""
    first = unit.eqns[0]
    in_place = donated.in_place_ops.get(first)
    if unit.eqns in kernels:
        kernel = kernels[unit.eqns]
        ins = tuple(emission.nodes[v] for v in kernel.ins)
        call = emission.out.call_function(kernel.call, ins)
        emission.bind(kernel.outs, unpacked(emission.out, call, kernel.outs))
    elif len(unit.eqns) > 1:
        for eqn, results in zip(unit.eqns, _group(emission, unit.eqns, donated)):
            emission.bind(eqn.outs, results)
    elif isinstance(first.out if first.results else None, Number):
        emission.bind(first.outs, [_number(emission, first)])
    elif isinstance(first.op, Primitive):
        emission.bind(first.outs, EMITTERS[first.op](emission, first, unit.position))
    else:
        local = localize(first, emission.sizes, emission.coordinates)
        emission.bind(first.outs, _operation(emission, local, in_place))


def _group(emission: Emission, eqns: EqnGroup, donated: Donation) -> list[list]:
    """Emit the call of equal equations. Returns the results of each."""
    in_place = donated.in_place_ops.get(eqns[0])
    if is_fused_update(eqns[0]):
        return _fused_update(emission, eqns, in_place)
    if is_read_of_host(eqns[0]):
        return _read_vector(emission, eqns)
    if _is_vector(eqns, donated, emission.inputs):
        return _over_vector(emission, eqns)
    in_place_eqns = _in_place_eqns(eqns, donated)
    return _over_lists(emission, in_place_eqns or eqns, in_place=in_place_eqns is not None)


def _operation(emission: Emission, eqn: Eqn, function: Any = None) -> list:
    """Emit the call of an operation, or of a `function` in its place.

    Returns the node of each result, None for those not bound. A small constant is made once, and is an attribute.
    """
    op: Any = function or eqn.op
    if isinstance(op, torch._ops.HigherOrderOperator):
        return _higher_order(emission, eqn)
    if emission.hoists and is_constant(eqn):
        return [emission.constant(op(*eqn.args, **eqn.kwargs))]
    call = emission.emit(op, eqn.args, eqn.kwargs)
    if isinstance(op, torch._ops.OpOverload) and not op._schema.returns:  # an update over lists
        return _overwritten(emission, eqn, op)
    return _results(emission.out, eqn, call)


def _higher_order(emission: Emission, eqn: Eqn) -> list:
    """Emit the call of a higher-order operator, or the launch of a kernel. Returns the node of each result."""
    launch = eqn.args[0] if eqn.args else None
    if isinstance(launch, Launch):
        ins = tuple(emission.nodes[v] for v in eqn.ins)
        leaves = emission.out.call_function(launch, ins)
    elif is_attention(eqn):
        leaves = emission.call(*_attention(emission, eqn), *eqn.ins)
    else:
        args: Any = (eqn.op, bound_results(eqn), *emission.operand(eqn.args))
        kwargs = {name: emission.operand(x) for name, x in eqn.kwargs.items()}
        leaves = emission.out.call_function(call_operator, args, kwargs)
    return unpacked(emission.out, leaves, eqn.outs)


def _attention(emission: Emission, eqn: Eqn) -> tuple[str, FlexAttention]:
    """The submodule that computes attention, and its name. Equal layers share it, and so its kernel."""
    structure = structure_of(eqn)
    if structure not in emission.attentions:
        name = f"{op_name(eqn.op)}_{next(emission.numbers)}"
        emission.attentions[structure] = name, FlexAttention(eqn, nested)
    return emission.attentions[structure]


def unpacked(out: fx.Graph, call: fx.Node, outs: Sequence[Var | None]) -> list:
    """The node of each result of a call that returns a sequence; None for those not bound."""
    nodes = []
    for k, v in enumerate(outs):
        nodes.append(None if v is None else out.call_function(operator.getitem, (call, k)))
    return nodes


def _results(out: fx.Graph, eqn: Eqn, call: fx.Node) -> list:
    """The node of each result of a call of an operation."""
    op: Any = eqn.op
    returns = op._schema.returns
    is_list = [isinstance(result.type, torch.ListType) for result in returns]
    if len(returns) == 1:
        return unpacked(out, call, eqn.outs) if is_list[0] else [call]
    if not all(is_list):
        return unpacked(out, call, eqn.outs)
    # An update over lists returns a list for each list that it takes, named like it, with "_out". Each has one tensor,
    # or none: an SGD may have no momenta.
    args = arguments_by_name(op, eqn.args, {})
    filled = []
    for k, result in enumerate(returns):
        if args.get(result.name.removesuffix("_out")):
            filled.append(out.call_function(operator.getitem, (call, k)))
    return [out.call_function(operator.getitem, (results, 0)) for results in filled]


def _fused_update(emission: Emission, eqns: Sequence[Eqn], in_place: Any) -> list[list]:
    """Emit one call of a fused optimizer for the updates of several tensors. Returns the results of each update."""
    # Each argument is a list of one tensor, or of none. The call has one list for all parameters.
    columns = zip(*(eqn.args for eqn in eqns))
    args = [list(chain.from_iterable(column)) for column in columns]
    emission.emit(in_place, args, eqns[0].kwargs)
    return [_overwritten(emission, eqn, in_place) for eqn in eqns]


def _overwritten(emission: Emission, eqn: Eqn, in_place: Any) -> list:
    """The nodes of the values that an update of one tensor overwrites; each argument is a list of one, or of none."""
    nodes = []
    for x, declared in zip(eqn.args, in_place._schema.arguments):
        if declared.alias_info is not None and x:
            nodes.append(emission.nodes[x[0]])
    return nodes


def _over_lists(emission: Emission, eqns: Sequence[Eqn], in_place: bool) -> list[list]:
    """Emit one call of an operation over lists for equal equations. Returns the results of each equation."""
    call = list_call(eqns, in_place)
    if call is None:
        raise ValueError(f"{eqns[0].op} has no form over lists for these equations.")
    op, args, kwargs = call
    # Numbers that were read as a list are passed as that list.
    args = tuple(emission.listed(x) for x in args)
    node = emission.emit(op, args, kwargs)
    if in_place:
        return [[emission.nodes[eqn.args[0]]] for eqn in eqns]
    results = unpacked(emission.out, node, [eqn.out for eqn in eqns])
    return [[result] for result in results]


def _over_vector(emission: Emission, eqns: EqnGroup) -> list[list]:
    """Emit one call for equal equations of scalars, over vectors of these. Returns the results of each equation."""
    first = eqns[0]
    columns = list(zip(*(eqn.args for eqn in eqns)))
    are_vectors = [isinstance(column[0], Var) and len(set(column)) > 1 for column in columns]
    # A scalar tensor promotes the dtype of another scalar, but not of a vector, so vectors are cast before.
    has_condition = op_name(first.op) == "where"
    dtypes = {v.dtype for v in first.args[has_condition:] if isinstance(v, Var)}
    dtype = functools.reduce(torch.promote_types, dtypes)
    args = []
    for k, (column, is_vector) in enumerate(zip(columns, are_vectors)):
        x = column[0]
        if is_vector:
            x = _vector(emission, column)
            if column[0].dtype != dtype and not (has_condition and k == 0):
                x = emission.emit(CAST, (x,), {"dtype": dtype})
        elif isinstance(x, Var) and not any(are_vectors):
            x = emission.emit(aten.expand.default, (x, [len(eqns)]), {})
        args.append(x)
    call = emission.emit(first.op, args, first.kwargs)
    outs = tuple(eqn.out for eqn in eqns)
    emission.vectors[outs] = call
    elements = emission.out.call_function(torch.unbind, (call,))
    emission.elements.append(elements)
    return _elements(emission, elements, outs)


def _elements(emission: Emission, call: fx.Node, outs: tuple[Var, ...]) -> list[list]:
    """The nodes that unpack a vector or list of scalars. Nodes without readers are erased at the end."""
    scalars = unpacked(emission.out, call, outs)
    emission.elements.extend(scalars)
    return [[scalar] for scalar in scalars]


def _read_vector(emission: Emission, eqns: EqnGroup) -> list[list]:
    """Emit one read of several scalars as numbers. Returns the results of each equation."""
    vector = _vector(emission, tuple(eqn.ins[0] for eqn in eqns))
    outs = tuple(eqn.out for eqn in eqns)
    call = emission.out.call_function(torch.Tensor.tolist, (vector,))
    emission.vectors[outs] = call
    return _elements(emission, call, outs)


def _number(emission: Emission, eqn: Eqn) -> fx.Node:
    """Emit the read of a scalar as a number, or arithmetic on numbers."""
    function = torch.Tensor.item if eqn.op is ITEM else ARITHMETIC[eqn.op]
    return emission.out.call_function(function, emission.operand(eqn.args))


def _vector(emission: Emission, scalars: tuple[Var, ...]) -> fx.Node:
    """The vector of several scalars: the vector that they were computed in, or a new one."""
    if scalars not in emission.vectors:
        nodes = [emission.nodes[v] for v in scalars]
        is_on_cpu = emission.device is None or emission.device.type == "cpu"
        stack = torch.stack if is_on_cpu else _stack_of_any_device
        emission.vectors[scalars] = emission.out.call_function(stack, (nodes,))
    return emission.vectors[scalars]


def _stack_of_any_device(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack scalars on one device. Capturable optimizers have step counts on the GPU, others on the CPU."""
    device = scalars[0].device
    return torch.stack([x.to(device) for x in scalars])


def _add_metadata(units: Sequence[_Unit], emitted: Sequence[list[fx.Node]]) -> None:
    """Write into the metadata of nodes the first equation of their unit, and which equations share their time.

    `emitted` are the nodes of each unit. Equations without a node take no time: they are said to run with the next unit
    that has one, with the weight 0.
    """
    silent = 0  # the number of equations without a node since the last unit that has one
    last: list[fx.Node] = []
    for unit, nodes in zip(units, emitted):
        if not nodes:
            silent += len(unit.eqns)
            continue
        weights = (0,) * silent + (1,) * len(unit.eqns)
        for node in nodes:
            node.meta.update(eqn=unit.eqns[0], weights=weights)
        silent = 0
        last = nodes
    for node in last:
        node.meta["weights"] += (0,) * silent
