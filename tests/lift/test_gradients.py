"""Gradients that a lifted loop keeps between its calls, and parameters that were taken from the module before the loop.

The lifted step computes what the loop computes, or raises an error.
"""

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from test_lift import data, everything, make_model, of
from torch import nn, optim

import ztrans as zt
from tests.support.worlds import ALL, clone, default_dtype, distance, slices

ADAMW = of("AdamW", lr=0.05, fused=True)  # which has the bits of the loop


def never(model, optimizer):
    """A loop that never resets gradients, so each call adds to those of the calls before."""

    def loop_step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return loop_step


def at_the_end(model, optimizer):
    plain = never(model, optimizer)

    def loop_step(x, y):
        loss = plain(x, y)
        optimizer.zero_grad()
        return loss

    return loop_step


def to_zeros(model, optimizer):
    plain = never(model, optimizer)

    def loop_step(x, y):
        optimizer.zero_grad(set_to_none=False)
        return plain(x, y)

    return loop_step


def by_hand(model, optimizer):
    plain = never(model, optimizer)

    def loop_step(x, y):
        for p in model.parameters():
            p.grad = None
        return plain(x, y)

    return loop_step


def every_second(model, optimizer):
    """A loop that takes its step after the first half of the batch, and keeps the second half's gradient."""

    def loop_step(x, y):
        F.mse_loss(model(x[:6]), y[:6]).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[6:]), y[6:])
        loss.backward()
        return loss

    return loop_step


def compare(make_loop, make=make_model, make_optimizer=ADAMW, ranks=1, stage=3, before=0, **how):
    """Run the loop, and the lifted step on a copy. Returns the largest distance of losses, state and gradients."""
    model = make()
    optimizer = make_optimizer(model)
    for batch in data(steps=before):
        never(model, optimizer)(*batch)
    lifted_model = make()
    lifted_optimizer = make_optimizer(lifted_model)
    (
        lifted_model.load_state_dict(model.state_dict()),
        lifted_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    )
    for p, q in zip(model.parameters(), lifted_model.parameters()):
        q.grad = None if p.grad is None else p.grad.clone()
    plain, lifted_loop = make_loop(model, optimizer), make_loop(lifted_model, lifted_optimizer)
    step, state = zt.lift(lifted_loop, lifted_model, lifted_optimizer, **how)
    run = zt.Step(step)
    if ranks > 1:
        run = zt.chain(zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage), *ALL)(step)
        lowered = run.lower(state, *slices(data()[0], ranks)[0])
        zt.ir.check(lowered.graph)
    state, worst = run.shard(state) if ranks == 1 else clone(state), 0.0
    for x, y in data():
        want = plain(x, y).detach()
        state, got = (
            run(state, x, y) if ranks == 1 else lowered.lockstep(state, slices((x, y), ranks))
        )
        worst = max(worst, distance(torch.stack(got).mean() if ranks > 1 else got, want))
    zt.write_back(lifted_model, lifted_optimizer, state)
    mine, theirs = everything(lifted_model, lifted_optimizer), everything(model, optimizer)
    worst = max(worst, distance({k: mine[k] for k in theirs}, theirs))
    assert not any(mine[k].any() for k in mine.keys() - theirs.keys()), (
        "state that only the lifted side has must still be zero"
    )
    if how.get("carry_grads"):
        for p, q in zip(model.parameters(), lifted_model.parameters()):
            worst = max(
                worst, distance(q.grad, p.grad) if p.grad is not None else float(q.grad is not None)
            )
    return worst


def test_a_loop_that_never_resets_is_refused():
    """Without the error the step would compute as if the loop reset them: a loss of 1.275 instead of 1.232."""
    with pytest.raises(
        ValueError,
        match=r"adds to the gradient.* for 0.weight(?s:.)*test_gradients.py:\d+(?s:.)*carry_grads=True",
    ):
        compare(never)
    with pytest.raises(ValueError, match=r"adds to the gradient"):
        compare(every_second)


