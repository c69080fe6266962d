"""Run flex_attention and its backward; on GPUs by kernels that Inductor compiles, with every backend of a program.

    out, lse, _ = flex_attention(q, k, v, score_mod, mask, ...)

A kernel never holds the scores [B, H, S, S]. On CPUs, and in f64 on GPUs, a program computes the dense meaning of the
operator, which holds them: on CPUs PyTorch has no kernel for backward, and its kernel for forward does not return
`lse`, which backward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..ir.graph import Eqn, substitute
from ..ir.higher_order import Function
from ..ir.operations import bound_results, call_operator
from ..ir.structure import structures
from ..rewrites.flex_attention import has_kernel, is_dense
from .inductor.compiler import Strided, fused


class FlexAttention(torch.nn.Module):
    """Calls attention, as a submodule of generated code. Equations that compute the same can share one.

    The first call on a GPU compiles the kernel for the layouts of its arguments. Later arguments with other layouts
    are copied.
    """

    def __init__(self, eqn: Eqn, nested: Callable[[Function], torch.nn.Module]) -> None:
        """`eqn` has the sizes of one rank. `nested` returns the code of a function that it calls."""
        super().__init__()
        self._op: Any = eqn.op
        self._ins = eqn.ins
        self._bound = bound_results(eqn)
        self._args = _with_code(eqn.args, nested)
        self._layouts: list[Strided] = []
        self._kernel: Callable[[list], Sequence] | None = None

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor | None]:
        query = values[0]
        if query.is_cuda and has_kernel(query.dtype):
            return self.by_kernel(*values)
        return self.densely(*values)

    def densely(self, *values: torch.Tensor) -> list[torch.Tensor | None]:
        """The results by the dense meaning of the operator."""
        return call_operator(self._op, self._bound, *self._arguments(values))

    def by_kernel(self, *values: torch.Tensor) -> list[torch.Tensor | None]:
        """The results by the kernel; None for a result that the equation does not bind."""
        if self._kernel is None:
            self._layouts = [Strided.of(x) for x in values]
            self._kernel = fused(self.bound_results, self._layouts, deterministic=True)
        inputs = [layout.conform(x) for layout, x in zip(self._layouts, values)]
        results = iter(self._kernel(inputs))
        return [next(results) if is_bound else None for is_bound in self._bound]

    def bound_results(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The results that the equation binds. Inductor compiles this function."""
        outputs = {"OUTPUT_LOGSUMEXP": self._bound[1], "OUTPUT_MAX": self._bound[2]}

        def for_kernel(options: dict) -> dict:
            """The options of a kernel. A program that was traced on CPUs asks for the dense backend."""
            backend = {"BACKEND": "AUTO"} if is_dense(options) else {}
            return options | outputs | backend

        args = [for_kernel(x) if isinstance(x, dict) else x for x in self._arguments(values)]
        results = call_operator(self._op, self._bound, *args)
        return [x for x, is_bound in zip(results, self._bound) if is_bound]

    def _arguments(self, values: Sequence[torch.Tensor]) -> tuple:
        by_var = dict(zip(self._ins, values, strict=True))
        return substitute(self._args, by_var.__getitem__)


def structure_of(eqn: Eqn) -> Hashable:
    """A key for what a call of attention computes. Calls with equal keys can share a submodule."""
    return structures([eqn], eqn.ins, (), lambda v: v.type)


def _with_code(tree: Any, nested: Callable[[Function], torch.nn.Module]) -> Any:
    """Arguments, with each function replaced by its code."""
    if isinstance(tree, Function):
        return nested(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_with_code(x, nested) for x in tree])
    return tree
