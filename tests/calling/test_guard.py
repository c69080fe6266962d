"""A state that comes back is recognised, and every change that somebody made to it meanwhile is noticed."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.calling.call import BoundCall
from ztrans.calling.guard import KnownArguments, KnownState
from ztrans.calling.leaf_records import RECORDS
from ztrans.calling.signature import Surroundings

Pair = namedtuple("Pair", "first second")


def step(state, x):
    return {**state, "w": state["w"] - 0.1 * zt.pmean(x.mean(), "dp"), "n": state["n"] + 1}, (
        state["w"] * x
    ).sum()


def fresh():
    return {"w": torch.ones(4, 3), "n": torch.zeros(()), "kept": [torch.ones(2), torch.ones(2)]}


X = torch.arange(12.0).view(4, 3)


def recognised(own, state, *batch):
    """The inputs of a call that a guard of the step recognises; None if it is examined as a new call."""
    call = BoundCall(state, batch or (X,))
    match = own._cache.match(call, Surroundings.of(own._function))
    return match and match[1]


@pytest.fixture
def run():
    """A step that has returned a state, and that state."""
    own = zt.Step.of(step)
    state, _ = own(own.shard(fresh()), X)
    assert recognised(own, state) is not None
    return own, state


def replace(state):
    state["w"] = torch.ones(4, 3)


def resize(state):
    state["kept"][0].resize_(1)


def transpose(state):
    state["w"].data = torch.ones(3, 4).t()


def move(state):
    state["n"] = state["n"].to("meta")


def cast(state):
    state["n"].data = torch.zeros((), dtype=torch.float64)


def train(state):
    state["w"].requires_grad_()


def exchange(state):
    state["w"].data = torch.ones(4, 3)


def share(state):
    state["kept"][0].data = state["kept"][1].data


def rename(state):
    state["m"] = state.pop("n")


def reorder(state):
    state["w"] = state.pop("w")


def wrap(state):
    state["kept"] = tuple(state["kept"])


def grow(state):
    state["kept"].append(torch.ones(2))


def count(state):
    state["n"] = 1


def wrap_in_parameter(state):
    state["w"] = torch.nn.Parameter(state["w"], requires_grad=False)


def cut(state):
    state["w"] = state["w"][:2]


def conjugate(state):
    state["kept"][0].data = torch.ones(2, dtype=torch.complex64).conj()


CHANGES = [
    replace,
    resize,
    transpose,
    move,
    cast,
    train,
    exchange,
    share,
    rename,
    reorder,
    wrap,
    grow,
    conjugate,
    count,
    wrap_in_parameter,
    cut,
]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed(run, change):
    own, state = run
    change(state)
    assert recognised(own, state) is None


@pytest.mark.parametrize(
    "change", [replace, exchange, train, wrap, reorder], ids=lambda change: change.__name__
)
def test_a_changed_state_runs_as_a_new_one(run, change):
    own, state = run
    change(state)
    expected, output = step(pytree.tree_map(lambda x: x.detach().clone(), state), X)
    state, computed = own(state, X)
    assert torch.equal(state["w"], expected["w"]) and torch.equal(state["n"], expected["n"])
    assert torch.equal(computed, output)


@pytest.mark.parametrize(
    "change, message",
    [
        (transpose, "w is not contiguous"),
        (share, "kept.0 and kept.1 share memory"),
    ],
    ids=["transpose", "share"],
)
def test_errors_are_those_of_a_new_state(run, change, message):
    own, state = run
    change(state)
    with pytest.raises(TypeError, match=message):
        own(state, X)


def test_a_batch_that_shares_memory_with_a_known_state_is_refused(run):
    own, state = run
    with pytest.raises(TypeError, match="w and x share memory"):
        own(state, state["w"])
    with pytest.raises(TypeError, match="w and x share memory"):
        own(state, state["w"].as_strided((4, 3), (3, 1)))
    own(state, X)


def test_the_state_that_comes_back_is_the_one_that_was_passed(run):
    own, state = run
    returned, _ = own(state, X)
    assert returned is state
    # A tree of the caller's own, with the same leaves, is known too.
    copy = {**state}
    assert recognised(own, copy) is not None


def test_another_batch_size_has_its_own_program_and_the_same_state(run):
    own, state = run
    state, _ = own(state, torch.ones(1, 3))
    state, _ = own(state, X)
    assert len(own._cache) == 2 and state["n"] == 3


def test_a_state_of_another_step_is_examined(run):
    own, state = run
    another = zt.Step.of(lambda state, x: ({**state, "w": state["w"] * 2}, x.sum()))
    assert recognised(another, state) is None
    doubled, _ = another(state, X)
    assert recognised(another, doubled) is not None and recognised(own, doubled) is not None
    assert torch.equal(doubled["w"], state["w"])


def test_an_alias_of_a_leaf_is_as_good_as_the_leaf(run):
    own, state = run
    memory, wanted = (
        state["w"],
        step({k: v if k == "kept" else v.clone() for k, v in state.items()}, X)[0],
    )
    state["w"] = state["w"].detach()
    state, _ = own(state, X)
    assert state["w"] is not memory and state["w"].data_ptr() == memory.data_ptr()
    assert torch.equal(state["w"], wanted["w"]) and torch.equal(memory, wanted["w"])


def test_a_compiled_step_knows_its_state_too():
    compiled = zt.Step.of(step).lower(fresh(), X).compile()
    state, _ = compiled(fresh(), X)
    assert compiled(state, X)[0] is state
    replace(state)
    assert compiled(state, X)[0] is not state


@pytest.fixture
def no_collection():
    """Python's garbage collector is off: an object is freed only when nothing refers to it."""
    import torch._dynamo  # noqa: F401  # its import, which a trace would do, leaves frames in a reference cycle

    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_memory_of_a_state_is_freed_when_its_owner_drops_it(no_collection):
    own = zt.Step.of(step)
    state, _ = own(own.shard(fresh()), X)
    references = [weakref.ref(x) for x in pytree.tree_leaves(state)]
    del state
    assert len(own._cache) == 1 and not any(reference() is not None for reference in references)