@pytest.mark.parametrize("make_loop", [at_the_end, by_hand])
def test_a_loop_that_resets_its_gradients_is_lifted_unchanged(make_loop):
    assert compare(make_loop) == 0


@pytest.mark.parametrize("has_gradients", [False, True], ids=["new", "before lift"])
@pytest.mark.parametrize("value", [None, 0.0])
def test_a_loop_without_an_optimizer_may_reset_gradients_after_its_backward(value, has_gradients):
    """Nobody reads them after the call, whether they are None or zeros then."""
    model = nn.Linear(6, 1)
    if has_gradients:
        model(torch.ones(1, 6)).sum().backward()

    def loop_step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad = None if value is None else torch.full_like(p, value)
        return loss

    step, state = zt.lift(loop_step, model)
    x, y = torch.ones(2, 6), torch.ones(2, 1)
    _, loss = zt.Step(step)(state, x, y)
    assert torch.equal(loss, F.mse_loss(model(x), y))


def test_a_loop_without_an_optimizer_that_never_resets_is_refused():
    model = nn.Linear(6, 1)

    def loop_step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    step, state = zt.lift(loop_step, model)
    with pytest.raises(ValueError, match=r"adds to the gradient.* for weight"):
        zt.Step(step).trace(state, torch.ones(2, 6), torch.ones(2, 1))


