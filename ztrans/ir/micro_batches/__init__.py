"""Micro-batches: a program that is written for one micro-batch and runs once for each.

    g.sum: f32[4] = accumulate(g)        first, middle...                  last
    g.mean = div(g.sum, 3)          -->  g.sum = g;  g.sum += g;  ...      g.sum += g; g.mean = div(g.sum, 3)
    w1 = sub(w, g.mean)                                                    w1 = sub(w, g.mean)

A value that depends on the batch reaches the update only through a mark (`accumulate`, `join`; see
`collectives.micro_marks`). So the equations before the marks are repeated, and the update, behind them, runs once, with
the last micro-batch. A leaf of the state that depends on the batch without a mark, such as a statistic of batch norm,
changes with every micro-batch, as in a loop.

`parts` writes the program as the three programs that run: that of the first micro-batch, that of each one in the
middle, and that of the last. None of them has a mark, and their lengths do not depend on the number of micro-batches.
"""

from .carry import Carry, check_rows, first_part, full_shape, is_cut
from .changes import changing
from .programs import Parts, in_order, parts
