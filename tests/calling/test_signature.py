"""Signatures: calls share a program if the step cannot tell them apart, and a difference is said in words."""

from __future__ import annotations

import enum
import warnings

import pytest
import torch

import ztrans as zt
from ztrans import compiled as compiled_module
from ztrans.calling import signature as signature_module
from ztrans.calling.call import BoundCall, StepFunction
from ztrans.calling.signature import Abstract, Signature, device_of_program

X = torch.arange(12.0).view(4, 3)
Y = torch.ones(3)


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


def step(state, x, scale=1.0, *, mode=None):
    return state, x.sum() * scale


def signature(*args, **kwargs):
    function = StepFunction(step)
    return Signature.of(BoundCall.of(function, args, kwargs), function)


SAME = {
    "other values": ((X, X, 0.5), (X + 1, X * 2, 2.5)),
    "other memory": ((X, X), (X.clone(), X.clone())),
    "a number in the state, and the tensor that the step returns for it": (
        ({"n": 1}, X),
        ({"n": torch.tensor(1)}, X),
    ),
    "a state of other strides, which is copied": ((X.t(), X), (X.t().contiguous(), X)),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_calls_that_a_program_can_serve_are_equal(pair):
    first, second = (signature(*args) for args in pair)
    assert first == second and hash(first) == hash(second)
    assert first.changes(second) == []


CHANGES = {
    "x was f32[4,3] and is f32[2,3]": ((X, X), (X, X[:2])),
    "x was f32[4,3] and is f64[4,3]": ((X, X), (X, X.double())),
    "x had the strides (3, 1) and has (1, 4)": ((X, X), (X, X.t().contiguous().t())),
    "x had requires_grad=False and has True": ((X, X), (X, X.clone().requires_grad_())),
    "x was on cpu and is on meta": ((X, X), (X, X.to("meta"))),
    "scale was i64[] and is f64[]": ((X, X, 1), (X, X, 1.0)),
    "scale was a number and is a tensor": (
        (X, X, 1.0),
        (X, X, torch.tensor(1.0, dtype=torch.float64)),
    ),
    "scale was i64[] and is True": ((X, X, 1), (X, X, True)),
    "scale was 'fast' and is 'slow'": ((X, X, "fast"), (X, X, "slow")),
    "scale was None and is f64[]": ((X, X, None), (X, X, 1.0)),
    "state.w was f32[4,3] and is f32[3]": (({"w": X}, X), ({"w": X[0]}, X)),
    "state.b is new": (({"w": X}, X), ({"w": X, "b": X}, X)),
    "x.mask is missing": ((X, {"x": X, "mask": X}), (X, {"x": X})),
    "scale is new": ((X, X), (X, X, 1.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_said_in_words(change):
    first, second = (signature(*args) for args in CHANGES[change])
    assert first != second and first.changes(second) == [change]


def test_a_container_of_another_kind_is_a_difference():
    (change,) = signature(X, (X, X)).changes(signature(X, [X, X]))
    assert change.startswith("the arguments were TreeSpec") and "and are TreeSpec" in change


def test_keys_in_another_order_are_named_from_the_first_on():
    before, after = ({key: X for key in order} for order in ("abc", "bca"))
    (change,) = signature(X, before).changes(signature(X, after))
    assert change == "x.b is in the place of x.a"


def test_constants_are_compared_by_value_and_type():
    assert signature(X, X, mode=Mode.FAST) == signature(X, X, mode=Mode.FAST)
    assert signature(X, X, mode=Mode.FAST) != signature(X, X, mode=Mode.EXACT)
    assert signature(X, X, mode=1) != signature(X, X, mode=True)
    assert signature(X, X, mode=True) != signature(X, X, mode=False)


def test_the_surroundings_belong_to_the_signature():
    rate = 0.1
    reading = StepFunction(lambda state, x: (state, x * rate))
    call = BoundCall(X, (X,))
    before = Signature.of(call, reading)
    rate = 0.2
    (change,) = before.changes(Signature.of(call, reading))
    assert change.startswith("rate was 0.1 and is 0.2 (test_signature.py:")
    rate = 0.1
    with torch.autocast("cpu", torch.bfloat16):
        assert before.changes(Signature.of(call, reading)) == [
            "autocast on cpu was off and is torch.bfloat16"
        ]
    assert before == Signature.of(call, reading)


def test_the_size_of_a_batch_can_be_left_out():
    sizes = [signature({"w": X}, x).without_sizes() for x in (X, X[:2], X[:0])]
    assert len(set(sizes)) == 1
    others = [
        signature({"w": X[:2]}, X),
        signature({"w": X}, X.double()),
        signature({"w": X}, X[0]),
    ]
    assert sizes[0] not in [other.without_sizes() for other in others]


def test_numbers_and_tensors_are_described_without_their_values():
    assert Abstract.of(1, False) == Abstract((), torch.int64, (), "cpu")
    assert Abstract.of(X.t(), False) == Abstract((3, 4), torch.float32, (1, 3), "cpu")
    assert Abstract.of(X.t(), True) == Abstract((3, 4), torch.float32, (4, 1), "cpu")


@pytest.mark.parametrize(
    "argument, advice",
    [
        ({1, 2}, "Make it a tensor"),
        (iter([1]), r"Call next\(...\) outside of the step"),
        (torch.nn.Linear(1, 1).parameters(), r"Call next\(...\) outside of the step"),
    ],
)
def test_an_argument_that_cannot_be_compared_is_refused(argument, advice):
    with pytest.raises(
        TypeError, match=rf"an argument holds a .*, which is neither a tensor,.*\n{advice}"
    ):
        zt.Step.of(step)(X, X, argument)


def test_a_step_that_is_traced_for_every_call_says_what_changed():
    rate = 0.0
    run = zt.Step.of(lambda state, x: (state, x.sum() * rate))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(8):
            rate = float(k)
            run(Y, X)
    rate = 8.0
    with pytest.warns(
        UserWarning,
        match=r"has been traced for 9 different calls.*:\n  \* rate was 7.0 and is 8.0 \(.*\)\n",
    ):
        run(Y, X)
    with pytest.warns(
        UserWarning,
        match=r"has been traced for 10 different calls.*:\n  \* x was f32\[4,3\] and is f32\[2,3\]\n",
    ):
        run(Y, X[:2])


def test_retrace_forgets_all_programs():
    run = zt.Step.of(step)
    run(Y, X)
    run(Y, X[:2])
    before = run._cache.values()
    run.retrace()
    assert len(before) == 2 and not len(run._cache)
    run(Y, X)
    (after,) = run._cache.values()
    assert all(after is not program for program in before)


NOT_STRIDED = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_STRIDED)
def test_a_sparse_or_nested_tensor_is_refused(kind):
    run = zt.Step.of(lambda state, x: (state, x))
    with pytest.raises(TypeError, match=r"an argument holds a (sparse|nested) tensor"):
        run({"w": torch.ones(3)}, NOT_STRIDED[kind]())


def test_a_sparse_tensor_in_place_of_a_dense_one_is_refused():
    run = zt.Step.of(lambda state, x: (state, x.sum()))
    state = {"w": torch.ones(3)}
    for _ in range(2):
        state, _ = run(state, torch.eye(3))
    with pytest.raises(TypeError, match="an argument holds a sparse tensor"):
        run(state, torch.eye(3).to_sparse())


def test_two_devices_of_one_type_have_two_programs(monkeypatch):
    """A program is bound to the streams, the constants and the current device of one GPU."""
    monkeypatch.setattr(signature_module, "_has_accelerator", lambda: True)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(OnDevice, "device", property(lambda self: device))
    on_first = signature({"w": OnDevice(X)}, X)
    device = torch.device("cuda", 1)
    on_second = signature({"w": OnDevice(X)}, X)
    assert on_first != on_second and hash(on_first) != hash(on_second)
    assert on_first.changes(on_second) == ["state.w was on cuda:0 and is on cuda:1"]
    assert device_of_program(leaf.abstract for leaf in on_second.leaves) == "cuda:1"
    assert on_first.without_layout() == on_second.without_layout()


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU."""


def test_a_program_of_one_gpu_refuses_the_arguments_of_another(monkeypatch):
    compiled = zt.Step.of(step).lower({"w": X.clone()}, X).compile()
    # It stays alive: a tensor in the same memory would be taken for this leaf.
    _alive, _ = compiled({"w": X.clone()}, X)
    monkeypatch.setattr(compiled_module, "device_of", lambda tensors: torch.device("cuda", 1))
    with pytest.raises(TypeError, match=r"step: the program runs on the CPU, and .* on cuda:1"):
        compiled({"w": X.clone()}, X)
