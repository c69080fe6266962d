"""Pass the functions of higher-order operators every tensor that they read as an argument.

    cond(p, lambda x: x @ w, g, [x])    -->    cond(p, lambda x, w: x @ w, lambda x, w: g(x), [x, w])

`torch.cond`, `scan` and `flex_attention` call functions of the step. Such a function may read tensors of the step that
are not its arguments. PyTorch finds them by compiling the function with Dynamo. Here the function runs once,
unrecorded, and its operations show which tensors it reads.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..calling.global_state import patched
from ..ir.nested import tensors_in
from ..ir.source import user_source
from .annotate import Origin, nodes_with_origin
from .errors import other_containers
from .regions import Fact

hops = torch.ops.higher_order
# `torch._higher_order_ops.cond` is the function, and not its module.
_COND = sys.modules[type(hops.cond).__module__]


def any_operands() -> contextlib.AbstractContextManager[None]:
    """Allow any containers of tensors as operands of `torch.cond`, which checks them before a mode sees the call."""
    return patched(_COND, validate_subgraph_args_types=lambda operands: None)


@contextlib.contextmanager
def attention_on_every_device() -> Iterator[None]:
    """Allow flex_attention on any device. Without a kernel for it, a program computes the dense attention."""
    with (
        patched(flex_attention, _validate_device=lambda query, key, value: None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def call_closed(
    op: HigherOrderOperator, args: tuple, kwargs: dict, visit: Callable[[Any], Any] = lambda x: x
) -> Any:
    """Call a higher-order operator with functions that read only their arguments.

    Args:
        op, args, kwargs: the operator and its arguments, as the step passes them.
        visit: maps the arguments that the operator is called with; by default they stay as they are.
    """
    call = _CLOSED_CALLS.get(op)
    if call is None:
        return op(*visit(args), **visit(kwargs))
    return call(op, visit, *args, **kwargs)


def _call_cond(
    op: Any, visit: Callable, pred: Any, if_true: Callable, if_false: Callable, operands: Any = ()
) -> Any:
    leaves, tree = pytree.tree_flatten(tuple(operands))
    true_branch = _Flat(if_true, tree)
    false_branch = _Flat(if_false, tree)
    # The operator passes the same operands to both branches, so both get the tensors that either of them reads.
    free = _tensors_read_by([true_branch, false_branch], leaves)
    _check_same("the branches of cond return", [true_branch.tree, false_branch.tree])
    operands = (*leaves, *free)
    branches = _close(true_branch, free), _close(false_branch, free)
    results = op(*visit((pred, *branches, operands)))
    return pytree.tree_unflatten(results, true_branch.tree)


def _call_scan(
    op: Any,
    visit: Callable,
    combine: Callable,
    init: Sequence,
    xs: Sequence,
    more: Sequence = (),
    **_: Any,
) -> Any:
    body = _Flat(combine, pytree.tree_structure((*init, *xs, *more)))
    rows = [x[0] for x in xs]
    free = _tensors_read_by([body], (*init, *rows, *more))
    # `torch.scan` passes a partial function that knows the containers of the carry, and returns the new carry first.
    if isinstance(combine, functools.partial) and body.tree is not None:
        start = combine.keywords["spec_init"]
        _check_same("the carry of scan begins and returns as", [start, body.tree.children()[0]])
    results = op(*visit((_close(body, free), init, xs, (*more, *free))))
    return pytree.tree_unflatten(results, body.tree)


def _call_attention(
    op: Any,
    visit: Callable,
    q: Any,
    k: Any,
    v: Any,
    score_mod: Callable,
    block_mask: tuple,
    *rest: Any,
    **_: Any,
) -> Any:
    # flex_attention has imported the module.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    *blocks, mask_mod = block_mask
    scale, options = rest[:2]
    # Both functions take the indices of batch, head, query and key.
    indices = [q.new_empty((), dtype=torch.int)] * 4
    with TransformGetItemToIndex():
        score_tensors = tuple(_tensors_read_by([score_mod], (q.new_empty(()), *indices)))
        mask_tensors = tuple(_tensors_read_by([mask_mod], indices))
    score_mod = _close(score_mod, score_tensors)
    mask = (*blocks, _close(mask_mod, mask_tensors))
    return op(*visit((q, k, v, score_mod, mask, scale, options, score_tensors, mask_tensors)))


_CLOSED_CALLS: Mapping[HigherOrderOperator, Callable] = {
    hops.cond: _call_cond,
    hops.scan: _call_scan,
    hops.flex_attention: _call_attention,
}


def _check_same(clause: str, containers: Sequence[pytree.TreeSpec | None]) -> None:
    """Raises: TraceError for two containers that differ. A container is None if its function failed."""
    first, second = containers
    if None not in containers and first != second:
        raise other_containers(clause, containers, user_source())


class _Flat:
    """A function from leaves to leaves. `tree` is the structure of its results, known after a call."""

    def __init__(self, function: Callable, operands: pytree.TreeSpec) -> None:
        self.function = function
        self.operands = operands
        self.tree: Any = None

    def __call__(self, *leaves: Any) -> tuple:
        operands = pytree.tree_unflatten(leaves, self.operands)
        results, self.tree = pytree.tree_flatten(self.function(*operands))
        return tuple(results)


def _close(function: Callable, free: Sequence[torch.Tensor]) -> Callable:
    """`function` with its free tensors as its last arguments."""

    def with_operands(*args: Any) -> Any:
        # The function still refers to the free tensors. They are replaced in the calls of PyTorch's functions.
        count = len(args) - len(free)
        operands = dict(zip(map(id, free), args[count:]))

        def operand_for(x: torch.Tensor) -> torch.Tensor:
            return operands.get(id(x), x)

        with _VisitArguments(lambda tree: pytree.tree_map_only(torch.Tensor, operand_for, tree)):
            return function(*args[:count])

    return with_operands


class _VisitArguments(TorchFunctionMode):
    """Applies `visit` to the arguments of PyTorch's functions. Their operations are recorded with their own lines."""

    def __init__(self, visit: Callable[[Any], Any]) -> None:
        super().__init__()
        self.visit = visit

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with nodes_with_origin(Origin(user_source(), Fact())):
            if isinstance(func, HigherOrderOperator):
                return call_closed(func, args, kwargs or {}, self.visit)
            return func(*self.visit(args), **self.visit(kwargs or {}))


def _tensors_read_by(functions: Sequence[Callable], args: Sequence[Any]) -> list[torch.Tensor]:
    """The free tensors of `functions`: arguments of their operations that they neither get nor compute."""
    # By id, the arguments of all operations.
    arguments: dict[int, torch.Tensor] = {}

    def visit(tree: Any) -> Any:
        arguments.update((id(x), x) for x in tensors_in(tree))
        return tree

    with (
        disable_proxy_modes_tracing(),
        torch.no_grad(),
        _CollectResults() as created,
        _VisitArguments(visit),
    ):
        for function in functions:
            # What fails here fails again in the trace, whose error says where.
            with contextlib.suppress(Exception):
                function(*args)
    not_free = set(map(id, pytree.tree_leaves(args)))
    not_free.update(map(id, created.tensors))
    return [x for key, x in arguments.items() if key not in not_free]


class _CollectResults(TorchDispatchMode):
    """Collects the results of all operations."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.tensors += tensors_in(results)
        return results
