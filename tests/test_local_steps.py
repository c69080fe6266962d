"""`zt.local_steps`: replicas that train apart and are averaged now and then, beside loops written by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import loop_of
from tests.support.processes import run_ranks
from tests.support.worlds import ALL, distance

HOSTS = zt.AbstractMesh(host=2, dp=2)
LR = 0.02


def first_state() -> dict:
    draw = torch.Generator().manual_seed(0)
    params = {"up": torch.randn(6, 5, generator=draw), "down": torch.randn(5, generator=draw)}
    return {"params": params, "moved": {k: torch.zeros_like(p) for k, p in params.items()}}


def loss_of(params: dict, x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x @ params["up"]) @ params["down"] - x[:, 0]).square().mean()


def momentum_step(state: dict, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
    grads, loss = torch.func.grad_and_value(loss_of)(state["params"], x)
    moved = {k: 0.9 * m + grads[k] for k, m in state["moved"].items()}
    return {
        "params": {k: p - LR * moved[k] for k, p in state["params"].items()},
        "moved": moved,
    }, loss


def sgd_step(state: dict, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
    grads, loss = torch.func.grad_and_value(loss_of)(state["params"], x)
    params = {k: p - LR * grads[k] for k, p in state["params"].items()}
    return {**state, "params": params}, loss


def batches(steps: int) -> list[list[torch.Tensor]]:
    """The batch of each of four ranks in each step."""
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 6, generator=draw) for _ in range(4)] for _ in range(steps)]


def on_hosts(step, *, stage: int = 3, transforms=ALL, **options) -> zt.Step:
    shard = zt.shard_params(HOSTS, stage=stage, independent_axis="host", **options)
    return zt.chain(shard, *transforms)(step)


class Trained:
    """Local steps that run in lock-step. `state` has all replicas as the first dim of their leaves."""

    def __init__(self, local: zt.LocalSteps, state: dict | None = None) -> None:
        self.local = local
        self.state = local.init(state or first_state())
        self.first = self.state
        self.programs: dict[zt.Step, zt.stages.Lowered] = {}
        self.losses: list[list[torch.Tensor]] = []

    def run(self, xs: list[torch.Tensor], step: zt.Step) -> None:
        if step not in self.programs:
            self.programs[step] = step.lower(self.first, xs[0])
        self.state, losses = self.programs[step].lockstep(self.state, [(x,) for x in xs])
        self.losses.append(losses)

    def train(self, steps: int, start: int = 0) -> None:
        for i, xs in enumerate(batches(start + steps)[start:], start):
            self.run(xs, self.local.at(i))

    def over_hosts(self, step: zt.Step) -> int:
        """The bytes between hosts of a step that has run."""
        cost = self.programs[step].cost_analysis()
        return sum(received for (axis, _), received in cost.wire if "host" in axis)


def by_hand(step, steps: int, h: int, outer=None, parts: list[set[str]] | None = None):
    """Two hosts, each a plain loop on the samples of its ranks, and the average of all parameters, or of some."""
    hosts = [first_state(), first_state()]
    shared = first_state()["params"]
    momentum = {k: torch.zeros_like(p) for k, p in shared.items()}
    for i, xs in enumerate(batches(steps)):
        before = [host["params"] for host in hosts]
        pairs = zip(hosts, (torch.cat(xs[:2]), torch.cat(xs[2:])))
        hosts = [step(host, x)[0] for host, x in pairs]
        done = i % h + 1
        if parts is None:
            due = set(shared) if done == h else set()
            sent = [host["params"] for host in hosts]
        else:
            due = next((p for k, p in enumerate(parts, 1) if done == k * h // len(parts)), set())
            sent = before
        for k in due:
            mean = (sent[0][k] + sent[1][k]) / 2
            if outer is not None:
                momentum[k] = 0.9 * momentum[k] + (shared[k] - mean)
                mean = shared[k] - 0.7 * (shared[k] - mean + 0.9 * momentum[k])
                shared[k] = mean
            for host, old in zip(hosts, sent):
                host["params"] = {**host["params"], k: mean + (host["params"][k] - old[k])}
    return hosts, shared, momentum


def replica(tree: dict, host: int) -> dict:
    return pytree.tree_map(lambda x: x[host], tree)


def shared_by_hosts(path: str, leaf: torch.Tensor):
    return "dp" if path.startswith("state.") else ("host", "dp")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("outer", [None, zt.nesterov(lr=0.7, momentum=0.9)], ids=["mean", "diloco"])
def test_replicas_train_apart_and_are_averaged_after_h_steps(stage, outer):
    run = Trained(zt.local_steps(on_hosts(momentum_step, stage=stage), 3, outer))
    inner, sync, _ = run.local
    run.train(6)
    hosts, shared, momentum = by_hand(momentum_step, 6, 3, outer)
    for host in range(2):
        assert distance(replica(run.state["state"], host), hosts[host]) < 1e-5
    if outer is not None:
        for host in range(2):
            assert distance(replica(run.state["outer"], host), shared) < 1e-5
            assert distance(replica(run.state["momentum"], host), momentum) < 1e-5
    for p in run.state["state"]["params"].values():
        assert torch.equal(p[0], p[1])
    assert not any(torch.equal(*m) for m in run.state["state"]["moved"].values())
    run.train(1, start=6)
    assert not any(torch.equal(*p) for p in run.state["state"]["params"].values())

    parts = 1 if stage == 0 else 2
    assert run.over_hosts(inner) == 0
    assert run.over_hosts(sync) == (6 // parts * 5 + -(-5 // parts)) * 4, "a rank's own part"
    every_step = zt.shard_params(HOSTS, stage=stage, replicate_axis="host")(momentum_step)
    cost = every_step.lower(first_state(), batches(1)[0][0]).cost_analysis()
    assert run.over_hosts(sync) == cost.over("host", "grad"), "in one of h steps"


@pytest.mark.parametrize("outer", [None, zt.nesterov(lr=0.7, momentum=0.9)], ids=["mean", "diloco"])
def test_parts_are_averaged_one_after_the_other_as_they_were_before_a_step(outer):
    run = Trained(zt.local_steps(on_hosts(momentum_step), 5, outer, parts=2))
    run.train(11)
    hosts, shared, momentum = by_hand(momentum_step, 11, 5, outer, parts=[{"up"}, {"down"}])
    for host in range(2):
        assert distance(replica(run.state["state"], host), hosts[host]) < 1e-5
        if outer is not None:
            assert distance(replica(run.state["outer"], host), shared) < 1e-5
            assert distance(replica(run.state["momentum"], host), momentum) < 1e-5
    names = [run.local.at(i).__name__ for i in range(6)]
    part = "momentum_step_and_part_{}_of_2"
    plain = "momentum_step"
    assert names == [plain, part.format(1), plain, plain, part.format(2), plain]
    of_parts = [run.over_hosts(step) for step in run.local.parts]
    run.run(batches(1)[0], run.local.sync)
    assert sum(of_parts) == run.over_hosts(run.local.sync) > max(of_parts)
    for p in run.state["state"]["params"].values():
        assert torch.equal(p[0], p[1]), "sync averages everything"


def wide_step(state: dict, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
    def loss_of(params):
        return torch.tanh(torch.tanh(x @ params["a"]) @ params["b"]).square().mean()

    grads, loss = torch.func.grad_and_value(loss_of)(state["params"])
    return {"params": {k: p - LR * grads[k] for k, p in state["params"].items()}}, loss


def test_the_message_of_a_part_is_hidden_under_the_step():
    """It takes 8 ms, of a step of 245 ms. The message of `sync` follows the step."""
    wires = dict(host=zt.Link("wire", 1e-5, 1e9), dp=zt.Link("nvlink", 1e-6, 1e11))
    step = on_hosts(wide_step, transforms=(zt.overlap_grads(), zt.prefetch()))
    local = zt.local_steps(step, 2, zt.nesterov(0.7), parts=2)
    first = local.init({"params": {k: torch.empty(2048, 2048, device="meta") for k in ("a", "b")}})
    x = torch.empty(1 << 18, 2048, device="meta")

    def lowered(step: zt.Step) -> zt.stages.Lowered:
        return step.lower(first, x, cluster=zt.cluster("h100", **wires))

    inner, part, sync = map(lowered, (local.inner, local.parts[0], local.sync))
    message = part.cost_analysis().over("host") / 1e9
    assert message > 8e-3
    seconds = [each.timeline().seconds for each in (inner, part, sync)]
    assert seconds[1] - seconds[0] < 0.4 * message < message < seconds[2] - seconds[0]


@pytest.mark.parametrize("stage", range(4))
def test_shared_parameters_may_be_cut_over_all_hosts(stage):
    """Of parts of different values no whole one is made: a host's parameters beside those that all hosts share."""
    outer = zt.nesterov(lr=0.7, momentum=0.9)
    step = on_hosts(momentum_step, stage=stage, axis=shared_by_hosts)
    run = Trained(zt.local_steps(step, 2, outer))
    run.train(4)
    hosts, shared, momentum = by_hand(momentum_step, 4, 2, outer)
    for host in range(2):
        assert distance(replica(run.state["state"], host), hosts[host]) < 1e-5
    assert distance(run.state["outer"], shared) < 1e-5
    assert distance(run.state["momentum"], momentum) < 1e-5
    if stage:
        # A reduce_scatter and a gather over all ranks, each of three of the four parts of 2 x 5 and 2 numbers.
        assert run.over_hosts(run.local.sync) == 2 * 3 * (2 * 5 + 2) * 4
        sent = [
            e.op.name
            for e in run.programs[run.local.sync].graph.eqns
            if "host" in e.kwargs.get("axis", "")
        ]
        assert set(sent) == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize("stage", [0, 3])
