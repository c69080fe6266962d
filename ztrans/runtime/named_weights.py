"""The weights that a call exports, streams or loads: tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..calling.trees import named_leaves
from ..ir.printer import counted
from .agreement import agree
from .failure import check_ended
from .session import Session, session_of
from .state import mesh_of_state


class Weights(NamedTuple):
    """Weights, each once.

    Attributes:
        tensors: a DTensor or a tensor by its first name.
        names: for each of them, all of its names: several if the weight is tied.
        mesh: their mesh; None in one process.
    """

    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, Sequence[str]]
    mesh: DeviceMesh | None

    @property
    def session(self) -> Session | None:
        """The session of their mesh."""
        return None if self.mesh is None else session_of(self.mesh)

    @staticmethod
    def of(tree: Any, call: str) -> Weights:
        """The weights in a tree, or in `params` of a state. Waits for the steps that write them.

        Raises: TypeError if a leaf is not a tensor; ValueError if there is none, if one is on meta, or if a state has
            buffers.
        """
        if isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping):
            if tree.get("buffers"):
                raise ValueError(
                    f"{call}: the state has buffers, and does not know which of them the module saves.\n"
                    f"Pass the weights by the names of the module: zt.state_dict(model, state)."
                )
            tree = tree["params"]
        leaves = named_leaves(tree)
        if not leaves:
            raise ValueError(f"{call}: there are no weights.\nPass tensors by name.")
        names_by_id: dict[int, list[str]] = {}
        for name, x in leaves.items():
            if not isinstance(x, torch.Tensor):
                what = f"{name} is {x!r}" if name else f"this is a {type(x).__name__}"
                raise TypeError(
                    f"{call}: {what}, and weights are tensors.\n"
                    f"Pass weights by name: zt.state_dict(model, state), or state['params'] of a step of your own."
                )
            if x.is_meta:
                raise ValueError(
                    f"{call}: {name} is on meta, and has no values.\nShard the state first: step.shard(state)."
                )
            names_by_id.setdefault(id(x), []).append(name)
        check_ended(list(leaves.values()), call)
        names = {first: (first, *others) for first, *others in names_by_id.values()}
        tensors = {name: leaves[name] for name in names}
        return Weights(tensors, names, mesh_of_state(tensors.values()))

    def agree(self, call: str, *options: Any) -> None:
        """Check that all ranks make this call with the same weights and options.

        Raises: RuntimeError on every rank if they do not.
        """
        if self.session is None:
            return
        kinds = [(name, tuple(x.shape), str(x.dtype)) for name, x in self.tensors.items()]

        def explain(by_rank: Mapping[int, tuple]) -> str:
            (first, (first_options, first_kinds)), *others = by_rank.items()
            for rank, (other_options, other_kinds) in others:
                if other_options != first_options:
                    return f"  Rank {first} calls it with {first_options}, rank {rank} with {other_options}.\n"
                pairs = [(a, b) for a, b in zip(first_kinds, other_kinds) if a != b]
                if pairs:
                    return (
                        f"  Rank {first} has {pairs[0][0]} where rank {rank} has {pairs[0][1]}.\n"
                    )
                if len(first_kinds) != len(other_kinds):
                    weights = counted(len(first_kinds), "weight")
                    return f"  Rank {first} has {weights}, rank {rank} has {len(other_kinds)}.\n"
            return ""

        agree(self.session, call, (tuple(map(str, options)), kinds), explain)


def check_dtype(dtype: Any, call: str) -> None:
    """Raises: TypeError if a dtype for weights is neither None nor a dtype of floats."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"{call}: dtype={dtype!r} is not a dtype of floats, such as torch.bfloat16. Other weights keep theirs."
        )
