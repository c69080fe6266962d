"""Changes in place, as the importer makes them functional: the graph's meaning is the eager run's, bit for bit."""

import pytest
import torch
from torch import Tensor

import ztrans as zt
from ztrans.trace import trace

X = torch.arange(12.0).view(3, 4)


def cases():
    """Functions of x: [3, 4] and i: [2] (indices) that change what they were given or made."""

    def add(x, i):
        x.add_(1)
        return x

    def row(x, i):
        x[0].add_(1)
        return x

    def columns(x, i):
        x[:, 1:3] = x[:, :2] * 10
        return x

    def steps(x, i):
        x[::2, ::3] = -1
        return x

    def views_of_views(x, i):
        x.t()[1].unsqueeze(0)[:, 1:].mul_(5)
        return x

    def two_aliases(x, i):
        a, b = x.view(12), x.t()
        a[3:5].add_(1)
        b[0].mul_(2)
        return a + x.reshape(12) + b.reshape(12)

    def alias_reads_later(x, i):
        y = x[1]
        x.mul_(3)
        return y + 1, x

    def old_value_stays(x, i):
        y = x * 1
        x.zero_()
        return y, x

    def copy_broadcast(x, i):
        x.copy_(torch.arange(4))
        return x

    def fill(x, i):
        x[1].fill_(7)
        x[2, 2:].zero_()
        return x

    def fill_by_tensor(x, i):
        x[0].fill_(x[1, 1])
        return x

    def masked(x, i):
        x.masked_fill_(x > 5, 0.5)
        return x

    def indices(x, i):
        x[i] = torch.tensor([100.0])
        x.index_add_(0, i, x[:2].clone())
        return x

    def scatter(x, i):
        x.scatter_(1, i.view(2, 1), 9.0)
        return x

    def out(x, i):
        y = torch.empty(3, 4)
        torch.add(x, 1, out=y)
        torch.maximum(y, x.flip(0), out=x)
        return x, y

    def names_only(x, i):
        y = x.clone()
        y.unsqueeze_(0).squeeze_(0).t_()
        y.add_(1)
        return y

    def pieces(x, i):
        a, b = x.split(2, 1)
        a.add_(1)
        b.mul_(a)
        return x

    def chunks(x, i):
        x.chunk(3)[2].sub_(4)
        return x

    def unbound(x, i):
        x.unbind(1)[3].neg_()
        return x

    def diagonal(x, i):
        x.diagonal().zero_()
        return x

    def strided(x, i):
        x.as_strided((2, 2), (4, 2), 1).add_(100)
        return x

    def transposed_view(x, i):
        y = x.t().contiguous()
        y.view(2, 6)[1].exp_()
        return y

    def movement(x, i):
        x.permute(1, 0)[2:].relu_()
        x.transpose(0, 1)[0] -= 3
        return x

    def promoted(x, i):
        y = i.clone()
        y.add_(2)
        x[0, :2] += y
        return x, y

    def half(x, i):
        y = x.to(torch.bfloat16)
        y.add_(x / 3)
        y.mul_(torch.tensor(0.1))
        return y

    def integers(x, i):
        i.mul_(2).add_(1)
        return x + i.sum()

    def made_inside(x, i):
        y = torch.zeros(4, 3)
        y[1:3, 0] = x[0, :2]
        y[i] += 1
        return y

    def accumulated(x, i):
        y = torch.zeros(4)
        for r in x:
            y += r
        return y

    def foreach(x, i):
        xs = [x[0].clone(), x[1].clone()]
        torch._foreach_mul_(xs, 2.0)
        torch._foreach_add_(xs, [x[2], x[0]], alpha=0.5)
        torch._foreach_addcmul_(xs, xs, xs, value=0.1)
        torch._foreach_lerp_(xs, [x[0], x[2]], 0.3)
        torch._foreach_pow_(xs, 2)
        torch._foreach_copy_(xs, [xs[1], xs[0]])
        torch._foreach_zero_([xs[0]])
        norms = torch._foreach_norm(xs)
        roots = torch._foreach_sqrt(torch._foreach_abs(xs))
        return *torch._foreach_add(torch._foreach_maximum(xs, 3.0), 1), *norms, *roots

    def foreach_tensors(x, i):
        xs = [x[0].clone(), x[1].clone()]
        torch._foreach_addcdiv_(xs, [x[2], x[2]], [x[0] + 1, x[1] + 1], [0.5, 2.0])
        torch._foreach_div_(xs, torch._foreach_neg([x[0] + 1, x[1] + 1]))
        torch._foreach_sub_(xs, 1)
        torch._foreach_clamp_min_(xs, -0.5)
        return xs

    return [f for f in list(locals().values()) if callable(f)]


