"""Known state: the state that a step returned last is recognised when it comes back.

In a loop every step is given the state that the step before it returned. So what was found out about that state is
still true: its layout, that its leaves share no memory, and which program it is for. Recognising it takes a fraction
of a microsecond a leaf: a leaf that was replaced, resized, moved or laid out anew in between is noticed, and the
state is then examined as a new one. A tensor with the properties and the memory of a leaf is as good as that leaf.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.distributed.tensor import DTensor

from ..ir.trees.known_tree import KnownTree

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class StateLeaves(NamedTuple):
    """The leaves of a state, in the order of its tree, and the tensors that this rank holds of them."""

    leaves: Sequence[torch.Tensor]
    local: list[torch.Tensor]


class LastState:
    """The state that a step returned last, until it returns another one, and what is known of its last batch."""

    def __init__(self) -> None:
        self.known: KnownState | None = None
        self.batch: Any = None

    def recognise(self, state: Any) -> StateLeaves | None:
        """The leaves of `state`, if the step returned it last, and nothing has changed; else None."""
        return self.known.recognise(state) if self.known is not None else None


class KnownState:
    """What is known of a state. It keeps no leaf alive.

    `key` stands for the properties of the state that a program is specialised on.
    """

    def __init__(self, state: Any, leaves: Sequence[torch.Tensor], key: Any) -> None:
        self.key = key
        self._tree = KnownTree(state)
        # The layout of a DTensor is no property of its local tensor.
        self._references = [(i, weakref.ref(x)) for i, x in enumerate(leaves) if type(x) not in _PLAIN]
        self._distributed = [i for i, x in enumerate(leaves) if isinstance(x, DTensor)]
        self._trained = [i for i, x in enumerate(leaves) if x.requires_grad]
        local = self._local(leaves)
        # Types, sizes, strides, dtypes and devices, in the way in which TorchDynamo compares them.
        self._guards = TensorGuards(*local, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._addresses = list(map(torch.Tensor.data_ptr, local))
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in local if x.numel())
        self._starts, self._ends = [start for start, _ in spans], [end for _, end in spans]

    def recognise(self, state: Any) -> StateLeaves | None:
        """The leaves of `state`, if it is the known state and has not changed; else None."""
        leaves = self._tree.leaves(state)
        if leaves is None or any(known() is not leaves[i] for i, known in self._references):
            return None
        local = self._local(leaves)
        try:
            if not self._guards.check(*local) or list(map(torch.Tensor.data_ptr, local)) != self._addresses:
                return None
        except TypeError:  # a leaf is no tensor any more
            return None
        for i in self._trained:
            local[i] = local[i].detach()
        return StateLeaves(leaves, local)

    def overlaps(self, x: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a leaf."""
        if not x.numel():
            return False
        first = x.data_ptr()
        last = first + x.itemsize * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))) - 1
        before = bisect_right(self._starts, first) - 1  # the leaf that begins there or earlier
        return bisect_right(self._starts, last) - 1 > before or (before >= 0 and first < self._ends[before])

    def _local(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that this rank holds of the leaves."""
        local = list(leaves)
        for i in self._distributed:  # without torch.no_grad(), which an interrupt could leave behind
            local[i] = local[i]._local_tensor  # type: ignore[attr-defined]
        return local
