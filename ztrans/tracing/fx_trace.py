"""Trace a function with `make_fx` into an FX graph, on PyTorch's fake tensors.

The function runs once, with its forward, backward and update. `make_fx` records its operations as nodes. Two modes are
active meanwhile: one records where each operation comes from (see `annotate`), the other replaces functions that cannot
be traced, and marks gradients (see `function_mode`). This module also adds the rules for fake tensors that PyTorch
lacks, and refuses a version of torch whose private APIs may differ.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._decomp
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from ..calling.global_state import patched
from ..calling.inputs import KnownValue
from . import c10d, loss_scaling
from .annotate import Annotate
from .checkpoints import mark_checkpoints
from .dtensors import unrecorded_layouts
from .function_mode import StepFunctions
from .higher_order import any_operands, attention_on_every_device
from .known_values import KnownInputs
from .triton_kernels import record_launches

# The releases of torch that ztrans works with, as in pyproject.toml: from OLDEST on, and before BEFORE.
OLDEST = "2.11"
BEFORE = "2.15"
aten = torch.ops.aten
# The limit of entries in the cache of fake operations after a trace, about 26 MiB.
_MOST_FAKE_RESULTS = 1 << 14


def check_torch(version: str = torch.__version__) -> None:
    """Check the release of torch, whose private APIs change. An installer checks it only when it installs ztrans.

    Raises: RuntimeError for a release outside of the range.

    >>> check_torch("2.13.0+cpu")
    """
    if not OLDEST <= TorchVersion(version) < BEFORE:
        requirement = f"torch>={OLDEST},<{BEFORE}"
        raise RuntimeError(
            f"ztrans: this is torch {version}, and ztrans uses private APIs of {requirement}.\n"
            f"Install such a torch, pip install '{requirement}', or a release of ztrans for torch {version}."
        )


class FxTrace(NamedTuple):
    """A function as traced by make_fx.

    Attributes:
        module: the FX graph. It takes the tensors of the inputs, and returns the tensors among the results.
        leaves: the leaves of the result: tensors without values, and constants.
        out_tree: the tree of the result.
        known: the inputs whose values the function has read, with these values.
    """

    module: fx.GraphModule
    leaves: Sequence[Any]
    out_tree: pytree.TreeSpec
    known: Sequence[KnownValue]


def trace_by_make_fx(
    call: Callable[[Sequence[torch.Tensor]], Any],
    make_inputs: Callable[[], list[torch.Tensor]],
    names: Sequence[str],
    step: str,
    known: Mapping[int, torch.Tensor],
) -> FxTrace:
    """Trace `call(make_inputs())`.

    Args:
        call: the function of the inputs.
        make_inputs: makes the inputs, on fake tensors.
        names: the names of the inputs, in the graph and in errors.
        step: the name of the step, for errors.
        known: by position, the values of inputs that the function may read.

    Raises: ValueError if the function does something that a program cannot express (see `annotate`).
    """
    # make_fx imports it, which must not happen under the modes below.
    import torch._dynamo

    _complete_fake_rules()
    results: tuple[list[Any], pytree.TreeSpec] = ([], pytree.tree_structure(()))
    values_read: list[KnownValue] = []
    fakes = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)

    # `user_source` stops its search at this function, by its name.
    def run_traced(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal results
        inputs = KnownInputs(known, tensors)
        with Annotate(step, fakes, inputs), StepFunctions(step, dict(zip(names, tensors))):
            results = pytree.tree_flatten(call(tensors))
        values_read.extend(inputs.read.values())
        return [x for x in results[0] if isinstance(x, torch.Tensor)]

    with _settings(), fakes:
        inputs = make_inputs()
    with _settings():
        module = make_fx(
            run_traced,
            decompositions(),
            "fake",
            _allow_non_fake_inputs=True,
            _disable_torch_fn_metadata_mode=True,
        )(*inputs)
    # The cache holds casts of fake weights, which the caller's autocast would use.
    torch.clear_autocast_cache()
    # FX names placeholders after the function's parameters, but `run_traced` has only `*tensors`. In FX's generated
    # code `self` is the module.
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names):
        node._rename("self_" if name == "self" else name)
        node.target = node.name
    module.recompile()
    # PyTorch caches the results of fake operations for every batch shape until the process ends: two encoder layers add
    # 510 entries, 0.8 MiB. Without the cache the next trace is slower, with the same result.
    if len(FakeTensorMode.cache) > _MOST_FAKE_RESULTS:
        FakeTensorMode.cache_clear()
    return FxTrace(module, *results, values_read)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set PyTorch up for a trace.

    Autograd runs in one thread, so that its order is deterministic. Optimizers run as under `torch.compile`: they keep
    their step count as a tensor, which a trace can follow.
    """
    with contextlib.ExitStack() as stack:
        # A step that is called in inference mode is traced under no_grad.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # It would read the values of gradients.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        # Torch 2.11 has no context manager for this flag.
        stack.enter_context(patched(torch.compiler, _is_compiling_flag=True))
        # Code under torch.compile is traced like any other code.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Distributions check their arguments, which reads the values of tensors.
        stack.enter_context(patched(torch.distributions.Distribution, _validate_args=False))
        # If shapes do not fit, this logger would print a second traceback.
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
        stack.enter_context(warnings.catch_warnings())
        # make_fx reads this attribute of every tensor, and PyTorch warns of a read from a non-leaf.
        warnings.filterwarnings("ignore", "The .grad attribute")
        stack.enter_context(fx_traceback.preserve_node_meta())
        # FX generates the code of a graph when it is first used.
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(mark_checkpoints())
        stack.enter_context(attention_on_every_device())
        stack.enter_context(any_operands())
        stack.enter_context(record_launches())
        stack.enter_context(unrecorded_layouts())
        yield


