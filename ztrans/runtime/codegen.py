"""Turn the program of one rank into Python code.

`to_fx` writes a program as a `torch.fx.GraphModule`, whose generated code drops each value after its last use. With
`donate`, elementwise equations overwrite values that nothing reads any more, above all the state. So a step holds one
copy of its state, and few temporaries.
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
from ..ir.collectives import Row, Rows, Shard, Start, rules
from ..ir.copies import Copy, is_copy
from ..ir.donation import Donation, donation, is_constant
from ..ir.graph import Eqn, Graph, Primitive, Var, substitute
from ..ir.higher_order import Function
from ..ir.layout import local_shape, localize, part
from ..ir.marks import Gradient, Reduced
from ..ir.op_facts import CAST, arguments_by_name
from ..ir.operations import bound_results, call_operator, direct, stride_safe
from ..ir.printer import op_name
from ..ir.rules import Wait
from ..ir.triton_launch import Launch
from ..ir.user_collectives import by_group
from ..rewrites.flex_attention import is_attention
from ..rewrites.number_operands import ARITHMETIC, ITEM, Number
from ..rewrites.update_groups import (
    EqnGroup,
    is_fused_update,
    is_read_of_host,
    is_scalar_arithmetic,
    list_call,
    overwriting_first,
)
from .collectives import channel_of, wait
from .flex_attention import FlexAttention, structure_of
from .host_copies import CarriedCopies
from .transports import Transports, lane_count, transports_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """A function that computes a group of equations: the values of `outs` from the values of `ins`."""

    call: Callable
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    writes: bool = False  # whether it overwrites the state


@dataclass(frozen=True)
class Emission:
    """The FX program of one rank under construction: its code, its submodules, and the node of each value."""

    out: fx.Graph
    module: torch.nn.Module
    nodes: dict[Var, Any]
    sizes: Mapping[str, int]  # of the mesh axes
    coordinates: Mapping[str, int]  # this rank's index along each of them
    mesh: DeviceMesh | None
    transports: Transports
    lanes: int = 0  # the number of lanes of its collectives
    device: torch.device | None = None  # where the program runs; None is a CPU
    in_place: Collection[Eqn] = ()  # the equations that overwrite an argument
    inputs: Collection[Var] = ()  # of the program
    numbers: Iterator[int] = field(default_factory=itertools.count)  # for unique attribute names
    # The names and submodules of attention, by structure.
    attentions: dict[Hashable, tuple[str, FlexAttention]] = field(default_factory=dict)
    # The vector of several scalars, by these scalars, and the nodes that unpack such vectors.
    vectors: dict[tuple[Var, ...], fx.Node] = field(default_factory=dict)
    elements: list[fx.Node] = field(default_factory=list)
    hoists: bool = True  # make small constants once; a nested function makes new ones, which may be overwritten

    def bind(self, outs: Sequence[Var | None], nodes: Sequence[Any]) -> None:
        """Set the nodes of results. `outs` has None for a result that is not bound."""
        for v, node in zip(outs, nodes):
            if v is not None:
                self.nodes[v] = node

    def call(self, name: str, module: torch.nn.Module, *members: Var) -> fx.Node:
        """Add `module` as the submodule `name`, and emit a call of it with the values of `members`."""
        self.module.add_module(name, module)
        return self.out.call_module(name, tuple(self.nodes[v] for v in members))

    def emit(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        """Emit a call of a PyTorch operation, or of a function that replaces it."""
        function = direct(stride_safe(op))
        kwargs = {name: self.operand(x) for name, x in kwargs.items()}
        return self.out.call_function(function, self.operand(tuple(args)), kwargs)

    def constant(self, x: torch.Tensor) -> fx.Node:
        """The node of a constant, which becomes an attribute of the module."""
        name = f"constant_{next(self.numbers)}"
        self.module.register_buffer(name, x)
        return self.out.get_attr(name)

    def operand(self, x: Any) -> Any:
        """An argument, with each value replaced by its node."""
        if isinstance(x, torch.Tensor):  # a literal: torch.tensor(...) inside the step
            return self.constant(x)
        if isinstance(x, Function):
            return self.function(x)
        if isinstance(x, (list, tuple)):
            return type(x)([self.operand(item) for item in x])
        return substitute(x, self.nodes.__getitem__)

    def list_operand(self, x: Any) -> Any:
        """An argument of an operation over lists: the node of the list if its numbers were read in one call."""
        if isinstance(x, list) and isinstance(x[0], Number):
            return self.vectors.get(tuple(x), x)
        return x

    def output(self, x: Any) -> Any:
        """An output: the node of a value, or a constant. A constant without a literal is an attribute of the module."""
        if isinstance(x, Var):
            return self.nodes[x]
        if x is None or type(x) in (bool, int, float, complex, str, bytes):
            return x
        name = f"object_{len(self.out.nodes)}"
        setattr(self.module, name, x)
        return self.out.get_attr(name)

    def function(self, function: Function) -> fx.Node:
        """The node of a function that an operation calls, which becomes a submodule with code of its own."""
        name = f"{function.graph.name}_{next(self.numbers)}"
        self.module.add_module(name, nested(function))
        return self.out.get_attr(name)


def emit_start(emission: Emission, eqn: Eqn, index: int) -> list[fx.Node]:
    """Emit a submodule that starts the collective, and a future for each member."""
    sizes = emission.sizes
    channel = inside = None
    if emission.mesh is not None:
        channel = channel_of(emission.mesh, eqn)
        inside = emission.transports.inside_channel(emission.mesh, eqn, sizes)
    module = emission.transports.start_module(
        eqn, sizes, emission.coordinates, channel, emission.lanes, inside
    )
    call = emission.call(f"{eqn.op}_{index}", module, *eqn.ins)
    return unpacked(emission.out, call, eqn.outs)


def emit_copy(emission: Emission, eqn: Eqn, index: int) -> list[fx.Node]:
    """Emit a submodule that starts a copy to the other memory, and returns its future.

    Raises: ValueError if a copy on a GPU cannot overwrite its leaf of the state, which another equation still reads.
    """
    transports = emission.transports
    if transports.are_beside_compute and "over" in eqn.kwargs and eqn not in emission.in_place:
        raise ValueError(
            f"offload: {eqn.kwargs['over'].name} is still read when its new value, {eqn.ins[0].name}, is copied to "
            f"the host.\nLeave it out of `where`."
        )
    module = transports.copy_module(eqn, emission.device)
    members = eqn.ins if eqn in emission.in_place else eqn.ins[:1]
    return [emission.call(f"{eqn.op}_{index}", module, *members)]


def emit_shard(emission: Emission, eqn: Eqn) -> list[fx.Node]:
    """Emit a call that returns this rank's part of a whole value, as a view."""
    value, dim = eqn.args
    axis = eqn.kwargs["axis"]
    rows = local_shape(value, emission.sizes, emission.coordinates)[dim]
    begin, length = part(rows, emission.sizes[axis], emission.coordinates[axis])
    return [emission.out.call_function(torch.narrow, (emission.nodes[value], dim, begin, length))]


