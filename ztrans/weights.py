"""The weights of a lifted state, by the names under which its module saves them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .lift.lifted_state import State, module_state_dict
from .runtime.stream_weights import stream_weights


def state_dict(model: nn.Module, state: State, *, to: int | None = None) -> dict[str, Any]:
    """What `model.state_dict()` would have if the values of a lifted state were in the module.

    By default the tensors are the leaves of the state, such as DTensors, and nothing is sent. They change with it.
    Buffers that the module does not save are left out. Tied weights have all of their names.

    Args:
        model: the module that was passed to `lift`. Its own values are not needed.
        state: the state of the lifted loop.
        to: a rank that gets whole tensors on the CPU, gathered one by one; the other ranks get an empty dict. All ranks
            must call it then. PyTorch's `get_model_state_dict` with `full_state_dict` and `cpu_offload` does the same.

    Raises: ValueError if the state belongs to another module; with `to` also the errors of `zt.stream_weights`.

    >>> import ztrans as zt
    >>> model = nn.BatchNorm1d(2)
    >>> _, state = zt.lift(lambda x: model(x), model)
    >>> zt.state_dict(model, state)["running_var"] is state["buffers"]["running_var"]
    True
    """
    weights = module_state_dict(model, state)
    if to is None:
        return weights
    first_names: dict[int, str] = {}
    for name, x in weights.items():
        first_names.setdefault(id(x), name)
    whole = {}
    for name, x in stream_weights(weights, to=to):
        whole[name] = x.cpu()
    if not whole:
        return {}
    return {name: whole[first_names[id(x)]] for name, x in weights.items()}
