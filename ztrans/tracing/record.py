"""record: run a function once on fake tensors, and record its operations.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from ..ir.ambient import having
from ..ir.source import Source
from .fakes.mode import Fakes
from .gradient_marks import Marks
from .nested.checkpoints import mark_checkpoints
from .nested.closures import any_operands
from .nested.recorded_calls import attention_on_every_device, forget_fakes
from .nested.triton_kernels import record_launches
from .operation import Operation
from .parallel.dtensors import unrecorded_layouts
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

    inputs: Sequence[torch.Tensor]
    operations: Sequence[Operation]
    outputs: Sequence[Any]  # the leaves of the result
    out_tree: pytree.TreeSpec  # the tree of the result
    tensors: list[tuple[weakref.ref, Source | None]]  # every tensor of the run, with the user's line that created it


def run_traced(
    call: Callable[[Sequence[torch.Tensor]], Any],
    make_inputs: Callable[[], list[torch.Tensor]],
    names: Sequence[str],
    step: str,
) -> Recorded:
    """Record `call(make_inputs())` on fake tensors. Errors call the inputs by their `names`.

    `user_source` ends its search of the stack at this function, by its name.

    Raises: ValueError if the function does something that a program cannot express (see `watch`).
    """
    mode = Fakes()
    watch = Watch(step, mode)
    # The recurrent layers of oneDNN save values for backward only under autograd, and a program runs without it. When
    # the program runs, PyTorch may still choose oneDNN.
    without_onednn = having(torch.backends.mkldnn, enabled=False)
    # Distributions check their arguments by default, which reads the values of tensors.
    unchecked = having(torch.distributions.Distribution, _validate_args=False)
    ways = _quiet(), without_onednn, unchecked, mark_checkpoints(), disable_autocast_cache()
    nested = attention_on_every_device(), any_operands(), record_launches(), unrecorded_layouts()
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # the step is traced as one that is called without gradients
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for context in (mode, *ways, *nested):
            stack.enter_context(context)
        inputs = make_inputs()
        watch.know(inputs)
        stack.enter_context(watch)
        stack.enter_context(Marks(step, dict(zip(names, inputs))))
        outputs, tree = pytree.tree_flatten(call(inputs))
    torch.clear_autocast_cache()  # it holds casts of fake weights, which the caller's autocast would use
    for o in watch.operations:
        if isinstance(o.op, fx.GraphModule):
            forget_fakes(o.op)
    return Recorded(inputs, watch.operations, outputs, tree, watch.references())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run autograd in one thread, so that its order is deterministic, and optimizers as under `torch.compile`.

    There an optimizer keeps its step count as a tensor, which the trace can follow.
    """
    compiling = having(torch.compiler, _is_compiling_flag=True)  # its context manager is younger than torch 2.11
    eager = torch.compiler.set_stance("force_eager")  # a region inside of torch.compile is traced as any other code
    one_thread = torch.autograd.set_multithreading_enabled(False)
    # Where shapes do not fit, this logger would write a traceback besides that of the error.
    silent = having(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)
    with silent, fx_traceback.preserve_node_meta(), one_thread, compiling, eager:
        yield
