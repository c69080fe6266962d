"""Leaves that the step itself divides over mesh axes: DTensors, as `parallelize_module` makes them.

A program holds the local tensor of such a leaf. While the step is traced it sees a DTensor around that tensor. DTensor
turns its operations into local operations and functional collectives, which the trace records. The results become local
tensors again: new state in the layout of the old, outputs whole. The tensors that PyTorch computes with to find shapes
and slices of a mesh are hidden from the trace. Tensors of a user's class that hold other tensors are refused.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from ..calling.global_state import patched
from ..ir.ambient import without_function_modes
from ..ir.user_sharding import UserSharding
from .errors import TraceError, TraceTypeError


def spec_of(leaf: Any, user_sharding: UserSharding, dtype: torch.dtype) -> DTensorSpec:
    """The layout of a leaf that the step divides, as the step sees it, in `dtype`."""
    # The step does not see the axes over which transforms distribute the leaf.
    mesh = leaf.device_mesh
    if len(user_sharding.axes) < mesh.ndim:
        mesh = mesh[user_sharding.axes]
    full = torch.empty(user_sharding.shape, dtype=dtype, device="meta")
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, user_sharding.placements, tensor_meta=meta)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """A local tensor as the step sees it: a DTensor if the leaf has a `spec`."""
    if spec is None:
        return local
    return DTensor(local.detach(), spec, requires_grad=local.requires_grad)


@contextlib.contextmanager
def unrecorded_layouts() -> Iterator[None]:
    """Hide from the trace how PyTorch computes the shapes of whole results, and the ranks in a slice of a mesh.

    PyTorch computes both with tensors. Torch 2.13 hides these tensors itself; torch 2.11 does not.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    find_shapes = propagator._propagate_tensor_meta_non_cached
    slice_mesh = DeviceMesh.__getitem__

    def hidden_shapes(schema: Any) -> Any:
        with disable_proxy_modes_tracing():
            return find_shapes(schema)

    def hidden_slice(mesh: DeviceMesh, names: Any) -> DeviceMesh:
        with _disable_current_modes(), without_function_modes():
            return slice_mesh(mesh, names)

    without_shapes = patched(propagator, _propagate_tensor_meta_non_cached=hidden_shapes)
    with without_shapes, patched(DeviceMesh, __getitem__=hidden_slice):
        yield


def refuse_wrappers(leaves_by_path: Iterable[tuple[str, Any]], caller: str = "trace") -> None:
    """Raises: TypeError for a tensor of a user's class that holds other tensors, as DTensor does."""
    for name, x in leaves_by_path:
        kind = type(x)
        if hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("torch."):
            raise TraceTypeError(
                f"{caller}: {name} is a {kind.__module__}.{kind.__qualname__}, which holds other tensors, and a "
                f"program has plain ones.\n"
                f"Make such a tensor inside of the step, from plain ones, and return what it holds. For the fp8 of "
                f"torchao, leave out enable_fsdp_float8_all_gather: zt.fuse_cast_gather() gathers fp8."
            )


def in_layout(new: Any, spec: DTensorSpec | None, path: str) -> Any:
    """This rank's part of a leaf of the new state, in the layout of the old leaf.

    Raises: TraceError for a leaf that was a DTensor and is a full tensor now, or the other way round.
    """
    old_kind = "a full tensor" if spec is None else "a DTensor"
    new_kind = "a DTensor" if isinstance(new, DTensor) else "a full tensor"
    if old_kind != new_kind:
        raise TraceError(
            f"trace: {path} was {old_kind}, and the step returned {new_kind} in its place.\n"
            f"Keep a leaf as it is from step to step: DTensor.from_local(...) or x.to_local() before it is returned."
        )
    if spec is None:
        return new
    return new.redistribute(spec.mesh, spec.placements).to_local()
