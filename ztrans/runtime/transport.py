"""Choose what sends the messages of a program: gloo between CPUs, or streams beside compute on GPUs.

All ranks first `reserve` what a program needs: its channels, and symmetric memory on GPUs. Then each rank makes the
modules that start its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import is_start, lane, rules
from ..ir.graph import Eqn, Graph
from .collectives import Start, channel_of
from .cuda.streams import Streams
from .cuda.symmetric import SymmetricMemory
from .cuda.transport import inside_channel_of, reserve_messages, streamed_start
from .process_groups import Channel, process_groups


def side_streams(mesh: DeviceMesh) -> Streams | None:
    """New streams beside the compute stream for a mesh of CUDA devices; None for other meshes."""
    if mesh.device_type != "cuda":
        return None
    groups = process_groups(mesh)
    if groups.symmetric is None:
        groups.symmetric = SymmetricMemory(timeout=groups.timeout)
    return Streams(symmetric=groups.symmetric)


def reserve(mesh: DeviceMesh, graphs: Iterable[Graph], streams: Streams | None = None) -> None:
    """Open the channels of programs, decide what carries their messages, and allocate the symmetric memory they need.

    All ranks of the mesh must call this together, for programs with the same messages, before they compile: a rank that
    then fails is not waited for.
    """
    streams = streams or side_streams(mesh)
    # All ranks open the channels in the order of the equations, because making a process group is collective.
    messages = []
    for graph in graphs:
        lanes = lane_count(graph, mesh, streams)
        for eqn in _starts(graph):
            messages.append((channel_of(mesh, eqn), eqn, graph.axes, lanes))
            if streams is not None:
                inside_channel_of(mesh, eqn, graph.axes)
    if streams is not None:
        reserve_messages(mesh, messages, streams)


def lane_count(graph: Graph, mesh: DeviceMesh | None, streams: Streams | None) -> int:
    """The number of lanes of a program, including the lanes of collectives that the user's step calls itself.

    On streams, hierarchical reductions have another lane for the level inside hosts.
    """
    lanes = {lane(eqn) for eqn in graph.eqns if rules(eqn).starts and rules(eqn).remote}
    inside = set()
    if mesh is not None and streams is not None:
        for eqn in _starts(graph):
            if inside_channel_of(mesh, eqn, graph.axes) is not None:
                inside.add(lane(eqn))
    return len(lanes) + len(inside)


def _starts(graph: Graph) -> list[Eqn]:
    return [eqn for eqn in graph.eqns if is_start(eqn)]


def start_module(
    eqn: Eqn,
    sizes: Mapping[str, int],
    coordinates: Mapping[str, int],
    channel: Channel | None,
    streams: Streams | None,
    lanes: int,
    inside: Channel | None = None,
) -> Start:
    """The module that starts a collective equation.

    Making it sends nothing: `reserve` has decided what carries the messages.

    Args:
        eqn: the equation.
        sizes: the sizes of the mesh axes.
        coordinates: this rank's index along each of them.
        channel: the channel of the messages. Without one the module can be printed, not called.
        streams: the streams of the collectives on GPUs.
        lanes: the number of lanes of the program.
        inside: the channel of the first level of a hierarchical reduction on GPUs.
    """
    if streams is None or channel is None:
        return Start(eqn, sizes, coordinates, channel)
    return streamed_start(eqn, sizes, coordinates, channel, streams, lanes, inside)
