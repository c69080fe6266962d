"""SimpleFSDP, torchtitan's idea: DTensor parametrizations under torch.compile, collectives scheduled by Inductor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.utils import _runtime_estimation

from .model import Task
from .native import loop


class Whole(nn.Module):
    """A parameter gathered where it is read, its gradient reduce-scattered."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, part: DTensor) -> Tensor:
        whole = part.redistribute(placements=[Replicate()], forward_dtype=self.dtype, backward_dtype=self.dtype)
        return whole.to_local(grad_placements=[Partial("avg")])


def compiled(task: Task) -> Callable[[], Tensor]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (task.ranks,))
    model, dtype = task.model(), torch.bfloat16 if task.bf16 else torch.float32
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Whole(dtype), unsafe=True)
    # Inductor asks triton for the bandwidth of a GPU; without one it is to go by that of a processor, in GB/s.
    _runtime_estimation.get_gpu_dram_gbps = lambda: 20.0
    options = torch._inductor.config.aten_distributed_optimizations
    options.enable_overlap_scheduling = True
    options.collective_bucketing = True
    return loop(task, model, compile=True)