@pytest.mark.slow
def test_carry_grads_carries_gradients_in_the_state():
    assert compare(never, carry_grads=True) == 0
    assert compare(never, carry_grads=True, before=2) == 0
    assert compare(every_second, carry_grads=True, before=1) == 0
    assert compare(at_the_end, carry_grads=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_carried_on_several_ranks(stage):
    with default_dtype(torch.float64):
        assert compare(never, carry_grads=True, ranks=3, stage=stage) < 1e-12
        assert (
            compare(
                never,
                make_optimizer=of("SGD", lr=0.1),
                carry_grads=True,
                before=1,
                ranks=2,
                stage=stage,
            )
            < 1e-12
        )


def test_a_loop_may_step_before_its_backward():
    """Its first call has no gradients, and updates nothing. The second call has some."""

    def early(model, optimizer):
        def loop_step(x, y):
            optimizer.step()
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return loop_step

    with pytest.raises(ValueError, match=r"reads the gradient.* for 0.weight"):
        compare(early)
    with pytest.raises(
        ValueError,
        match=r"no gradient for .*weight. With carry_grads=True(?s:.)*step\(\) is called before at .*test_gradients",
    ):
        compare(early, carry_grads=True)
    assert compare(early, before=1, carry_grads=True) == 0


class Partly(nn.Module):
    """A module of which one layer is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.used(x)


DECAY = of("AdamW", lr=0.05, weight_decay=0.5, fused=True)


@pytest.mark.parametrize("make_loop", [at_the_end, by_hand])
def test_parameters_without_gradients_stay_as_they_are(make_loop):
    """With gradients of zeros instead of None, AdamW would decay their weights."""
    assert compare(make_loop, Partly, DECAY) == 0


REFUSED = {
    "carried": (
        never,
        {"carry_grads": True},
        r"no gradient for unused.weight. With carry_grads=True(?s:.)*freeze the parameter",
    ),
    "zeros": (
        to_zeros,
        {},
        r"calls zero_grad\(set_to_none=False\).*zeros or None.*\n  at .*test_gradients.*\nCall zero_grad\(\)",
    ),
}


@pytest.mark.parametrize("make_loop, how, message", REFUSED.values(), ids=REFUSED)
def test_a_gradient_that_is_zeros_or_none_is_refused(make_loop, how, message):
    """The untouched loop has zeros or None, as earlier calls have reached the parameter or not."""
    with pytest.raises(ValueError, match=message):
        compare(make_loop, Partly, DECAY, **how)


def clipped(make_loop):
    """A loop that clips its gradients, and adds to each, before the optimizer steps."""

    def with_clips(model, optimizer):
        def step():
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.add_(0.01)
            optimizer.step()

        return make_loop(model, types.SimpleNamespace(zero_grad=optimizer.zero_grad, step=step))

    return with_clips


def test_what_a_loop_does_to_gradients_that_are_none_has_no_effect():
    with default_dtype(torch.float64):
        assert compare(clipped(at_the_end), Partly, DECAY) == 0


def test_a_loop_may_compute_its_gradients_from_those_of_backward():
    def halves(model, optimizer):
        def loop_step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / 2
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return loop_step

    assert compare(halves, Partly, DECAY) == 0


def test_carried_gradients_may_be_set_to_zeros():
    assert compare(to_zeros, before=1, carry_grads=True) == 0


def test_gradients_from_before_lift_are_refused():
    with pytest.raises(ValueError, match=r"adds to the gradient(?s:.)*and before lift"):
        compare(at_the_end, before=1)


READS = {
    "a function": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "in place": lambda model: [p.grad.mul_(0.5) for p in model.parameters()],
    "an operator": lambda model: [p.grad * 2 for p in model.parameters()],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_the_gradients_of_an_earlier_call_is_refused(read):
    def reads(model, optimizer):
        def loop_step(x, y):
            read(model)
            optimizer.zero_grad()
            return never(model, optimizer)(x, y)

        return loop_step

    with pytest.raises(
        ValueError,
        match=r"reads the gradient that an earlier call has left for 0.weight(?s:.)*test_gradients.py:\d+",
    ):
        compare(reads, before=1)


def test_a_loop_that_writes_its_gradients_itself_needs_no_zero_grad():

    def written(model, optimizer):
        def loop_step(x, y):
            loss = F.mse_loss(model(x), y)
            for p, g in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters()))
            ):
                p.grad = g
            optimizer.step()
            return loss

        return loop_step

    assert compare(written) == 0


def test_an_optimizer_may_step_during_backward():
    def hooked(model, optimizer):
        def step(p):
            optimizer.step()
            optimizer.zero_grad()

        last = model[0].weight
        last.register_post_accumulate_grad_hook(step)

        def loop_step(x, y):
            loss = F.mse_loss(model[3](model[2](F.linear(x, model[0].weight))), y)
            loss.backward()
            return loss

        return loop_step

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Identity(), nn.Tanh(), nn.Identity())

    assert compare(hooked, make) == 0


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW([p], lr=0.01, foreach=True),
        lambda p: torch.optim.NAdam([p], lr=0.01),
    ],
    ids=["sgd", "foreach", "nadam"],
)
def test_an_optimizer_for_each_parameter_may_step_in_its_hook(make_optimizer):
    """What the hook of a parameter calls is traced as what the loop calls, so rates are inputs there too."""

    def update(optimizer, p):
        optimizer.step()
        optimizer.zero_grad()

    def lifted():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizers = []
        for p in model.parameters():
            optimizers.append(make_optimizer(p))
            p.register_post_accumulate_grad_hook(functools.partial(update, optimizers[-1]))

        def loop_step(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return model, loop_step, zt.lift(loop_step, model, optimizers)

    x = torch.arange(24.0).view(4, 6) / 24
    model, loop_step, _ = lifted()
    _, _, (step, state) = lifted()
    lowered = zt.Step.of(step).lower(state, x)
    for _ in range(3):
        loop_step(x)
        state, _ = lowered.lockstep(state, [(x,)])
    assert distance(state["params"], dict(model.named_parameters())) < 1e-6


def held(model, optimizer):
    """A loop that uses tensors of the module as they were taken from it before."""
    params, mean = list(model.parameters()), model[1].running_mean

    def loop_step(x, y):
        for p in params:
            p.grad = None
        loss = F.mse_loss(model(x), y) + 0.1 * params[0].square().sum() + mean.sum()
        (gradient,) = torch.autograd.grad(loss, params[:1], retain_graph=True)
        loss.backward()
        params[0].grad.add_(gradient, alpha=0.5)
        nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        with torch.no_grad():
            params[2].mul_(0.9)
            mean.mul_(0.5)
        params[3].data = params[3].data.clamp(-0.1, 0.1)
        return loss

    return loop_step


def make_normed():
    return make_model(norm=nn.BatchNorm1d)


def test_tensors_taken_before_the_loop_are_those_of_the_state():
    assert compare(held, make=make_normed) < 1e-6


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


@pytest.mark.parametrize("by_grad", [False, True])
def test_a_parameter_taken_before_the_loop_may_not_go_to_an_autograd_function(by_grad):
    """PyTorch calls it with the tensor itself, so its gradient would be that of the module's own parameter."""
    model = make_model()
    optimizer, params = of("SGD", lr=0.1)(model), list(model.parameters())

    def loop_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + Doubled.apply(params[0]).sum()
        if by_grad:
            for p, g in zip(params, torch.autograd.grad(loss, params)):
                p.grad = g
        else:
            loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"uses 0.weight as it was taken from the module before(?s:.)*test_gradients.py:\d+",
    ):
        zt.Step(step).trace(state, *data()[0])
    assert all(p.grad is None for p in params)


