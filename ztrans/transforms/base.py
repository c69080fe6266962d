"""A transform is a frozen value that describes a rewrite of a train step.

A public function such as `prefetch()` builds the value. Applying it to a step appends it to the step's tuple of
transforms; nothing runs. Chains form a monoid: `chain()` is the identity, and
`chain(a, chain(b, c)) == chain(a, b, c)`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import members_of
from ..ir.graph import Graph, Layout, MemoryKind
from ..ir.layout import AbstractMesh
from ..ir.source import Source, where
from ..ir.user_sharding import UserSharding
from ..ir.verifier import ProgramError, check, check_interface

if TYPE_CHECKING:
    from ..step import Step

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, repr=False)
class Transform:
    """A pure rewrite of a traced train step. Two transforms are equal if their options are.

    To write a transform, subclass this as a frozen dataclass with a `rewrite`. A transform that distributes the step
    over ranks, as `shard_params` does, also has a `mesh`, the `axes` that it uses, and the `layout` of each state leaf.

    `phase` orders the rewrites. Transforms of phases 0 and 1 rewrite the program as it was traced. In phase 2,
    `shard_params` comes first and makes the program of one rank, which the others of that phase rewrite. Those of
    phase 3 rewrite the program that all others have made. Within a phase they run in the order in which they were
    applied.
    """

    phase: ClassVar[int] = 2

    # The mesh that the program runs on, if this transform distributes it.
    mesh: DeviceMesh | AbstractMesh | None = dataclasses.field(
        default=None, repr=False, kw_only=True
    )

    def __new__(cls, *args: Any, **options: Any) -> Transform:
        """Raises: TypeError if the class takes options and is no dataclass."""
        if (args or options) and "__dataclass_params__" not in vars(cls):
            raise TypeError(
                f"{cls.__name__}: a transform with options is a frozen dataclass with a field for each option. Without "
                f"it, two {cls.__name__} with different options are equal, and one replaces the other.\n"
                f"Write @dataclass(frozen=True) above class {cls.__name__}, and the options as fields, such as n: int."
            )
        return super().__new__(cls)

    def rewrite(self, graph: Graph) -> Graph:
        """The program after this transform."""
        raise NotImplementedError

    def layout(self, path: str, shape: tuple[int, ...], leaf: torch.Tensor) -> Layout | None:
        """The layout in which a state leaf is kept between steps, or None if this transform does not choose it.

        Args:
            path: the path of the leaf in the state, such as `params.fc1.weight`.
            shape: its shape; of a leaf that the step itself divides, that of this rank's part.
            leaf: a meta tensor of its shape and dtype, before the step itself divides it.
        """
        return None

    def leaf_memory(self, path: str, leaf: torch.Tensor) -> MemoryKind:
        """The memory in which a state leaf is kept between steps, "device" or "host".

        Args:
            path: the path of the leaf in the state.
            leaf: a meta tensor of its shape and dtype, before the step itself divides it.
        """
        return "device"

    @property
    def variants(self) -> tuple[Transform, ...]:
        """The transforms among which a plan chooses, if an option is open: the first that fits and is fastest.

        All of them have the same layouts.
        """
        return (self,)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `mesh` whose ranks hold the same state, whole or in parts."""
        return ()

    def leaf_axes(self, path: str, leaf: torch.Tensor) -> tuple[str, ...]:
        """The axes along which all ranks hold the same state leaf, whole or in parts. By default these are `axes`.

        Args:
            path: the path of the leaf in the state.
            leaf: a meta tensor of its shape and dtype, before the step itself divides it.
        """
        return self.axes

    @property
    def memory_limit(self) -> int | None:
        """The bytes that may be live on a rank, if this transform names them. It is one limit on the whole step."""
        return None

    def within(self, limit: int) -> Transform:
        """This transform with `limit` as its option `memory`. It is unchanged if it has no limit of memory."""
        return self

    @property
    def micro_batches(self) -> int:
        """How many equal parts the batch is cut into; the step is traced for one of them."""
        return 1

    @property
    def name(self) -> str:
        """The name of the class in small letters: `_MergeEqual` is `merge_equal`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__.lstrip("_")).lower()

    def __call__(self, fn: Callable[P, R]) -> Step[P, R]:
        from ..step import Step  # imported here, because `step` imports this module

        return Step.of(fn).then(self)

    def __repr__(self) -> str:
        options = []
        for field in dataclasses.fields(self):
            option = getattr(self, field.name)
            is_default = field.default is not dataclasses.MISSING and option == field.default
            if field.repr and not is_default:
                options.append(f"{field.name}={_as_text(option)}")
        return f"{self.name}({', '.join(options)})"


def _as_text(option: object) -> str:
    """An option as text; a function by its name.

    The text of a transform is part of its program, which ranks and plan files compare. So it has no addresses, as
    Python prints them for methods, partials and objects: they differ from process to process.
    """
    if inspect.isfunction(option):
        return option.__name__
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(option))


def constructor(build: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that returns a transform, with an error for `@build` without a call."""

    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if len(args) == 1 and callable(args[0]) and not options:
            parameters = inspect.signature(build).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty]
            options_by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            step: Any = args[0]
            raise TypeError(
                f"{build.__name__}: applied to {getattr(step, '__name__', repr(step))} without a call.\n"
                f"  at {where(Source.of(step))}\n"
                f"Write @zt.{build.__name__}({', '.join(needed)}): the call takes the options, and returns the "
                f"transform.{_by_name(options_by_name)}"
            )
        return build(*args, **options)

    return checked


