"""Activation checkpoints in a trace: each runs its function once, and marks its operations.

PyTorch's own checkpoints run their function again in backward: by hooks on saved tensors, which `torch.func` does not
support, or by a nested `.backward()`, which a trace cannot follow. After a `functional_call` they would read the
module's own parameters. In a program, backward recomputes the results of the marked operations instead (see
`rewrites.recompute`). So all kinds of checkpoints take one path: reentrant or not, selective, nested, and composable.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as plain
from torch.distributed._composable import checkpoint_activation as composable
from torch.utils._python_dispatch import TorchDispatchMode

from ..calling.global_state import patched

# PyTorch's generator that runs before and after the function of a checkpoint. Torch 2.14 has renamed it.
_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(plain, f"{_GENERATOR}_impl"):
    _GENERATOR = f"{_GENERATOR}_impl"
# Keys of FX's metadata. Selective checkpoints write the second one.
_MARK = "ztrans_checkpoint"
_POLICY = "recompute"


class CheckpointMark(NamedTuple):
    """The checkpoint around an operation. A checkpoint that is not selective drops every result."""

    number: int
    is_selective: bool


def mark_of_operation() -> CheckpointMark | None:
    """The mark of the checkpoint around the operation that is running."""
    return fx_traceback.current_meta.get(_MARK)


def forget_policy() -> None:
    """Remove the policy that a selective checkpoint wrote for an operation. Later operations would get it too."""
    fx_traceback.current_meta.pop(_POLICY, None)


def policy_of(meta: Mapping[str, Any], mark: CheckpointMark) -> plain.CheckpointPolicy | None:
    """The policy of a checkpoint for the results of an operation that was recorded with this metadata."""
    return meta.get(_POLICY) if mark.is_selective else plain.CheckpointPolicy.MUST_RECOMPUTE


@contextlib.contextmanager
def mark_checkpoints() -> Iterator[None]:
    """Make checkpoints run their function once, and mark its operations, inside the context."""
    numbers = itertools.count()

    def run(function: Any, *args: Any, context_fn: Callable | None = None, **options: Any):
        if not torch.is_grad_enabled():
            yield
            return
        meta = fx_traceback.current_meta
        outer: CheckpointMark | None = meta.get(_MARK)
        # Torch 2.14 passes it by name.
        make_contexts = context_fn or args[1]
        forward, _ = make_contexts()
        is_selective = isinstance(forward, TorchDispatchMode)
        if outer is None:
            meta[_MARK] = CheckpointMark(next(numbers), is_selective)
        else:
            # The results in a nested checkpoint belong to the outer one, which drops them too.
            meta[_MARK] = CheckpointMark(outer.number, is_selective and outer.is_selective)
        try:
            with forward:
                yield
        finally:
            if outer is None:
                del meta[_MARK]
            else:
                meta[_MARK] = outer

    with (
        patched(plain, **{_GENERATOR: run}),
        patched(composable, **{_GENERATOR: run}),
        patched(plain.CheckpointFunction, apply=_run_reentrant),
    ):
        yield


def _run_reentrant(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
    """Run a reentrant checkpoint as one that is not.

    As in PyTorch, it computes no gradients, and warns, if none of its arguments requires one.
    """
    plain.check_backward_validity(args)
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        return plain.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
    with torch.no_grad():
        return function(*args)
