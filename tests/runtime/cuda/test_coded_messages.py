"""Codes over NCCL, on a double of its process groups: the bits that gloo gives, and few launches."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.test_wire_format import BF16, CASES, I4, I8, SHAPES, inputs_of, reduction, run
from tests.support.fabric import on_all_ranks
from ztrans.ir.collectives import wire_format
from ztrans.ir.routes import Hosts
from ztrans.runtime.cuda.symmetric import message_kind
from ztrans.runtime.transports import choose_transport


def check(eqn, hosts) -> None:
    """The values on each rank have the dtypes, the bits and the strides of values that gloo delivers."""
    members = inputs_of(eqn, hosts.ranks)
    expected, _ = run(eqn, hosts, members)
    for here, true in zip(on_all_ranks(eqn, hosts, members), expected):
        for x, y in zip(here, true, strict=True):
            assert x.dtype == y.dtype and x.is_contiguous() and torch.equal(x, y)


@pytest.mark.parametrize("name", CASES)
def test_codes_over_nccl_have_the_bits_of_gloo(name):
    check(CASES[name], Hosts(3))


@pytest.mark.parametrize("between", [None, I4, BF16], ids=str)
@pytest.mark.parametrize("to", [0, None], ids=["reduce_scatter", "all_reduce"])
def test_hosts_send_each_other_sums_in_another_format(to, between):
    check(reduction(SHAPES, I8, to=to, between=between), Hosts(6, 2))


@pytest.mark.parametrize("name", ["gather", "scatter along dim 1"])
def test_other_collectives_on_several_hosts(name):
    check(CASES[name], Hosts(4, 2))


class Launches(TorchDispatchMode):
    """Counts the operations of ztrans by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ztrans":
            name = function.name().removeprefix("ztrans::")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "hosts", "launches"),
    [
        ("gather", Hosts(2), {"encode": 1, "decode": 1}),
        ("scatter", Hosts(2), {"encode": 1, "sum_coded": 1}),
        ("all_reduce", Hosts(2), {"encode": 2, "sum_coded": 1, "decode": 1}),
        ("scatter", Hosts(6, 2), {"encode": 3, "sum_coded": 3}),
    ],
)
def test_one_launch_encodes_all_members_and_one_decodes_or_adds_them(name, hosts, launches):
    """Between two hosts there are two exchanges inside a host, and then one between hosts."""
    eqn = CASES[name]
    modes = [Launches() for _ in range(hosts.ranks)]
    on_all_ranks(eqn, hosts, inputs_of(eqn, hosts.ranks), modes)
    assert [mode.counts for mode in modes] == [launches] * hosts.ranks


def test_symmetric_memory_leaves_codes_to_nccl():
    eqn = CASES["gather"]
    why = message_kind(eqn, {"dp": 2}, 1)
    assert why == "it carries no codes"
    transport = choose_transport(eqn.op, None, wire_format(eqn, eqn.ins[0]), lambda: why)
    assert str(transport) == (
        "nccl all_gather (moves bytes; no symmetric memory: it carries no codes)"
    )
