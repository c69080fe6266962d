"""A transform is a frozen value that describes a rewrite of a train step.

A public function such as `prefetch()` builds the value. Applying it to a step appends it to the step's tuple of
transforms; nothing runs. Chains form a monoid: `chain()` is the identity, and
`chain(a, chain(b, c)) == chain(a, b, c)`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import joint_axis, members, members_of
from ..ir.graph import Eqn, Graph, Kept, Layout, MemoryKind, Split, Var
from ..ir.layout import AbstractMesh, LeafSharding, as_tensor, mesh_axes
from ..ir.printer import first_names
from ..ir.source import Source, where
from ..ir.user_sharding import UserSharding
from ..ir.verifier import ProgramError, check, check_interface

if TYPE_CHECKING:
    from ..step import Step

P = ParamSpec("P")
R = TypeVar("R")
# Which leaves of the state: a pattern for `fnmatch` of their paths, or a function of the path and a meta tensor.
Where = str | Callable[[str, torch.Tensor], bool]
_LISTED = 8  # leaves that an error lists


@dataclass(frozen=True, repr=False)
class Transform:
    """A pure rewrite of a traced train step. Two transforms are equal if their options are.

    To write a transform, subclass this as a frozen dataclass with a `rewrite`. A transform that distributes the step
    over ranks, as `shard_params` does, also has a `mesh`, the `axes` that it uses, and the `leaf_sharding` of each leaf
    of the state.

    `phase` orders the rewrites. Phases 0 and 1 rewrite the program as it was traced; `accumulate` and then `store` come
    last there. In phase 2, `shard_params` comes first and makes the program of one rank; the other transforms of the
    phase rewrite that. Phase 2.5 chooses formats of messages, and in phase 3 `offload` moves what is left of its
    leaves. Within a phase, transforms run in the order in which they were applied.
    """

    phase: ClassVar[float] = 2
    # Whether its `variants` compute other bits. Then all batch sizes have the variant that was chosen first.
    variants_change_bits: ClassVar[bool] = False

    # The mesh that the program runs on, if this transform distributes it.
    mesh: DeviceMesh | AbstractMesh | None = dataclasses.field(
        default=None, repr=False, kw_only=True
    )

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the short text of a transform, which `dataclass` would replace. Its text is part of its program."""
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Transform.__repr__  # type: ignore[method-assign]

    def __new__(cls, *args: Any, **options: Any) -> Transform:
        """Raises: TypeError if the class takes options but is not a dataclass."""
        if (args or options) and "__dataclass_params__" not in vars(cls):
            raise TypeError(
                f"{cls.__name__}: a transform with options is a frozen dataclass with a field for each option. Without "
                f"it, two {cls.__name__} with different options are equal, and one replaces the other.\n"
                f"Write @dataclass(frozen=True) above class {cls.__name__}, and the options as fields, such as n: int."
            )
        return super().__new__(cls)

    def rewrite(self, graph: Graph) -> Graph:
        """The program after this transform."""
        raise NotImplementedError(
            f"{self!r} has no rewrite. Define rewrite(self, graph) in {type(self).__name__}; it returns the new Graph."
        )

    def leaf_sharding(self, path: str, leaf: torch.Tensor, shape: tuple[int, ...]) -> LeafSharding:
        """How a leaf of the state lies on the mesh between steps. By default it is whole on every rank of `axes`.

        Of several transforms, the first one that splits the leaf chooses its layout, the first one that moves it to
        another memory than the device's chooses that, and the first one with a dtype chooses the dtype between steps.

        Args:
            path: the path of the leaf in the state, such as `params.fc1.weight`.
            leaf: a meta tensor with the shape and dtype of the whole leaf. A number is a scalar.
            shape: the shape of the leaf, or of this rank's part if the step itself divides the leaf.
        """
        return LeafSharding(self.axes)

    def keeps(self, leaves: Mapping[str, torch.Tensor]) -> Sequence[Kept]:
        """The leaves that this transform adds to the state, as `init` of an optax transform; by default none.

        Its `rewrite` finds them by `graph.kept_by(self.name)`, and gives them new values by `Rewriter.set_leaf`. All
        variants keep the same leaves.

        Args:
            leaves: the leaves of the user's state by their paths, meta tensors as in `leaf_sharding`.
        """
        return ()

    @property
    def variants(self) -> tuple[Transform, ...]:
        """This transform with each value of an open option. A plan chooses the first of the fastest that fit.

        All variants have the same shardings of leaves. If they compute other bits, set `variants_change_bits`.
        """
        return (self,)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `mesh` whose ranks hold the same state, whole or in parts."""
        return ()

    @property
    def memory_limit(self) -> int | None:
        """The most bytes that may be live on a rank, if this transform sets a limit. It holds for the whole step."""
        return None

    def within(self, limit: int) -> Transform:
        """This transform with `limit` as its option `memory`, or unchanged if it sets no limit on memory."""
        return self

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage, if this transform has one."""
        return None

    @property
    def micro_batches(self) -> int:
        """The number of equal parts that the batch is cut into; the step is traced for one of them."""
        return 1

    @property
    def name(self) -> str:
        """The name of the class in snake case: `Int8Gathers` and `_Int8Gathers` become `int8_gathers`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__.lstrip("_")).lower()

    def __call__(self, fn: Callable[P, R]) -> Step[P, R]:
        from ..step import Step  # imported here, because `step` imports this module

        return Step.of(fn).then(self)

    def __repr__(self) -> str:
        """The name, and the options that differ from their defaults: `clip_by_value(limit=0.5)`."""
        options = []
        for field in dataclasses.fields(self):
            option = getattr(self, field.name)
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            is_default = default is not dataclasses.MISSING and option == default
            if field.repr and not is_default:
                options.append(f"{field.name}={_as_text(option)}")
        return f"{self.name}({', '.join(options)})"


def _as_text(option: object) -> str:
    """An option as text; a function by its name.

    The text of a transform is part of its program, which ranks and plan files compare. So it leaves out the addresses
    that Python prints for methods, partials and objects: they differ from process to process.
    """
    if inspect.isfunction(option):
        return option.__name__
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(option))


def constructor(build: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that returns a transform, so that `@build` without a call is an error."""

    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if len(args) == 1 and callable(args[0]) and not options:
            parameters = inspect.signature(build).parameters.values()
            required = [p.name for p in parameters if p.default is p.empty]
            option_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            step: Any = args[0]
            raise TypeError(
                f"{build.__name__}: applied to {getattr(step, '__name__', repr(step))} without a call.\n"
                f"  at {where(Source.of(step))}\n"
                f"Write @zt.{build.__name__}({', '.join(required)}): the call takes the options, and returns the "
                f"transform.{_option_hint(option_names)}"
            )
        return build(*args, **options)

    return checked