def test_the_memory_of_a_model_is_freed_when_its_owner_drops_it(no_collection):
    def train():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())

        def loop_step(x):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        lifted, state = zt.lift(loop_step, model, optimizer)
        own = zt.Step.of(lifted)
        for _ in range(2):
            state, _ = own(state, X)
        return [weakref.ref(x) for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]

    references = train()
    assert references and not any(reference() is not None for reference in references)


def test_trees_of_any_kind():
    leaves = [torch.ones(n) for n in range(1, 6)]
    tree = {
        "a": Pair(leaves[0], [leaves[1]]),
        "b": OrderedDict(x=leaves[2]),
        "c": ((), (leaves[3], {})),
        "d": leaves[4],
    }
    known = KnownState(tree)
    assert all(x is y for x, y in zip(known.match(tree).state, leaves, strict=True))
    assert known.match({**tree, "a": (leaves[0], [leaves[1]])}) is None
    assert known.match({**tree, "b": {"x": leaves[2]}}) is None
    assert known.match({**tree, "c": (leaves[3], {})}) is None
    assert known.match({**tree, "d": [leaves[4]]}) is None


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield zt.make_mesh("cpu", dp=2)
    dist.destroy_process_group()


def test_another_layout_of_the_same_memory_is_noticed(mesh):
    own = zt.shard_params(mesh)(step)
    state, _ = own(own.shard(fresh()), X)
    assert isinstance(state["w"], DTensor) and recognised(own, state) is not None
    local = state["w"].to_local()
    state["w"] = DTensor.from_local(local, mesh, [Shard(0)])
    assert recognised(own, state) is None
    state, _ = own(state, X)
    state["w"] = DTensor.from_local(torch.ones(4, 3), mesh, [Replicate()])
    with pytest.raises(TypeError, match="expected the layout"):
        own(state, X)


def test_a_call_is_examined_after_a_leaf_of_any_state_is_to_be_refused(run):
    own, state = run
    RECORDS.refuse([torch.zeros(2)], "step 1 of another failed")
    assert recognised(own, state) is None
    state, _ = own(state, X)
    assert recognised(own, state) is not None
    RECORDS.refuse([state["n"]], "step 3 of step failed")
    with pytest.raises(RuntimeError, match="and some are old: step 3 of step failed"):
        own(state, X)


def test_an_argument_in_the_storage_of_a_leaf_is_noticed():
    """Whether it overlaps the leaf is found out as for a new call."""
    memory = torch.zeros(10)
    storages = KnownState([memory[2:4], torch.zeros(0)]).storages
    known = KnownArguments([torch.ones(2)])
    assert known.match([memory[3:5]], storages) is None
    assert known.match([memory[6:8]], storages) is None
    assert known.match([torch.zeros(2)], storages) is not None
    empty = KnownArguments([torch.ones(0)])
    assert empty.match([torch.zeros(0)], storages) is not None


ARGUMENTS = {
    "another size": torch.ones(2, 3),
    "another dtype": X.double(),
    "other strides": torch.arange(12.0).view(3, 4).t(),
    "that requires a gradient": X.clone().requires_grad_(),
    "a container": [X],
    "a number": 1.0,
    "a set, which no step takes": {1},
    "nothing": None,
}


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_another_argument_is_noticed(run, argument):
    own, state = run
    assert recognised(own, state, X + 1) is not None
    assert recognised(own, state, argument) is None
    assert recognised(own, state) is not None


