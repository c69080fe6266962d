"""Mark each gradient of a traced step with the value that it belongs to.

The results of `torch.autograd.grad`, which `torch.func.grad` calls too, are marked (see `ops.marks`). `.backward()` is
expressed by `torch.autograd.grad`. The marks tell transforms which values are gradients, and of which leaves.

Private attributes of torch's objects are read here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .. import ops
from ..ir.dependencies import reachable
from ..ir.source import user_source
from .errors import no_gradient, sparse_gradient

BACKWARDS = (torch.autograd.backward, torch.Tensor.backward)


class MarkGradients(TorchFunctionMode):
    """Marks the gradients that the functions of autograd return."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of PyTorch, and mark the gradients that it returns."""
        if func in BACKWARDS:
            return backward(*args, **kwargs, mode=self)
        if func is torch.autograd.grad:
            return marked_gradients(*args, **kwargs)
        return func(*args, **kwargs)


def checked_losses(step: str, outputs: Any = None, tensors: Any = None, **_: Any) -> list:
    """The losses of a derivative. Raises: ValueError if they depend on nothing that requires a gradient."""
    losses = _listed(outputs if tensors is None else tensors)
    if not any(x.requires_grad for x in losses):
        raise no_gradient(user_source(), step)
    return losses


def marked_gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple:
    """`torch.autograd.grad` with marked results."""
    gradients = _dense(torch.autograd.grad(outputs, inputs, *args, **kwargs))
    results = []
    for g, x in zip(gradients, _listed(inputs)):
        results.append(None if g is None else _marked(g, x))
    return tuple(results)


def backward(
    loss,
    *,
    gradient=None,
    grad_tensors=None,
    inputs=None,
    retain_graph=None,
    create_graph=False,
    mode: TorchFunctionMode,
) -> None:
    """`loss.backward(gradient)` or `torch.autograd.backward(losses, grad_tensors)`: add the gradients to `.grad`.

    The hooks of leaves belong to the step (an optimizer may step in them), so they run in `mode` too.
    """
    losses = _listed(loss)
    seeds = gradient if grad_tensors is None else grad_tensors
    leaves = leaves_of(losses) if inputs is None else _listed(inputs)
    gradients = torch.autograd.grad(
        losses,
        leaves,
        None if seeds is None else _listed(seeds),
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=True,
    )
    for leaf, g in zip(leaves, _dense(gradients)):
        if g is not None:
            # A fused optimizer pairs the elements of a leaf and its gradient by their order in memory. State is
            # contiguous, so the gradient must be too. PyTorch's own `.backward()` makes it so as well.
            _accumulate(leaf, _marked(g.contiguous(), leaf), create_graph)
            with mode:
                for hook in (leaf._post_accumulate_grad_hooks or {}).values():
                    hook(leaf)


def _marked(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`g`, marked as the gradient of `p`. A DTensor is first reduced over its mesh, to the layout of `p`."""
    if not isinstance(g, DTensor) or not isinstance(p, DTensor):
        return ops.gradient(g, p.detach())
    # With create_graph=True a gradient is differentiated again, and so are the collectives that reduce it.
    with torch.set_grad_enabled(g.requires_grad):
        g = g.redistribute(p.device_mesh, p.placements)
        value: Any = p.detach()
        local = ops.gradient(g.to_local(), value.to_local())
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _dense(gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """The gradients themselves. Raises: ValueError if one is sparse, because its shape depends on values."""
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise sparse_gradient(user_source())
    return gradients


def _accumulate(leaf: torch.Tensor, g: torch.Tensor, create_graph: bool) -> None:
    """Add a gradient to the `.grad` of a leaf."""
    if leaf.grad is None:
        leaf.grad = g
    elif create_graph:
        leaf.grad = leaf.grad + g
    else:
        with torch.no_grad():
            leaf.grad.add_(g)


def _listed(tensors: Any) -> list:
    """A tensor or several, in any form that autograd accepts, as a list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return list(tensors.values()) if isinstance(tensors, dict) else list(tensors)


def leaves_of(losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward pass would reach."""

    def next_nodes(node: Any) -> list:
        return [next_node for next_node, _ in node.next_functions if next_node is not None]

    loss_nodes = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    leaves: dict[int, torch.Tensor] = {}
    for node in reachable(loss_nodes, next_nodes):
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
    return list(leaves.values())