def test_averaged_in_every_step_with_rate_1_it_is_the_plain_step(stage):
    run = Trained(zt.local_steps(on_hosts(sgd_step, stage=stage), 1, zt.nesterov(1.0, 0.0)))
    run.train(3)
    plain = first_state()
    for xs, losses in zip(batches(3), run.losses):
        plain, loss = sgd_step(plain, torch.cat(xs))
        assert torch.allclose(torch.stack(losses).mean(), loss)
    for host in range(2):
        assert distance(replica(run.state["state"], host)["params"], plain["params"]) < 1e-6


def test_no_program_depends_on_h():
    step = on_hosts(momentum_step)
    x = batches(1)[0][0]
    texts = []
    for h in (3, 50):
        local = zt.local_steps(step, h, zt.nesterov(0.7), parts=2)
        programs = [local.inner, local.sync, *local.parts]
        texts.append([str(each.trace(local.init(first_state()), x)) for each in programs])
    assert texts[0] == texts[1]
    longer = dataclasses.replace(local, h=60)
    assert longer.sync is local.sync and longer.parts is local.parts
    assert longer.at(29) is local.parts[0] and longer.at(59) is local.parts[1]


@pytest.mark.parametrize("number", [1.5, -1, True, "3"])
def test_a_step_has_a_whole_number(number):
    local = zt.local_steps(on_hosts(momentum_step), 3)
    with pytest.raises(ValueError, match=r"at: number=.*; it is the number of a step, counted"):
        local.at(number)