def test_constants_of_a_batch_are_compared():
    own = zt.Step.of(lambda state, x, mode, none: (state + 1, x.sum() * len(mode)))
    state, _ = own(torch.zeros(3), X, "fast", None)
    assert recognised(own, state, X, "fast", None) is not None
    assert recognised(own, state, X, "exact", None) is None
    assert recognised(own, state, X, "fast", 0) is None


def test_other_surroundings_are_noticed():
    rate = 0.5
    own = zt.Step.of(lambda state, x: (state + rate, x.sum()))
    state, _ = own(torch.zeros(3), X)
    assert recognised(own, state) is not None
    rate = 0.25
    assert recognised(own, state) is None
    state, _ = own(state, X)
    assert torch.equal(state, torch.full((3,), 0.75)) and recognised(own, state) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert recognised(own, state) is None


def test_every_program_of_a_step_recognises_its_state(run):
    own, state = run
    state, _ = own(state, torch.ones(1, 3))
    assert (
        recognised(own, state, torch.ones(1, 3)) is not None and recognised(own, state) is not None
    )
    for x in (X, torch.ones(1, 3), X):
        returned, _ = own(state, x)
        assert returned is state


def test_a_compiled_step_is_frozen_and_its_runs_change_the_bound_program():
    compiled = zt.Step.of(step).lower(fresh(), X).compile()
    with pytest.raises(AttributeError):
        compiled.binding = None
    assert compiled.binding.local_program is None and compiled.binding.guard is None
    compiled(fresh(), X)
    assert compiled.binding.local_program is not None and compiled.binding.guard is not None


def test_an_output_that_is_a_number_of_the_call_may_be_written():
    """The guard keeps the tensor of a number, and the caller may have got that as an output."""
    run = zt.Step.of(lambda state, x, rate: (state, (x.sum() * rate, rate)))
    state = run.shard({"w": torch.ones(2)})
    for _ in range(3):
        state, (output, rate) = run(state, torch.ones(3), 0.5)
        assert output == 1.5 and rate == 0.5
        rate += 1


def test_zeros_of_both_signs_are_numbers_of_their_own():
    run = zt.Step.of(lambda state, x, rate: (state, x / rate))
    state = run.shard({"w": torch.ones(2)})
    for rate in (0.0, 0.0, -0.0, 0.0):
        state, output = run(state, torch.ones(3), rate)
        assert output.signbit().all() == (str(rate) == "-0.0")


def test_a_distributed_leaf_that_is_frozen_is_noticed():
    def step(state, x):
        trained = [key for key, p in state.items() if p.requires_grad]
        weights = {key: p.detach().requires_grad_(key in trained) for key, p in state.items()}
        loss = (x @ weights["a"] @ weights["b"]).mean()
        gradients = torch.autograd.grad(loss, [weights[key] for key in trained])
        new = {key: p.detach() for key, p in state.items()}
        for key, gradient in zip(trained, gradients):
            new[key] = new[key] - gradient
        return new, x.sum()

    run = zt.shard_params(zt.make_mesh("cpu", dp=-1))(step)
    state = run.shard({key: torch.ones(4, 4).requires_grad_() for key in "ab"})
    for _ in range(2):
        state, _ = run(state, torch.ones(2, 4))
    before = state["a"].full_tensor().clone()
    state["a"].requires_grad_(False)
    state, _ = run(state, torch.ones(2, 4))
    assert torch.equal(state["a"].full_tensor(), before)
    assert len(run._cache) == 2


def test_a_state_made_under_inference_mode_is_refused_before_anything_is_written():
    with torch.inference_mode():
        state = {"w": torch.zeros(3)}
    run = zt.Step.of(lambda state, x: ({"w": state["w"] - x.mean(0)}, x.sum()))
    x = torch.ones(2, 3)
    for _ in range(2):
        with pytest.raises(
            TypeError, match=r"w was made under torch.inference_mode\(\), and a step"
        ):
            run(state, x)
        assert state["w"].tolist() == [0.0] * 3
    state = run.shard(state)  # as the error says
    state, _ = run(state, x)
    assert state["w"].tolist() == [-1.0] * 3


@pytest.mark.parametrize("transforms", [(), (zt.remat(),)])
def test_what_unshard_returns_is_not_trained_on(transforms):
    run = zt.chain(*transforms)(
        lambda state, x: ({"w": state["w"] - x.mean(0), "n": state["n"]}, x.sum())
    )
    x = torch.ones(2, 3)
    state, _ = run(run.shard({"w": torch.zeros(3), "n": 2}), x)
    best = run.unshard(state)
    for _ in range(3):
        state, _ = run(state, x)
    assert best["w"].tolist() == [-1.0] * 3 and state["w"].tolist() == [-4.0] * 3
