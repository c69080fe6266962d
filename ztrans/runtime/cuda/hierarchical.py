"""Hierarchical reductions on GPUs, which reduce terms inside each host first, and then between hosts.

Each level has a communicator and a lane of its own. So the first level of a message, over the links inside a host, runs
while the second level of the previous message, over the links between hosts, is under way:

    first level    ──■ exchange, sum ──■ exchange, sum ──●
                                     │                 │
    second level                     └─■ exchange, sum ──■ exchange, sum ──●

Messages have one order in both lanes. All members of an equation are one message. Its terms are exchanged inside a host
in a few calls, whatever the number of hosts and members: each call sends as many terms as there is memory for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import ops
from ...ir.collectives import rules
from ...ir.routes import share_of_exchange
from ..channels import Channel
from . import coded_messages
from .nccl import StreamedStart, all_to_all, rounds
from .packed_message import PackedMessage


class HierarchicalStart(StreamedStart):
    """Starts one hierarchical reduction, like `StreamedStart`."""

    def __init__(self, inside: Channel, *common: Any) -> None:
        """`inside` carries the first level. `common` are the arguments of a `StreamedStart`."""
        super().__init__(*common)
        self.inside = inside
        self.inside_lane = self.streams.lane(inside)
        self.hosts = self.channel.hosts
        self.is_exchanged = True
        self.arriving_rows = self.hosts.count
        self.arriving_format = self.host_format
        eqn = common[0]
        self.of_totals = rules(eqn).halves(eqn) is not None
        self.members_by_message = [list(range(len(self.outs)))]

    def _part_elements(self) -> list[int]:
        """The elements of a part of each member that is sent as codes."""
        return coded_messages.part_elements(self, self.members_by_message[0], self.of_totals)

    def join(self) -> None:
        self.streams.join(self.inside_lane)
        super().join()

    def _send_buffers_of(
        self, ks: list[int], terms: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """One send buffer, or one for each member if some terms are sent without a copy."""
        is_term_sent = [self._is_sent_as_it_is(k, term) for k, term in zip(ks, terms)]
        if not any(is_term_sent):
            return super()._send_buffers_of(ks, terms)
        rows = []
        sizes = []
        for k, term, is_sent in zip(ks, terms, is_term_sent):
            if not is_sent:
                rows.append(term.movedim(self.dim, 0))
                sizes.append(self.size * self.part_sizes[k])
        packed = terms[0].new_empty(sum(sizes), dtype=self.wire)
        packed_members = iter(packed.split(sizes))
        buffers = []
        for term, is_sent in zip(terms, is_term_sent):
            buffers.append(term.view(-1) if is_sent else next(packed_members))

        def pack() -> None:
            if rows:
                ops.cast_pack(rows, sizes, self.wire, out=packed)

        return buffers, pack

    def _send(self, messages: Sequence[PackedMessage]) -> list[torch.Tensor]:
        (message,) = messages
        hosts = self.hosts
        # Host by host, the terms for its ranks in each send buffer.
        by_host = [buffer.view(hosts.count, -1) for buffer in message.send_buffers]
        terms = [rows[host] for host in range(hosts.count) for rows in by_host]
        numel = sum(map(len, terms))
        room = numel * share_of_exchange(hosts, self.format, self.host_format)
        sizes = [len(x) // hosts.local for x in terms]
        if self.format.is_coded:
            elements = self._part_elements()
            sizes = [coded_messages.row_numel(self.host_format, elements)] * hosts.count
        # Both lanes use the sums, so they are allocated on the compute stream, which has launched nothing since the
        # packing that both lanes wait for.
        sums = message.send_buffers[0].new_empty(sum(sizes), dtype=self.host_format.carrier)
        with self.streams.communicate(self.inside_lane):
            rest = sums
            for batch in rounds([len(x) for x in terms], room):
                mine, rest = rest.tensor_split([sum(sizes[batch])])
                self._sum_inside(terms[batch], mine, sizes[batch])
        self.lane.wait_stream(self.inside_lane)
        peers = range(self.rank % hosts.local, self.size, hosts.local)
        with self.streams.communicate(self.lane):
            received = message.receive_buffer()
            with self.channel.errors():
                all_to_all(received, sums, self.group, peers)
            message.finish(received)
        return [*message.send_buffers, sums]

    def _sum_inside(
        self, terms: list[torch.Tensor], sums: torch.Tensor, lengths: Sequence[int]
    ) -> None:
        """Reduce this host's terms for this rank and for its peers on other hosts, into sums of these lengths.

        The terms for the ranks of one host are next to each other, so the terms of a single member are sent in place.
        """
        local = self.hosts.local
        first = self.rank // local * local
        sizes = [len(x) // local for x in terms]
        send_buffer = terms[0]
        if len(terms) > 1:
            send_buffer = ops.cast_pack(terms, sizes, self.wire, ranks=local)
        received = torch.empty_like(send_buffer)
        with self.inside.errors():
            all_to_all(received, send_buffer, self.inside.group, range(first, first + local))
        rows = received.view(local, -1)
        if self.format.is_coded:
            self._sum_codes(rows, sums, len(lengths))
        else:
            self._reduce_rows(rows, sums.split(lengths), self.reduction_of_hosts, local)

    def _sum_codes(self, rows: torch.Tensor, sums: torch.Tensor, hosts: int) -> None:
        """Add the codes for some hosts, and encode each sum as it is sent to its host."""
        sizes = self._part_elements() * hosts
        totals = [rows.new_empty(size, dtype=self.format.sum_dtype) for size in sizes]
        reduction = self.reduction_of_hosts
        coded_messages.sum_rows(self.format, rows, totals, sizes, reduction, len(rows))
        coded_messages.pack(self.host_format, totals, sizes, 1, sums.view(1, -1))