def emit_primitive(emission: Emission, eqn: Eqn, index: int) -> list[Any]:
    """Emit the calls of a primitive, whose index makes names unique. Returns the nodes of its results."""
    match rules(eqn):
        case Start():
            return emit_start(emission, eqn, index)
        case Copy():
            return emit_copy(emission, eqn, index)
        case Wait():
            return [emission.out.call_function(wait, (emission.nodes[eqn.args[0]],))]
        case Shard():
            return emit_shard(emission, eqn)
        case Rows():
            return [emission.out.call_function(torch.unsqueeze, (emission.nodes[eqn.args[0]], 0))]
        case Row():
            return [emission.out.call_function(torch.select, (emission.nodes[eqn.args[0]], 0, 0))]
        case Gradient() | Reduced():  # a mark that no transform has replaced is its first argument
            return [emission.nodes[eqn.args[0]]]
        case _:  # `micro_batches` replaces the marks of micro-batches before code is made
            raise NotImplementedError(f"{eqn.op} has no code")


def to_fx(
    graph: Graph,
    mesh: DeviceMesh | None = None,
    donate: bool = False,
    groups: Sequence[EqnGroup] = (),
    kernels: Mapping[EqnGroup, Kernel] = MappingProxyType({}),
    transports: Transports | None = None,
    on_write: Callable[[], None] | None = None,
    device: torch.device | None = None,
) -> fx.GraphModule:
    """The program of one rank (rank 0 without a mesh) as an FX module with flat inputs and outputs.

    A collective becomes a submodule that starts it, and calls of `wait`. `meta["eqn"]` of a node is the first
    equation that it runs, and `meta["values"]` has the values that the node computes.

    Args:
        graph: the program.
        mesh: the mesh whose process groups carry the collectives. All of its ranks must call this together the first
            time, which opens the groups. Without a mesh the module can be printed, not run.
        donate: whether equations may overwrite values that nothing reads any more.
        groups: adjacent equations that become one call: of a kernel, a fused optimizer or an operation over lists.
        kernels: the kernels of groups.
        transports: what sends the messages; by default those of the mesh or the device. Nothing is sent or timed here:
            `transports.reserve` has decided what carries the messages.
        on_write: a function that the program calls before the first equation that overwrites the state.
        device: the device of the program; by default the mesh's, or a CPU without a mesh.

    Raises: ValueError if the program runs for several micro-batches.
    """
    if graph.micro > 1:
        raise ValueError(
            f"to_fx: {graph.name} runs for {graph.micro} micro-batches, in up to three programs.\n"
            f"Write each of these: to_fx(zt.ir.micro_batch_programs(graph).last), and likewise first and middle."
        )
    indices = coordinates(graph, mesh)
    transports = transports or transports_of(mesh, device)
    # Before `by_group`, which replaces the axes of the step's own collectives by process groups.
    lanes = lane_count(graph, mesh, transports)
    if mesh is not None:
        graph = by_group(graph, mesh)
        device = device or torch.device(mesh.device_type)
    in_kernels = frozenset(eqn for group in kernels for eqn in group)
    donated = donation(graph, in_kernels) if donate else Donation({}, {}, {}, {})
    units = list(_units(graph, groups, kernels, donated))
    first_write = _first_write(units, kernels, donated, graph.state)

    out = fx.Graph()
    emission = Emission(
        out=out,
        module=torch.nn.Module(),
        nodes={v: _placeholder(out, v) for v in graph.inputs},
        sizes=graph.axes,
        coordinates=indices,
        mesh=mesh,
        transports=transports,
        lanes=lanes,
        device=device,
        in_place=donated.in_place_ops,
        inputs=set(graph.inputs),
    )
    copies = transports.carried_copies()
    _take_copies(emission, graph, copies)
    ends = [len(out.nodes)]  # the number of nodes before the first unit, and after each unit
    for unit in units:
        if on_write is not None and unit is first_write:
            out.call_function(on_write)
        _emit_unit(unit, emission, kernels, donated)
        ends.append(len(out.nodes))
    nodes = list(out.nodes)
    _put_copies(emission, graph, copies)
    out.output([emission.output(x) for x in graph.outputs])
    _add_metadata(units, [nodes[begin:end] for begin, end in pairwise(ends)])
    for v, node in emission.nodes.items():
        if isinstance(node, fx.Node):
            node.meta.setdefault("values", []).append(v)
    for node in reversed(emission.elements):  # in reverse, because a scalar reads its vector
        if not node.users:
            out.erase_node(node)
    return fx.GraphModule(emission.module, out, graph.name)


