"""fit_on_host: move values of forward to the host until a step fits its limit of memory.

    a = gelu(h); y = mm(a, w)              a = gelu(h); y = mm(a, w); ha = wait(to_host(a))
    ...                              -->   ...
    dw = mm(dy, a)                         a' = wait(to_device(ha)); dw = mm(dy, a')

The values that wait for backward the longest go first. They have the most time to leave and to return, and when
backward needs them, least else is live. As many go as the limit asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.copies import is_copy
from ..ir.graph import Graph, Var, dce
from ..ir.keep_on_host import keep_on_host, values_for_backward
from ..ir.liveness import liveness
from ..ir.printer import format_bytes
from ..ir.varying import varying
from .buffers import local_bytes
from .cluster import Cluster
from .cost import memory
from .make_plan import problem_within
from .simulate import messages, play, seconds
from .skeleton import skeleton
from .solver.search import needs

_AT_LEAST = 1 << 16  # bytes of a value that is moved: less is not worth a copy
_COPIES = 2  # a value that is idle for less than so many times the time of its copy stays


def fit_on_host(graph: Graph, cluster: Cluster) -> Graph:
    """The program with as few values of forward on the host as its limit asks for; with all, if it needs more.

    It stays as it is if no transform asks for this, or if there is no limit.
    """
    limit = graph.hints.memory
    if not graph.hints.offload or limit is None or _least_bytes(graph, cluster, limit) <= limit:
        return graph
    candidates = _candidates(graph, cluster)
    least = 0
    most = len(candidates)
    while least < most:
        count = (least + most) // 2
        if _least_bytes(_moved(graph, candidates[:count]), cluster, limit) <= limit:
            most = count
        else:
            least = count + 1
    moved = _moved(graph, candidates[:most])
    size = local_bytes(graph)
    total = format_bytes(sum(map(size, candidates[:most])))
    note = f"{most} values of forward, {total}, wait for backward on the host"
    return moved.replace(notes=(*moved.notes, note))


def _moved(graph: Graph, values: Sequence[Var]) -> Graph:
    return dce(keep_on_host(graph, set(values)))


def _least_bytes(graph: Graph, cluster: Cluster, limit: int) -> int:
    """The bytes that the program needs in the best of its orders."""
    s = skeleton(graph)
    if not s.gathers and not s.reductions:
        return memory(graph).peak
    problem, _ = problem_within(s, cluster, limit)
    return needs(problem).bytes


def _candidates(graph: Graph, cluster: Cluster) -> list[Var]:
    """The values that may be moved, those that wait the longest first."""
    root = liveness(graph).root
    last_in_forward: dict[Var, int] = {}
    first_in_backward: dict[Var, int] = {}
    for i, e in enumerate(graph.eqns):
        storages = [root[v] for v in (*e.ins, *e.results)]
        if e.region == "forward":
            last_in_forward.update(dict.fromkeys(storages, i))
        elif e.region == "backward":
            for storage in storages:
                first_in_backward.setdefault(storage, i)
    collectives = [message for e, message, _ in messages(graph, cluster) if not is_copy(e)]
    time = play(seconds(graph, cluster), collectives).start
    size = local_bytes(graph)
    depends_on_batch = varying(graph, ("batch",))
    idle: dict[Var, float] = {}
    for v in values_for_backward(graph):
        waits = time[first_in_backward[v]] - time[last_in_forward[v] + 1]
        is_worth_it = size(v) >= _AT_LEAST and waits >= _COPIES * sum(cluster.copy_seconds(size(v)))
        if is_worth_it and v in depends_on_batch:
            idle[v] = waits
    return sorted(idle, key=lambda v: (-idle[v], v.name))