def switched(model, optimizer, last):
    """A loop that freezes the first layer, before its step or (with `last`) after it."""
    plain = at_the_end(model, optimizer)

    def loop_step(x, y):
        if not last:
            model[0].requires_grad_(False)
        loss = plain(x, y)
        if last:
            model[0].requires_grad_(False)
        return loss

    return loop_step


@pytest.mark.parametrize("last", [False, True])
def test_a_loop_that_leaves_a_parameter_frozen_is_refused(last):
    with pytest.raises(
        ValueError,
        match=r"leaves requires_grad=False on 0.weight(?s:.)*or set it back before its end",
    ):
        compare(lambda m, o: switched(m, o, last))


def test_a_loop_may_freeze_parameters_until_its_end():
    def set_back(model, optimizer):
        plain = switched(model, optimizer, last=False)

        def loop_step(x, y):
            loss = plain(x, y)
            model[0].requires_grad_(True)
            return loss

        return loop_step

    assert compare(set_back) == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_is_refused_and_not_changed(fused):
    model = make_model()
    optimizer, scaler = of("AdamW", lr=0.05, fused=fused)(model), torch.amp.GradScaler("cpu")

    def loop_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    with pytest.raises(
        ValueError, match=r"uses a GradScaler(?s:.)*test_gradients.py:\d+(?s:.)*bfloat16"
    ):
        zt.Step(step).trace(state, *data()[0])
    loop_step(*data()[0])  # the plain loop can still use the scaler
    assert not isinstance(scaler._scale, torch._subclasses.FakeTensor)


def loop_with(scaler):
    """A loop that scales its loss, as a function of a model and an optimizer."""

    def make(model, optimizer):
        def loop_step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        return loop_step

    return make


def test_a_disabled_grad_scaler_is_allowed():
    assert compare(loop_with(torch.amp.GradScaler("cpu", enabled=False))) == 0


