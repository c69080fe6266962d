"""Hierarchical reductions: terms are summed inside each host, and then the sums of hosts are summed.

Each level has a communicator and a lane of its own. So the first level of a message, over the links inside a host, runs
while the second level of the message before it, over those between hosts, is under way:

    first level    ──■ exchange, sum ──■ exchange, sum ──●
                                     │                 │
    second level                     └─■ exchange, sum ──■ exchange, sum ──●

Messages have one order in both lanes. The first level has an exchange for each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import ops
from ..process_groups import Channel
from .nccl import PackedMessage, StreamedStart, all_to_all


class HierarchicalStart(StreamedStart):
    """Starts one hierarchical reduce_scatter, like `StreamedStart`."""

    def __init__(self, inside: Channel, *common: Any) -> None:
        """`inside` carries the first level. `common` are the arguments of a `StreamedStart`."""
        super().__init__(*common)
        self.inside = inside
        self.inside_lane = self.streams.lane(inside)
        self.hosts = self.channel.hosts
        self.is_exchanged = True
        self.arriving_rows = self.hosts.count
        self.arriving_dtype = self.partial

    def join(self) -> None:
        self.streams.join(self.inside_lane)
        super().join()

    def _send(self, messages: Sequence[PackedMessage]) -> list[torch.Tensor]:
        # Both lanes use the sums, so they are allocated on the compute stream. It has launched nothing since the
        # packing that both lanes wait for.
        sums = []
        for message in messages:
            numel = message.send_buffer.numel() // self.hosts.local
            sums.append(message.send_buffer.new_empty(numel, dtype=self.partial))
        with self.streams.communicate(self.inside_lane):
            for message, sum_of_host in zip(messages, sums):
                self._sum_inside(message.send_buffer, sum_of_host)
        self.lane.wait_stream(self.inside_lane)
        peers = range(self.rank % self.hosts.local, self.size, self.hosts.local)
        with self.streams.communicate(self.lane):
            for message, sum_of_host in zip(messages, sums):
                received = message.receive_buffer()
                with self.channel.errors():
                    all_to_all(received, sum_of_host, self.group, peers)
                message.finish(received)
        return [*(message.send_buffer for message in messages), *sums]

    def _sum_inside(self, terms: torch.Tensor, sums: torch.Tensor) -> None:
        """Sum the terms of this host for this rank, and for its peers on the other hosts.

        The terms for the ranks of one host are next to each other. So they are exchanged for one host after the other:
        nothing is transposed, and no more than the terms for one host have been received at any time.
        """
        local = self.hosts.local
        first = self.rank // local * local
        for_hosts = terms.view(self.hosts.count, -1)
        for terms_for_host, sum_for_host in zip(for_hosts, sums.view(self.hosts.count, -1)):
            received = torch.empty_like(terms_for_host)
            with self.inside.errors():
                all_to_all(received, terms_for_host, self.inside.group, range(first, first + local))
            rows = received.view(local, -1)
            ops.sum_terms(rows, [sum_for_host], [len(sum_for_host)], "sum", local)
            del received, rows
