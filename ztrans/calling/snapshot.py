"""Check that nobody has changed a leaf of the state since a step returned it.

The next step checks this before it uses results of the last step that depend on the leaf: gathers that have started,
and copies in half precision. A leaf is unchanged if it is the same tensor that the step returned, at the same address,
with the same version counter. PyTorch's counter does not count writes through `.data`, by a collective of
torch.distributed, or by a kernel that PyTorch does not know.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from .inputs import Inputs


class Snapshot(NamedTuple):
    """A leaf, with the version counters of it and of this rank's tensor, and the address. It keeps no tensor alive."""

    leaf: weakref.ref
    version: int
    local_version: int
    address: int

    @staticmethod
    def of(inputs: Inputs, position: int) -> Snapshot:
        """The leaf at a position among the inputs of a step, as it is now."""
        leaf = inputs.state[position]
        tensor = inputs.tensors[position]
        return Snapshot(weakref.ref(leaf), leaf._version, tensor._version, tensor.data_ptr())

    def is_unchanged(self, inputs: Inputs, position: int) -> bool:
        """Whether the leaf at a position is the same tensor, and nothing has changed it since."""
        if self.leaf() is not inputs.state[position]:
            return False
        return self[1:] == Snapshot.of(inputs, position)[1:]
