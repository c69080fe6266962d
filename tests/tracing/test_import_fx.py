"""In-place operations and views: the functional program has the bits of the step."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.worlds import clone
from ztrans.runtime.codegen import to_fx

HERE = Path(__file__).name
T = torch.randn


def alike(want, got) -> bool:
    """Whether all leaves have equal dtypes and equal values, NaN included."""
    pairs = list(zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True))
    return all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(9.5), b.nan_to_num(9.5)) for a, b in pairs
    )


def agrees(change, *inputs) -> zt.ir.Graph:
    """Check that the program of `change` changes and returns the same as `change(*inputs)`.

    The program runs in the interpreter, as FX code, and compiled with donation. Returns the program.
    """

    def step(x, *batch):
        results = change(x, *batch)
        results = (
            [m for m in results if m is not None] if isinstance(results, (tuple, list)) else results
        )
        return x, (() if results is None else results, *batch)

    torch.manual_seed(3)
    want = step(*clone(inputs))
    lowered = zt.Step.of(step).lower(*clone(inputs))
    graph = zt.ir.check(lowered.graph)
    assert not any(e.op._schema.is_mutable for e in graph.eqns)
    for run in (zt.ir.evaluate, lambda graph, *flat: to_fx(graph)(*flat)):
        flat = pytree.tree_leaves(clone(inputs))
        torch.manual_seed(3)
        assert alike(want, run(graph, *flat)), graph
        assert run is not zt.ir.evaluate or alike(flat, inputs), "evaluate changed its inputs"
    torch.manual_seed(3)
    assert alike(want, lowered.compile()(*clone(inputs))), graph
    return graph


def aliases(x):
    a, b = x[0], x.t()[:, 0]
    a.add_(1), b.mul_(2), a.sub_(b)
    return a + b


def swapped(x):
    a, b = x[0], x[1]
    kept = a.clone()
    a.copy_(b), b.copy_(kept)
    return a


def split(x):
    a, b, c = x.split(2, 1)
    a.add_(1), c.mul_(2), b.copy_(a + c)
    return a * b


def split_with_sizes(x):
    a, b = x.split([1, 5], -1)
    b.zero_(), a.add_(b[:, :1] + 1)
    return a


def parts_and_whole(x):
    """Writes to a part, to the whole, and to parts of a part, in an order in which each is read afterwards."""
    a, b, c = x.split(2, 1)
    first, second = a.unbind(1)
    a.mul_(2), second.add_(b[:, 0]), first.sub_(second)
    x.add_(1)
    b.add_(a), c.t().mul_(3), x[0].neg_()
    other = x.split(3, 1)[0]
    other.mul_(5), a.exp_()
    return a + b, first * second, c, x, other


def parts_twice(x):
    """Parts of two splits with the same arguments: one of the base, and one of a part."""
    a, b = x.chunk(2, 1)
    c, d = a.chunk(2, 1)
    e, f = x.chunk(2, 1)
    e.mul_(2), d.add_(1), f.sub_(c.sum())
    return a, b, c, d


def unbound(x):
    _, b, c, d = x.unbind()
    b.add_(c), d.sub_(b)
    return d, x.unbind(-1)[1].mul_(3)


def new_shape(x):
    z = x.clone()
    z.unsqueeze_(0).add_(1)
    z.squeeze_(), z.t_()
    z[0].mul_(3), z.transpose_(0, 1)
    return z, z.sum(0)


def strided(x):
    x.as_strided((2, 2), (6, 1), 1).add_(1)
    tail = x[1:]
    tail.add_(1), tail.as_strided((2, 2), (6, 1)).mul_(3), tail.sub_(1)
    middle = x[:, 1:3]
    middle.mul_(2)
    return (
        tail.as_strided((2, 2), (1, 2)),
        middle.as_strided((2, 2), (6, 1)),
        tail.as_strided((2,), (1,), 7),
    )


def stacked_views(x):
    v = x[:, 1:3]
    v.add_(1)
    w = v.unsqueeze(0)
    w.mul_(2), v.sub_(1)
    return w + v


def memory_order(x, t, y):
    t = t.detach().clone()
    return t.copy_(y), t.t().view(-1), torch.add(y, 1, out=t).t().view(-1)


def transposed_into_a_view(x, z):
    v = x.view(12, 2)
    return v.copy_(z.t()), x.view(-1)


def renamed(x, y):
    kept = x.data
    x.data = z = y * 2
    z.add_(1), x[0].mul_(3)
    return kept, z


def named_shape(x):
    return x.set_(x.new_ones(6, 4).t())


def set_to_another(x, y):
    z = y * 2
    x.set_(z), z.add_(1), x[0].mul_(3)
    return x, z


def filled(x, y, value):
    x[0].fill_(3), x[1, 1:].fill_(value), x[:, 2:4].zero_()
    return x.t().masked_fill_(y.t() > 0, 1.5), x[2:].masked_fill_(y[2:] < 0, value)


def indexed(x, y, i):
    x[i] = y[:2]
    x[i, i] = 5.0
    x[:, i] += 1
    x[1:][i - 1].add_(1), x[0].__setitem__(i, y[0, :2])
    return x.index_put_((i,), y[:2], accumulate=True), x[:, 1:].index_add_(0, i, y[:2, 1:], alpha=2)


def scattered(x, y, i):
    x.scatter_(0, i, y), x.scatter_(1, i[:, :2], 2.5), x.scatter_add_(0, i, y)
    return (
        x.scatter_reduce_(0, i, y, "amax"),
        x.index_fill_(1, i[0, :2], 2.0),
        x.masked_scatter_(y > 0, y),
    )


def into(x, y):
    """`out=` is an input, a view, a new tensor, one with other strides or another dtype, or two tensors."""
    torch.add(x, y, out=x), torch.sub(x[0], y[1], out=x[2])
    turned = torch.add(x, y, out=torch.empty(6, 4).t())
    values, indices = torch.max(x, 1, out=(torch.empty(4), torch.empty(4, dtype=torch.int64)))
    wide = torch.mul(x, y, out=torch.empty(4, 6, dtype=torch.float64))
    greater = torch.gt(x, 0, out=torch.empty(4, 6, dtype=torch.bool))
    return (
        turned.t().view(-1),
        values,
        indices,
        wide,
        greater,
        torch.cat([x, y], out=torch.empty(8, 6)),
    )


def drawn(x):
    x[0].normal_(2, 0.1), x[1].uniform_(-1, 1), x[2].bernoulli_(0.3), x[3, 1:].exponential_()
    torch.rand(3)  # the result is not used, but the draw advances the generator
    noisy = F.rrelu(x, training=True), F.rrelu_(x[:2], training=True)
    return (
        *noisy,
        F.dropout(x, 0.5),
        F.dropout(x, 0.2, inplace=True),
        torch.rand_like(x),
        torch.randperm(5),
    )


def bits(x):
    x.view(torch.int32).add_(1)
    pairs = torch.view_as_complex(x.view(4, 3, 2))
    pairs.mul_(1j), torch.view_as_real(pairs)[0].add_(1)
    return pairs


def conjugated(z):
    """Lazy conjugates and negations: they are read, written through, and returned."""
    lazy = z.conj()
    lazy[0].mul_(1 + 2j), z[1].add_(lazy[2])
    lazy.imag.add_(1), z.mH[0].sub_(1)
    negative = torch._neg_view(z.real)
    negative[2].add_(3)
    z.copy_(lazy)
    return lazy, negative, lazy[1:].view(-1), z.mH


def literal(x):
    t = torch.tensor([1.0, 2.0])
    return (
        t.add_(1) * torch.tensor(3.0),
        torch.tensor([[1.0, 2.0]] * 5)[3] + x[0, :2],
        torch.zeros(3).add_(x[0, :3]),
    )


def backward_in_place(x, y):
    p = x.detach().requires_grad_()
    h = (p * 2).clone()
    h[0].mul_(3), h[:, 1:3].add_(y[:, 1:3]), h.t()[0].exp_()
    return torch.autograd.grad((h * y).sum(), [p])


def grads_are_accumulated(x, y):
    p = x.detach().requires_grad_()
    (p * y).sum().backward()
    g, row = p.grad, p.grad[0]
    p.grad.mul_(2)
    p.square().sum().backward()
    torch.nn.utils.clip_grad_norm_([p], 0.1)
    return g, row, p.grad


X, Y, I2, I46 = T(4, 6), T(4, 6), torch.tensor([2, 0]), torch.randint(0, 4, (4, 6))
STEPS = {
    "add_": (lambda x: x.add_(1), X),
    "select": (lambda x: x[0].add_(1), X),
    "slices": (lambda x, y: (x.__setitem__((slice(None), slice(1, 3)), y[:, 3:5]), x[::2, 1::2].neg_()), X, Y),
    "negative slices": (lambda x: (x[-1, -2:].mul_(2), x[-3:-1].add_(1), x[2:100].add_(1), x[2:2].add_(1)), X),
    "ellipsis, none, scalar": (lambda x: (x[..., 0].add_(1), x[:, None].mul_(2), x[1, 2].add_(1)), X),
    "nested": (lambda x: (x[1:3][:, 2:][0][1:].mul_(5), x.view(-1)[::2].view(3, 4).add_(1)), X),
    "transpose then select": (lambda x: x.transpose(0, 1).select(0, 1).add_(1), X),
    "permute": (lambda x: (x.permute(2, 0, 1)[0].add_(1), x.permute(-1, 0, 1)[1].mul_(2), x.mT[1].neg_()), T(2, 3, 4)),
    "flatten": (lambda x: (x.flatten()[3:9].add_(1), x.reshape(3, 8)[1].zero_(), x.unflatten(1, (2, 3))[:, 1].add_(1)), X),
    "copies": (lambda x: (x.t().reshape(-1).add_(1), x.t().contiguous().add_(1), x.float().add_(1), x.detach()[0].add_(1)), X),
    "two aliases": (aliases, X), "swap": (swapped, X), "views of views": (stacked_views, X),
    "split": (split, X), "parts and whole": (parts_and_whole, X), "parts twice": (parts_twice, X), "split_with_sizes": (split_with_sizes, X), "unbind": (unbound, X), "chunk": (lambda x: x.chunk(2)[1].add_(x.chunk(3, -1)[2].sum()), X),
    "shape in place": (new_shape, X), "squeeze": (lambda x: (x.squeeze(0).add_(1), x.squeeze((0, 2)).mul_(2)), T(1, 4, 1)),
    "diagonal": (lambda x: (x.diagonal().zero_(), x.diagonal(-1).fill_(9), x.fill_diagonal_(2.0)), X), "diagonal of dims": (lambda x: x.diagonal(0, 1, 2).mul_(2), T(2, 3, 3)),
    "as_strided": (strided, X), "expand": (lambda x: (x[:, :1].expand(4, 1).add_(1), x[0].expand(4, 6) * x), X),
    "copy_ with broadcast": (lambda x, y: x.copy_(y), X, T(6)), "copy_ with cast": (lambda x, y: x[1:].copy_(y), X, T(1, 6).double()), "copy_ to integers": (lambda x, y: x.copy_(y), torch.arange(6), T(6) * 5),
    "copy_ transposed": (lambda x, z: (x.copy_(z.t()), x.view(-1)), X, T(6, 4)), "copy_ to a view": (transposed_into_a_view, X, T(2, 12)),
    "memory order": (memory_order, X, T(6, 4).t(), Y),
    "fill": (filled, X, Y, T(())), "index": (indexed, X, Y, I2), "scatter": (scattered, X, Y, I46), "out": (into, X, Y),
    "random": (drawn, X), "bits": (bits, X), "lazy": (conjugated, torch.complex(X, Y)), "literals": (literal, X), "data": (renamed, X, Y), "set_": (named_shape, X), "set_ to another": (set_to_another, X, Y),
    "autograd through views": (backward_in_place, X, Y), "gradients": (grads_are_accumulated, X, Y),
    "activations": (lambda x: (F.relu_(x[0]), F.elu_(x[1]), F.leaky_relu_(x[2], 0.1), F.silu(x[3], inplace=True), x.clamp_(max=0.5)), X),
    "matmuls": (lambda x, a, b: (x.addmm_(a, b, beta=0.5, alpha=2), x[0].addmv_(b.t(), a[0]), x.triu_(), x.cumsum_(0)), X, T(4, 3), T(3, 6)),
    "bf16 += f32": (lambda x, y: (x.add_(y), x[0].add_(y[1], alpha=0.3), x.mul_(y), x.lerp_(x.abs(), 0.3)), X.bfloat16(), Y),
    "f32 += f64": (lambda x, y, s: (x.add_(y), x.mul_(s), x.pow_(2), x.floor_divide_(0.3), x.remainder_(0.2)), X, Y.double(), T((), dtype=torch.float64)),
    "int": (lambda x, y: (x.add_(3), x.mul_(y), x.pow_(2), x.floor_divide_(2), x.add_(True), x.bitwise_and_(7)), torch.arange(6), torch.arange(6).int()),
    "int32 += int64": (lambda x, y: (x.add_(y), x[:2].sub_(y[0])), torch.arange(6).int(), torch.arange(6)),
    "comparisons": (lambda x, y: (x[0].lt_(y[0]), x[1].eq_(0.0), x[2].logical_not_()), X, Y), "bool": (lambda x, y: (x.logical_or_(y), x.mul_(y), x.__ixor__(y)), X > 0, Y > 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_program_of_an_in_place_operation_has_its_bits(name):
    agrees(*STEPS[name])


def hooked(x, y):
    p, seen = x.detach().requires_grad_(), []
    p.register_hook(lambda g: g * 2)
    p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad * 3))
    (p * y).sum().backward()
    return p.grad, *seen


def test_gradient_hooks_of_a_leaf_run():
    agrees(hooked, X, Y)


REFUSED = {
    "its view `unfold`, which has no functional form": lambda x: x[0].unfold(0, 3, 3).add_(1),
    "its view `expand`, which has no functional form": lambda x: x[0].expand(1, 6).add_(1),
    "aten.linspace.out has no functional form": lambda x: torch.linspace(0, 1, 6, out=x[0].clone()),
    "aten.eye.out has no functional form": lambda x: torch.eye(4, out=x[:, :4].clone()),
    "aten.add.out makes f32[4,6] of f32[0]": lambda x: torch.add(x, 1, out=torch.empty(0)),
    "takes a shape from a tensor's values": lambda x: x[x > 0].add_(1),
    "reads a tensor [4, 6] (torch.float32) that is neither its state nor its batch": lambda x: Y.__setattr__("data", x),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_an_operation_without_a_functional_form_is_refused_at_its_line(message):
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        refused = REFUSED[message]
        zt.Step.of(lambda x: (x, refused(x))).trace(X)
    line = next(
        n
        for n, row in enumerate(Path(__file__).read_text().splitlines(), 1)
        if f'"{message}": lambda' in row
    )
    assert f"{HERE}:{line} " in str(e.value)
    assert alike(Y, Y.clone()), "the trace has changed a tensor of the caller"


def test_a_line_that_writes_into_the_batch_is_named():
    def step(state, x, cache):
        cache[0] += x  # here
        cache.unsqueeze(0).mul_(2)
        return state, cache.sum()

    state, x, cache = {"w": torch.ones(1)}, torch.ones(2), torch.zeros(3, 2)
    with pytest.warns(
        UserWarning,
        match=r"(?s)writes into its argument cache, and the tensor of the caller.*\.py:\d+ in .*step",
    ) as told:
        assert zt.Step.of(step)(state, x, cache)[1] == 4
    assert len(told) == 1 and not cache.any()


@pytest.mark.parametrize(
    "view",
    [torch.view_as_real, torch.conj, lambda z: z.view(torch.float64)],
    ids=["real", "conj", "bits"],
)
def test_as_strided_of_a_view_with_other_values_is_refused(view):
    z = T(4, dtype=torch.complex64)
    step = zt.Step.of(lambda state, z: (state, view(z).as_strided((2,), (1,))))
    with pytest.raises(
        ValueError,
        match=rf"the step calls as_strided on a view whose values are not those in memory.*\n  at .*{HERE}:\d+.*\nCopy the view",
    ):
        step({"w": torch.ones(1)}, z)
    copied = zt.Step.of(lambda state, z: (state, view(z).clone().as_strided((2,), (1,))))
    assert torch.equal(
        copied({"w": torch.ones(1)}, z)[1], view(z).resolve_conj().as_strided((2,), (1,))
    )


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.empty_like(x).uniform_(1, 2),
        lambda x: torch.empty_like(x).exponential_(),
        lambda x: x.clone().bernoulli_(0.3),
        lambda x: torch.rand_like(x),
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_random_numbers_are_drawn_in_the_order_of_memory(draw):
    """As dropout draws its mask for the result of an attention layer, which is transposed."""
    x = T(3, 4, 5).permute(2, 0, 1)
    step = zt.Step.of(lambda state, x: (state, draw(x)))
    torch.manual_seed(0)
    want = draw(x)
    torch.manual_seed(0)
    assert torch.equal(step({"w": torch.ones(1)}, x)[1], want)
