"""The state of a step: the names and layouts of its leaves, and the leaves that transforms keep in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .calling.call import BoundCall, StepFunction
from .calling.inputs import check_state
from .calling.kept import KeptLeaves, WithKept, joined, parted
from .calling.trees import leaf_names
from .ir.graph import Kept
from .ir.layout import AbstractMesh, LeafSharding, as_tensor
from .ir.printer import first_names
from .ir.user_sharding import UserSharding
from .ops import MOMENTS
from .runtime.failure import check_ended
from .runtime.state import first_value, in_memory
from .transforms.base import Transform, kept_leaves, kept_shape, meta_leaf, sharding_of


@dataclass(frozen=True)
class StepState:
    """The states of one step, by its name, its function and its transforms."""

    step: str
    function: StepFunction
    transforms: tuple[Transform, ...]

    def names(self, state: Any) -> tuple[list[str], list[str]]:
        """For each leaf of a state, its short name, and its path in messages."""
        return leaf_names(self.function.parameters(1), (state,))

    def shardings(self, state: Any) -> list[LeafSharding]:
        """How each leaf of a state lies on the mesh between steps, in the order of the leaves in its tree.

        Raises: TypeError if a leaf is neither a tensor nor a number.
        """
        names, paths = self.names(state)
        leaves = pytree.tree_leaves(state)
        check_state(paths, leaves)
        kept = {leaf.name: leaf for leaf in self.kept_in(state)}
        return [
            sharding_of(self.transforms, name, leaf, kept.get(name))
            for name, leaf in zip(names, leaves)
        ]

    @property
    def is_lifted(self) -> bool:
        """Whether a state is a dict that holds what transforms keep, as that of a lifted loop."""
        return self.function.extra is not None

    def parted(self, state: Any) -> WithKept:
        """The user's state, and the leaves that transforms keep beside it; {} if there are none."""
        return parted(state, [t.name for t in self.transforms], self.is_lifted)

    def paired(self, state: Any) -> Any:
        """A state whose pair `(state, kept)` is a `WithKept`, also if the caller has put it together again."""
        pair = self.parted(state)
        return pair if type(state) is tuple and pair.kept else state

    def kept(self, own: Any) -> tuple[Kept, ...]:
        """The leaves that transforms keep beside the user's state."""
        if all(type(t).keeps is Transform.keeps for t in self.transforms):
            return ()
        names, _ = self.names(own)
        leaves = {name: meta_leaf(x) for name, x in zip(names, pytree.tree_leaves(own))}
        return kept_leaves(self.transforms, leaves)

    def kept_in(self, state: Any) -> tuple[Kept, ...]:
        """The leaves that transforms keep in a state, which has them."""
        return self.kept(self.parted(state).state)

    def started(
        self, state: Any, mesh: DeviceMesh | AbstractMesh | None, only_missing: bool = False
    ) -> Any:
        """A state whose kept leaves have their first values, or only those that it lacks. Its leaves are not copied."""
        own, present = self.parted(state)
        kept = self.kept(own)
        if not kept:
            return own
        names, _ = self.names(own)
        leaves = dict(zip(names, pytree.tree_leaves(own)))
        check_ended([*leaves.values()], "init")
        is_sharded = any(isinstance(leaf, DTensor) for leaf in leaves.values())
        device_mesh = mesh if is_sharded and isinstance(mesh, DeviceMesh) else None
        device = next((x.device for x in leaves.values() if getattr(x, "ndim", 0)), None)
        started: KeptLeaves = {}
        for leaf in kept:
            value = present.get(leaf.transform, {}).get(leaf.path) if only_missing else None
            if value is None:
                value = self._first_value(leaf, leaves, device_mesh, device)
            started.setdefault(leaf.transform, {})[leaf.path] = value
        return joined(own, started, self.is_lifted)

    def _first_value(
        self,
        kept: Kept,
        leaves: Mapping[str, Any],
        mesh: DeviceMesh | None,
        device: torch.device | None,
    ) -> torch.Tensor:
        """The first value of a leaf that a transform keeps beside these leaves.

        Raises: ValueError if it has a row for each rank, like a leaf that the step itself divides.
        """
        like = as_tensor(leaves[kept.like]) if isinstance(kept.like, str) else torch.empty(())
        if kept.layout == "rows" or not isinstance(kept.like, str):
            shape = kept_shape(self.transforms, kept, leaves)
            blank = torch.empty(shape, dtype=like.dtype, device="meta")
            sharding = sharding_of(self.transforms, kept.name, blank, kept)
            if UserSharding.of(like, sharding.axes) is not None:
                raise ValueError(
                    f"{self.step}: {kept.name} has a row for each rank, and the step itself divides {kept.like}, as "
                    f"parallelize_module does.\nLeave this leaf out: {kept.transform}(where=...)."
                )
            return first_value(kept, blank, sharding, mesh, device)
        stored = sharding_of(self.transforms, kept.like, like).dtype
        if stored in MOMENTS and kept.start == "copy":
            raise ValueError(
                f"{self.step}: {kept.name} starts as a copy of {kept.like}, which store keeps as a moment in 8 bits.\n"
                f"Leave this leaf out of one of them: {kept.transform}(where=...)."
            )
        if kept.dtype is None and stored is not None:
            # The leaf is stored in a narrower dtype than the step, and the transform that keeps this one, read.
            kept = dataclasses.replace(kept, dtype=torch.float32)
        sharding = sharding_of(self.transforms, kept.name, like, kept)
        return first_value(kept, like, sharding, mesh, like.device)

    def exchanged(self, state: Any, transform: str) -> Any:
        """A state in which the leaves that a transform keeps, and those that they are like, have changed places.

        Nothing is copied, unless one of the two is in another memory or dtype.

        Raises: ValueError if the step has no such transform; TypeError if the state lacks these leaves.
        """
        if not any(t.name == transform for t in self.transforms):
            raise ValueError(
                f"{self.step}: it has no {transform} among its transforms, so its state has no leaves of it.\n"
                f"Apply it before the loop: zt.{transform}(...)(step)."
            )
        state = self.paired(state)
        own, _ = self.check_kept(state)
        names, _ = self.names(state)
        leaves = dict(zip(names, pytree.tree_leaves(state)))
        memory = {name: s.memory for name, s in zip(names, self.shardings(state))}
        for kept in self.kept(own):
            if kept.transform == transform and isinstance(kept.like, str):
                old, new = leaves[kept.like], leaves[kept.name]
                leaves[kept.like] = in_memory(
                    memory[kept.like], memory[kept.name], new.to(old.dtype)
                )
                leaves[kept.name] = in_memory(
                    memory[kept.name], memory[kept.like], old.to(new.dtype)
                )
        return pytree.tree_unflatten(leaves.values(), pytree.tree_structure(state))

    def completed(self, call: BoundCall, mesh: DeviceMesh | AbstractMesh | None) -> BoundCall:
        """A call whose state has the leaves that transforms keep. A lifted state gets them if it has none.

        Raises: TypeError if another state has none, or if a state has others.
        """
        own, present = self.parted(call.state)
        if self.is_lifted and not present and isinstance(own, dict):
            # The state is donated, and some loops do not use the one that the step returns.
            call.state.update(self.parted(self.started(own, mesh)).kept)
            return call
        self.check_kept(call.state)
        return call._replace(state=self.paired(call.state))

    def check_kept(self, state: Any) -> WithKept:
        """The two parts of a state that has the leaves which transforms keep.

        Raises: TypeError if it lacks one, or has others.
        """
        own, present = self.parted(state)
        expected = [leaf.name for leaf in self.kept(own)]
        actual = [f"{transform}.{path}" for transform, leaves in present.items() for path in leaves]
        if sorted(expected) == sorted(actual):
            return WithKept(own, present)
        missing = [name for name in expected if name not in actual]
        more = [name for name in actual if name not in expected]
        if missing:
            raise TypeError(
                f"{self.step}: the state lacks {first_names(missing)}, which its transforms keep from step to step.\n"
                f"Call `state = step.init(state)` once before the loop, or `state = step.shard(state)`, which does it; "
                f"then pass on what the step returns."
            )
        raise TypeError(
            f"{self.step}: the state has {first_names(more)}, which none of its transforms keeps.\n"
            f"Pass the state without what they keep, `state.state`, or start that again: step.init(state)."
        )
