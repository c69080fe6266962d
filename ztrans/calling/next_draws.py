"""Choose what the random generators of Python and NumPy draw next.

Two traces of a step may draw alike by chance, above all where a number is compared with a small probability. So a step
that draws in Python is traced with the lowest draws and with the highest ones: where its program depends on a draw,
these programs differ.

Both generators are Mersenne Twisters, whose state is a public list of words. Each word gives 32 bits of a draw.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy

# With these words `random.random()` gives 1.5e-8, and `random.choice` takes the first entry.
LOWEST = [64] * 400
# With these words `random.random()` gives 1 - 1.5e-8. `random.choice` rejects the first 300, which are larger than any
# position; with the others it takes an entry that is not the first, if there is another.
HIGHEST = [0xFFFFFFBF] * 300 + [0x7FFFFF01] * 100


@contextlib.contextmanager
def next_draws(words: Sequence[int]) -> Iterator[None]:
    """Inside, the generators first draw these words, and then random ones. Afterwards they are as before.

    Without words, the context does nothing.
    """
    if not words:
        yield
        return
    python = random.getstate()
    of_numpy = numpy.random.get_state(legacy=False)
    chosen = [_word_of_state(word) for word in words]
    try:
        version, (*state, _), _ = python
        random.setstate((version, (*chosen, *state[len(chosen) :], 0), None))
        # A caller may have set another kind of generator.
        if of_numpy["bit_generator"] == "MT19937":
            key = numpy.array([*chosen, *of_numpy["state"]["key"][len(chosen) :]], numpy.uint32)
            numpy.random.set_state(("MT19937", key, 0, 0, 0.0))
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def _word_of_state(drawn: int) -> int:
    """The word of a state for which a Mersenne Twister draws these 32 bits: its tempering, backwards."""
    y = drawn
    y ^= y >> 18
    y ^= (y << 15) & 0xEFC60000
    word = y
    # Each turn finds 7 more bits.
    for _ in range(4):
        word = y ^ ((word << 7) & 0x9D2C5680)
    return word ^ (word >> 11) ^ (word >> 22)