def _by_name(options: Sequence[str]) -> str:
    """What else an error says about a function that is passed to a transform: it may have been meant as an option."""
    if not options:
        return ""
    return f" If this function is an option, name it, one of {', '.join(options)}."


def rewritten(graph: Graph, transform: Transform) -> Graph:
    """The program after a transform, verified.

    Raises:
        TypeError: the rewrite did not return a program.
        ProgramError: the program is not well formed, or its inputs or outputs have changed. The error names the
            transform and the equation.
    """
    new = transform.rewrite(graph)
    if not isinstance(new, Graph):
        raise TypeError(
            f"{transform!r}: rewrite returned a {type(new).__name__}; it returns the new Graph."
        )
    try:
        check(new)
        check_interface(graph, new)
    except ProgramError as error:
        raise ProgramError(
            f"{transform!r} made a program that is not well formed: {error}.\n"
            f"Correct its rewrite: the program that it returns must pass zt.ir.check(graph)."
        ) from None
    return new.replace(transforms=(*graph.transforms, repr(transform)))


# ---- chains


@dataclass(frozen=True, repr=False)
class Chain(Transform):
    """Several transforms as one, the first to apply first."""

    transforms: tuple[Transform, ...] = ()

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"


def chain(*transforms: Transform) -> Chain:
    """Compose transforms, as `optax.chain` does; the first is applied first: `chain(a, b)(f) == b(a(f))`.

    >>> chain() == chain(chain(), chain())
    True
    """
    flat: list[Transform] = []
    for t in transforms:
        if not isinstance(t, Transform):
            raise TypeError(
                f"chain: {t!r} is not a transform; call it first: chain(prefetch(), ...)."
            )
        flat.extend(t.transforms if isinstance(t, Chain) else (t,))
    return Chain(tuple(flat))


# ---- the transforms of a step


def appended(transforms: tuple[Transform, ...], transform: Transform) -> tuple[Transform, ...]:
    """The transforms of a step with another one at the end. One that the step already has is not appended again.

    Raises: ValueError if the step has the transform with other options; or if the transform has a mesh, and follows a
        transform that rewrites the program of one rank, or one with another mesh.
    """
    if isinstance(transform, Chain):
        return functools.reduce(appended, transform.transforms, transforms)
    if transform in transforms:
        return transforms
    _check_kind(transforms, transform)
    if transform.mesh is not None:
        _check_mesh(transforms, transform)
    return (*transforms, transform)


def _check_kind(transforms: tuple[Transform, ...], new: Transform) -> None:
    """Raises: ValueError if the step has a transform of this kind already."""
    for t in transforms:
        if type(t) is type(new):
            raise ValueError(
                f"{new.name}: applied twice with different options, {t!r} and {new!r}.\nKeep one of them. "
                f"An option that differs from leaf to leaf is a function, as in "
                f"shard_params(axis=lambda path, leaf: ...)."
            )


def _check_mesh(transforms: tuple[Transform, ...], new: Transform) -> None:
    """Raises: ValueError if a transform that distributes the step comes too late, or has a mesh of its own."""
    earlier = [t.name for t in transforms if t.phase == Transform.phase and t.mesh is None]
    if earlier:
        raise ValueError(
            f"{new.name}: applied after {', '.join(earlier)}, but it makes the program that these transforms change.\n"
            f"Apply it first: as the innermost decorator, or first in zt.chain(...)."
        )
    mesh = mesh_of(transforms)
    if mesh is not None and mesh != new.mesh:
        raise ValueError(
            f"{new.name}: its mesh is {new.mesh!r}, and the transforms before it have {mesh!r}.\n"
            f"Give them one mesh, with an axis for each."
        )


