"""SimpleFSDP, as in torchtitan: DTensor parametrizations under torch.compile. Inductor schedules the collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils import _runtime_estimation
from torch.utils.flop_counter import flop_registry

from .model import Task
from .native import loop

FLOPS, MEMORY, WIRE = (
    1e11,
    2e10,
    1.2e8,
)  # of one core: FLOP/s, bytes/s of its memory, bytes/s of a gigabit link


def milliseconds(node: fx.Node, size: int | None = None) -> float:
    """An estimate for a node: a collective by its bytes, a product by its FLOPs, others by their memory traffic."""
    tensors = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    moved = size or sum(x.numel() * x.itemsize for x in tensors)
    if "c10d" in str(node.target):
        return 1e3 * moved / WIRE
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 1e3 * moved / MEMORY
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    return 1e3 * count(*args, **kwargs, out_val=node.meta["val"]) / FLOPS


class Whole(nn.Module):
    """A parametrization that gathers a parameter where it is read, and reduce-scatters its gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, part: DTensor) -> Tensor:
        whole = part.redistribute(
            placements=[Replicate()], forward_dtype=self.dtype, backward_dtype=self.dtype
        )
        return whole.to_local(grad_placements=[Partial("avg")])


def compiled(task: Task) -> Callable[[], Tensor]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (task.ranks,))
    model, dtype = task.model(), torch.bfloat16 if task.bf16 else torch.float32
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Whole(dtype), unsafe=True)
    # Inductor asks triton for the memory bandwidth of a GPU. Here that of the CPU is returned instead, in GB/s.
    _runtime_estimation.get_gpu_dram_gbps = lambda: MEMORY / 1e9
    options = torch._inductor.config.aten_distributed_optimizations
    options.custom_runtime_estimation = milliseconds  # by default it times kernels on a GPU
    options.enable_overlap_scheduling = True
    options.collective_bucketing = True
    return loop(task, model, compile=True)
