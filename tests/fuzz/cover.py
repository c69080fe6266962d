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
    20, 28, 61, 76, 103, 120, 123, 129, 134, 146, 151, 173, 174, 210, 212, 240, 255, 269, 274, 295, 322, 330, 368,
    369, 419, 420, 430, 462, 472, 505, 561, 563, 568, 643, 728, 769, 801, 812, 825, 853, 883, 913, 962, 974, 1012,
    1018, 1026, 1027, 1033, 1054, 1066, 1094, 1167, 1171, 1178, 1212, 1221, 1234, 1247, 1265, 1270, 1303, 1315,
    1327, 1346, 1353, 1404, 1467, 1507, 1534, 1541, 1569, 1620, 1865, 1883, 1925, 1943, 2067, 2091, 2100, 2104,
    2118, 2129, 2155, 2289, 2336, 2479, 2578, 2629, 2656, 2706, 2716, 2793, 2988,
)  # fmt: skip
POOL = 1000
CANDIDATES = 3000


def pairs(case: Case) -> set[Hashable]:
    """The pairs of a case: of each part with its stage, and of each transform with the way to take gradients."""
    program, options = case.program, case.options
    transforms = {transform.name for transform in (*options.before, *options.after)}
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
