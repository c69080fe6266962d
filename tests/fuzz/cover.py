"""Cover: few seeds whose cases have every pair of parts that random cases have.

    python -m tests.fuzz.cover      # prints the seeds, when parts were added

A part alone is rarely wrong. Most mismatches that a random program showed were those of a layer, an optimizer or a
transform at one stage.
"""

from __future__ import annotations

from collections.abc import Hashable

from .check import Case

# A greedy cover of the pairs of the first 1,000 seeds, by cheap ones of the first 3,000.
SEEDS = (
    1, 41, 61, 106, 120, 133, 174, 176, 251, 275, 395, 419, 427, 431, 440, 462, 497, 531, 545, 556, 572, 592, 633,
    650, 714, 715, 724, 727, 728, 741, 745, 760, 798, 825, 853, 923, 938, 951, 955, 968, 974, 984, 1004, 1054, 1096,
    1104, 1127, 1130, 1171, 1210, 1211, 1221, 1247, 1270, 1300, 1303, 1346, 1386, 1390, 1415, 1455, 1478, 1525,
    1533, 1557, 1568, 1576, 1594, 1602, 1616, 1621, 1704, 1750, 1809, 1851, 1963, 1968, 2067, 2121, 2143, 2155,
    2253, 2329, 2440, 2522, 2540, 2578, 2589, 2627, 2874, 2924, 2928, 2938, 2998,
)  # fmt: skip
POOL = 1000
CANDIDATES = 3000


def pairs(case: Case) -> set[Hashable]:
    """The pairs of a case: of each part with its stage, and of each transform with the way to take gradients."""
    program, options = case.program, case.options
    transforms = {transform.name for transform in (*options.before, *options.after, *options.tiles)}
    transforms |= {transform.name for transform in options.averages}
    if options.local is not None:
        transforms.add("local_steps")
    parts = {
        ("optimizer", program.optimizer.update.__qualname__.split(".")[0]),
        ("style", program.style),
        ("pattern", program.pattern),
        ("ranks", options.ranks),
        ("reduce_dtype", options.reduce_dtype),
        ("budget", bool(options.prefetch and options.budget)),
    }
    parts |= {("layer", layer.run.__qualname__.split(".")[0]) for layer in program.layers}
    parts |= {("transform", name) for name in transforms}
    stage = dict(options.shard)["stage"]
    case_pairs: set[Hashable] = {(part, stage) for part in parts}
    case_pairs.add((program.style, program.pattern))
    case_pairs |= {(name, program.style) for name in transforms}
    case_pairs |= {(name, program.pattern) for name in transforms}
    return case_pairs


def cost(case: Case) -> float:
    """What a case costs: its layers, as often as its step differentiates them, beside what all cases cost."""
    program = case.program
    passes = program.micro * (1 if program.pattern == "once" else 2)
    return 2 + len(program.layers) * (1 + passes) / 2


def cover(cases: list[Case]) -> list[int]:
    """Seeds of `cases` that have all pairs of the first `POOL`.

    The next seed has the most that are missing, for its cost. Then those go without which none would be missing, the
    dearest first.
    """
    by_seed = {case.seed: pairs(case) for case in cases}
    seed_cost = {case.seed: cost(case) for case in cases}
    every = set().union(*(by_seed[seed] for seed in range(POOL)))
    missing = every
    chosen = list[int]()
    while missing:
        seed = max(
            by_seed, key=lambda seed: (len(by_seed[seed] & missing) / seed_cost[seed], -seed)
        )
        chosen.append(seed)
        missing = missing - by_seed[seed]
    for seed in sorted(chosen, key=lambda seed: -seed_cost[seed]):
        others = set().union(*(by_seed[other] for other in chosen if other != seed))
        if every <= others:
            chosen.remove(seed)
    return sorted(chosen)


if __name__ == "__main__":
    print(cover([Case.of(seed) for seed in range(CANDIDATES)]))
