"""What is recorded about the leaves of states from one call to the next.

Each leaf has a record. It belongs to the tensor or DTensor that the caller holds, and does not keep it alive:

| in the record | written by | read by |
|---|---|---|
| the mesh of its step, its independent axes, its rows | `shard`, `init` | `save`, `load` |
| that nobody has written to it | `shard` of a meta state | a step |
| the steps that its state has taken | each step | the comparison of ranks, errors |
| the failure that left its state half updated | a step that fails | a step, `shard`, `unshard`, `save` |

A `Snapshot` is a leaf as a call left it. The next call checks that the leaf is unchanged before it uses what depends on
the leaf: gathers that have started, copies in half precision, values that a trace has read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from .inputs import Inputs


@dataclass(slots=True)
class Record:
    """What is recorded about a leaf.

    Attributes:
        mesh: the mesh of the step that it was sharded for; None if it was sharded for none.
        independent: the axes of this mesh along which replicas that train apart hold values of their own.
        rows: the number of ranks that each have a row of it, a term of their sum; 0 for other leaves.
        steps: the steps that its state has taken. Only the first tensor of a state counts them.
        failure: the failure that left its state half updated; empty if none did.
        fill_version: the version of its memory after `shard` filled it; None once somebody has written to it.
    """

    mesh: DeviceMesh | None = None
    independent: tuple[str, ...] = ()
    rows: int = 0
    steps: int = 0
    failure: str = ""
    fill_version: int | None = None


class LeafRecords:
    """The records of all leaves.

    Attributes:
        refusals: the number of times that leaves were recorded which a step must refuse. Few ever are, so calls do not
            ask each leaf: a guard recognises no call after another refusal was recorded.
    """

    def __init__(self) -> None:
        self.refusals = 0
        self._by_leaf = WeakIdKeyDictionary()

    def of(self, leaf: torch.Tensor) -> Record:
        """The record of a leaf."""
        return self._by_leaf.setdefault(leaf, Record())

    def of_state(self, leaves: Sequence[Any]) -> Record:
        """The record of the first tensor of a state, which counts the steps of the state."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                return self.of(leaf)
        return Record()

    def refuse(self, leaves: Iterable[Any], failure: str) -> None:
        """Record the failure that left the state of these leaves half updated."""
        self.refusals += 1
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.of(leaf).failure = failure

    def failure(self, leaves: Iterable[Any]) -> str:
        """The failure that left the state of these leaves half updated; empty if none did."""
        for leaf in leaves if self.refusals else ():
            if isinstance(leaf, torch.Tensor) and self.of(leaf).failure:
                return self.of(leaf).failure
        return ""


RECORDS = LeafRecords()


def check_whole(leaves: Iterable[Any], name: str) -> None:
    """Check that no failed step has left this state half updated.

    Raises: RuntimeError if one has.
    """
    failure = RECORDS.failure(leaves)
    if failure:
        raise RuntimeError(
            f"{name}: this state is half updated, some leaves are new and some are old: {failure}.\n"
            f"Load a checkpoint and go on from there: state = step.shard(loaded). With "
            f'overlap_grads(update="last") a step writes nothing until every reduction is done, so most failures '
            f"leave the old state whole."
        )


class Snapshot(NamedTuple):
    """A leaf, with the version counters of it and of this rank's tensor, and the address. It keeps no tensor alive.

    PyTorch's counter does not count writes through `.data`, by a collective of torch.distributed, or by a kernel that
    PyTorch does not know.
    """

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
