"""Choose the next draws of the random generators of Python and NumPy.

Two traces of a step may take the same branch by chance, above all if it compares a draw with a small probability. So a
step that draws in Python is traced with the lowest draws and with the highest: if its program depends on a draw, these
programs differ.

Both generators are Mersenne Twisters. Their state is a public list of words, and each word gives 32 bits of a draw.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy

# With these words `random.random()` gives 1.5e-8, and `random.choice` takes the first entry.
LOWEST = [64] * 400
# With these words `random.random()` gives 1 - 1.5e-8. `random.choice` rejects the first 300, which are larger than any
# position. With the other words it takes an entry other than the first, if there is one.
HIGHEST = [0xFFFFFFBF] * 300 + [0x7FFFFF01] * 100


@contextlib.contextmanager
def next_draws(words: Sequence[int]) -> Iterator[None]:
    """Make the generators draw these words first, inside the context. Afterwards they continue as before it.

    Without words, the context does nothing.
    """
    if not words:
        yield
        return
    python_state = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    state_words = [_word_of_state(word) for word in words]
    count = len(state_words)
    try:
        version, (*old_words, _), _ = python_state
        random.setstate((version, (*state_words, *old_words[count:], 0), None))
        # A caller may have set another kind of generator.
        if numpy_state["bit_generator"] == "MT19937":
            numpy_words = numpy_state["state"]["key"]
            key = numpy.array([*state_words, *numpy_words[count:]], numpy.uint32)
            numpy.random.set_state(("MT19937", key, 0, 0, 0.0))
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _word_of_state(bits: int) -> int:
    """The word of a state that makes a Mersenne Twister draw these 32 bits: the inverse of its tempering."""
    y = bits
    y ^= y >> 18
    y ^= (y << 15) & 0xEFC60000
    word = y
    # Each iteration finds 7 more bits.
    for _ in range(4):
        word = y ^ ((word << 7) & 0x9D2C5680)
    return word ^ (word >> 11) ^ (word >> 22)
