"""`overlap_grads`: reductions start as soon as their gradients are computed."""

import itertools

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.net import lower
from tests.support.programs import CASES, mlp_momentum
from tests.support.worlds import on_ranks, sharded
from ztrans.ir import Provenance
from ztrans.ir.collectives import REDUCE_SCATTER, WAIT, reduce, wait
from ztrans.ir.graph import Eqn, Graph, Partial, Split, Var
from ztrans.ir.op_facts import ADD, is_matmul, is_view_or_cast
from ztrans.planning import make_plan as plans
from ztrans.planning.cluster import Link
from ztrans.planning.limit import DoesNotFit
from ztrans.planning.solver.validate import ScheduleError


def test_the_program_prints(golden):
    """Autograd casts both gradients at the end of backward. In the program each cast follows its matmul."""
    assert str(lower(zt.overlap_grads())) == golden


def test_the_difference_prints(golden):
    assert zt.ir.diff(lower(), lower(zt.overlap_grads())) == golden


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adam", "cast_inside", "cast_outside", "autocast"])
def test_every_reduction_starts_where_its_last_member_is_born(name):
    _, _, lowered = sharded(CASES[name], 4, steps=1, transforms=(zt.overlap_grads(),))
    eqns = lowered.graph.eqns
    at = {}
    producer = {}
    for i, e in enumerate(eqns):
        at.update(dict.fromkeys(e.outs, i))
        producer.update(dict.fromkeys(e.outs, e))
    readers: dict = {}
    for e in eqns:
        for v in e.ins:
            readers.setdefault(v, []).append(e)

    def born(v):
        while is_view_or_cast(producer[v]) and len(readers[v]) == 1:
            v = producer[v].ins[0]
        return at[v]

    for i, e in enumerate(eqns):
        if e.op is REDUCE_SCATTER and e.provenance.role == "grad":
            between = eqns[max(map(born, e.ins)) + 1 : i]
            # Only views, casts, other collectives and eager updates are between a gradient's birth and its reduction.
            moved = (
                is_view_or_cast(b) or b.provenance or str(b.op) == "wait" or b.region == "update"
                for b in between
            )
            assert all(moved), (name, e)


@pytest.mark.slow
def test_the_size_of_a_bucket_can_be_given():
    def sizes(**options):
        _, _, lowered = sharded(
            CASES["gpt_adam"], 4, steps=1, transforms=(zt.overlap_grads(**options),)
        )
        starts = [
            e for e in lowered.graph.eqns if e.op is REDUCE_SCATTER and e.provenance.role == "grad"
        ]
        return [sum(v.numel * v.dtype.itemsize for v in e.ins) for e in starts], starts  # in bytes

    assert all(len(e.ins) == 1 for e in sizes(bucket=0)[1]), "each gradient alone"
    for cap in (1000, 4000):
        bytes_sent, eqns = sizes(bucket=cap)
        assert all(size <= cap or len(e.ins) == 1 for size, e in zip(bytes_sent, eqns))


def deep(layers: int, held: range = range(0)):
    """A step with a deep chain of matmuls, of which the layers `held` are frozen, and its state."""

    def step(state, x):
        def loss(free):
            h = x
            for i in range(layers):
                h = torch.tanh(h @ {**free, **state["held"]}[f"w{i:02}"])
            return h.square().mean()

        grads, value = grad_and_value(loss)(state["free"])
        return {**state, "free": {k: w - 0.1 * grads[k] for k, w in state["free"].items()}}, value

    weights = {f"w{i:02}": torch.zeros(8, 8) for i in range(layers)}
    named = {f"w{i:02}" for i in held}
    return step, {
        "free": {k: w for k, w in weights.items() if k not in named},
        "held": {k: w for k, w in weights.items() if k in named},
    }


SLOW_TO_START = zt.cluster(
    "cpu", dp=Link("wire", 1.0, 1e15)
)  # a latency of one second, so few messages are best


def gaps(lowered) -> list[int]:
    """The matmuls from the first gradient's birth to the first reduction, and then between the following ones."""
    passed = 0
    births = {}
    starts = []
    for e in zt.ir.check(lowered.graph).eqns:
        passed += is_matmul(e)
        births.update(dict.fromkeys(e.outs, passed))
        if e.op is REDUCE_SCATTER and e.provenance.role == "grad":
            starts += [passed] if starts else [min(births[v] for v in e.ins), passed]
    return [b - a for a, b in itertools.pairwise(starts)]