def test_any_outer_optimizer():
    """An entry of the outer state begins as `outer.init` says."""

    class Adam:
        def init(self, p):
            return {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}

        def __call__(self, params, pseudo_gradient, outer_state):
            new, state = {}, {}
            for k, g in pseudo_gradient.items():
                mean = 0.9 * outer_state[k]["mean"] + 0.1 * g
                square = 0.99 * outer_state[k]["square"] + 0.01 * g.square()
                new[k] = params[k] - 0.1 * mean / (square.sqrt() + 1e-3)
                state[k] = {"mean": mean, "square": square}
            return new, state

    run = Trained(zt.local_steps(on_hosts(sgd_step), 2, Adam()))
    run.train(2)
    (mean, _), _, _ = by_hand(sgd_step, 2, 2)
    start = first_state()["params"]
    g = {k: p - mean["params"][k] for k, p in start.items()}
    _, state = Adam()(start, g, {k: Adam().init(p) for k, p in start.items()})
    expected, _ = Adam()(start, g, {k: Adam().init(p) for k, p in start.items()})
    assert distance(replica(run.state["state"], 1)["params"], expected) < 1e-5
    assert distance(replica(run.state["momentum"], 0), state) < 1e-4


def test_a_lifted_loop():
    """With its scheduler, a frozen layer, a batch norm and an evaluation."""

    def lifted():
        torch.manual_seed(0)
        layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 1)
        model = nn.Sequential(*layers)
        model[2].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)

        return model, optimizer, loop_of(model, optimizer)

    model, optimizer, loop_step = lifted()
    step, first = zt.lift(loop_step, model, optimizer)
    # Each host is one rank: a batch norm of two ranks has the statistics of each, and no plain loop has these.
    shard = zt.shard_params(zt.AbstractMesh(host=2, dp=1), independent_axis="host")
    local = zt.local_steps(zt.chain(shard, *ALL)(step), 2)
    state = local.init(first)
    assert list(state) == ["state"], "a mean needs no outer state"
    hosts = [lifted() for _ in range(2)]
    programs = {each: each.lower(state, batches(1)[0][0]) for each in (local.inner, local.sync)}
    for i, (*xs, _, _) in enumerate(batches(3)):
        rate = 1e-2 / (i + 1)  # as a scheduler sets it
        optimizer.param_groups[0]["lr"] = rate
        state, _ = programs[local.at(i)].lockstep(state, [(x,) for x in xs])
        for (_, own_optimizer, own_step), x in zip(hosts, xs):
            own_optimizer.param_groups[0]["lr"] = rate
            own_step(x)
        if i == 1:
            with torch.no_grad():
                for p, q in zip(*(own.parameters() for own, _, _ in hosts)):
                    p.copy_((p + q) / 2)
                    q.copy_(p)
    for host, (own, _, _) in enumerate(hosts):
        mine = replica(state["state"], host)
        assert distance(mine["params"], dict(own.named_parameters())) < 1e-4
        assert distance(mine["buffers"], dict(own.named_buffers())) < 1e-4
    sent = programs[local.sync].cost_analysis().over("host")
    assert sent == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("outer", [None, zt.nesterov(1.0, 0.0)], ids=["mean", "outer"])
