"""The errors and warnings of tracing. Each says what the step does, on which of the user's lines, and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from ..ir.source import Source, library_line, user_source, where


class TraceError(ValueError):
    """A step that cannot be traced. The text names the user's line, and says what to write instead."""


class ReadsValueError(TraceError):
    """A step that reads a value of a tensor."""


class OutsideTensorError(TraceError):
    """A step that uses `tensor`, which is neither its state nor its batch, nor a value that it has computed."""

    def __init__(self, text: str, tensor: torch.Tensor) -> None:
        super().__init__(text)
        self.tensor = tensor


class TraceTypeError(TypeError):
    """A step that cannot be traced because of the type of a value."""


class TraceRuntimeError(RuntimeError):
    """A function of PyTorch that failed in a step, with a RuntimeError."""


class TraceIndexError(IndexError):
    """A function of PyTorch that failed in a step, with an IndexError."""


# The errors of PyTorch's functions that are explained, with the user's line and the arguments, and what they become.
FAILURES: dict[type[Exception], type[Exception]] = {
    RuntimeError: TraceRuntimeError,
    TypeError: TraceTypeError,
    ValueError: TraceError,
    IndexError: TraceIndexError,
}


def outside_tensor(arg: torch.Tensor, source: Source | None, step: str) -> OutsideTensorError:
    """A tensor that existed before the step and is not one of its arguments."""
    return OutsideTensorError(
        f"trace: {step} reads a tensor {list(arg.shape)} ({arg.dtype}) that is neither its state nor its batch.\n"
        f"  at {where(source)}\n{_in_library('It is not a parameter or buffer of a module')}"
        f"Pass it in: as state if it lives from step to step (parameters, buffers, masks), else with the batch.\n"
        f"In a loop that is lifted, take parameters from the module, inside the loop step: model.parameters(); and "
        f"make a table or a mask a buffer of it before lift: model.register_buffer(name, tensor). In another step, "
        f"call a module by torch.func.functional_call(module, state['params'], args).",
        arg,
    )


def unequal_parts(path: str, why: str) -> TraceError:
    """A DTensor whose parts differ in shape from rank to rank, or are terms of a sum."""
    return TraceError(
        f"trace: the ranks hold other parts of {path} than one program can have: {why}.\n"
        f"Choose a size that the axis divides, or replicate this leaf over it."
    )


def divided_batch(path: str) -> TraceTypeError:
    """A DTensor in the batch that is cut over an axis of the step's transforms."""
    return TraceTypeError(
        f"trace: {path} is a DTensor that is cut over an axis of the step's transforms, and a step takes the rows of "
        f"its rank.\nPass them as a tensor: {path}.to_local()."
    )


def _in_library(why: str) -> str:
    """The line of a library that does what is refused, and the ways around it; empty if the user's own line does it."""
    line = library_line()
    if not line:
        return ""
    return (
        f"  which leads to {line}\n"
        f"{why}. To avoid that line of a library, choose an option, or eval() of its module; or compute that part in "
        f"the step from the results before it, such as the loss from the logits. In code of your own:\n"
    )


def reads_value(
    op: Any, source: Source | None, step: str, *, needs_shape: bool = False
) -> ReadsValueError:
    """The step reads a value of a tensor, or, with `needs_shape`, uses a shape that depends on values."""
    action = "reads a tensor's value"
    if needs_shape:
        action = "takes a shape from a tensor's values"
    if op is torch.ops.aten._ctc_loss.Tensor:
        special_case = f"{_WITH_NUMBERS}\n"
    else:
        special_case = _in_library("A traced step runs on tensors without values")
    return ReadsValueError(
        f"trace: {step} {action} while it is traced ({op}).\n"
        f"  at {where(source)}\n{special_case}"
        f"A traced step runs on tensors without values: replace .item(), bool() and `if` on tensors by "
        f"torch.where, and boolean indexing by masks. To log a value, return its tensor as output, and read it after "
        f"the step. To check it, do the same. A number that you pass is an input too: decide before, and pass a bool. "
        f"A length must follow from shapes: pad to that of the batch."
    )


def reads_changed(path: str, source: Source | None, step: str) -> ReadsValueError:
    """The step reads the value of a tensor of its module, and changes the tensor."""
    return ReadsValueError(
        f"trace: {step} reads a tensor's value while it is traced, and changes that tensor, {path}.\n"
        f"  at {where(source)}\n"
        f"Its program would use the value of the trace in every call. Use torch.where in place of `if`; or decide "
        f"before the step, and pass a bool."
    )


