"""Compiler: a function of tensors as one kernel that Inductor compiles, and whether there is a compiler for it.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextlib.contextmanager
def fake() -> Iterator[FakeTensorMode]:
    """Tensors created inside have types and strides, and no elements."""
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode, torch.no_grad():
        yield mode


def fused(
    function: Callable,
    like: Callable[[], list[torch.Tensor]],
    donated: Sequence[int] = (),
    deterministic: bool = False,
) -> Callable[[list], Sequence]:
    """Compile `function` with Inductor, as one kernel if possible.

    The kernel takes a list of tensors with the dtypes, shapes and strides of those that `like` creates. It may write
    over the arguments whose positions are in `donated`. With `deterministic` no timing decides how it computes, so
    that all ranks have the same kernel.
    """
    from torch._inductor import config  # imported here, because that takes a second
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with fake() as mode:
        fakes = like()
        module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
        # Constant folding would replace x * 1 by x, whose storage the result must not share.
        with config.patch(joint_graph_constant_folding=False):
            module = joint_graph_passes(module)
        module.graph.eliminate_dead_code()  # such as reads of results that attention does not write
    (output,) = module.graph.find_nodes(op="output")
    result_strides = [x.meta["val"].stride() for x in output.args[0]]
    output.meta.update(
        user_visible_output_idxs=[*range(len(result_strides))],
        original_output_strides=result_strides,
    )
    for k, node in enumerate(module.graph.find_nodes(op="placeholder")):
        # The names of the arguments are the only part of Inductor's cache key that shows which are donated.
        node.target = f"donated_{k}" if k in donated else f"given_{k}"
    module.recompile()
    # Inductor donates buffers to the backward pass of a compiled model only, so this is compiled as one. Of the
    # metadata of such a pass it reads these two fields.
    context = TracingContext(mode)
    metadata: Any = SimpleNamespace(static_input_indices=[], bw_donated_idxs=[*donated])
    context.fw_metadata = metadata
    # `KernelCall` checks the layouts of the arguments at its first call, so the kernel need not do so at every call.
    options = {"deterministic": deterministic, "size_asserts": False}
    with torch.no_grad(), tracing(context), config.patch(options):
        return compile_fx_inner(module, fakes, is_backward=True)


def bare(kernel: Callable[[list], Sequence]) -> Callable[[list], Sequence]:
    """What a compiled kernel calls in the end, without what Inductor does around its first call."""
    return getattr(kernel, "current_callable", None) or kernel


def check_compiler() -> None:
    """Raises: ValueError when Inductor finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "compile: backend 'inductor' needs a C++ compiler, and there is none.\n"
            "Install g++ or clang, or name one in the environment variable CXX; or compile(backend='eager')."
        ) from None