def _option_hint(options: Sequence[str]) -> str:
    """A hint for the error: the function may be meant as one of these options."""
    if not options:
        return ""
    return f" If this function is an option, name it, one of {', '.join(options)}."


def rewritten(graph: Graph, transform: Transform) -> Graph:
    """Apply a transform to a program, and verify the result.

    Raises:
        TypeError: the rewrite did not return a program.
        ProgramError: the new program is not well formed, or its inputs or outputs have changed. The error names the
            transform and the equation.
    """
    new = transform.rewrite(graph)
    if not isinstance(new, Graph):
        raise TypeError(
            f"{transform!r}: rewrite returned a {type(new).__name__}; it returns the new Graph."
        )
    try:
        check(new)
        shardings = program_shardings(graph, [transform])
        dtypes = {v.name: s.dtype for v, s in shardings.items() if s.dtype is not None}
        check_interface(graph, new, transform.micro_batches, dtypes)
    except ProgramError as error:
        raise ProgramError(
            f"{transform!r} made a program that is not well formed: {error}.\n"
            f"Correct its rewrite: the program that it returns must pass zt.ir.check(graph)."
        ) from None
    return new.replace(transforms=(*graph.transforms, repr(transform)))


# ---- chains


@dataclass(frozen=True)
class Chain(Transform):
    """Several transforms as one, in the order in which they are applied."""

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
    """Append a transform to those of a step, unless the step already has it.

    Raises: ValueError if the step has the transform with other options; or if the transform has a mesh, but follows a
        transform that rewrites the program of one rank, or a transform with another mesh.
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
    """Raises: ValueError if a transform that distributes the step comes too late, or has another mesh than the step."""
    earlier = [t.name for t in transforms if t.phase >= Transform.phase and t.mesh is None]
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
    """The program with the memory limit of its transforms, if they set one.

    Raises: ValueError if two transforms set different limits.
    """
    for t in transforms:
        if t.memory_limit is not None:
            graph = graph.with_memory_limit(t.memory_limit, t.name)
    return graph


def mesh_of(transforms: Iterable[Transform]) -> DeviceMesh | AbstractMesh | None:
    """The mesh that a step with these transforms runs on, or None if it runs in one process."""
    return next((t.mesh for t in transforms if t.mesh is not None), None)


def stage_of(transforms: Iterable[Transform]) -> int | None:
    """The ZeRO stage of a step with these transforms, if there is one."""
    return next((t.zero_stage for t in transforms if t.zero_stage is not None), None)


def micro_batches_of(transforms: Iterable[Transform]) -> int:
    """The number of micro-batches of a step with these transforms."""
    return max((t.micro_batches for t in transforms), default=1)


# ---- leaves of the state


def kept_leaves(
    transforms: Iterable[Transform], leaves: Mapping[str, torch.Tensor]
) -> tuple[Kept, ...]:
    """The leaves that transforms keep in a state, whose other leaves these meta tensors are, by path.

    Raises: ValueError if one is like a leaf that the state does not have, if two have one name, or if one starts as a
        copy of nothing.
    """
    kept: dict[str, Kept] = {}
    for t in transforms:
        for leaf in t.keeps(leaves):
            leaf = dataclasses.replace(leaf, transform=t.name)
            problem = ""
            if isinstance(leaf.like, str) and leaf.like not in leaves:
                problem = f"is like {leaf.like!r}, and the state has {first_names([*leaves])}"
            elif leaf.name in leaves or leaf.name in kept:
                problem = "has the name of another leaf of the state"
            elif leaf.start == "copy" and (leaf.layout == "rows" or not isinstance(leaf.like, str)):
                problem = "starts as a copy, but has a shape or rows of its own"
            if problem:
                raise ValueError(f"{t!r}: the leaf {leaf.name} that it keeps {problem}.")
            kept[leaf.name] = leaf
    return tuple(kept.values())


def leaf_sharding(
    transforms: Iterable[Transform],
    path: str,
    leaf: torch.Tensor,
    shape: tuple[int, ...],
    kept: Kept | None = None,
) -> LeafSharding:
    """How a leaf of the state lies on the mesh with all of these transforms (see `Transform.leaf_sharding`).

    A leaf that a transform keeps is distributed as the leaf that it is like. Its own path chooses its memory.
    """
    axes: list[str] = []
    independent: list[str] = []
    layout: Layout = ()
    memory: MemoryKind = "device"
    dtype: torch.dtype | None = None
    rows = 1 if kept is not None and kept.layout == "rows" else 0
    # By phase, as they rewrite the program: what follows a transform that narrows a leaf sees the narrow one.
    for t in sorted(transforms, key=lambda t: t.phase):
        if kept is None or t.mesh is None:
            sharding = t.leaf_sharding(path, leaf, shape)
        else:
            sharding = _kept_sharding(t, t.mesh, kept, leaf, shape)
        # The transform that keeps a leaf has chosen its dtype.
        if kept is None and dtype is None and sharding.dtype is not None:
            dtype = sharding.dtype
            leaf = leaf.to(dtype)
        axes += sharding.axes
        independent += sharding.independent
        layout = layout or sharding.layout
        memory = memory if memory != "device" else sharding.memory
        rows = max(rows, sharding.rows)
    axes, independent = list(dict.fromkeys(axes)), list(dict.fromkeys(independent))
    return LeafSharding(tuple(axes), layout, memory, tuple(independent), dtype, rows)


def _kept_sharding(
    t: Transform,
    mesh: DeviceMesh | AbstractMesh,
    kept: Kept,
    leaf: torch.Tensor,
    shape: tuple[int, ...],
) -> LeafSharding:
    """How a transform that distributes a step distributes a leaf that another one keeps."""
    if not isinstance(kept.like, str):
        return dataclasses.replace(t.leaf_sharding(kept.name, leaf, shape), layout=())
    if kept.layout != "rows":
        sharding = t.leaf_sharding(kept.like, leaf, shape)
        if kept.axis is not None:
            return _over_one_axis(sharding, kept, kept.axis)
        return sharding if kept.layout == "like" else dataclasses.replace(sharding, layout=())
    row = torch.empty(leaf.shape[1:], dtype=leaf.dtype, device="meta")
    sharding = t.leaf_sharding(kept.like, row, tuple(row.shape))
    sizes = dict(mesh_axes(mesh))
    axis = joint_axis(members_of(sharding.axes), sizes)
    rows = math.prod(sizes[member] for member in members(axis))
    return dataclasses.replace(sharding, axes=(axis,), layout=(Split(axis),), rows=rows)


def _over_one_axis(sharding: LeafSharding, kept: Kept, axis: str) -> LeafSharding:
    """The sharding of a kept leaf that is cut over one of the axes over which its leaf is, whose sharding is given.

    Raises: ValueError if its leaf is not cut over this axis, or is cut over no other.
    """
    if not sharding.layout:
        return sharding
    cut_over = members_of(p.axis for p in sharding.layout)
    if axis not in cut_over or len(cut_over) == 1:
        raise ValueError(
            f"{kept.transform}: {kept.name} cannot be cut over {axis!r} alone, because {kept.like} is cut over "
            f"{' and '.join(map(repr, cut_over))}.\nGive the hosts an axis of their own, and cut parameters over both: "
            f"zt.make_mesh(device, host=-1, dp=8) and shard_params(mesh, axis=('host', 'dp')); then name 'dp'."
        )
    others = tuple(name for name in members_of(sharding.axes) if name != axis)
    layout = tuple(Split(axis, p.dim) for p in sharding.layout if isinstance(p, Split))
    return dataclasses.replace(sharding, axes=(axis, *others), layout=layout)


def kept_shape(
    transforms: Sequence[Transform], kept: Kept, leaves: Mapping[str, torch.Tensor]
) -> tuple[int, ...]:
    """The shape of a leaf that a transform keeps beside these leaves, with all of its rows."""
    if not isinstance(kept.like, str):
        return kept.like
    shape = tuple(leaves[kept.like].shape)
    if kept.layout != "rows":
        return shape
    blank = torch.empty(1, *shape, device="meta")
    return leaf_sharding(transforms, kept.name, blank, tuple(blank.shape), kept).rows, *shape


def sharding_of(
    transforms: Sequence[Transform], path: str, value: object, kept: Kept | None = None
) -> LeafSharding:
    """How a leaf of a state lies on the mesh, from its value: a tensor, a DTensor or a number."""
    leaf = meta_leaf(value)
    sharding = leaf_sharding(transforms, path, leaf, tuple(leaf.shape), kept)
    user_sharding = UserSharding.of(value, sharding.axes)
    if user_sharding is None:
        return sharding
    return leaf_sharding(transforms, path, leaf, user_sharding.local_shape, kept)


def meta_leaf(value: object) -> torch.Tensor:
    """A leaf of a state as transforms see it: a meta tensor with its whole shape. A number is a scalar."""
    tensor = as_tensor(value)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def program_shardings(graph: Graph, transforms: Iterable[Transform]) -> dict[Var, LeafSharding]:
    """How each leaf of the state of a program lies on the mesh with these transforms."""
    kept = {leaf.name: leaf for leaf in graph.kept}
    shardings = {}
    for v, leaf in _meta_leaves(graph):
        shardings[v] = leaf_sharding(transforms, v.name, leaf, v.shape, kept.get(v.name))
    return shardings


def _meta_leaves(graph: Graph) -> list[tuple[Var, torch.Tensor]]:
    """The leaves of the state of a program, each with a meta tensor that has its shape before the step divides it."""
    shapes = graph.leaf_shapes or [v.shape for v in graph.state]
    leaves = []
    for v, shape in zip(graph.state, shapes):
        leaves.append((v, torch.empty(shape, dtype=v.dtype, device="meta")))
    return leaves


def chosen_leaves(graph: Graph, where: Where) -> list[Var]:
    """The leaves of the state of a program that an option `where` chooses."""
    return [v for v, leaf in _meta_leaves(graph) if matches(where, v.name, leaf)]


def matches(where: Where, path: str, leaf: torch.Tensor) -> bool:
    """Whether an option `where` chooses a leaf of the state.

    >>> matches("*.weight", "params.fc1.weight", torch.empty(4, 2))
    True
    """
    return fnmatchcase(path, where) if isinstance(where, str) else where(path, leaf)


def all_axes(transforms: Iterable[Transform], shardings: Iterable[LeafSharding]) -> tuple[str, ...]:
    """The axes of the mesh over which a step is distributed, given the shardings of the leaves of its state.

    A joint axis counts as its members. A step may have no leaves, so the axes of the transforms themselves count too.
    """
    axes: list[str] = []
    for t in transforms:
        axes += t.axes
    for sharding in shardings:
        axes += sharding.axes
        axes += sharding.independent
    return members_of(axes)


# ---- options and their errors


def is_from(e: Eqn, line: str) -> bool:
    """Whether an equation comes from a line. The line may name the last folders too, as in "models/net.py:14"."""
    return e.source is not None and f"/{e.source.file}:{e.source.line}".endswith(f"/{line}")


def check_number(option: str, value: object, kind: str, least: int, *choices: object) -> None:
    """Check an option that is a whole number of at least `least`, or one of `choices`.

    Raises: ValueError that names the valid values: `kind`, or one of the choices.
    """
    # True is the integer 1 in Python, but nobody means it as a number.
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    if value not in choices:
        alternatives = "".join(f", or {choice!r}" for choice in choices)
        raise ValueError(f"{option}={value!r}; it is {kind}{alternatives}.")


def byte_count(option: str, value: Any, least: int, *choices: object) -> Any:
    """The value of an option that is a number of bytes, or one of `choices`. A float such as 40e9 becomes an int.

    Raises: ValueError that names the valid values.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_number(option, value, "a number of bytes", least, *choices)
    return value