@pytest.mark.slow
@pytest.mark.parametrize("most, fewest", [(8, 9), (4, 18), (2, 35)])
@pytest.mark.parametrize("bucket", ["auto", 1 << 30])
def test_at_most_the_given_number_of_matmuls_is_between_two_reductions(most, fewest, bucket):
    """There are 36 gradients, two matmuls apart. Without the limit, one message for all would be the cheapest."""
    step, state = deep(36)
    options = {"bucket": bucket} if most == 8 else {"bucket": bucket, "max_matmuls_between": most}
    transform = zt.chain(
        zt.shard_params(zt.AbstractMesh(dp=4)),
        zt.overlap_grads(**options),
        zt.prefetch(memory=1 << 30),
    )
    lowered = transform(step).lower(state, torch.zeros(2, 8), cluster=SLOW_TO_START)
    assert max(gaps(lowered)) <= most
    assert fewest <= len(gaps(lowered)) <= fewest + 2, (
        "there are no more messages than the limit needs"
    )


def test_without_a_limit_on_matmuls_one_message_is_the_cheapest():
    step, state = deep(36)
    overlap = zt.overlap_grads(max_matmuls_between=None)
    transform = zt.chain(
        zt.shard_params(zt.AbstractMesh(dp=4)), overlap, zt.prefetch(memory=1 << 30)
    )
    assert gaps(transform(step).lower(state, torch.zeros(2, 8), cluster=SLOW_TO_START)) == [70]


def test_the_limit_on_matmuls_does_not_apply_where_nothing_is_reduced():
    """Layers 10 to 29 are frozen. Their twenty matmuls in backward have no gradient to reduce."""
    step, state = deep(36, range(10, 30))
    transform = zt.chain(
        zt.shard_params(zt.AbstractMesh(dp=4)), zt.overlap_grads(), zt.prefetch(memory=1 << 30)
    )
    lowered = transform(step).lower(state, torch.zeros(2, 8), cluster=SLOW_TO_START)
    (wide,) = (gap for gap in gaps(lowered) if gap > 8)
    assert 20 <= wide <= 22 + 8


@pytest.mark.parametrize("most", [1, 2, 8])
def test_the_limit_on_matmuls_holds_in_a_gpt(most):
    overlap = zt.overlap_grads(bucket=1 << 30, max_matmuls_between=most)
    shard = zt.shard_params(zt.AbstractMesh(dp=4))
    ahead = zt.prefetch(memory=1 << 30)
    lowered = on_ranks(CASES["gpt_adam"], 4, shard, overlap, ahead, cluster=SLOW_TO_START)
    assert max(gaps(lowered)) <= max(most, 3), (
        "between two gradients attention has the product before its backward, that kernel, and the next gradient"
    )


@pytest.mark.parametrize("broken", ["realise", "validate"])
def test_an_invalid_order_is_replaced_by_the_order_as_written(broken, monkeypatch):
    """If a bug makes the schedule invalid, the program does not change, a note says so, and the plan can be saved."""
    case = (
        mlp_momentum()
    )  # lowered programs are kept by case, and no other test may be given this one
    shard = zt.shard_params(zt.AbstractMesh(dp=4))
    plain = on_ranks(case, 4, shard)
    if broken == "realise":
        whole = plans.realise
        cut = lambda g: g.replace(eqns=tuple(e for e in g.eqns if e.op is not WAIT))
        monkeypatch.setattr(plans, "realise", lambda *a: cut(whole(*a)))
    else:
        monkeypatch.setattr(
            plans,
            "validate",
            lambda *a: (_ for _ in ()).throw(ScheduleError("out of order: Bucket")),
        )
    lowered = on_ranks(case, 4, shard, zt.overlap_grads(), zt.prefetch())
    assert [str(e.outs) for e in zt.ir.check(lowered.graph).eqns] == [
        str(e.outs) for e in plain.graph.eqns
    ]
    (note,) = lowered.plan.notes
    reason = {"realise": "is read before it is bound", "validate": "out of order: Bucket"}[broken]
    assert note.startswith("the order is as written: the planned one is not valid: ")
    assert reason in note and note in " ".join(str(lowered.plan).split())
    monkeypatch.undo()
    assert str(lowered.with_plan(lowered.plan)) == str(lowered)


