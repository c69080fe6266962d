"""Operations over lists and fused optimizers become one equation for each tensor.

Also the lookup of the functional overload of an operation.
"""

import pytest
import torch

from tests.tracing.test_import_fx import T, agrees
from ztrans.tracing.overloads import functional

LIST = [T(3, 2), T(4), T(())]
OTHER, POSITIVE = [T(3, 2), T(4), T(())], [T(3, 2).abs() + 0.1, T(4).abs() + 0.1, T(()).abs() + 0.1]
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max")
UNARY = (
    "sqrt",
    "rsqrt",
    "neg",
    "abs",
    "reciprocal",
    "exp",
    "log",
    "sign",
    "round",
    "sigmoid",
    "zero",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", BINARY)
def test_a_binary_operation_over_lists_has_its_bits(name):
    new, change = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    agrees(lambda xs, ys: (*change(xs, ys), *new(xs, ys)), POSITIVE, OTHER)
    agrees(lambda xs: (*change(xs, 0.3), *new(xs, 2), *change(xs, [0.1, 0.2, 0.3])), POSITIVE)


@pytest.mark.parametrize("name", UNARY)
def test_a_unary_operation_over_a_list_has_its_bits(name):
    new, change = getattr(torch, f"_foreach_{name}", None), getattr(torch, f"_foreach_{name}_")
    agrees(lambda xs: (*(new(xs) if new else ()), change(xs) and None), POSITIVE)


LISTS = {
    "alpha": lambda xs, ys, zs, t: (torch._foreach_add_(xs, ys, alpha=-0.1), torch._foreach_sub_(xs, ys, alpha=0.1)),
    "a tensor": lambda xs, ys, zs, t: (torch._foreach_mul_(xs, t), torch._foreach_div_(xs, t), torch._foreach_add_(xs, t)),
    "addc": lambda xs, ys, zs, t: (torch._foreach_addcmul_(xs, ys, zs, -0.1), torch._foreach_addcdiv_(xs, ys, zs, value=0.2)),
    "addc, a list": lambda xs, ys, zs, t: torch._foreach_addcdiv_(xs, ys, zs, [0.1, 0.2, 0.3]),
    "lerp": lambda xs, ys, zs, t: (torch._foreach_lerp_(xs, ys, 0.1), torch._foreach_lerp_(xs, ys, zs)),
    "norms": lambda xs, ys, zs, t: [torch.stack(torch._foreach_norm(xs, p, dtype=torch.float64)) for p in (1, 2, float("inf"))],
    "powers of": lambda xs, ys, zs, t: torch._foreach_pow(0.9, xs),
    "copy": lambda xs, ys, zs, t: torch._foreach_copy_(xs, [y.bfloat16() for y in ys]),
    "greatest": lambda xs, ys, zs, t: torch._foreach_max(xs),
    "views that overlap": lambda xs, ys, zs, t: torch._foreach_add_([xs[0][0], xs[0].t(), xs[1][1:]], [xs[0][1], ys[0].t(), ys[1][1:]]),
    "one twice": lambda xs, ys, zs, t: torch._foreach_mul_([xs[0], xs[0]], [xs[0], ys[0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_any_operation_over_lists_has_its_bits(name):
    agrees(
        lambda *a: (LISTS[name](*a), None)[1] if "norms" not in name else LISTS[name](*a),
        LIST,
        OTHER,
        POSITIVE,
        T(()),
    )


def test_an_operation_over_a_list_becomes_one_equation_for_each_member():
    graph = agrees(lambda xs, ys: torch._foreach_add_(xs, ys), LIST, OTHER)
    assert [(e.op, len(e.outs)) for e in graph.eqns] == [(torch.ops.aten.add.Tensor, 1)] * 3


def fused(name, **options):
    def change(state, grads):
        params, m, v, largest, steps = (list(column) for column in state)
        columns = {
            "sgd": [m if options["momentum"] else [None] * 2] if name == "sgd" else [],
            "adagrad": [v, steps],
        }
        adam = [m, v, largest if options.get("amsgrad") else [], steps]
        module = __import__(f"torch.optim.{name}", fromlist=[name])
        getattr(module, name)(
            params, list(grads), *columns.get(name, adam), fused=True, foreach=False, **options
        )

    return change


ADAM = {
    "beta1": 0.9,
    "beta2": 0.95,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "eps": 1e-3,
    "maximize": False,
}
SGD = {"weight_decay": 0.1, "lr": 0.1, "dampening": 0, "maximize": False}


@pytest.mark.parametrize("change", [
    fused("adamw", amsgrad=False, **ADAM), fused("adamw", amsgrad=True, **ADAM), fused("adam", amsgrad=False, **ADAM),
    fused("sgd", momentum=0, nesterov=False, **SGD), fused("sgd", momentum=0.9, nesterov=True, **SGD),
    fused("adagrad", lr=0.1, weight_decay=0, lr_decay=0, eps=1e-3, maximize=False),
], ids=["adamw", "amsgrad", "adam", "sgd", "momentum", "adagrad"])  # fmt: skip
def test_a_fused_optimizer_has_its_bits(change):
    pair = lambda: [T(3, 2), T(4)]
    positive = lambda: [p.abs() for p in pair()]
    agrees(
        change, (pair(), pair(), positive(), positive(), [torch.zeros(()), torch.zeros(())]), pair()
    )


def test_the_functional_overload_is_chosen_by_the_types_of_the_arguments():
    aten = torch.ops.aten
    assert functional(aten.pow_.Scalar) is aten.pow.Tensor_Scalar
    assert functional(aten.bernoulli_.float) is aten.bernoulli.p
    assert functional(aten.gt.Scalar_out) is aten.gt.Scalar
    assert functional(aten.normal_.default) is aten.normal_functional.default
    assert functional(aten._fused_adamw_.tensor_lr) is aten._fused_adamw.tensor_lr
    assert functional(aten.resize_.default) is not aten.resize_.default
