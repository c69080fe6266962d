"""Templates: what is needed to create the results of an operation on fake tensors without asking PyTorch's rules.

The types of the results follow from the operation and from the types of its arguments. So the first call of an
operation with arguments of some types leaves a template, and later calls create their results from it.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.utils import is_builtin
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from ...ir.relations import ATOMS, instances

# What an operation with one of these tags returns does not follow from the types of its arguments, or it changes these.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}

Template = Callable[[FakeTensorMode, Sequence[Any]], Any]  # creates the results of a call from its arguments


def key_of(mode: FakeTensorMode, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple | None:
    """The operation and the properties of its arguments from which the types of its results follow.

    None if they do not follow from these: such a call has no template.
    """
    if not _has_templates(op):
        return None
    key = [op, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
    for name, x in kwargs.items():
        key.append(name)
        if not _describe(mode, x, key):
            return None
    return tuple(key) if _describe(mode, args, key) else None


def _describe(mode: FakeTensorMode, x: Any, key: list) -> bool:
    """Add the properties of an argument to `key`. Returns False if results may depend on more than these."""
    kind = type(x)
    key.append(kind)
    if kind is FakeTensor:
        if x.fake_mode is not mode or not _is_plain(x):
            return False
        flags = x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference()
        key += (x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device, *flags)
        return not x._has_symbolic_sizes_strides
    if kind in ATOMS:
        key.append(x)
        return True
    if isinstance(x, (tuple, list)):
        key.append(len(x))
        return all(_describe(mode, item, key) for item in x)
    return False


@functools.cache
def _has_templates(op: Any) -> bool:
    """Whether templates are kept for an operation. They are not for a user's operator, whose rule may be replaced."""
    known = isinstance(op, OpOverload) and (is_builtin(op) or op.namespace == "ztrans")
    return known and _TAGS.isdisjoint(op.tags)


def _is_plain(x: Any) -> bool:
    """Whether `x` is a fake tensor that is dense, and of which PyTorch does not keep the value."""
    return type(x) is FakeTensor and x.constant is None and x.layout is torch.strided


def template_of(mode: FakeTensorMode, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Template | None:
    """The template of a result, or None if it would not create such a result from arguments of the same types."""
    if isinstance(result, (tuple, list)):
        return _of_several(mode, args, kwargs, result)
    if type(result) in ATOMS:
        return lambda mode, args: result
    if not _is_plain(result):
        return None
    shown = [x for x in instances((args, kwargs), torch.Tensor) if _storage(x) == _storage(result)]
    if not shown:
        return _of_tensor(mode, args, None, result)
    indices = [index for index, x in enumerate(args) if x is shown[0]]
    if len(shown) > 1 or not indices:
        return None  # of several arguments with one storage, or of those in lists, a template could take another
    return _of_argument(indices[0]) if shown[0] is result else _of_tensor(mode, args, indices[0], result)


def _of_several(mode: FakeTensorMode, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> Template | None:
    members = [template_of(mode, args, kwargs, x) for x in results]
    kind, known = list if isinstance(results, list) else tuple, [member for member in members if member is not None]
    if len(known) < len(members):
        return None
    return lambda mode, args: kind([member(mode, args) for member in known])


def _of_argument(index: int) -> Template:
    """The template of a result that is an argument itself, as operations in place return it."""
    return lambda mode, args: args[index]


def _of_tensor(mode: FakeTensorMode, args: Sequence[Any], base: int | None, result: FakeTensor) -> Template | None:
    """The template of a new tensor or, with `base`, of a view of the argument at this index."""
    shape, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.fake_device
    offset = int(result.storage_offset())

    def create(mode: FakeTensorMode, args: Sequence[Any]) -> FakeTensor:
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if base is not None:
                empty.set_(args[base].untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, empty, device)

    same_keys = torch._C._dispatch_key_set(create(mode, args)) == torch._C._dispatch_key_set(result)
    return create if same_keys and not result.requires_grad and (base is not None or not offset) else None


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
