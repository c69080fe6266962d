"""Backend: the groups of a program as compiled kernels; equal groups share one.

Groups are compared as text, with their values numbered, so the layers of a model compile a handful of
kernels. Nothing is sent while a program is being compiled. Results are those of the eager backend but
for rounding: a fused sum is made in another order, half-precision values inside a kernel are not
rounded, a product may be made by another library, and attention by products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...ir.donation import Donation, donation
from ...ir.graph import Eqn, Graph, Var, producers, substitute
from ...ir.layout import localize
from ...ir.user_collectives import by_group, is_users
from ...ir.varying import varying
from ...ir.write_order import first_write
from ..codegen import Kernel, bind, fused, to_fx
from . import cpu_attention as attention
from . import cpu_matmul as products
from .fake_layouts import Strided, run, strides, text
from .fusion import Group, fuse


class Fused(torch.nn.Module):
    """A kernel as a call: a result that takes the place of an argument is that argument. It reads arguments that lie
    as `given` says, and others are copied; the state, which it may write, always does."""

    def __init__(
        self, kernel: Callable[[list], Sequence], over: Sequence[int | None], given: Sequence[Strided]
    ) -> None:
        super().__init__()
        self.kernel, self.over, self.given = kernel, over, given

    def forward(self, *args: torch.Tensor) -> list[torch.Tensor]:
        made = iter(self.kernel([given.holds(x) for x, given in zip(args, self.given)]))
        return [next(made) if k is None else args[k] for k in self.over]


def executable(
    graph: Graph,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
    on_write: Callable[[], None] | None = None,
) -> tuple[Graph, Callable]:
    """The program in the order in which it runs, and a function of flat inputs as `execute` makes it.

    It is compiled for inputs that lie in memory as `inputs` do; others are copied to lie so. Its
    attribute `kernels` holds what was compiled, by text.
    """
    at = {axis: mesh.get_local_rank(axis) if mesh is not None else 0 for axis in graph.axes}
    graph, groups = fuse(graph)

    def lie(groups: Sequence[Group]) -> tuple[Donation, dict[Var, Strided]]:
        given = donation(graph, {e for g in groups if not g.updates for e in g.eqns})
        return given, strides(by_group(graph, mesh) if mesh is not None else graph, at, inputs, given.twins)

    given, lies = lie(groups)
    together = tuple(g for g in groups if g.updates or _on_one_device([lies[v] for v in (*g.ins, *g.outs)]))
    if together != groups:  # the others run one by one, and may write over their arguments
        groups, (given, lies) = together, lie(together)
    over = varying(graph, ("batch",))

    def varies(e: Eqn) -> bool:
        """What does not must be equal on all ranks to the bit, and another may find another way faster."""
        return e.region != "update" and all(v in over for v in e.outs if v is not None)

    compiled: dict[str, Callable] = {}
    kernels: dict[Group, Kernel] = {}
    made, place, writes_from = producers(graph.eqns), {e: i for i, e in enumerate(graph.eqns)}, first_write(graph)
    for group in (g for g in groups if not g.updates):
        begin, end = place[group.eqns[0]], place[group.eqns[-1]]
        old = _over(graph, group, given, end) if begin >= writes_from else {}
        eqns = [localize(e, graph.axes, at) for e in group.eqns]
        ins = tuple(dict.fromkeys((*group.ins, *old.values())))
        places = [ins.index(old[v]) if v in old else None for v in group.outs]
        donated = [k for k, v in enumerate(ins) if v in made and _dies(v, made[v], ins, given, end)]
        alike = bool(graph.axes) and not all(v in over and made[v].region != "update" for v in group.outs)
        key = f"{text(eqns, ins, group.outs, lies)} over {places} donated {donated}{' alike' if alike else ''}"
        if key not in compiled:
            compiled[key] = _compiled(eqns, ins, group.outs, places, donated, lies, alike)
        kernels[group] = Kernel(Fused(compiled[key], places, [lies[v] for v in ins]), ins, group.outs, writes=bool(old))
    calls = {e: call for e in graph.eqns if varies(e) and (call := _other(e, lies)) is not None}
    program = bind(graph, to_fx(graph, mesh, True, groups, kernels, calls, on_write=on_write), on_write)
    wanted = [lies[v] for v in graph.inputs]

    def called(inputs: Sequence[torch.Tensor]) -> list[Any]:
        return program([w.holds(x) for x, w in zip(inputs, wanted)])

    called.program, called.kernels = program.program, compiled  # type: ignore[attr-defined]
    return graph, called


def _other(e: Eqn, lies: Mapping[Var, Strided]) -> Callable | None:
    """What computes an equation in less time than its operation does, if anything does."""
    given = e.op, substitute(e.args, lies.__getitem__), substitute(e.kwargs, lies.__getitem__)
    return products.other(*given) or attention.other(*given)


def _on_one_device(values: Sequence[Strided]) -> bool:
    """A scalar may lie elsewhere, as lr does."""
    return len({x.device for x in values if x.shape} or {x.device for x in values}) == 1


def _over(graph: Graph, group: Group, given: Donation, end: int) -> dict[Var, Var]:
    """The new state that a group writes over the old one, which nothing reads any more."""
    old = dict(reversed([*zip(graph.outputs[: graph.num_state], graph.inputs)]))

    def may(new: Var) -> bool:
        v = old.get(new)
        alike = v is not None and (v.shape, v.dtype, v.layout) == (new.shape, new.dtype, new.layout)
        needed = max(given.last.get(v, -1), given.read.get(v, -1))
        if not alike or given.owner[new] is not new or needed > end:
            return False
        return not any(given.owner[x] is v for x in group.ins if x is not v)  # a kernel knows nothing of aliases

    return {new: old[new] for new in group.outs if may(new)}


def _dies(v: Var, maker: Eqn, ins: Sequence[Var], given: Donation, end: int) -> bool:
    """Whether a value dies with the group that ends at `end` and nothing else that this reads lies in its storage."""
    if not isinstance(maker.op, torch._ops.OpOverload) or is_users(maker) or given.owner[v] is not v:
        return False
    dies = max(given.last[v], given.read.get(v, -1)) <= end
    return dies and not any(given.owner[x] is v for x in ins if x is not v)


def _compiled(
    eqns: Sequence[Eqn],
    ins: Sequence[Var],
    outs: Sequence[Var],
    over: Sequence[int | None],
    donated: Sequence[int],
    lies: Mapping[Var, Strided],
    alike: bool,
) -> Callable[[list], Sequence]:
    """A kernel of these equations, which returns the results that take nobody's place; `alike` on all ranks."""

    def computed(*args: torch.Tensor) -> list[torch.Tensor]:
        env = dict(zip(ins, args))
        for e in eqns:
            env.update((v, x) for v, x in zip(e.outs, run(e, env)) if v is not None)
        for v, k in zip(outs, over):
            if k is not None:
                args[k].copy_(env[v])
        return [env[v] for v, k in zip(outs, over) if k is None]

    return fused(computed, lambda: [lies[v].empty() for v in ins], donated, alike)
