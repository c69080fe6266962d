"""Transform and chain: rewrites of a step as values.

A transform is a frozen value built by a public function; applied to a train step it is appended to
the step's tuple of transforms, and nothing runs. Chains form a monoid: `chain()` is the identity
and `chain(a, chain(b, c)) == chain(a, b, c)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..ir.graph import Graph, Layout
from ..ir.verifier import ProgramError, check, check_interface

if TYPE_CHECKING:
    from ..step import Step


@dataclass(frozen=True, repr=False)
class Transform:
    """A pure rewrite of a staged train step; equality and hash are those of its options.

    They take turns, those of one turn in the order in which they were applied. At turns 0 and 1 the program
    is as it was traced, but for what others of these have done.
    """

    turn: ClassVar[int] = 2

    def rewrite(self, graph: Graph) -> Graph:
        """The program after this transform."""
        raise NotImplementedError

    def layout(self, path: str, shape: tuple[int, ...], leaf: Any) -> Layout | None:
        """Where a state leaf lives; None leaves it as it is (only shard_params moves state)."""
        return None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose ranks hold the same state, or parts of it (only shard_params has some)."""
        return ()

    @property
    def as_written(self) -> bool:
        """Whether it works on the program as it was traced."""
        return self.turn < Transform.turn

    @property
    def name(self) -> str:
        return type(self).__name__.lstrip("_").lower()

    def __call__(self, fn: Callable | Step) -> Step:
        from ..step import Step  # a door upwards: a transform applied to a function is a step

        return Step.of(fn).then(self)

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.repr and (f.default is dataclasses.MISSING or getattr(self, f.name) != f.default)
        ]
        return f"{self.name}({', '.join(shown)})"


def rewritten(graph: Graph, transform: Transform) -> Graph:
    """The program after a transform, verified.

    Raises: ProgramError that names the transform and the equation when its rewrite made no well-formed program, or
    one with other inputs or outputs; TypeError when it made none.
    """
    new = transform.rewrite(graph)
    if not isinstance(new, Graph):
        raise TypeError(f"{transform!r}: rewrite returned a {type(new).__name__}; it returns the new Graph.")
    try:
        check(new)
        check_interface(graph, new)
    except ProgramError as error:
        raise ProgramError(
            f"{transform!r} made a program that is not well formed: {error}.\n"
            f"Correct its rewrite: the program that it returns must pass zt.check(graph)."
        ) from None
    return new.replace(history=(*graph.history, repr(transform)))


@dataclass(frozen=True, repr=False)
class Chain(Transform):
    """Several transforms, first to last, as one."""

    transforms: tuple[Transform, ...] = ()

    def __call__(self, fn: Callable | Step) -> Step:
        from ..step import Step  # the same door

        step = Step.of(fn)
        for transform in self.transforms:
            step = step.then(transform)
        return step

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"


def chain(*transforms: Transform) -> Chain:
    """Transforms applied first to last: `chain(a, b)(f) == b(a(f))`, as `optax.chain`.

    >>> chain() == chain(chain(), chain())
    True
    """
    flat: list[Transform] = []
    for t in transforms:
        if not isinstance(t, Transform):
            raise TypeError(f"chain: {t!r} is not a transform; call it first: chain(prefetch(), ...).")
        flat.extend(t.transforms if isinstance(t, Chain) else (t,))
    return Chain(tuple(flat))
