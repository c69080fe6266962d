"""The errors of kernels and of higher-order operators. Each names the user's line, and what to do instead."""

from __future__ import annotations

from ...ir.source import Source, where
from ..errors import TraceError


def writes_nothing(kernel: str, source: Source | None) -> TraceError:
    """A Triton kernel that writes into none of the tensors that it is given, as far as its source shows."""
    return TraceError(
        f"trace: the Triton kernel {kernel} writes into none of its arguments, so a program would leave it out.\n"
        f"  at {where(source)}\n"
        f"Pass the tensors that it writes as arguments, and not their addresses; or make it an operator with a fake "
        f"implementation: torch.library.custom_op."
    )


def no_nested(name: str, why: str, source: Source | None) -> TraceError:
    """A function that a higher-order operator calls does what no sub-program can."""
    return TraceError(
        f"trace: a function ({name}) of cond, scan, while_loop or flex_attention {why}.\n"
        f"  at {where(source)}\n"
        f"Do that before the call and pass the result in as an argument, or return the values and do it afterwards."
    )


def mask_from_before(source: Source | None, step: str) -> TraceError:
    """A BlockMask of a closure, of the batch, or of a cache: its tensors are none of the trace."""
    return TraceError(
        f"trace: {step} gives flex_attention a BlockMask that was made before the step.\n"
        f"  at {where(source)}\n"
        f"Make it in the step: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=q.device). Pass in the tensors "
        f"that mask_mod reads, such as the document of each token, with the batch."
    )


def differentiates_loop(source: Source | None, step: str) -> TraceError:
    """A while_loop that autograd records: its backward would have a value for each of its turns."""
    return TraceError(
        f"trace: {step} differentiates a while_loop, whose number of turns depends on values, so the values that "
        f"backward needs have no known size.\n"
        f"  at {where(source)}\n"
        f"Use scan over a fixed number of turns, and torch.where to keep the values of those that have ended; or call "
        f"while_loop on tensors that need no gradient: under torch.no_grad(), or detached."
    )
