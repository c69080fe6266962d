"""Record each launch of a Triton kernel as one equation, with or without a GPU.

    add_kernel[grid](x, y, out, n, BLOCK=16)    -->    out1 = triton(add_kernel[(2,)](n=24, BLOCK=16), x, y, out)

While a step is traced, a launch runs nothing. The source of a kernel shows which arguments it changes. It writes by
`tl.store(pointer, ...)`, an atomic operation, the `store` of a descriptor, or assembly that is not pure. The pointer
comes from the arguments in its expression, and from the arguments that its names were computed from, by assignments,
loops and comprehensions. The result of `tl.load` is a value, not a pointer. An argument that is passed on to another
kernel function counts as changed. All arguments do if the source binds names in another way.

A kernel inside an operator of `torch.library` (`triton_op`, `custom_op`) is part of that operator.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14, with triton 3.6 to 3.8.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._library.triton import set_wrap_triton_enabled

from ..calling.global_state import patched
from ..ir.dependencies import reachable
from ..ir.triton_launch import Launch, has_tuning_wrappers, unwrapped
from .errors import writes_nothing
from .functionalize import Builder

# The name of every operation that writes contains one of these.
_WRITES = ("store", "atomic_")
# The statements whose assignments are analysed. Any other statement of a kernel may bind names in unknown ways.
_STATEMENTS = (
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Expr, ast.Return),
    *(ast.Pass, ast.Break, ast.Continue, ast.Assert),
)
# Python's functions that a kernel may call. Triton's own are called as attributes: `tl.arange`.
_PYTHON = ("range", "min", "max", "len", "float", "int")


@contextlib.contextmanager
def record_launches() -> Iterator[None]:
    """Record launches of Triton kernels instead of running them, with or without `wrap_triton` around a kernel."""
    # Until Triton is imported, no kernel exists.
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.jit import KernelInterface

    with patched(KernelInterface, __getitem__=_recorded_launch), set_wrap_triton_enabled(False):
        yield


def _recorded_launch(kernel: Any, grid: Any) -> Callable:
    def launch(*args: Any, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args)) | options
        # The wrappers of an autotuned kernel choose its block sizes when it runs, and the grid may depend on them.
        size = grid
        if callable(grid) and not has_tuning_wrappers(kernel):
            size = grid(arguments)
        if isinstance(size, int):
            size = (size,)
        tensors = {}
        numbers = {}
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor):
                tensors[name] = x
            else:
                numbers[name] = x
        constants = {"grid": size, "numbers": numbers}
        torch.ops.higher_order.triton_kernel_wrapper_mutation(
            kernel_idx=kernel_side_table.add_kernel(kernel),
            constant_args_idx=kernel_side_table.add_constant_args(constants),
            grid=[],
            tma_descriptor_metadata={},
            kwargs=tensors,
        )

    return launch


def import_launch(builder: Builder, recorded: Mapping[str, Any]) -> None:
    """Import a recorded launch as an equation, and write its results to the arguments that the kernel changes.

    Raises: ValueError if the kernel's source writes into no argument.
    """
    kernel: Any = kernel_side_table.get_kernel(recorded["kernel_idx"])
    constants = kernel_side_table.get_constant_args(recorded["constant_args_idx"])
    tensors = recorded["kwargs"]
    may_change = changed_arguments(unwrapped(kernel))
    changed_names = tuple(name for name in tensors if name in may_change)
    launch = Launch(kernel, constants["grid"], tuple(tensors), changed_names, constants["numbers"])
    if not launch.changed:
        raise writes_nothing(launch.name, builder.source)
    values = {name: builder.read(x) for name, x in tensors.items()}
    like = [builder.meta(values[name]) for name in launch.changed]
    op = torch.ops.higher_order.triton_kernel_wrapper_functional
    results = builder.emit(op, (launch, *values.values()), like=like, name="triton")
    for name, value in zip(launch.changed, results):
        builder.write(tensors[name], value)


def changed_arguments(function: FunctionType) -> set[str]:
    """The names of the arguments that a kernel may write into, by its source.

    >>> def kernel(x, out):
    ...     pointer = out + tl.arange(0, 16)
    ...     tl.store(pointer, tl.load(x + tl.arange(0, 16)))
    >>> changed_arguments(kernel)
    {'out'}
    """
    parameters = inspect.signature(function).parameters.keys()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    if _binds_otherwise(tree):
        return set(parameters)
    # For each name in the kernel, the names that its values are computed from.
    sources_of: defaultdict[str, list[str]] = defaultdict(list)
    for target, value in _assignments(tree):
        for name in _names(target):
            sources_of[name] += _names(value)
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    pointers: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            pointers += _pointers_written(node, scope)
    sources = reachable(pointers, lambda name: sources_of[name])
    return set(sources) & parameters


def _binds_otherwise(tree: ast.Module) -> bool:
    """Whether the source of a kernel binds names in ways that `_assignments` does not follow."""
    (kernel,) = tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            return True
        if isinstance(node, ast.stmt) and node is not kernel and not isinstance(node, _STATEMENTS):
            return True
    return False


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets and values of assignments, loops and comprehensions. `a, b = x, y` gives two pairs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            value = node.value
            for target in node.targets:
                if (
                    isinstance(target, ast.Tuple)
                    and isinstance(value, ast.Tuple)
                    and not _has_star(target.elts + value.elts)
                ):
                    yield from zip(target.elts, value.elts)
                else:
                    yield target, value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter
        elif (
            isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr)
            and node.value is not None
        ):
            yield node.target, node.value


def _has_star(entries: list[ast.expr]) -> bool:
    return any(isinstance(entry, ast.Starred) for entry in entries)


def _names(tree: ast.expr) -> Iterator[str]:
    """The names that the value of an expression is computed from, without the names inside a load."""
    if isinstance(tree, ast.Call) and _called_name(tree).startswith("load"):
        return
    if isinstance(tree, ast.Name):
        yield tree.id
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.keyword):
            child = child.value
        if isinstance(child, ast.expr):
            yield from _names(child)


def _pointers_written(call: ast.Call, scope: Mapping[str, Any]) -> Iterator[str]:
    """The names of the pointers that a call writes through. `scope` has the kernel's globals and closure variables."""
    arguments = list(call.args)
    by_name: dict[str | None, ast.expr] = {}
    for keyword in call.keywords:
        arguments.append(keyword.value)
        by_name[keyword.arg] = keyword.value
    is_assembly = _called_name(call).startswith("inline_asm")
    if _calls_another_kernel(call, scope) or (is_assembly and not _is_true(by_name.get("is_pure"))):
        for argument in arguments:
            yield from _names(argument)
    elif isinstance(call.func, ast.Attribute) and any(x in call.func.attr for x in _WRITES):
        # `descriptor.store(...)` writes through its object, `tl.store(pointer, ...)` through its first argument.
        yield from _names(call.func.value)
        pointer = by_name.get("pointer")
        for argument in [pointer] if pointer is not None else arguments[:1]:
            yield from _names(argument)


def _is_true(flag: ast.expr | None) -> bool:
    """Whether an argument is a constant that is true."""
    return isinstance(flag, ast.Constant) and bool(flag.value)


def _calls_another_kernel(call: ast.Call, scope: Mapping[str, Any]) -> bool:
    """Whether a call is of the user's own kernel function, by its name or as an attribute of a module."""
    if not isinstance(call.func, ast.Attribute):
        return _called_name(call) not in _PYTHON
    owner = call.func.value
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    module = scope.get(owner.id) if isinstance(owner, ast.Name) else None
    if not isinstance(module, ModuleType):
        return False
    package, _, _ = module.__name__.partition(".")
    return package != "triton"


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