@pytest.mark.parametrize("function", cases(), ids=lambda f: f.__name__)
def test_the_graph_means_what_the_function_does(function):
    def step(state, i):
        x = state["x"]
        return {"x": x}, function(x, i)

    given, indices = X.clone(), torch.tensor([0, 2])
    graph = trace(step, {"x": given}, indices).graph
    graph.check()
    assert not any(e.op._schema.is_mutable for e in graph.eqns if hasattr(e.op, "_schema"))
    assert torch.equal(given, X) and indices.tolist() == [0, 2], "tracing changed its arguments"
    said = zt.evaluate(graph, given, indices)
    assert torch.equal(given, X) and indices.tolist() == [0, 2], "evaluating changed its arguments"
    x = X.clone()
    returned = function(x, indices.clone())
    flat = [returned] if isinstance(returned, Tensor) else list(returned)
    for got, want in zip(said, [x, *flat], strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("fused", ["adam", "adamw", "sgd"])
def test_fused_optimizers_are_one_equation_per_parameter(fused):
    from torch.optim.adam import adam
    from torch.optim.adamw import adamw
    from torch.optim.sgd import sgd

    def step(state, _):
        p, m, v, steps = state
        grads = [x * 0.1 for x in p]
        how = {"foreach": False, "fused": True, "lr": 0.1, "weight_decay": 0.01, "maximize": False}
        if fused == "sgd":
            sgd(p, grads, m, momentum=0.9, dampening=0.0, nesterov=True, **how)
        else:
            run = {"adam": adam, "adamw": adamw}[fused]
            run(p, grads, m, v, [], steps, amsgrad=False, beta1=0.9, beta2=0.9, eps=1e-8, **how)
        return [p, m, v, steps], None

    def fresh():
        make = lambda: [torch.full((3,), 2.0), torch.full((2, 2), 3.0)]  # noqa: E731
        return [make(), make(), make(), [torch.tensor(1.0), torch.tensor(1.0)]]

    graph = trace(step, fresh(), 0).graph.check()
    assert sum("_fused" in str(e.op) for e in graph.eqns) == 2
    flat = torch.utils._pytree.tree_leaves(fresh())
    want = torch.utils._pytree.tree_leaves(step(fresh(), 0)[0])
    for got, x in zip(zt.evaluate(graph, *flat, torch.tensor(0)), want):
        assert torch.equal(got, x)


def test_random_draws_in_place_keep_their_order():
    def step(state, _):
        a = torch.empty(3).normal_()
        b = torch.empty(3).uniform_(1, 2)
        state["x"][0, :3] = a.bernoulli_(0.5)
        return state, b

    graph = trace(step, {"x": X}, 0).graph.check()
    torch.manual_seed(3)
    said = zt.evaluate(graph, X, torch.tensor(0))
    torch.manual_seed(3)
    state, b = step({"x": X.clone()}, 0)
    assert torch.equal(said[0], state["x"]) and torch.equal(said[1], b)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.expand(2, 3, 4).add_(1), "through its view `expand`"),
        (lambda x: x.unfold(1, 2, 1).mul_(2), "through its view `unfold`"),
    ],
    ids=["expand", "unfold"],
)
def test_what_has_no_functional_form(change, message):
    def step(state, _):
        change(state["x"])
        return state, None

    with pytest.raises(ValueError, match=message) as e:
        trace(step, {"x": X}, 0)
    assert "test_functional.py" in str(e.value)
