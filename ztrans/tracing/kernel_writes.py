"""Kernel writes: which arguments of a Triton kernel it changes, according to its source.

A kernel writes by `tl.store(pointer, ...)`, an atomic operation, or the `store` of a descriptor. The pointer is
computed from the arguments in its expression, and from the arguments that the names in it were computed from. What
`tl.load` returns is a value and not a pointer. An argument that is passed on to another kernel function counts as
changed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator

from ..ir.relations import grouped, reachable

_WRITES = ("store", "atomic_")  # how the names of operations that write begin
_LANGUAGE = ("tl", "triton", "language", "libdevice", "range", "min", "max", "len", "float", "int")


def changed_arguments(function: Callable) -> set[str]:
    """The names of the arguments into which the source of a kernel may write.

    >>> def kernel(x, out):
    ...     pointer = out + tl.arange(0, 16)
    ...     tl.store(pointer, tl.load(x + tl.arange(0, 16)))
    >>> changed_arguments(kernel)
    {'out'}
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    assigned = ((name, value) for target, value in _assignments(tree) for name in _names(target))
    computed_from = grouped((name, source) for name, value in assigned for source in _names(value))
    stored_to = [
        name for call in ast.walk(tree) if isinstance(call, ast.Call) for name in _written(call)
    ]
    pointers = reachable(stored_to, lambda name: computed_from.get(name, []))
    return set(pointers) & inspect.signature(function).parameters.keys()


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts)
                else:
                    yield target, node.value
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _names(tree: ast.expr) -> Iterator[str]:
    """The names in an expression from which its value is computed. What a load reads is none of them."""
    if isinstance(tree, ast.Call) and _called(tree).startswith("load"):
        return
    if isinstance(tree, ast.Name):
        yield tree.id
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr | ast.keyword):
            yield from _names(child.value if isinstance(child, ast.keyword) else child)


def _written(call: ast.Call) -> Iterator[str]:
    """The names of the pointers through which a call writes."""
    name, arguments = _called(call), [*call.args, *(k.value for k in call.keywords)]
    if isinstance(call.func, ast.Attribute):
        if name.startswith(_WRITES):
            yield from _names(call.func.value)  # a descriptor
            yield from _names(
                next((k.value for k in call.keywords if k.arg == "pointer"), arguments[0])
            )
    elif name not in _LANGUAGE:  # another kernel function
        for argument in arguments:
            yield from _names(argument)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
