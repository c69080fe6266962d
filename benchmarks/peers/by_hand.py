"""ZeRO-3 written by hand for this model, as an engineer might write it in a week without a library.

The parameters of a layer are one flat buffer, cut evenly over the ranks. A layer is gathered while the layer before it
computes, in forward and again in backward. Its gradients are exchanged while backward goes on, over a second
communicator. One fused AdamW updates the flat shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .model import Task, adamw, loss_of
from .wire import all_gather, exchange


class Layer:
    """The parameters of some modules, which are gathered together and reduced together."""

    def __init__(
        self, modules: Sequence[nn.Module], dtype: torch.dtype, gathers, reductions
    ) -> None:
        self.params = [p for module in modules for p in module.parameters()]
        self.gathers, self.reductions, ranks = gathers, reductions, gathers.size()
        size = sum(p.numel() for p in self.params)
        self.pad = -size % ranks
        flat = torch.cat([p.detach().view(-1) for p in self.params] + [torch.zeros(self.pad)])
        self.part = nn.Parameter(flat.chunk(ranks)[gathers.rank()].clone())
        self.whole = torch.empty(size + self.pad, dtype=dtype)
        self.bytes, self.gathering, self.exchanging = self.whole.nbytes, None, None
        for p, view in zip(
            self.params, self.whole.split([p.numel() for p in self.params] + [self.pad])
        ):
            p.data = view.view(p.shape)
        self.free()

    def free(self) -> None:
        """Free the gathered parameters. Views that autograd keeps are valid again after the next gather."""
        self.whole.untyped_storage().resize_(0)

    def start_gather(self) -> None:
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.bytes)
            self.sent = self.part.detach().to(self.whole.dtype)
            self.gathering = all_gather(self.whole, self.sent, self.gathers)

    def finish_gather(self) -> None:
        self.start_gather()
        if self.gathering:
            self.gathering.wait()
            self.gathering = self.sent = None

    def start_reduce(self) -> None:
        grads = [p.grad.view(-1) for p in self.params]
        self.terms = torch.cat([*grads, grads[0].new_zeros(self.pad)]).view(
            self.reductions.size(), -1
        )
        for p in self.params:
            p.grad = None
        self.received = torch.empty_like(self.terms)
        self.exchanging = exchange(self.received, self.terms, self.reductions)

    def finish_reduce(self) -> None:
        if self.exchanging:
            self.exchanging.wait()
            me = self.reductions.rank()
            self.received[me] = self.terms[me]
            self.part.grad = self.received.sum(0, dtype=torch.float32).div_(self.reductions.size())
            self.exchanging = self.terms = self.received = None


def zero3(task: Task) -> Callable[[], Tensor]:
    dist.init_process_group("gloo")
    groups = dist.new_group(), dist.new_group()
    model, dtype = task.model(), torch.bfloat16 if task.bf16 else torch.float32
    modules = [[model.token], *([block] for block in model.blocks), [model.norm, model.head]]
    layers = [Layer(m, dtype, *groups) for m in modules]
    last, under_way = len(layers) - 1, []

    def before_forward(i: int) -> None:
        layers[i].finish_gather()
        if i < last:
            layers[i + 1].start_gather()

    def after_forward(i: int) -> None:
        if i < last:  # backward starts with the last layer, so that one is kept
            layers[i].free()

    def before_backward(i: int) -> None:
        layers[i].finish_gather()
        if i > 1:  # the backward of an embedding does not read the embedding
            layers[i - 1].start_gather()

    def after_gradient(i: int) -> None:
        if any(p.grad is None for p in layers[i].params):
            return
        layers[i].free()
        layers[i].start_reduce()
        under_way.append(layers[i])
        if len(under_way) > 2:
            under_way.pop(0).finish_reduce()

    for i, (layer, parts) in enumerate(zip(layers, modules)):
        parts[0].register_forward_pre_hook(lambda *_, i=i: before_forward(i))
        parts[-1].register_forward_hook(lambda *_, i=i: after_forward(i))
        if i > 0:
            parts[-1].register_full_backward_pre_hook(lambda *_, i=i: before_backward(i))
        for p in layer.params:
            p.register_post_accumulate_grad_hook(lambda p, i=i: after_gradient(i))

    optimizer, (x, y) = adamw([layer.part for layer in layers]), task.batch()

    def step() -> Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        while under_way:
            under_way.pop(0).finish_reduce()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