def test_hosts_with_equal_batches_compute_what_one_computes(outer):
    """In parts, also if the step writes its parameters in place, as an optimizer does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop_step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def in_place_step(state, x):
        new, loss = sgd_step(state, x)
        return {
            **new,
            "params": {k: p.copy_(new["params"][k]) for k, p in state["params"].items()},
        }, loss

    step, first = zt.lift(loop_step, model, optimizer)
    for plain, state in ((step, first), (in_place_step, first_state())):
        truth = pytree.tree_map(torch.clone, state)
        run = Trained(zt.local_steps(on_hosts(plain), 3, outer, parts=2), state)
        for i, xs in enumerate(batches(5)):
            run.run([*xs[:2], *xs[:2]], run.local.at(i))
            truth, _ = plain(truth, torch.cat(xs[:2]))
        for host in range(2):
            assert distance(replica(run.state["state"], host)["params"], truth["params"]) < 1e-5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"h": 0}, r"local_steps: h=0; it is a number of steps, at least 1"),
        ({"h": 2, "parts": 0}, r"local_steps: parts=0; it is a number of parts, at least 1"),
        ({"h": 2, "parts": 3}, r"parts=3 and h=2(?s:.*)at most h parts"),
    ],
)
def test_options_that_mean_nothing(options, text):
    with pytest.raises(ValueError, match=text):
        zt.local_steps(on_hosts(sgd_step), **options)


@pytest.mark.parametrize(
    "outer", [0.7, torch.optim.SGD, zt.nesterov], ids=["rate", "class", "uncalled"]
)
def test_an_outer_optimizer_is_a_function(outer):
    with pytest.raises(TypeError, match=r"outer=.*such as zt\.nesterov\(lr=0\.7, momentum=0\.9\)"):
        zt.local_steps(on_hosts(sgd_step), h=2, outer=outer)


@pytest.mark.parametrize(
    ("outer", "text"),
    [
        (
            lambda p, g, s: {k: p[k] - g[k] for k in p},
            "returned a dict; it returns a pair of dicts",
        ),
        (lambda p, g, s: ({"up": p["up"]}, s), "returned no new value of down"),
    ],
    ids=["one dict", "some parameters"],
)
def test_an_outer_optimizer_returns_parameters_and_state(outer, text):
    """A parameter that it left out would stay that of each host."""
    local = zt.local_steps(on_hosts(sgd_step), h=2, outer=outer)
    with pytest.raises(TypeError, match=text):
        local.sync.lower(local.init(first_state()), batches(1)[0][0])


@pytest.mark.parametrize("step", ["inner", "sync"])
@pytest.mark.parametrize("lifted", [False, True])
def test_a_state_that_init_has_not_made(step, lifted):
    x = batches(1)[0][0]
    plain, state = sgd_step, first_state()
    if lifted:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loop_step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        plain, state = zt.lift(loop_step, model, optimizer)
    local = zt.local_steps(on_hosts(plain), h=2, outer=zt.nesterov(0.7))
    with pytest.raises(TypeError, match=r"the state has no 'state'(?s:.*)local\.init\(state\)"):
        getattr(local, step).lower(state, x)
    if step == "sync":
        with pytest.raises(TypeError, match="the state has no 'outer'"):
            local.sync.lower({"state": state}, x)


def test_errors_say_what_to_write():
    with pytest.raises(ValueError, match=r"sgd_step has no axis (?s:.*)independent_axis='host'"):
        zt.local_steps(zt.shard_params(HOSTS, replicate_axis="host")(sgd_step), 2)
    local = zt.local_steps(on_hosts(sgd_step), 4, zt.nesterov(0.7), parts=3)
    with pytest.raises(
        TypeError, match=r"the keys 'w', and local steps average (?s:.*)at 'params'"
    ):
        local.init({"w": torch.ones(2)})
    with pytest.raises(
        ValueError, match=r"parts=3, and the state has 2 parameters(?s:.*)at most 2 parts"
    ):
        local.parts[0].lower(local.init(first_state()), batches(1)[0][0])


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_resume_with_their_bits_and_a_lost_rank_ends_a_sync():
    rows = run_ranks(2, "local_ranks.py")
    shard = zt.shard_params(zt.AbstractMesh(host=2, dp=1), independent_axis="host")
    run = Trained(
        zt.local_steps(zt.chain(shard, *ALL)(momentum_step), 4, zt.nesterov(0.7), parts=2)
    )
    for i, xs in enumerate(batches(9)):
        run.run(xs[:2], run.local.at(i))
    run.run(batches(1)[0][:2], run.local.sync)
    for row in rows:
        host = row["rank"]
        assert row["resumed"] == row["went_on"]
        mine = pytree.tree_map(lambda x, host=host: x[host].tolist(), run.state)
        assert row["synchronized"] == mine, "bits of lock-step"
        assert row["evaluated"] == pytest.approx(row["by_module"])
    assert rows[0]["synchronized"]["state"]["params"] == rows[1]["synchronized"]["state"]["params"]
    lost = rows[0]["lost"]
    assert lost["kind"] == "LostRank" and lost["after"] < 30
    assert "momentum_step_and_sync" in lost["text"] and "rank 1" in lost["text"].lower()
