"""Programs as text: one equation a line, types beside names, the user's line at the margin.

Names are stable across passes, so two stages of a program differ only where a pass changed it,
and `diff` shows just that.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch

from .graph import DTYPES, Eqn, Graph, Var

_MARGIN = 88
_NAMES = {"_to_copy": "cast", "linalg_vector_norm": "norm", "lift_fresh_copy": "constant"}
_DEFAULTS = {"layout", "device", "pin_memory", "non_blocking", "memory_format"}  # noise on one kind of device


def op_name(op: Any) -> str:
    """The short name of an operation: `addmm`, `cast`, `all_gather`."""
    if isinstance(op, torch._ops.OpOverload):
        short = op._schema.name.split("::")[-1]
        return _NAMES.get(short, short)
    return str(op)


def _value(x: Any) -> str:
    if isinstance(x, Var):
        return x.name
    if isinstance(x, torch.dtype):
        return DTYPES.get(x, str(x))
    if isinstance(x, torch.Tensor):
        return f"tensor({x.tolist()})" if x.numel() <= 8 else f"tensor(<{tuple(x.shape)}>)"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(_value, x)) + "]"
    return str(x)


def equation(eqn: Eqn) -> str:
    """One equation as text, its source line at the margin."""
    outs = ", ".join("_" if out is None else f"{out.name}: {out.type}" for out in eqn.outs)
    args = [_value(a) for a in eqn.args]
    for key, x in eqn.kwargs.items():
        if key not in _DEFAULTS and x is not None:
            args.append(_value(x) if key in ("dtype", "op") else f"{key}={_value(x)}")
    line = f"  {outs} = {op_name(eqn.op)}({', '.join(args)})"
    return f"{line:<{_MARGIN}}  # {eqn.source}" if eqn.source else line


def header(graph: Graph) -> str:
    """The mesh and the transforms applied; those that commute are listed in one order."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in graph.mesh)
    done = sorted(graph.history, key=lambda name: (not name.startswith("shard_params"), name))
    parts = [graph.name, f"mesh: {mesh}" if mesh else "", " > ".join(done)]
    return "# " + "   ".join(filter(None, parts))


def program(graph: Graph) -> str:
    """The whole program as text.

    >>> x, y = Var("x", torch.float32, (4,)), Var("y", torch.float32, (4,))
    >>> print(program(Graph("f", (x,), (Eqn(torch.ops.aten.relu.default, (x,), (y,)),), (y,), 0)))
    # f
    def f(
        x: f32[4],
    ):
      # forward
      y: f32[4] = relu(x)
      return y
    """
    lines = [header(graph), *(f"# note: {note}" for note in graph.notes), f"def {graph.name}("]
    lines += [f"    {var.name}: {var.type}," for var in graph.inputs]
    lines.append("):")
    region = None
    for eqn in graph.eqns:
        moved = eqn.provenance is not None or op_name(eqn.op) == "wait"  # schedules move these across regions
        if eqn.region != region and (region is None or not moved):
            region = eqn.region
            lines.append(f"  # {region}")
        lines.append(equation(eqn))
    lines.append("  return " + ", ".join(map(_value, graph.outputs)))
    return "\n".join(lines)


def diff(before: Any, after: Any, context: int = 1) -> str:
    """What a pass changed: a unified diff of two programs' texts (anything that prints as one).

    >>> print(diff("a\\nb", "a\\nc"))
    @@ -1,2 +1,2 @@
     a
    -b
    +c
    """
    one, two = (str(x).splitlines() for x in (before, after))
    return "\n".join(list(difflib.unified_diff(one, two, lineterm="", n=context))[2:])


def format_seconds(seconds: float) -> str:
    """Seconds as text.

    >>> format_seconds(0.0042), format_seconds(3.5e-6), format_seconds(0)
    ('4.20 ms', '3.50 us', '0.00 us')
    """
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if abs(seconds) < 999.995 * scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds:.2f} s"


def format_bytes(count: float) -> str:
    """Bytes as text.

    >>> format_bytes(512), format_bytes(3 << 20)
    ('512 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