def failed(
    error: Exception,
    func: Any,
    tensors: str,
    source: Source | None,
    step: str,
    under_torch_func: bool,
) -> Exception:
    """A function of PyTorch fails, because of the shapes of its arguments or because it needs their values.

    Args:
        error: the error of PyTorch.
        func: the function.
        tensors: the function's arguments, in words.
        source: the user's line.
        step: the name of the step.
        under_torch_func: whether a transform of torch.func runs the function.
    """
    call = getattr(func, "__name__", str(func))
    plain = "To see whether the step fails without its transforms too, call its function: step.fn(state, ...)."
    is_users_operator = isinstance(func, OpOverload) and func.namespace != "aten"
    advice = _BY_AUTOGRAD if under_torch_func and is_users_operator else _ADVICE.get(call, plain)
    return FAILURES[type(error)](
        f"trace: {step}: {call} failed: {error}\n  at {where(source)}\n"
        f"Its arguments are {tensors or 'no tensors'}.\n{advice}"
    )


_WITH_NUMPY = (
    "A traced step runs on tensors without values: compute with torch inside the step, or with NumPy outside, and "
    "pass the result in."
)
_BY_AUTOGRAD = (
    "Take the gradients by torch.autograd.grad(loss, params) or loss.backward(), of params that require them: they "
    "support such functions and operators. torch.func.grad does not."
)
_WITH_NUMBERS = (
    "Give ctc_loss its lengths as lists of numbers, and reduction='sum' or 'none': F.ctc_loss(log_probs, labels, "
    "[time] * rows, [length] * rows, reduction='none').mean()."
)
_NOTHING_TO_FORMAT = (
    "A traced tensor has no value to print. Return it as output, and print it after the step."
)
_ADVICE = {
    "numpy": _WITH_NUMPY,
    "__array__": _WITH_NUMPY,
    "ctc_loss": _WITH_NUMBERS,
    "__format__": _NOTHING_TO_FORMAT,
}


def no_gradient(source: Source | None, step: str) -> TraceError:
    """The step takes the gradient of a loss that depends on nothing that requires one."""
    why = "gradients are off"
    advice = "Call the step outside of torch.no_grad() and torch.inference_mode()."
    if torch.is_grad_enabled():
        why = "the loss depends on nothing that requires a gradient"
        advice = (
            "In a step of a state, take gradients by torch.func.grad(loss_fn)(params), or begin with "
            "w = state['w'].detach().requires_grad_() before loss.backward() and w.grad. In a lifted loop, leave "
            "requires_grad of at least one parameter on."
        )
    return TraceError(f"trace: {step} takes gradients, and {why}.\n  at {where(source)}\n{advice}")


def sparse_gradient(source: Source | None) -> TraceError:
    """The gradient of a lookup with `sparse=True`."""
    return TraceError(
        f"trace: backward makes a sparse gradient, and the gradients of a program are dense.\n"
        f"  at {where(source)}\n"
        f"Leave out sparse=True of the embedding, or sparse_grad=True of gather."
    )


def own_generator(op: Any, source: Source | None, step: str) -> TraceError:
    """The step draws from a random generator of its own."""
    return TraceError(
        f"trace: {step} uses a torch.Generator ({op}), which is not an input of the program: it would be used once, in "
        f"the trace.\n"
        f"  at {where(source)}\n"
        f"Draw from the default generator and seed it outside of the step, with another seed on each rank."
    )


def unsupported_collective(op: Any, why: str, source: Source | None, step: str) -> TraceError:
    """The step calls a collective of torch.distributed that a program cannot hold."""
    return TraceError(
        f"trace: {step} calls torch.distributed's {op._schema.name.split('::')[1].strip('_')}, which a program, the "
        f"same on all ranks, cannot hold: {why}.\n"
        f"  at {where(source)}\n"
        f"Use all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor, broadcast or all_to_all_single, "
        f"or do it between steps."
    )


def operator_without_rule(
    op: Any, transform: str, source: Source | None, step: str
) -> TraceTypeError:
    """A higher-order operator under a transform of torch.func for which PyTorch has no rule."""
    return TraceTypeError(
        f"trace: {step} calls {op.name()} under torch.func.{transform}, for which PyTorch has no rule.\n"
        f"  at {where(source)}\n{_BY_AUTOGRAD}"
    )