def _take_copies(emission: Emission, graph: Graph, copies: CarriedCopies) -> None:
    """Emit the call that takes over the copies to the host that the previous step has left in progress."""
    leaves = [v for v in graph.state if v.future]
    copies_beside_compute = emission.transports.are_beside_compute and any(map(is_copy, graph.eqns))
    if leaves or copies_beside_compute:
        call = emission.out.call_function(copies.take, tuple(emission.nodes[v] for v in leaves))
        emission.bind(leaves, unpacked(emission.out, call, leaves))


def _put_copies(emission: Emission, graph: Graph, copies: CarriedCopies) -> None:
    """Emit the call that hands copies to the host, still in progress, to the next step. It returns the new leaves."""
    leaves = [v for v in graph.new_state if v.future]
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
    nodes: dict[Var, Any] = {v: out.placeholder(v.name) for v in graph.inputs}
    emission = Emission(out, torch.nn.Module(), nodes, {}, {}, None, Transports(), hoists=False)
    for eqn in graph.eqns:
        emission.bind(eqn.outs, _emit_operation(emission, eqn))
    out.output(function.returned(substitute(graph.outputs, emission.nodes.__getitem__)))
    return fx.GraphModule(emission.module, out, graph.name)


def _placeholder(out: fx.Graph, v: Var) -> fx.Node:
    """The parameter of the code for an input, with a name that is unique in the code."""
    name = "".join(c if c.isalnum() else "_" for c in v.name)
    node = out.placeholder(name if name != "self" else "self_")
    node.target = node.name
    return node


