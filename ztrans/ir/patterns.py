"""Sharding rules as patterns, in the notation of einops.

    ... -> ...              any number of arguments and results, broadcast to one shape
    a b -> b                a sum over the first dim
    k, k ->                 an inner product
    m _, _ n -> m n         a product of matrices

A pattern has a letter, or a word, for each dim of the arguments and results. If an argument is cut along a letter, all
values with this letter are cut along it, the other arguments are whole, and the other results are terms, one on each
rank. `_` is a dim that may not be cut, and `...` stands for any number of dims. If a pattern shows one argument, all
are like it, and so for results. An argument may be broadcast: it may lack dims at the front, or have a single row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")
WHOLE = "_"
_DOTS = "..."
Letters = tuple[str, ...]  # of the dims of a value


class Pattern(NamedTuple):
    """The letters of arguments and results, and the operation that combines the terms of a result.

    With None, results without the letter are no terms: each part has its own, such as the seed of a kernel.
    """

    ins: tuple[Letters, ...]
    outs: tuple[Letters, ...]
    terms: str | None = "sum"


def parse(text: str) -> Pattern:
    """The pattern that a text shows.

    Raises: ValueError if it has no arrow, or several.

    >>> parse("m _, _ n -> m n")
    Pattern(ins=(('m', '_'), ('_', 'n')), outs=(('m', 'n'),), terms='sum')
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"a pattern has one arrow, as in 'm _, _ n -> m n'; got {text!r}.")
    ins, outs = (tuple(tuple(value.split()) for value in side.split(",")) for side in sides)
    return Pattern(ins, outs)


@functools.lru_cache(1024)
def letters_of(
    pattern: Pattern, shapes: tuple[Sequence[int], ...], results: int
) -> tuple[list[Letters], list[Letters]]:
    """The letter of each dim of arguments with these shapes, and of a number of results.

    Raises: ValueError if the pattern shows another number of arguments or results.

    >>> letters_of(parse("m n, m _, _ n -> m n"), ((5,), (4, 3), (3, 5)), 1)
    ([('n',), ('m', '_'), ('_', 'n')], [('m', 'n')])
    >>> letters_of(parse("... -> ..."), ((4, 3), (1, 3), ()), 1)
    ([('.1', '.0'), ('_', '.0'), ()], [('.1', '.0')])
    """
    ins = _repeated(pattern.ins, len(shapes), "arguments")
    outs = _repeated(pattern.outs, results, "results")
    # Dims are counted from the last one, because shapes are broadcast from there.
    counts = [len(shape) - len(x) + 1 for x, shape in zip(ins, shapes) if _DOTS in x]
    names = tuple(f".{k}" for k in reversed(range(max(counts, default=0))))
    last_letters = []
    lengths: dict[str, int] = {}
    for letters, shape in zip(ins, shapes):
        padded = (WHOLE,) * len(shape) + _expanded(letters, names)
        last = padded[len(padded) - len(shape) :]
        last_letters.append(last)
        lengths.update((letter, rows) for letter, rows in zip(last, shape) if rows != 1)
    aligned = []
    for last, shape in zip(last_letters, shapes):
        # A single row of a longer dim is broadcast.
        aligned.append(
            tuple(
                letter if rows == lengths.get(letter, 1) else WHOLE
                for letter, rows in zip(last, shape)
            )
        )
    return aligned, [_expanded(letters, names) for letters in outs]


def _repeated(values: tuple[Letters, ...], count: int, kind: str) -> tuple[Letters, ...]:
    if len(values) not in (1, count):
        raise ValueError(f"a pattern shows {len(values)} {kind} of an operation that has {count}.")
    return values if len(values) == count else values * count


def _expanded(letters: Letters, names: Letters) -> Letters:
    """The letters, with `names` in place of an ellipsis."""
    if _DOTS not in letters:
        return letters
    start = letters.index(_DOTS)
    return letters[:start] + names + letters[start + 1 :]


def along(
    letter: str, values: Sequence[Letters], split: Callable[[int], S], otherwise: T
) -> list[S | T]:
    """The placements of values that are cut along a letter: `split(dim)`, or `otherwise` for values without it."""
    return [split(letters.index(letter)) if letter in letters else otherwise for letters in values]