def cannot_be_traced(op: Any, error: Exception, source: Source | None, step: str) -> TraceError:
    """An operation that has no fake implementation."""
    return TraceError(
        f"trace: {step} uses {op}, which does not run on tensors without values: {str(error).splitlines()[0]}\n"
        f"  at {where(source)}\n"
        f"Do it outside of the step, or give the operation a fake implementation: torch.library.register_fake."
    )


def reads_earlier_trace(arg: torch.Tensor, source: Source | None, step: str) -> OutsideTensorError:
    """The step reads a tensor that an earlier trace left in an attribute or a cache."""
    return OutsideTensorError(
        f"trace: {step} reads a tensor {list(arg.shape)} that an earlier trace left, and that has no values.\n"
        f"  at {where(source)}\n"
        f"Compute it in every step, without a cache or an attribute that keeps it; or make it before the first step "
        f"and pass it in as state.",
        arg,
    )


def draws_again(func: Any, source: Source | None, step: str) -> TraceError:
    """Backward draws random numbers."""
    return TraceError(
        f"trace: {step} draws random numbers in its backward pass ({func}).\n"
        f"  at {where(source)}\n"
        f"Draw them in the forward pass, and save them for backward."
    )


def warn_of_many_programs(step: str, count: int, changes: Sequence[str]) -> None:
    """Warn that a step has been traced `count` times. `changes` are the differences of the last two traced calls."""
    lines = "".join(f"  * {change}\n" for change in changes[:4])
    warn(
        f"{step} has been traced for {count} different calls. Since the call that was traced before the last one:\n"
        f"{lines}Every new shape is traced and compiled: pad batches to a few sizes. So is every new value of a number "
        f"that the step reads besides its arguments: pass it as an argument. In a lifted loop these numbers are the "
        f"settings of the module and of the optimizer's parameter groups.",
        user_source(),
    )


def warn_of_trace(text: str, source: Source | None) -> None:
    """Warn at the user's line, on one rank, because all ranks trace the same code."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warn(text, source)


def warn_of_written_batch(name: str, source: Source | None) -> None:
    """Warn that the step writes into an argument of the batch, and the program does not."""
    warn_of_trace(
        f"trace: the step writes into its argument {name}, and the tensor of the caller will not change.\n"
        f"  at {where(source)}\n"
        f"Write into a copy, {name}.clone(), or make it a leaf of the state if the next step reads what is written.",
        source,
    )


def warn(text: str, source: Source | None) -> None:
    """Warn at the user's line."""
    if source is None:
        warnings.warn(text, stacklevel=3)
    else:
        warnings.warn_explicit(text, UserWarning, source.file, source.line)


def writes_nothing(kernel: str, source: Source | None) -> TraceError:
    """A Triton kernel whose source writes into none of its tensor arguments."""
    return TraceError(
        f"trace: the Triton kernel {kernel} writes into none of its arguments, so a program would leave it out.\n"
        f"  at {where(source)}\n"
        f"Pass the tensors that it writes as arguments, and not their addresses; or make it an operator with a fake "
        f"implementation: torch.library.custom_op."
    )


def unsupported_function(name: str, why: str, source: Source | None) -> TraceError:
    """A function of a higher-order operator does what a sub-program cannot."""
    return TraceError(
        f"trace: a function ({name}) of cond, scan or flex_attention {why}.\n"
        f"  at {where(source)}\n"
        f"Do that before the call and pass the result in as an argument, or return the values and do it afterwards."
    )


def other_containers(clause: str, containers: Sequence[Any], source: Source | None) -> TraceError:
    """Functions of cond or scan return different containers, or dicts with their keys in another order."""
    texts = [" ".join(str(container).split()) for container in containers]
    return TraceError(
        f"trace: {clause} different containers: {' and '.join(texts)}.\n"
        f"  at {where(source)}\n"
        f"Return the same container each time, with the same keys in the same order."
    )


def mask_from_before(source: Source | None, step: str) -> TraceError:
    """A BlockMask from a closure, the batch or a cache: its tensors do not belong to the trace."""
    return TraceError(
        f"trace: {step} gives flex_attention a BlockMask that was made before the step.\n"
        f"  at {where(source)}\n"
        f"Make it in the step: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=q.device). Pass in the tensors "
        f"that mask_mod reads, such as the document of each token, with the batch."
    )


def while_loop(source: Source | None, step: str) -> TraceError:
    """A while_loop: its backward would need values of every turn."""
    return TraceError(
        f"trace: {step} calls while_loop, whose number of turns depends on values, so what backward needs has no known "
        f"size.\n"
        f"  at {where(source)}\n"
        f"Use scan over a fixed number of turns, and torch.where to keep the values of those that have ended."
    )
