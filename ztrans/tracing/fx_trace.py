"""fx_trace: run a function once on fake tensors, and record its operations as an FX graph.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch._decomp
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import flex_attention
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from ..ir.ambient import having
from ..ir.source import Source
from .errors import seeds
from .gradient_marks import Marks
from .nested.checkpoints import mark_checkpoints
from .nested.closures import any_operands
from .nested.triton_kernels import record_launches
from .watch import Watch

OLDEST, BEFORE = "2.11", "2.15"  # the releases of torch that ztrans works with, as in pyproject.toml


def check_torch(version: str = torch.__version__) -> None:
    """Check the release of torch, whose private APIs change. An installer does so only when it installs ztrans.

    Raises: RuntimeError for a torch outside of the range.

    >>> check_torch("2.13.0+cpu")
    """
    if not OLDEST <= TorchVersion(version) < BEFORE:
        wanted = f"torch>={OLDEST},<{BEFORE}"
        raise RuntimeError(
            f"ztrans: this is torch {version}, and ztrans uses private APIs of {wanted}.\n"
            f"Install such a torch, pip install '{wanted}', or a release of ztrans for torch {version}."
        )


class Recorded(NamedTuple):
    """The recorded run of a function."""

    graph: Any  # the operations of the run, as FX records them, or imported as a `Graph`
    out_tree: pytree.TreeSpec  # the tree of the result
    tensors: list[tuple[weakref.ref, Source | None]]  # every tensor of the run, with the user's line that created it


def record(
    call: Callable[[Sequence[torch.Tensor]], Any],
    make_inputs: Callable[[], list[torch.Tensor]],
    wants_grad: Sequence[bool],
    names: Sequence[str],
    step: str,
) -> Recorded:
    """Record `call(make_inputs())` on fake tensors. The inputs for which `wants_grad` holds require gradients.

    Errors call the inputs by their `names`.

    Raises: ValueError if the function seeds PyTorch's generator, or does something that a program cannot express
        (see `watch`).
    """
    with _outside_inference_mode():
        return _recorded(call, make_inputs, wants_grad, names, step)


def _recorded(call: Callable, make_inputs: Callable, wants_grad: Sequence, names: Sequence[str], step: str) -> Recorded:
    # The tracing rule of while_loop asks for the environment; all shapes of a program are numbers.
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with _Fakes(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True) as mode, _quiet():
        inputs = make_inputs()
    watch = Watch(step, mode)
    trees: list[pytree.TreeSpec] = []

    def flat(*tensors: torch.Tensor) -> list[Any]:
        for tensor, wants in zip(tensors, wants_grad):
            tensor.requires_grad_(wants)
        watch.remember(tensors, None)
        with watch, Marks(step, dict(zip(names, tensors))):
            result = call(tensors)
        leaves, tree = pytree.tree_flatten(result)
        trees.append(tree)
        return leaves

    generator = torch.random.get_rng_state()
    with (
        mode,
        _quiet(),
        _sparingly(),
        _without_onednn(),
        mark_checkpoints(),
        _attention_on_every_device(),
        any_operands(),
        record_launches(),
    ):
        options = {"_allow_non_fake_inputs": True, "_disable_torch_fn_metadata_mode": True}
        module = make_fx(flat, _declared(), "fake", **options)(*inputs)
    torch.clear_autocast_cache()  # it holds casts of fake weights, which the caller's autocast would use
    if not torch.equal(generator, torch.random.get_rng_state()):
        torch.random.set_rng_state(generator)
        raise seeds("torch.manual_seed", None, step)
    _forget_fakes(module)
    return Recorded(module.graph, trees[0], watch.tensors)


def _forget_fakes(module: fx.GraphModule) -> None:
    """Remove the fake tensors that PyTorch has kept in the graphs of functions (see `_sparingly`)."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            node.meta.pop("val", None)


@contextlib.contextmanager
def _attention_on_every_device() -> Iterator[None]:
    """Let flex_attention be traced for any device. Without a kernel, a program computes it by its dense meaning."""
    with having(flex_attention, _validate_device=lambda query, key, value: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Trace without oneDNN.

    Its recurrent layers save values for backward only under autograd, and a program runs without autograd. When the
    program runs, PyTorch may still choose oneDNN.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Trace a step that is called under inference mode as one that is called without gradients."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


@dataclass(frozen=True)
class Seen:
    """The properties of a result at the time of the operation. Later operations may change those of the tensor."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(result: Any) -> Any:
        """The properties of the tensors in a result."""
        if isinstance(result, (list, tuple)):
            return [Seen.of(x) for x in result]
        if not isinstance(result, torch.Tensor):
            return result
        if result.layout is not torch.strided:
            return Seen(result.dtype, result.shape, (), 0)
        return Seen(result.dtype, result.shape, result.stride(), int(result.storage_offset()))

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def storage_offset(self) -> int:
        return self.offset


@contextlib.contextmanager
def _sparingly() -> Iterator[None]:
    """Let make_fx record of each result what the import reads, and generate no code for the graph.

    By itself it would keep a copy of each fake tensor, which takes a tenth of the time of a trace. In the graphs of
    functions that higher-order operators call, these copies stay: PyTorch reads them to differentiate the functions.
    """
    plain, step = proxy_tensor.set_meta, list[fx.Tracer]()

    def set_meta(proxy: Any, result: Any) -> Any:
        step[:] = step or [proxy.tracer]
        proxy.node.meta["seen"] = Seen.of(result)
        return proxy if proxy.tracer is step[0] else plain(proxy, result)

    with having(proxy_tensor, set_meta=set_meta), _use_lazy_graph_module(True):
        yield


@functools.cache
def _declared() -> dict:
    """Decompositions of cuDNN's batch norm.

    Its schema does not declare that it writes the running statistics. The operations that it decomposes into do.
    """
    aten = torch.ops.aten
    return torch._decomp.get_decompositions([aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward])


class _Fakes(FakeTensorMode):
    """Fake tensors that skip fused optimizers which overwrite their arguments and return nothing.

    PyTorch would run these on real tensors, as large as the model, to learn the types of their results.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) and func not in registered_hop_fake_fns:
            # The operator looks for the class of its mode, and does not know a subclass.
            return func.python_key_table[FakeTensorMode](self, *args, **kwargs)
        if func.name().startswith("aten::_fused_") and not func._schema.returns:
            return None
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run autograd in one thread, so that its order is deterministic, and optimizers as under `torch.compile`.

    There an optimizer keeps its step count as a tensor, which the trace can follow.
    """
    compiling = having(torch.compiler, _is_compiling_flag=True)  # its context manager is younger than torch 2.11
    # Where shapes do not fit, this logger would write a traceback besides that of the error.
    silent = having(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)
    eager = torch.compiler.set_stance("force_eager")  # a region inside of torch.compile is traced as any other code
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with silent, fx_traceback.preserve_node_meta(), one_thread, compiling, eager:
        yield