def with_limit(graph: Graph, transforms: Iterable[Transform]) -> Graph:
    """The program with the limit of memory that its transforms name, if they do.

    Raises: ValueError if two of them name different limits.
    """
    for t in transforms:
        if t.memory_limit is not None:
            graph = graph.with_memory_limit(t.memory_limit, t.name)
    return graph


def mesh_of(transforms: Iterable[Transform]) -> DeviceMesh | AbstractMesh | None:
    """The mesh that a step with these transforms runs on, or None if it runs in one process."""
    return next((t.mesh for t in transforms if t.mesh is not None), None)


def micro_batches_of(transforms: Iterable[Transform]) -> int:
    """The number of micro-batches of a step with these transforms."""
    return max((t.micro_batches for t in transforms), default=1)


# ---- how they keep the leaves of the state


def axes_of(transforms: Iterable[Transform], name: str, leaf: object) -> tuple[str, ...]:
    """The axes over which these transforms shard or replicate a state leaf."""
    meta_leaf = _meta(leaf)
    axes: dict[str, None] = {}  # in order, each once
    for t in transforms:
        axes.update(dict.fromkeys(t.leaf_axes(name, meta_leaf)))
    return tuple(axes)


def all_axes(
    transforms: Iterable[Transform], of_leaves: Iterable[Iterable[str]]
) -> tuple[str, ...]:
    """The axes of the mesh over which a step is distributed, from those of each leaf of its state.

    Joint axes are taken apart. A step may have no leaves, so the axes that are known without them count too.
    """
    axes: list[str] = []
    for t in transforms:
        axes += t.axes
    for leaf_axes in of_leaves:
        axes += leaf_axes
    return members_of(axes)


def layout_of(transforms: Sequence[Transform], name: str, leaf: object) -> Layout:
    """The layout of a state leaf, from the first transform that chooses one. A number is whole on every rank.

    Of a leaf that the step itself divides over other axes, it is the layout of this rank's part.
    """
    if not isinstance(leaf, torch.Tensor):
        return ()
    user_sharding = UserSharding.of(leaf, axes_of(transforms, name, leaf))
    shape = user_sharding.local_shape if user_sharding else tuple(leaf.shape)
    meta_leaf = _meta(leaf)
    for t in transforms:
        layout = t.layout(name, shape, meta_leaf)
        if layout is not None:
            return layout
    return ()


def memory_of(transforms: Iterable[Transform], name: str, leaf: object) -> MemoryKind:
    """The memory in which these transforms keep a state leaf. A number is on the device."""
    if not isinstance(leaf, torch.Tensor):
        return "device"
    meta_leaf = _meta(leaf)
    on_host = any(t.leaf_memory(name, meta_leaf) == "host" for t in transforms)
    return "host" if on_host else "device"


# ---- leaves of the state without data


def _meta(leaf: object) -> torch.Tensor:
    """A meta tensor of the shape and dtype of a state leaf. A number is a scalar."""
    tensor = leaf if isinstance(leaf, torch.Tensor) else torch.empty(())
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def meta_leaves(graph: Graph) -> list[torch.Tensor]:
    """Meta tensors of the shapes and dtypes of the state leaves, before the step itself divides them."""
    leaves = graph.inputs[: graph.num_state]
    shapes = graph.leaf_shapes or [v.shape for v in leaves]
    return [torch.empty(shape, dtype=v.dtype, device="meta") for v, shape in zip(leaves, shapes)]


# ---- options and their errors


def check_number(option: str, value: object, kind: str, least: int, *others: object) -> None:
    """Check an option that is a whole number, at least `least`, or one of `others`.

    Raises: ValueError that says what the option is: `kind`, or one of the others.
    """
    # True is 1 in Python, and no number of anything.
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    if value not in others:
        alternatives = "".join(f", or {other!r}" for other in others)
        raise ValueError(f"{option}={value!r}; it is {kind}{alternatives}.")


def byte_count(option: str, value: Any, least: int, *others: object) -> Any:
    """An option that is a number of bytes, or one of `others`. A float such as 40e9 is a whole number too.

    Raises: ValueError that says what the option is.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_number(option, value, "a number of bytes", least, *others)
    return value


def no_step(fn: object) -> TypeError:
    """The error for a transform that is applied to something else than a function."""
    advice = ""
    if isinstance(fn, tuple):
        advice = "\nUnpack what lift returns: step, state = zt.lift(...)."
    return TypeError(
        f"a transform applies to a train step, a function (state, batch) -> (state, output), and this is a "
        f"{type(fn).__name__}.{advice}"
    )