def check_where(name: str, where: object, example: str) -> None:
    """Check the option `where` of the transform `name`, a pattern such as `example` or a function.

    Raises: TypeError if it is neither.
    """
    if not isinstance(where, str) and not callable(where):
        raise TypeError(
            f"{name}: where={where!r}; it is a pattern of paths, such as {example!r}, or a function "
            f"where(path, leaf) that returns a bool."
        )


def matches_none(
    name: str, where: Where, leaves: Sequence[Var], condition: str = "", advice: str = ""
) -> ValueError:
    """The error for an option `where` of the transform `name` that chooses none of the `leaves`."""
    option = repr(where) if isinstance(where, str) else getattr(where, "__name__", repr(where))
    listed = "There are none"
    if leaves:
        listed = f"These are {first_names([v.name for v in leaves], _LISTED)}"
    return ValueError(
        f"{name}: where={option} matches no leaf of the state{condition}.\n{listed}.{advice}"
    )


def no_step(fn: object) -> TypeError:
    """The error for a transform that is applied to something other than a function."""
    advice = ""
    if isinstance(fn, tuple):
        advice = "\nUnpack what lift returns: step, state = zt.lift(...)."
    elif isinstance(fn, nn.Module):
        advice = (
            "\nLift the loop that trains it: step, state = zt.lift(loop_step, module, optimizer)."
        )
    return TypeError(
        f"a transform applies to a train step, a function (state, batch) -> (state, output), and this is a "
        f"{type(fn).__name__}.{advice}"
    )
