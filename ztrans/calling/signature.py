"""The signature of a call, which is the key of its program: calls with equal signatures share a program.

A signature holds the tree of the arguments, the types and layouts of their leaves, and the surroundings of the call:
PyTorch's modes, the values that the step reads in addition to its arguments, and the constants of an `ExtraInputs`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.ambient import ambient
from ..ir.graph import Var
from ..ir.user_sharding import UserSharding
from .call import BoundCall, StepFunction
from .errors import not_comparable, not_strided
from .reads import ReadValues
from .trees import leaf_names, opened


class Abstract(NamedTuple):
    """A tensor or a number without its value: shape, dtype, stride, device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: str

    @property
    def type(self) -> str:
        """The dtype and the shape, as programs print them."""
        return Var("", self.dtype, self.shape).type

    def empty(self, device_of_meta: str, requires_grad: bool) -> torch.Tensor:
        """An uninitialised tensor of this kind, on its own device; for a meta leaf on `device_of_meta`."""
        device = device_of_meta if self.device == "meta" else self.device
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return empty.requires_grad_(requires_grad)

    @staticmethod
    def of(
        leaf: Any, is_state: bool, user_sharding: UserSharding | None = None
    ) -> Abstract | Constant:
        """A leaf without its value, or as a constant; of a leaf that the step itself divides, this rank's part.

        Raises: TypeError for a leaf that can be neither an input nor a constant.
        """
        if is_number(leaf):
            return _INTEGER if isinstance(leaf, Integral) else _FLOAT
        if not isinstance(leaf, torch.Tensor):
            return Constant.of(leaf, is_state)
        # State is stored contiguous, whatever the strides of the caller's leaf are.
        shape = torch.Size(user_sharding.local_shape) if user_sharding else leaf.shape
        stride = _contiguous_stride(shape) if is_state or user_sharding else leaf.stride()
        return Abstract(tuple(shape), leaf.dtype, stride, _device(leaf))


_INTEGER = Abstract((), torch.int64, (), "cpu")
_FLOAT = Abstract((), torch.float64, (), "cpu")


def device_of_program(leaves: Iterable[Abstract]) -> str:
    """The first accelerator with a leaf, such as "cuda:0"; without one, "cpu" if a leaf is on the CPU, else "meta".

    Scalars on the CPU, such as the counters of an optimizer, do not count.
    """
    device = "meta"
    for leaf in leaves:
        if leaf.device not in ("cpu", "meta"):
            return leaf.device
        if leaf.device == "cpu" and leaf.shape:
            device = "cpu"
    return device


class Constant(NamedTuple):
    """A leaf that is neither a tensor nor a number. It is compared by `==`."""

    kind: type
    value: Any

    @staticmethod
    def of(leaf: Any, is_state: bool) -> Constant:
        """The constant of a leaf.

        Raises: TypeError for a value that cannot be compared with the value in another call.
        """
        if not isinstance(leaf, Hashable) or isinstance(leaf, Iterator):
            raise not_comparable(leaf, is_state)
        return Constant(type(leaf), leaf)