@pytest.mark.parametrize("remat", [(), (zt.remat(memory=1),)])
def test_an_invalid_order_is_no_way_around_the_limit(remat, monkeypatch):
    """The order as written needs more than the limit, so it is refused too, also where the plan may recompute."""
    case = mlp_momentum()
    ahead = zt.prefetch(memory=1)
    monkeypatch.setattr(plans, "_check_near_limit", lambda *a: None)
    monkeypatch.setattr(
        plans,
        "validate",
        lambda *a: (_ for _ in ()).throw(ScheduleError("out of order: Bucket")),
    )
    with pytest.raises(DoesNotFit, match="is less than the step needs in any order tried"):
        on_ranks(case, 4, zt.shard_params(zt.AbstractMesh(dp=4)), ahead, *remat)


@pytest.mark.parametrize("options, message", [
    ({"bucket": "big"}, "overlap_grads: bucket='big'; it is a number of bytes, or 'auto'."),
    ({"bucket": -1}, "overlap_grads: bucket=-1; it is a number of bytes, or 'auto'."),
    ({"bucket": True}, "overlap_grads: bucket=True; it is a number of bytes, or 'auto'."),
    ({"bucket": 2.5}, "overlap_grads: bucket=2.5; it is a number of bytes, or 'auto'."),
    ({"bucket": None}, "overlap_grads: bucket=None; it is a number of bytes, or 'auto'."),
    ({"max_in_flight": -1}, "overlap_grads: max_in_flight=-1; it is a number of bytes, or None."),
    ({"max_matmuls_between": 0}, "overlap_grads: max_matmuls_between=0; it is a number of matmuls, at least 1, or None."),
    ({"max_matmuls_between": True}, "overlap_grads: max_matmuls_between=True; it is a number of matmuls, at least 1, or None."),
    ({"update": "soon"}, "overlap_grads: update='soon'; use 'eager' or 'last'."),
])  # fmt: skip
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError) as caught:
        zt.overlap_grads(**options)
    assert str(caught.value) == message


def test_new_statistics_of_batch_norms_share_messages():
    names = ("mean0", "variance0", "mean1", "variance1")

    def step(state, x):
        def loss_of(w):
            new = {name: state[name].clone() for name in names}
            for k in "01":
                mean = new[f"mean{k}"]
                variance = new[f"variance{k}"]
                y = torch.nn.functional.batch_norm(x @ w, mean, variance, training=True)
            return y.square().mean(), new

        grad, (_, new) = torch.func.grad_and_value(loss_of, has_aux=True)(state["w"])
        return {"w": state["w"] - grad, **new}, None

    state = {"w": torch.randn(8, 8)} | {name: torch.ones(8) for name in names}

    def messages(*transforms):
        chain = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=2), *transforms)
        graph = chain(step).lower(state, torch.randn(4, 8)).graph
        return [len(e.ins) for e in graph.eqns if e.op is REDUCE_SCATTER]

    assert messages() == [1] * 5 and max(messages(zt.overlap_grads())) >= 4


def test_a_gradient_may_be_the_sum_of_a_thousand_terms():
    """As that of a weight of a recurrent network: each use adds a term, and each sum reads the one before."""
    terms = [Var(f"x{k}", torch.float32, (4,), (Partial("dp", "mean"),)) for k in range(1201)]
    eqns = []
    total = terms[0]
    for k, term in enumerate(terms[1:]):
        longer = Var(f"s{k}", torch.float32, (4,), term.layout)
        eqns.append(Eqn(ADD, (total, term), (longer,), region="backward"))
        total = longer
    of_w = Provenance("grad", ("w",), "dp")
    start = reduce([total], ["g"], "dp", "mean", Split("dp"), provenance=of_w, region="backward")
    end = wait(start.out, region="backward")
    graph = Graph("f", tuple(terms), (*eqns, start, end), (end.out,), 0, mesh=(("dp", 2),))
    hints = {e.hint for e in zt.overlap_grads().rewrite(graph).eqns if e.op is ADD}
    assert hints == {"birth"}
