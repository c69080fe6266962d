"""operation: define an operation of `torch.ops.ztrans` that writes its results into its arguments.

    define("double(Tensor x, Tensor(a!) out) -> ()", check, reference, launch)

`check` raises for wrong arguments. Then `reference` runs on CPU tensors, and `launch` on CUDA tensors. On fake tensors
only `check` runs, so a trace holds the operation as one node.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("ztrans", "FRAGMENT")


def define(schema: str, check: Callable, reference: Callable, launch: Callable) -> None:
    """Define the operation of `schema`, whose arguments are all positional."""

    def checked(run: Callable) -> Callable:
        def implementation(*args):
            check(*args)
            run(*args)

        return implementation

    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, checked(reference), "CPU")
    _LIBRARY.impl(name, checked(launch), "CUDA")
    torch.library.register_fake(f"ztrans::{name}", checked(lambda *_: None), lib=_LIBRARY)