def test_a_disabled_grad_scaler_may_be_given_to_lift():
    model = nn.Linear(6, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step, state = zt.lift(loop_with(scaler)(model, optimizer), model, optimizer, scaler=scaler)
    state, _ = zt.Step(step)(state, torch.ones(2, 6), torch.ones(2, 1))
    zt.write_back(model, optimizer, state, scaler=scaler)
    assert model.weight.equal(state["params"]["weight"])


def test_a_scaler_without_parameters_or_without_a_scale_in_the_state_is_refused():
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(
        ValueError, match="lift: the model has no parameters, so there is no gradient"
    ):
        zt.lift(lambda x: x, nn.Identity(), scaler=scaler)
    model = nn.Linear(6, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    _, state = zt.lift(lambda x: x, model, optimizer)
    with pytest.raises(
        ValueError, match=r"the state has no scale, because its loop was lifted without"
    ):
        zt.write_back(model, optimizer, state, scaler=scaler)


def test_a_setting_of_the_scaler_that_has_changed_is_named():
    model = nn.Linear(6, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    step, state = zt.lift(loop_with(scaler)(model, optimizer), model, optimizer, scaler=scaler)
    batch = torch.ones(2, 6), torch.ones(2, 1)
    lowered = zt.Step(step).lower(state, *batch)
    scaler.set_growth_interval(7)
    with pytest.raises(TypeError, match=r"\* a setting of the scaler has changed"):
        lowered.lockstep(state, [batch])


def test_a_state_of_another_module_is_not_written_back():
    model, other = nn.Linear(6, 1), nn.Sequential(nn.Linear(6, 1))
    _, state = zt.lift(lambda x: x, model)
    with pytest.raises(
        ValueError, match=r"the state has no parameter .0\.weight., and the module has"
    ):
        zt.write_back(other, (), state)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_one_loop_accumulates_and_another_one_steps(kind):
    """Both carry the gradients, in one state."""

    def loops(model):
        optimizer = getattr(optim, kind)(model.parameters(), lr=0.1, weight_decay=0.1)

        def accumulate(x):
            loss = model[0](x).square().mean()
            loss.backward()
            return loss

        def update():
            optimizer.step()
            optimizer.zero_grad()
            return torch.zeros(())

        return optimizer, accumulate, update

    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2)])
    plain[1].requires_grad_(False)
    model = copy.deepcopy(plain)
    _, accumulate, update = loops(plain)
    optimizer, *both = loops(model)
    lifted_accumulate, _ = zt.lift(both[0], model, carry_grads=True)
    lifted_update, state = zt.lift(both[1], model, optimizer, carry_grads=True)
    lifted_accumulate, lifted_update = zt.Step.of(lifted_accumulate), zt.Step.of(lifted_update)
    state = lifted_update.shard(state)
    for i in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        state, loss = lifted_accumulate(state, x)
        assert loss.item() == pytest.approx(accumulate(x).item(), rel=1e-6)
        if i % 2:
            state, _ = lifted_update(state)
            update()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(state["params"][name], p.detach())
    assert len(lifted_accumulate._cache) == 1 and len(lifted_update._cache) <= 2


def in_some_calls(model, optimizer):
    def loop_step(x, y, steps):
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        if steps:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return loop_step


@pytest.mark.slow
def test_a_loop_steps_in_some_calls_as_it_is_told():
    """Each of the two programs carries the gradients, on one rank and on several."""
    batches = [(*batch, k % 2 == 1) for k, batch in enumerate(data(steps=4))]
    with default_dtype(torch.float64):
        batches = [(x.double(), y.double(), steps) for x, y, steps in batches]
        model, lifted = make_model(), make_model()
        optimizer, lifted_optimizer = ADAMW(model), ADAMW(lifted)
        step, state = zt.lift(
            in_some_calls(lifted, lifted_optimizer), lifted, lifted_optimizer, carry_grads=True
        )
        alone, parts = zt.Step(step), copy.deepcopy(state)
        sharded = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *ALL)(step)
        rows = [[(x[k::2], y[k::2], steps) for k in range(2)] for x, y, steps in batches]
        programs = {steps: sharded.lower(parts, *rows[0][0][:2], steps) for steps in (False, True)}
        for batch, ranks in zip(batches, rows):
            state, loss = alone(state, *batch)
            assert torch.equal(loss, in_some_calls(model, optimizer)(*batch))
            parts, _ = programs[batch[2]].lockstep(parts, ranks)
    truth = dict(model.named_parameters())
    assert distance(state["params"], truth) == 0 and distance(parts["params"], truth) < 1e-12


def test_gradients_on_the_host_are_written_to_parameters_on_another_device():
    model = nn.Linear(2, 2, device="meta")
    values = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    zt.write_back(model, (), {"params": values, "optimizer": {}, "grads": values})
    assert all(p.grad.device == p.device for p in model.parameters())
