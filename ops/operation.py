"""Define an operation of `torch.ops.ztrans`, which writes its results into its arguments or returns new tensors.

    define("double(Tensor x, Tensor(a!) out) -> ()", check, reference, launch)

`check` raises for wrong arguments. Then `reference` runs on CPU tensors, and `launch` on CUDA tensors. On fake tensors
`fake` makes the results, if there are any, so a trace has the operation as one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

LIBRARY = torch.library.Library("ztrans", "FRAGMENT")


def define(
    schema: str,
    check: Callable,
    reference: Callable,
    launch: Callable,
    fake: Callable = lambda *_, **__: None,
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Define the operation with this schema and these tags of PyTorch."""

    def checked(run: Callable) -> Callable:
        def implementation(*args, **kwargs):
            check(*args, **kwargs)
            return run(*args, **kwargs)

        return implementation

    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, checked(reference), "CPU")
    LIBRARY.impl(name, checked(launch), "CUDA")
    torch.library.register_fake(f"ztrans::{name}", checked(fake), lib=LIBRARY)


def define_composite(schema: str, function: Callable) -> None:
    """Define the operation with this schema. `function` computes it from other operations, on every device."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def check_like(
    name: str,
    kind: str,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise for a tensor that is not contiguous, of the dtype, and on the device. `kind` is its name in errors."""
    for k, x in enumerate(tensors):
        if x.dtype != dtype or x.device != device or not x.is_contiguous():
            raise ValueError(f"{name}: {kind} {k} must be contiguous, {dtype} and on {device}.")