@functools.cache
def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python or NumPy, and so an input of the program.

    A bool is not one: each of its two values has its own program.
    """
    # Every call asks this for many floats, and an isinstance check against an abstract class is slow.
    if type(leaf) is float:
        return True
    return isinstance(leaf, Real) and not isinstance(leaf, bool)


def _device(leaf: torch.Tensor) -> str:
    """The device of a tensor, such as `cuda:1`: a program is bound to the streams and constants of one device."""
    device = leaf.device
    if device.type == "meta":
        return "meta"
    # On a CPU build of torch, a fake cuda tensor would abort the process.
    return str(device) if device.type != "cpu" and _has_accelerator() else "cpu"


_has_accelerator = functools.cache(torch.accelerator.is_available)


class Leaf(NamedTuple):
    """The properties of a leaf of the arguments that a program is specialised on.

    Attributes:
        abstract: the leaf without its value, or a `Constant`.
        placements: the mesh and the placements of a DTensor.
        counts_as_tensor: whether it is a tensor, or a number in the state: the step returns a tensor for that.
        requires_grad: whether it requires a gradient.
    """

    abstract: Abstract | Constant
    placements: tuple | None
    counts_as_tensor: bool
    requires_grad: bool

    @staticmethod
    def of(x: Any, is_state: bool) -> Leaf:
        """The signature of a leaf of the state, or of another argument.

        Raises: TypeError for a leaf that a program cannot have.
        """
        if not isinstance(x, torch.Tensor):
            return Leaf(Abstract.of(x, is_state), None, is_state, False)
        if x.layout is not torch.strided or x.is_nested:
            raise not_strided(x, is_state)
        placements = (x.device_mesh, x.placements) if isinstance(x, DTensor) else None
        return Leaf(Abstract.of(x, is_state), placements, True, x.requires_grad)

    def without_sizes(self) -> Leaf:
        """This leaf without the sizes of its dims."""
        if isinstance(self.abstract, Constant):
            return self
        sizes = (0,) * len(self.abstract.shape)  # the number of dims stays
        return self._replace(abstract=self.abstract._replace(shape=sizes, stride=()))

    def without_layout(self) -> Leaf:
        """This leaf without its device, strides and placements: a program accepts leaves in other layouts."""
        if isinstance(self.abstract, Constant):
            return self
        return Leaf(self.abstract._replace(stride=(), device=""), None, True, False)

    def change(self, later: Leaf) -> str:
        """The first difference between this and a later leaf, in words."""
        old = self.abstract
        new = later.abstract
        if isinstance(old, Constant) or isinstance(new, Constant):
            return f"was {_text(old)} and is {_text(new)}"
        if old.type != new.type:
            return f"was {old.type} and is {new.type}"
        if self.counts_as_tensor != later.counts_as_tensor:
            return (
                "was a tensor and is a number"
                if self.counts_as_tensor
                else "was a number and is a tensor"
            )
        if self.requires_grad != later.requires_grad:
            return f"had requires_grad={self.requires_grad} and has {later.requires_grad}"
        if old.device != new.device:
            return f"was on {old.device} and is on {new.device}"
        if old.stride != new.stride:
            return f"had the strides {old.stride} and has {new.stride}"
        return f"was laid out {self.placements} and is {later.placements}"


def _text(value: Abstract | Constant) -> str:
    return repr(value.value) if isinstance(value, Constant) else value.type


class Surroundings(NamedTuple):
    """The values that a program is specialised on in addition to its arguments.

    Attributes:
        modes: PyTorch's global state (see `ambient`).
        reads: the values that the step reads.
        constants: the constants of an `ExtraInputs`, by name.
    """

    modes: tuple
    reads: ReadValues
    constants: tuple[tuple[str, Hashable], ...]

    @staticmethod
    def of(function: StepFunction) -> Surroundings:
        """The present surroundings of a step function."""
        constants: tuple[tuple[str, Hashable], ...] = ()
        if function.extra is not None:
            constants = tuple(function.extra.constants().items())
        return Surroundings(tuple(ambient().items()), function.reads.values(), constants)

    def changes(self, later: Surroundings) -> list[str]:
        """The differences between these and later surroundings, each in words."""
        changes = []
        for (name, old), (_, new) in zip(self.modes, later.modes):
            if old != new:
                changes.append(f"{name} was {old} and is {new}")
        for (name, old), (_, new) in zip(self.constants, later.constants):
            if old != new:
                changes.append(f"{name} has changed")
        if self.reads != later.reads:
            changes += self.reads.changes(later.reads)
        return changes


@dataclass(frozen=True)
class Signature:
    """The calls that a program is made for: the only key of programs.

    Attributes:
        tree: the tree of all arguments, the state first.
        keywords: the names of the last arguments of the batch, which are passed by name.
        leaves: the leaves of the tree.
        num_state: the number of leaves that belong to the state.
        surroundings: the surroundings of the call.
        parameters: the names of all arguments.
    """

    tree: pytree.TreeSpec
    keywords: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    num_state: int
    surroundings: Surroundings
    parameters: tuple[str, ...] = field(compare=False)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.tree, self.keywords, self.leaves, self.surroundings))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def of(
        call: BoundCall, function: StepFunction, surroundings: Surroundings | None = None
    ) -> Signature:
        """The signature of a call of a step function, by default in the present surroundings.

        Raises: TypeError for an argument that can be neither an input nor a constant of a program.
        """
        surroundings = surroundings or Surroundings.of(function)
        leaves, tree = pytree.tree_flatten(call.tree())
        num_state = tree.children()[0].num_leaves
        return Signature(
            tree,
            call.keywords,
            tuple(Leaf.of(x, i < num_state) for i, x in enumerate(leaves)),
            num_state,
            surroundings,
            tuple(call.parameters(function)),
        )

    @property
    def inputs(self) -> list[int]:
        """The positions of the leaves that are inputs of the program."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf.abstract, Abstract)]

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each leaf in messages, such as `state.params.weight`."""
        # The names depend on the tree alone, so zeros stand for the leaves.
        arguments = pytree.tree_unflatten([0] * len(self.leaves), self.tree)
        state, *batch_leaves = arguments
        return leaf_names(self.parameters, (state, *map(opened, batch_leaves)))[1]

    def paths_missing_in(self, other: Signature) -> list[str]:
        """The paths of this signature that another one does not have."""
        return [path for path in self.paths if path not in other.paths]

    def without_sizes(self) -> Signature:
        """This signature without the sizes of the batch."""
        state = self.leaves[: self.num_state]
        batch_leaves = tuple(leaf.without_sizes() for leaf in self.leaves[self.num_state :])
        return replace(self, leaves=(*state, *batch_leaves))

    def stored_as(self, dtypes: Sequence[torch.dtype | None]) -> Signature:
        """This signature with leaves in their dtypes between steps; None leaves one as it is."""
        leaves = []
        for leaf, dtype in zip(self.leaves, dtypes, strict=True):
            if dtype is not None and isinstance(leaf.abstract, Abstract):
                leaf = leaf._replace(abstract=leaf.abstract._replace(dtype=dtype))
            leaves.append(leaf)
        return replace(self, leaves=tuple(leaves))

    def without_layout(self) -> Signature:
        """This signature without the layouts of its leaves."""
        return replace(self, leaves=tuple(leaf.without_layout() for leaf in self.leaves))

    def changes(self, later: Signature) -> list[str]:
        """The differences between this and a later signature, in words, arguments first."""
        changes = []
        if (self.tree, self.keywords) == (later.tree, later.keywords):
            for path, old, new in zip(self.paths, self.leaves, later.leaves):
                if old != new:
                    changes.append(f"{path} {old.change(new)}")
        else:
            changes += [f"{path} is new" for path in later.paths_missing_in(self)]
            changes += [f"{path} is missing" for path in self.paths_missing_in(later)]
            # The same keys in another order.
            moved_pairs = [pair for pair in zip(self.paths, later.paths) if pair[0] != pair[1]]
            if moved_pairs and not changes:
                old_path, new_path = moved_pairs[0]
                changes.append(f"{new_path} is in the place of {old_path}")
            if not changes:
                changes.append(f"the arguments were {self.tree} and are {later.tree}")
        return changes + self.surroundings.changes(later.surroundings)
