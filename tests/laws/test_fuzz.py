"""Random programs, optimizers and options against the plain step: nobody chose these by hand. See `fuzz`."""

import pytest
import torch

from tests.fuzz import check
from tests.fuzz.check import Case, failure
from tests.fuzz.cover import POOL, SEEDS, pairs
from tests.fuzz.layer import Layer
from tests.fuzz.optimizers import OPTIMIZERS
from tests.fuzz.programs import LAYERS, PATTERNS, STYLES
from tests.fuzz.truth import doubles
from tests.support.versions import OLD

EACH = 10  # python -m tests.fuzz --runs 5000 is the rest
# An optimizer that works on blocks splits a leaf without elements, which torch 2.11 cannot do with fake tensors.
BUG_OF_OLD_TORCH = "split failed: list assignment index out of range"


def groups_of_seeds():
    """The first seed of each group. `make test` runs every third group."""
    for first in range(0, len(SEEDS), EACH):
        every_third = first % (3 * EACH) == 0
        yield pytest.param(first, marks=() if every_third else pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize("first", list(groups_of_seeds()))
def test_random_programs(first):
    """Sharded they are the plain step, their programs are well formed, and schedules and fusion change no bit."""
    failures = [text for seed in SEEDS[first : first + EACH] if (text := failure(seed))]
    if OLD:
        failures = [text for text in failures if BUG_OF_OLD_TORCH not in text]
    assert not failures, "\n".join(failures)


def test_a_seed_is_a_case():
    """The same case each time, down to the numbers of its state and its batches."""
    for seed in range(20):
        case, same = Case.of(seed), Case.of(seed)
        assert case.name == same.name
        with doubles():
            pairs = zip(case.program.batch(4, 1), same.program.batch(4, 1))
            assert all(torch.equal(x, y) for x, y in pairs)
            states = case.program.state()["params"], same.program.state()["params"]
            assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_every_kind_of_part_comes_up():
    cases = [Case.of(seed) for seed in range(POOL)]
    kinds = {_made_by(layer) for case in cases for layer in case.program.layers}
    assert kinds == {make.__name__ for make in LAYERS}
    assert len(OPTIMIZERS) >= 15
    makers = {case.program.optimizer.update.__qualname__.split(".")[0] for case in cases}
    assert makers == {make.__name__ for make in OPTIMIZERS}
    assert {case.program.style for case in cases} == set(STYLES)
    assert {case.program.pattern for case in cases} == set(PATTERNS)
    assert {case.options.ranks for case in cases} == {2, 3, 5}
    assert {dict(case.options.shard)["stage"] for case in cases} == {0, 1, 2, 3}
    assert len({case.options.reduce_dtype for case in cases}) == 4
    used = {t.name for case in cases for t in (*case.options.before, *case.options.after)}
    assert used == {
        *("remat", "delay_weight_grads", "overlap_grads", "fuse_cast_gather"),
        *("offload", "owned_updates"),
    }
    assert any(case.options.averages for case in cases)
    assert any(case.options.prefetch and case.options.budget for case in cases)
    formats = {t.name for case in cases for t in case.options.codes}
    assert formats == {"quantize_gathers", "quantize_grads", "store"}
    every = set().union(*map(pairs, cases))
    covered = set().union(*(pairs(Case.of(seed)) for seed in SEEDS))
    assert every <= covered, "python -m tests.fuzz.cover"


def _made_by(layer: Layer) -> str:
    return layer.run.__qualname__.split(".")[0]


@pytest.mark.slow
def test_what_is_wrong_is_found(monkeypatch):
    """A millionth of a millionth is not: a hundred times the tolerance is, with a line that shows it again."""
    true_steps = check.true_steps

    def shifted(by):
        def steps(program, options):
            state, outputs = true_steps(program, options)
            state["params"] = {k: p * (1 + by) for k, p in state["params"].items()}
            return state, outputs

        return steps

    monkeypatch.setattr(check, "true_steps", shifted(1e-12))
    assert failure(1) is None
    monkeypatch.setattr(check, "true_steps", shifted(1e-8))
    assert "python -m tests.fuzz --only 1    # Wrong: 1e-08 from the truth\n" in failure(1)


def test_bits_that_change_are_found(monkeypatch):
    equal = check._equal
    monkeypatch.setattr(check, "_equal", lambda a, b: equal(a, b) and False)
    assert "schedules and fusion change bits" in failure(1)