class _Unit(NamedTuple):
    """Equations that run as one call, or a single equation."""

    position: int  # of the first equation in the program
    eqns: EqnGroup


def _units(
    graph: Graph, groups: Sequence[EqnGroup], kernels: Mapping[EqnGroup, Kernel], donated: Donation
) -> Iterator[_Unit]:
    """The units of a program, in order: each group that a kernel or one call computes, and each other equation."""
    by_first: dict[Eqn, EqnGroup] = {}
    later_members: set[Eqn] = set()  # of the groups
    inputs = set(graph.inputs)
    for group in groups:
        if group in kernels or _is_vector(group, donated, inputs) or _is_one_call(group, donated):
            by_first[group[0]] = group
            later_members.update(group[1:])
    for index, eqn in enumerate(graph.eqns):
        if eqn not in later_members:
            yield _Unit(index, by_first.get(eqn, (eqn,)))


def _is_vector(group: EqnGroup, donated: Donation, inputs: Collection[Var]) -> bool:
    """Whether a group of equal scalar equations becomes one call on a vector: not if one overwrites an input."""
    if is_read_of_host(group[0]):
        return True
    if not is_scalar_arithmetic(group[0]):
        return False
    return not any(donated.owner.get(eqn.out) in inputs for eqn in group)


def _is_one_call(group: EqnGroup, donated: Donation) -> bool:
    """Whether one call of a fused optimizer, or of an operation over lists, can compute equal equations.

    Either all of them write in place or none does. None may read what another one writes, because one kernel may
    compute them in any order.
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
    are_independent = len(overwritten) == len(group) and overwritten.isdisjoint(other_inputs)
    return are_independent and list_call(in_place_eqns, in_place=True) is not None


def _in_place_eqns(group: EqnGroup, donated: Donation) -> list[Eqn] | None:
    """The in-place forms of equal equations, with the overwritten argument first; None without such a form of each."""
    in_place_eqns = []
    for eqn in group:
        in_place_op = donated.in_place_ops.get(eqn)
        if in_place_op is None:
            return None
        in_place_eqn = overwriting_first(eqn, in_place_op)
        if in_place_eqn is None:
            return None
        in_place_eqns.append(in_place_eqn)
    return in_place_eqns


def _first_write(
    units: Sequence[_Unit],
    kernels: Mapping[EqnGroup, Kernel],
    donated: Donation,
    state: Sequence[Var],
) -> _Unit | None:
    """The first unit that overwrites the state; None if no unit does."""
    leaves = set(state)
    for unit in units:
        if unit.eqns in kernels:
            if kernels[unit.eqns].writes:
                return unit
            continue
        for eqn in unit.eqns:
            overwrites = eqn in donated.in_place_ops
            if overwrites and any(donated.owner.get(v) in leaves for v in eqn.results):
                return unit
    return None


def _emit_unit(
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
        for eqn, results in zip(unit.eqns, _emit_group(emission, unit.eqns, donated)):
            emission.bind(eqn.outs, results)
    elif first.results and isinstance(first.out, Number):
        emission.bind(first.outs, [_emit_number(emission, first)])
    elif isinstance(first.op, Primitive):
        emission.bind(first.outs, emit_primitive(emission, first, unit.position))
    else:
        local = localize(first, emission.sizes, emission.coordinates)
        emission.bind(first.outs, _emit_operation(emission, local, in_place))


def _emit_group(emission: Emission, eqns: EqnGroup, donated: Donation) -> list[list]:
    """Emit one call for equal equations. Returns the nodes of the results of each."""
    in_place = donated.in_place_ops.get(eqns[0])
    if is_fused_update(eqns[0]):
        return _emit_fused_update(emission, eqns, in_place)
    if is_read_of_host(eqns[0]):
        return _emit_reads(emission, eqns)
    if _is_vector(eqns, donated, emission.inputs):
        return _emit_over_vector(emission, eqns)
    in_place_eqns = _in_place_eqns(eqns, donated)
    return _emit_over_lists(emission, in_place_eqns or eqns, in_place=in_place_eqns is not None)


def _emit_operation(emission: Emission, eqn: Eqn, function: Any = None) -> list:
    """Emit the call of an operation, or of the `function` that replaces it. A small constant becomes an attribute.

    Returns: the node of each result; None for a result that is not bound.
    """
    op: Any = function or eqn.op
    if isinstance(op, torch._ops.HigherOrderOperator):
        return _emit_higher_order(emission, eqn)
    if emission.hoists and is_constant(eqn):
        return [emission.constant(op(*eqn.args, **eqn.kwargs))]
    call = emission.emit(op, eqn.args, eqn.kwargs)
    if isinstance(op, torch._ops.OpOverload) and not op._schema.returns:  # an update over lists
        return _overwritten(emission, eqn, op)
    return _results(emission.out, eqn, call)


def _emit_higher_order(emission: Emission, eqn: Eqn) -> list:
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
    """The name and the submodule of a call of attention. Equal layers share one submodule, and so its kernel."""
    structure = structure_of(eqn)
    if structure not in emission.attentions:
        name = f"{op_name(eqn.op)}_{next(emission.numbers)}"
        emission.attentions[structure] = name, FlexAttention(eqn, nested)
    return emission.attentions[structure]


def unpacked(out: fx.Graph, call: fx.Node, outs: Sequence[Var | None]) -> list:
    """The node of each result of a call that returns a sequence; None for a result that is not bound."""
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
    # An update over lists returns a list for each list argument, under its name and "_out". Each has one tensor, or
    # none: an SGD may have no momenta.
    args = arguments_by_name(op, eqn.args, {})
    nonempty_lists = []
    for k, result in enumerate(returns):
        if args.get(result.name.removesuffix("_out")):
            nonempty_lists.append(out.call_function(operator.getitem, (call, k)))
    return [out.call_function(operator.getitem, (results, 0)) for results in nonempty_lists]


def _emit_fused_update(emission: Emission, eqns: Sequence[Eqn], in_place: Any) -> list[list]:
    """Emit one call of a fused optimizer for the updates of several tensors. Returns the results of each update."""
    # In each update, an argument is a list of one tensor, or of none. The call has one list for all updates.
    columns = zip(*(eqn.args for eqn in eqns))
    args = [list(chain.from_iterable(column)) for column in columns]
    emission.emit(in_place, args, eqns[0].kwargs)
    return [_overwritten(emission, eqn, in_place) for eqn in eqns]


def _overwritten(emission: Emission, eqn: Eqn, in_place: Any) -> list:
    """The nodes of the values that an update overwrites. Each of its arguments is a list of one tensor, or of none."""
    nodes = []
    for x, declared in zip(eqn.args, in_place._schema.arguments):
        if declared.alias_info is not None and x:
            nodes.append(emission.nodes[x[0]])
    return nodes


def _emit_over_lists(emission: Emission, eqns: Sequence[Eqn], in_place: bool) -> list[list]:
    """Emit one call of an operation over lists for equal equations. Returns the results of each equation."""
    call = list_call(eqns, in_place)
    if call is None:
        raise ValueError(f"{eqns[0].op} has no form over lists for these equations.")
    op, args, kwargs = call
    args = tuple(emission.list_operand(x) for x in args)
    node = emission.emit(op, args, kwargs)
    if in_place:
        return [[emission.nodes[eqn.args[0]]] for eqn in eqns]
    results = unpacked(emission.out, node, [eqn.out for eqn in eqns])
    return [[result] for result in results]


def _emit_over_vector(emission: Emission, eqns: EqnGroup) -> list[list]:
    """Emit one call, over vectors, for equal equations of scalars. Returns the results of each equation."""
    first = eqns[0]
    columns = list(zip(*(eqn.args for eqn in eqns)))
    are_vectors = [isinstance(column[0], Var) and len(set(column)) > 1 for column in columns]
    # A scalar tensor promotes the dtype of another scalar, but not of a vector, so vectors are cast first. The
    # condition of `where` promotes nothing.
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
            # The equations share all arguments: an expanded one makes the result a vector.
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


def _emit_reads(emission: Emission, eqns: EqnGroup) -> list[list]:
    """Emit one call that reads several scalars as numbers. Returns the results of each equation."""
    vector = _vector(emission, tuple(eqn.ins[0] for eqn in eqns))
    outs = tuple(eqn.out for eqn in eqns)
    call = emission.out.call_function(torch.Tensor.tolist, (vector,))
    emission.vectors[outs] = call
    return _elements(emission, call, outs)


def _emit_number(emission: Emission, eqn: Eqn) -> fx.Node:
    """Emit the read of a scalar as a number, or arithmetic on numbers."""
    function = torch.Tensor.item if eqn.op is ITEM else ARITHMETIC[eqn.op]
    return emission.out.call_function(function, emission.operand(eqn.args))


def _vector(emission: Emission, scalars: tuple[Var, ...]) -> fx.Node:
    """The vector of several scalars: the one that they were computed in, or else a new one."""
    if scalars not in emission.vectors:
        nodes = [emission.nodes[v] for v in scalars]
        is_on_cpu = emission.device is None or emission.device.type == "cpu"
        stack = torch.stack if is_on_cpu else _stack_across_devices
        emission.vectors[scalars] = emission.out.call_function(stack, (nodes,))
    return emission.vectors[scalars]


def _stack_across_devices(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack scalars on the device of the first: capturable optimizers count steps on the GPU, others on the CPU."""
    device = scalars[0].device
    return torch.stack([x.to(device) for x in scalars])


def _add_metadata(units: Sequence[_Unit], nodes_by_unit: Sequence[list[fx.Node]]) -> None:
    """Write the first equation of each unit, and the weights by which equations share its time, into its nodes.

    Equations without a node take no time. They share the time of the next unit that has nodes, or of the last one if
    none follows, with weight 0.
    """
    silent = 0  # equations without a node since the last unit that has nodes
    last_nodes: list[fx.Node] = []
    for unit, nodes in zip(units, nodes_by_unit):
        if not nodes:
            silent += len(unit.eqns)
            continue
        weights = (0,) * silent + (1,) * len(unit.eqns)
        for node in nodes:
            node.meta.update(eqn=unit.eqns[0], weights=weights)
        silent = 0
        last_nodes = nodes
    for node in last_nodes:
        node.meta["weights"] += (0,) * silent