@functools.cache
def decompositions() -> dict[Any, Callable]:
    """The operations that make_fx replaces by simpler ones, with the functions that run those.

    - operations over lists, which PyTorch defines by an operation on each member;
    - collectives that change their arguments, or that one rank alone calls (see `c10d`);
    - cuDNN's batch norm, whose schema does not declare that it writes the running statistics;
    - the kernels of a GradScaler, which PyTorch has for one device (see `loss_scaling`).
    """
    table: dict[Any, Callable] = dict(
        torch._decomp.get_decompositions([aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward])
    )
    table.update(loss_scaling.FORMS)
    over_lists = torch._C.DispatchKey.CompositeExplicitAutograd
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_"):
            if not name.endswith("out") and has_kernel(name, over_lists):
                op = _operation(name)
                table[op] = functools.partial(op._op_dk, over_lists)
        elif name.startswith(("c10d::", "_c10d_functional::")):
            op = _operation(name)
            if c10d.is_outside_programs(op):
                table[op] = functools.partial(c10d.functionalized, op, _finished_work)
    return table


def _operation(name: str) -> Any:
    """The operation with a name such as `aten::add.Tensor`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _finished_work() -> Any:
    """A `Work` of torch.distributed that has finished."""
    return torch._C._distributed_c10d.FakeWork().boxed()


@functools.cache
def _complete_fake_rules() -> torch.library.Library:
    """Register the rules for fake tensors that PyTorch lacks.

    Without them PyTorch runs a fused optimizer on zeros as large as the model, and refuses ctc_loss. Its rule for
    oneDNN's recurrent layers returns an empty workspace, so plans would not count that memory.
    """
    # The cache of this function keeps the library alive: a freed library removes its kernels.
    library = torch.library.Library("aten", "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_fused_") and not name.endswith("out"):
            returns = _operation(name)._schema.returns
            if not returns and not has_kernel(name, "Meta"):
                library.impl(name.removeprefix("aten::"), lambda *args, **kwargs: None, "Meta")
    if aten._ctc_loss.default not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(aten._ctc_loss.default)(_ctc_losses)
        fake_impls.register_op_impl(aten.mkldnn_rnn_layer.default)(_recurrent_layer)
    return library


def _ctc_losses(
    mode: Any, op: Any, log_probs: torch.Tensor, targets: Any, rows: Any, lengths: Any, *rest: Any
) -> Any:
    """Fake results of `ctc_loss` with lengths that are lists of numbers."""
    time_steps, batch = log_probs.shape[:2]
    losses = log_probs.new_empty(batch)
    return losses, log_probs.new_empty(batch, time_steps, 2 * max(lengths) + 1)


def _recurrent_layer(
    mode: Any, op: Any, x: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fake results of `mkldnn_rnn_layer`, with the workspace that it saves for backward.

    The workspace has 15.3 to 15.7 fp32 numbers for each element of the output, measured with 128 to 256 hidden values.
    """
    *_, hidden, cell, _, _, _, size, _, _, _, _, train = args
    output = x.new_empty(*x.shape[:2], size)
    workspace_bytes = 16 * 4 * output.numel() if train else 0
    workspace = x.new_empty(workspace_bytes, dtype=torch.uint8)
    return output, torch.empty_like(hidden), torch.empty_like(cell), workspace
