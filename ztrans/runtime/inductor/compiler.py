"""Compile a function of tensors with Inductor, and infer the layouts of the values of a program.

The layouts are inferred without computing any value: each kind of equation runs once, on fake tensors.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...calling.inputs import device_of
from ...ir.collectives import rules
from ...ir.donation import in_place, updated
from ...ir.graph import Eqn, Graph, Primitive, Var
from ...ir.layout import local_shape, localize
from ...ir.operations import compute
from ...ir.structure import structure
from ...ir.triton_launch import Launch
from ...ops import decoded, nearest, rounded
from ...rewrites.update_groups import is_fused_update

# Our operations that a kernel computes with others, and what they mean in PyTorch's.
_OURS: Mapping[Any, Callable] = {
    torch.ops.ztrans.stochastic_round.default: rounded,
    torch.ops.ztrans.widened.default: decoded,
    torch.ops.ztrans.narrowed.default: nearest,
}


class Strided(NamedTuple):
    """The layout of a tensor, as the arguments of `torch.empty_strided`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor) -> Strided:
        return Strided(x.dtype, tuple(x.shape), x.stride(), x.device)

    def empty(self) -> torch.Tensor:
        """An uninitialized tensor with this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a tensor has this shape, dtype and strides. The stride of a dim of size 1 may differ."""
        if x.shape != self.shape or x.dtype != self.dtype:
            return False
        if x.stride() == self.stride:
            return True
        dims = zip(self.shape, x.stride(), self.stride)
        return all(size == 1 or stride == expected for size, stride, expected in dims)

    def conform(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in this layout: copied if its strides or its dtype differ, which fake tensors do not always predict.

        Raises: RuntimeError if it has another shape.
        """
        if x.shape != self.shape:
            raise RuntimeError(
                f"inductor: a value has shape {[*x.shape]}, and {[*self.shape]} in the traced program.\n"
                f"The fake implementation of an operation (register_fake) returns a shape that differs from the "
                f"operation's. Correct it, or compile(backend='eager')."
            )
        return x if self.fits(x) else self.empty().copy_(x)


@contextlib.contextmanager
def fake() -> Iterator[FakeTensorMode]:
    """A context that creates tensors with dtypes, shapes and strides, but without elements."""
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode, torch.no_grad():
        yield mode


def infer_layouts(
    graph: Graph,
    coordinates: Mapping[str, int],
    inputs: Sequence[torch.Tensor],
    in_place_ops: Mapping[Eqn, Any],
) -> dict[Var, Strided]:
    """Infer the layout of every value of a program on the rank at these coordinates.

    The result of an in-place operation keeps the layout of the argument that it overwrites.
    """
    tensor_inputs = (*graph.state, *graph.arguments)
    layouts = {v: Strided.of(x) for v, x in zip(tensor_inputs, inputs, strict=True)}
    device = device_of(inputs) or torch.device("cpu")
    layouts.update(_carried_layouts(graph, coordinates, device))
    by_structure: dict[Hashable, list[Strided | None]] = {}
    for eqn in graph.eqns:
        shapes = [local_shape(v, graph.axes, coordinates) for v in eqn.results]
        results: Sequence[Strided | None]
        if isinstance(eqn.op, Primitive):
            results = _primitive_layouts(eqn, shapes, layouts, device)
        else:
            op = in_place_ops.get(eqn)
            if isinstance(op, torch._ops.OpOverload) and op._schema.returns:
                eqn = eqn.replace(op=op)  # the operation that will run
            results = _run_fake(localize(eqn, graph.axes, coordinates), layouts, by_structure)
        for v, layout in zip(eqn.outs, results):
            if v is not None and layout is not None:
                layouts[v] = layout
    return layouts


def _primitive_layouts(
    eqn: Eqn,
    shapes: Sequence[tuple[int, ...]],
    layouts: Mapping[Var, Strided],
    device: torch.device,
) -> list[Strided]:
    """The layouts of the results of a primitive, in a program on `device`.

    Received values are contiguous, whatever was sent. A copy between two memories keeps the strides.
    """
    if rules(eqn).copies:
        target = device if eqn.out.memory == "device" else torch.device("cpu")
        return [layouts[eqn.ins[0]]._replace(device=target)]
    if rules(eqn).shares_storage(eqn):
        whole = layouts[eqn.args[0]]
        # This rank's row has one dim less, which has size 1 here, and a value of rows has one more.
        stride = (1, *whole.stride)[-len(shapes[0]) :] if shapes[0] else ()
        return [whole._replace(shape=shapes[0], stride=stride)]
    device = layouts[eqn.ins[0]].device
    return [_received_layout(v, shape, device) for v, shape in zip(eqn.results, shapes)]


def _carried_layouts(
    graph: Graph, coordinates: Mapping[str, int], device: torch.device
) -> Iterator[tuple[Var, Strided]]:
    """The layouts of the values that the previous step has started to gather."""
    for v in graph.carried_inputs:
        yield v, _received_layout(v, local_shape(v, graph.axes, coordinates), device)


def _received_layout(v: Var, shape: tuple[int, ...], device: torch.device) -> Strided:
    """The layout of a value that a collective delivers: contiguous."""
    return Strided(v.dtype, shape, torch.empty(shape, device="meta").stride(), device)


def _run_fake(
    eqn: Eqn, layouts: Mapping[Var, Strided], by_structure: dict[Hashable, list[Strided | None]]
) -> list[Strided | None]:
    """The layouts of an equation's results, from a run on fake tensors; one run for all of the same structure."""
    if is_fused_update(eqn):  # fake tensors would compute these for real
        overwritten = updated(eqn, in_place(eqn.op))
        if overwritten:
            return [layouts[v] for v, _ in overwritten]
    launch = eqn.args[0] if eqn.args else None
    if isinstance(launch, Launch):  # Triton kernels cannot run on fake tensors
        tensors = zip(launch.tensors, eqn.args[1:])
        return [layouts[v] for name, v in tensors if name in launch.changed]
    key = structure(eqn, layouts.__getitem__)
    if key not in by_structure:
        results: list[Strided | None] = []
        with fake():
            for x in compute(eqn, {v: layouts[v].empty() for v in eqn.ins}):
                results.append(Strided.of(x) if isinstance(x, torch.Tensor) else None)
        by_structure[key] = results
    return by_structure[key]


def fused(
    function: Callable,
    like: Sequence[Strided],
    donated: Sequence[int] = (),
    deterministic: bool = False,
    any_rows: bool = False,
) -> Callable[[list], Sequence]:
    """Compile `function` with Inductor, into one kernel if possible.

    The kernel takes a list of tensors with the layouts `like`. It may write over the arguments at the positions
    `donated`. With `deterministic`, Inductor selects nothing by timing, so that all ranks get the same kernel. With
    `any_rows`, the first dim of all tensors may have any one size.
    """
    from torch._inductor import config  # imported here, because that takes a second
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with fake() as mode:
        if any_rows:
            rows = _any_size(mode)
            like = [layout._replace(shape=(rows, *layout.shape[1:])) for layout in like]
        fakes = [layout.empty() for layout in like]
        decompositions = {**select_decomp_table(), **_OURS}
        module = make_fx(function, decomposition_table=decompositions)(*fakes)
        # Constant folding would replace x * 1 by x, whose storage the result must not share.
        with config.patch(joint_graph_constant_folding=False):
            module = joint_graph_passes(module)
        module.graph.eliminate_dead_code()  # such as reads of results that attention does not write
    (output,) = module.graph.find_nodes(op="output")
    strides = [x.meta["val"].stride() for x in output.args[0]]
    positions = [*range(len(strides))]
    output.meta.update(user_visible_output_idxs=positions, original_output_strides=strides)
    for k, node in enumerate(module.graph.find_nodes(op="placeholder")):
        # The names of the arguments are the only part of Inductor's cache key that shows which are donated.
        node.target = f"donated_{k}" if k in donated else f"given_{k}"
    module.recompile()
    # Inductor donates buffers only to the backward pass of a compiled model, so compile the kernel as one. It reads
    # only these two fields of the metadata of such a pass.
    context = TracingContext(mode)
    metadata: Any = SimpleNamespace(static_input_indices=[], bw_donated_idxs=[*donated])
    context.fw_metadata = metadata
    # No size_asserts: `KernelCall` checks the layouts of the arguments once, at its first call.
    # No static launcher: a launch waits while the GPU's queue is full, and Inductor's own launcher holds the GIL while
    # it waits. Signal handlers, and the threads that write checkpoints or end this process, would wait too.
    options = {
        "deterministic": deterministic,
        "size_asserts": False,
        "use_static_cuda_launcher": False,
    }
    with torch.no_grad(), tracing(context), config.patch(options):
        return compile_fx_inner(module, fakes, is_backward=True)


def _any_size(mode: FakeTensorMode) -> Any:
    """A size that fake tensors of this mode may have, and that stands for any."""
    from torch._dynamo.source import ConstantSource  # imported here, because that takes a second

    env: Any = mode.shape_env
    source = ConstantSource("rows")
    symbol = env.create_unspecified_symbol(1000, source, DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=1000, source=source)


def inner_callable(kernel: Callable[[list], Sequence]) -> Callable[[list], Sequence]:
    """The function inside a compiled kernel, without the work that Inductor does around its first call."""
    return getattr(kernel, "current_callable", None) or kernel


def check_compiler() -> None:
    """Raises: ValueError if Inductor finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "compile: backend 'inductor' needs a C++ compiler, and there is none.\n"
            "Install g++ or clang, or name one in the environment variable CXX; or compile(backend='eager')."
        ) from None
