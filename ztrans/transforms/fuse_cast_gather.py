"""Cast a parameter before it is gathered, not after."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from ..ir.collectives import rules
from ..ir.graph import Eqn, Graph, Var, users, variables
from ..ir.op_facts import CAST, rearranges
from ..ir.operations import compute
from ..ir.rewriter import Rewriter
from ..ir.wire_format import Coded
from .base import Transform, constructor
from .sharding.before_gathers import cast_before_gathers


@constructor
def fuse_cast_gather() -> Transform:
    """Gather parameters in the dtype that the step uses: half the bytes for bf16, and the same bits.

    A gather moves elements and a cast is elementwise, so the two commute. A gather that sends codes goes on sending
    them: they are decoded in the dtype that the step uses. Casts also commute with views that rearrange
    elements, but not with a view of the same bytes as another dtype. A gather is fused with the casts after it if every
    reader of the gathered value casts it to the same narrower dtype, directly or through such views.

    Rewrites:
        f = all_gather(w)                       f = all_gather(w, bf16)
        a = wait(f)                      -->    a = wait(f)
        b = t(a); c = cast(b, bf16)             b = t(a)               # c is b

    The cast of a scaled parameter moves too, if the scale is one number for the whole tensor, as in fp8 training. The
    scale may depend on a maximum of the parameter: one small all_reduce at the start of the step finds the maxima of
    all parameters. At stage 3 backward gathers the fp8 value again.

    Rewrites:
        a = wait(all_gather(w))                 m = wait(all_reduce(max(abs(w)), max))
        s = div(448, max(abs(a)))        -->    s = div(448, m); v = cast(mul(w, s), f8e4m3)
        c = cast(mul(a, s), f8e4m3)             c = wait(all_gather(v))

    Source: DeepSpeed DeepCompile, "fuse allgather and downcast" (#7588), 2025; torchao's fp8 gathers for FSDP2, 2024.

    >>> fuse_cast_gather()
    fuse_cast_gather()
    """
    return _FuseCastGather()


@dataclass(frozen=True)
class _FuseCastGather(Transform):
    def rewrite(self, graph: Graph) -> Graph:
        graph = cast_before_gathers(graph)
        readers = users(graph)
        outputs = set(variables(graph.outputs))
        new = Rewriter(graph)
        narrow: dict[Var, Var] = {}  # the values that become narrower
        for e in graph.eqns:
            # A gather that already casts, or that sends a bucket, does not change.
            is_cast = rules(e).moves and isinstance(e.kwargs["dtype"], torch.dtype)
            if not rules(e).moves or is_cast or len(e.outs) != 1:
                continue
            narrowing = _Narrowing(readers, outputs)
            dtype = narrowing.dtype_of(e)
            if dtype is None:
                continue
            for v in (e.out, *narrowing.values):
                narrow[v] = dataclasses.replace(v, dtype=dtype)
            for cast in narrowing.casts:
                new.drop(cast)
                new.alias(cast.out, cast.args[0])
        for v, narrower in narrow.items():
            new.alias(v, narrower)
            maker = new.makers[v]
            new.replace(maker, _retyped(maker, narrow))
        return new.applied()


def _retyped(e: Eqn, narrow: dict[Var, Var]) -> Eqn:
    """The equation with its results in their narrower dtype."""
    outs = tuple(None if out is None else narrow.get(out, out) for out in e.outs)
    e = e.replace(outs=outs)
    if rules(e).moves and not is_sent_as_codes(e):
        e = e.replace(kwargs={**e.kwargs, "dtype": e.out.dtype})
    return e


def is_sent_as_codes(gather: Eqn) -> bool:
    """Whether a gather sends codes, and its value is wider than they are: eight-bit floats are sent as they are."""
    return isinstance(gather.kwargs["dtype"], Coded) and gather.out.dtype.itemsize > 1


class _Narrowing:
    """The changes to a program if a gather sends a narrower dtype.

    Attributes:
        values: the gathered value and its views, which become narrower.
        casts: the casts of these values, which go away.
    """

    def __init__(self, readers: Mapping[Var, Sequence[Eqn]], outputs: Set[Var]) -> None:
        self.values: list[Var] = []
        self.casts: list[Eqn] = []
        self._readers = readers
        self._outputs = outputs

    def dtype_of(self, gather: Eqn) -> torch.dtype | None:
        """The one narrower dtype that every use of a gathered value casts it to, or None."""
        (end,) = self._readers[gather.out]
        strided = torch.empty(end.out.shape, dtype=end.out.dtype, device="meta")
        if not self._collect(end.out, strided):
            return None
        dtypes = {cast.kwargs["dtype"] for cast in self.casts}
        if len(dtypes) != 1:
            return None
        (dtype,) = dtypes
        return dtype if dtype.itemsize < gather.out.dtype.itemsize else None

    def _collect(self, v: Var, strided: torch.Tensor) -> bool:
        """Collect the views and casts of a value. `strided` is a meta tensor with its strides.

        Returns: Whether it has no other readers.
        """
        if v in self._outputs:
            return False
        self.values.append(v)
        for e in self._readers.get(v, ()):
            if e.op is CAST and _only_casts(e, strided):
                self.casts.append(e)
            elif rearranges(e):
                for out, view in zip(e.outs, compute(e, {v: strided})):
                    if out is not None and not self._collect(out, view):
                        return False
            else:
                return False
        return True


def _only_casts(cast: Eqn, strided: torch.Tensor) -> bool:
    """Whether a cast keeps the device and the strides. A cast of rows with gaps would close the gaps."""
    if cast.kwargs.get("dtype") is None or cast.kwargs.get("device"):
        return False
    memory_format = cast.kwargs.get("memory_format") or torch.preserve_format
    return torch.empty_like(strided, memory_format=memory_format).stride() == strided.stride()
