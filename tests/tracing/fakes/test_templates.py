"""Results from templates are those that PyTorch's rules give for the same arguments."""

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from ztrans.tracing import record
from ztrans.tracing.fakes.mode import Fakes
from ztrans.tracing.fakes.templates import key_of, template_of

aten = torch.ops.aten


def properties(result, args) -> list:
    """What a program can see of each tensor in a result, with the first argument whose memory it shows."""
    given = [x.untyped_storage()._cdata for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]

    def of(x):
        if not isinstance(x, torch.Tensor):
            return x
        shown = next((k for k, storage in enumerate(given) if storage == x.untyped_storage()._cdata), None)
        flags = x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference(), type(x), torch._C._dispatch_key_set(x)
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device, shown, *map(str, flags)

    return [isinstance(result, list), *map(of, pytree.tree_leaves(result))]


@pytest.fixture
def compared(monkeypatch):
    """Results from templates are compared with those of PyTorch's own rules. Returns their number, and that of the
    calls which were the first of their kind."""
    counts = {"templates": 0, "first calls": 0}

    class Compared(Fakes):
        templates = {}  # noqa: RUF012
        comparing = False  # while PyTorch's rule runs, which may call operations itself

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if self.comparing:
                return self.dispatch(func, types, args, kwargs or {})
            key = key_of(self, func, args, kwargs or {})
            is_new, has_template = key not in self.templates, self.templates.get(key) is not None
            result = super().__torch_dispatch__(func, types, args, kwargs)
            counts["first calls"] += is_new and key in self.templates
            if has_template:
                counts["templates"] += 1
                self.comparing = True
                expected = self.dispatch(func, types, args, kwargs or {})
                self.comparing = False
                assert properties(result, (args, kwargs)) == properties(expected, (args, kwargs)), func
            return result

    monkeypatch.setattr(record, "Fakes", Compared)
    return counts


@pytest.mark.parametrize("name", CASES)
def test_results_of_a_step(name, compared):
    """The second trace has no call for which no earlier call has left a template, or the note that there is none."""
    case = CASES[name]
    step, state, batch = zt.Step.of(case.step), case.state(), case.batch(case.samples)
    text, first_calls, templates = str(step.trace(state, *batch)), compared["first calls"], compared["templates"]
    assert str(step.trace(state, *batch)) == text
    assert compared["first calls"] == first_calls > 0 and compared["templates"] > 2 * templates


def test_results_of_views_and_lists(compared):
    def step(x, y):
        parts = torch.split(x, [1, 3], 1)
        a, b = torch.unbind(y)
        x = torch.cat([*parts, *torch.broadcast_tensors(x, x[:1])], 1)[:, :4]
        z = torch.view_as_real(torch.view_as_complex(y.reshape(2, 2, 2)).conj().resolve_conj())
        halves = torch._foreach_mul([a, b], 2.0)
        top, places = y.max(0)
        return x, (*halves, z.neg(), y.t().contiguous(), top, places, y.as_strided((2,), (1,), 1), torch.rand_like(y))

    x, y = torch.zeros(3, 4), torch.zeros(2, 4)
    texts = {str(zt.Step.of(step).trace(x, y)) for _ in range(3)}
    assert len(texts) == 1 and compared["templates"] > 20


def test_results_follow_the_default_dtype():
    def step(x, n):
        return x, n / 2 + torch.ones(())

    def dtype():
        return zt.Step.of(step).trace(torch.zeros(2), torch.arange(3)).graph.outputs[1].dtype

    assert [dtype(), dtype()] == [torch.float32] * 2
    torch.set_default_dtype(torch.float64)
    try:
        assert dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def template(op, *args, same=False):
    with Fakes() as mode:
        args = pytree.tree_map_only(torch.Tensor, lambda x: mode.from_tensor(x), args)
        args = (args[0], args[0]) if same else args
        return template_of(mode, args, {}, mode.dispatch(op, (), args, {}))


def test_a_result_that_could_be_of_either_argument_has_no_template():
    """The arguments of a later call have the same types, and other identities."""
    x = torch.zeros(2, 3)
    assert template(aten.add_.Tensor, x, torch.ones(2, 3)) is not None
    assert template(aten.add_.Tensor, x, x, same=True) is None, "both arguments are the result"
    assert template(aten.broadcast_tensors.default, [x, x[:1]]) is None, "it shows a member of a list"


def test_arguments_without_a_key():
    """Operators of users, whose rules may be replaced, and constants, whose values PyTorch keeps."""
    with Fakes() as mode:
        x = torch.zeros(2)
        assert key_of(mode, aten.neg.default, (x,), {}) is not None
        assert key_of(mode, aten.nonzero.default, (x,), {}) is None, "the shape depends on the values"
        constant = aten.lift_fresh_copy.default(torch.tensor(1.0))
    with Fakes() as other:
        assert key_of(other, aten.neg.default, (x,), {}) is None, "a tensor of another trace"
    assert constant.constant is not None and key_of(mode, aten.neg.default, (constant,), {}) is None
