"""Known trees: the leaves of a batch whose structure is known; another structure is noticed."""

from dataclasses import dataclass

import pytest
import torch

import ztrans as zt

A, B = torch.arange(3.0), torch.ones(3)


@dataclass
class Pair:
    first: torch.Tensor
    second: object


def tensors_in(tree):
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in tensors_in(value)]
    if isinstance(tree, list | tuple):
        return [x for value in tree for x in tensors_in(value)]
    if isinstance(tree, Pair):
        return tensors_in([tree.first, tree.second])
    return [] if tree is None or isinstance(tree, str) else [tree]


def step(state, x, y=None):
    total = sum(torch.as_tensor(x, dtype=torch.float64).sum() for x in tensors_in((x, y)))
    return state + total, total


BATCHES = [
    *(
        (A,),
        ([A],),
        ((A,),),
        ([A, B],),
        ({"a": A},),
        ({"b": A},),
        ({"a": A, "b": B},),
        ({"b": B, "a": A},),
    ),
    *(
        (A, B),
        (A, None),
        (A, "text"),
        (A, 2),
        (A, 2.5),
        (A, [None]),
        (None, A),
        (Pair(A, B),),
        (Pair(A, None),),
    ),
    *(
        (A.double(),),
        (A[:2],),
        (A.view(1, 3),),
        (torch.ones(3, 2).t(),),
        (torch.ones(2, 3),),
        ([],),
        ([A, [B]],),
    ),
]


@pytest.fixture(scope="module")
def run() -> zt.Step:
    """One step for all batches, which traces each of them once.

    A call asks the newest program first. So the program of each batch is asked about all older batches, and about each
    newer one before that is traced.
    """
    return zt.Step.of(step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step has been traced")
@pytest.mark.parametrize("before", BATCHES, ids=str)
def test_a_batch_of_another_structure_is_noticed(run, before):
    state = torch.zeros((), dtype=torch.float64)
    state, _ = run(state, *before)
    for batch in (before, *BATCHES):
        state, total = run(state, *batch)
        assert total == step(state, *batch)[1], batch
        state, _ = run(state, *before)
    assert len(run._cache) <= len(BATCHES)


def test_what_is_known_of_a_batch_is_kept_while_batches_are_alike():
    run, state = zt.Step.of(step), torch.zeros((), dtype=torch.float64)
    state, _ = run(state, {"a": A}, y=0.5)
    (program,) = run._cache.values()
    guard = program.binding.guard
    for k in range(3):
        state, total = run(state, {"a": A * k}, y=k / 2)
        assert program.binding.guard is guard and total == 3 * k + k / 2
    state, _ = run(state, {"a": A.double()}, y=0.5)
    assert len(run._cache) == 2
    state, _ = run(state, {"a": A}, y=0.5)
    assert program.binding.guard is guard, "both programs recognise the state"


def test_a_batch_that_begins_to_require_gradients_is_traced_again():
    def needs(state, x):
        return state + 1, x.sum() if not x.requires_grad else torch.autograd.grad(
            x.square().sum(), x
        )[0].sum()

    run, state = zt.Step.of(needs), torch.zeros(())
    for x, wanted in ((A, 3), (A.clone().requires_grad_(), 6), (A, 3)):
        state, output = run(state, x)
        assert output == wanted
    assert len(run._cache) == 2
