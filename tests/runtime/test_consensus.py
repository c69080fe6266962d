"""What ranks compare before they run a program."""

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from ztrans.planning.fingerprint import update_fingerprint
from ztrans.runtime.consensus import Promise


def of_matrices(state, x):
    """An update by products of matrices. With a batch of one row, backward transposes once more."""
    grads, loss = grad_and_value(lambda p: (x @ p["a"] @ p["b"]).square().mean())(state)
    return {k: state[k] - g @ g.t() @ g / g.norm() for k, g in grads.items()}, loss


@pytest.mark.parametrize("stage", [1, 3])
def test_programs_for_two_sizes_of_a_batch_promise_the_same(stage):
    """They number temporary values in other ways."""
    state = {"a": torch.ones(4, 1), "b": torch.ones(1, 5)}
    step = zt.shard_params(zt.AbstractMesh(dp=3), stage=stage)(of_matrices)
    first = step.lower(state, torch.ones(4, 4))
    other = step.trace(state, torch.ones(1, 4)).follow(first)
    lines, others = (Promise(x.graph, update_fingerprint(x.hinted)).lines for x in (first, other))
    assert lines == others and len(lines) > 3
