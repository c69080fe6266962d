"""Whether a leaf of the state is as a step has left it.

The next step asks before it uses what this step has made from the leaf: gathers that are under way, and copies in half
precision. A leaf is the same if it is the very tensor that the step has returned, at the same address, and PyTorch's
version counter says that nothing has changed it since. The counter does not see what is written through `.data`, by a
collective of torch.distributed, or by a kernel that PyTorch does not know.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from .inputs import Inputs


class Snapshot(NamedTuple):
    """A leaf, and the version counters and the address of what this rank has of it. It keeps no tensor alive."""

    leaf: weakref.ref
    version: int
    local_version: int
    address: int

    @staticmethod
    def of(inputs: Inputs, place: int) -> Snapshot:
        """The leaf at a position among the inputs of a step, as it is now."""
        leaf = inputs.state[place]
        tensor = inputs.tensors[place]
        return Snapshot(weakref.ref(leaf), leaf._version, tensor._version, tensor.data_ptr())

    def is_unchanged(self, inputs: Inputs, place: int) -> bool:
        """Whether the leaf at a position is the same tensor, and nothing has changed it since."""
        return self.leaf() is inputs.state[place] and self[1:] == Snapshot.of(inputs, place)[1:]
