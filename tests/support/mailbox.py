"""Gloo's sends and receives between ranks that are objects of one process, with the bytes between each pair counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ztrans.ir.routes import Hosts
from ztrans.runtime.channels import Channel


@dataclass
class Mailbox:
    sent: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    nbytes: Counter[tuple[int, int]] = field(default_factory=Counter)  # by sender and receiver

    def inside_and_between(self, hosts: Hosts) -> tuple[int, int]:
        """The bytes that were sent inside hosts, and between them."""
        far = sum(n for (a, b), n in self.nbytes.items() if a // hosts.local != b // hosts.local)
        return self.nbytes.total() - far, far


@dataclass(frozen=True)
class Done:
    wait: Callable[[], object]


@dataclass(eq=False)
class Group:
    """The process group of one rank. What is sent is read when it is received, as gloo sends in place."""

    mail: Mailbox
    at: int
    ranks: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.ranks

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Done:
        assert (self.at, to, tag) not in self.mail.sent, "two messages have the same tag"
        self.mail.sent[self.at, to, tag] = tensors[0]
        self.mail.nbytes[self.at, to] += tensors[0].nbytes
        return Done(lambda: None)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Done:
        return Done(lambda: tensors[0].copy_(self.mail.sent.pop((source, self.at, tag))))


class LocalChannel(Channel):
    """A channel between objects of one process."""

    is_gloo = True


def channels(hosts: Hosts) -> tuple[Mailbox, list[Group], list[Channel]]:
    """A channel for each rank. The groups are returned because a channel does not own its group."""
    mail = Mailbox()
    groups = [Group(mail, rank, hosts.ranks) for rank in range(hosts.ranks)]
    opened = [LocalChannel("dp", "reductions", hosts=hosts) for _ in groups]
    for channel, group in zip(opened, groups):
        channel.open(group)
    return mail, groups, opened
