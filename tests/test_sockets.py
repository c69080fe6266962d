"""Connections between ranks, in one process."""

import contextlib
import secrets
import socket
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ztrans import sockets
from ztrans.sockets import Peer


@contextlib.contextmanager
def pair(memory=None):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    for end in ends if memory else ():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, memory)
    peers = Peer(1, ends[0]), Peer(0, ends[1])
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture(autouse=True, scope="module")
def woken():
    """Nobody looks without being woken, and who is not woken is late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "_LOOK", None)
        patch.setattr(sockets, "_LATE", 10.0)
        yield


@pytest.fixture
def two():
    with pair() as peers:
        yield peers


SIZES = st.lists(st.integers(0, 3) | st.integers(0, 3 * sockets._ENOUGH), max_size=6)


@settings(max_examples=50, deadline=None)
@given(SIZES, SIZES, st.sampled_from([None, 50_000, 100_000, 300_000]))
def test_pieces_go_both_ways_in_order(there, back, memory):
    sent = [[torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes] for sizes in (there, back)]
    came = [[torch.empty_like(x) for x in xs] for xs in sent]
    with pair(memory) as (a, b):
        under_way = [p.receive(x) for p, xs in ((b, came[0]), (a, came[1])) for x in xs]
        under_way += [p.send(x) for p, xs in ((a, sent[0]), (b, sent[1])) for x in xs]
        for piece in under_way:
            piece.wait()
            assert piece.buffer is None, "the tensor is let go"
    assert all(torch.equal(x, y) for xs, ys in zip(sent, came) for x, y in zip(xs, ys))


def test_a_piece_that_comes_in_crumbs(two):
    """They take more of the kernel's memory than they hold, so it wakes the receiver before enough is there."""
    a, b = two
    sent = torch.arange(sockets._ENOUGH // 8)
    came = torch.empty_like(sent)
    waiting, crumbs = b.receive(came), sent.view(torch.uint8).split(100)
    for crumb in crumbs[:-100]:
        a.socket.sendall(crumb.numpy())
    time.sleep(0.2)
    a.socket.sendall(torch.cat(crumbs[-100:]).numpy())
    waiting.wait()
    assert torch.equal(came, sent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_pieces_of_any_dtype_and_no_dim(two, dtype):
    a, b = two
    for x in (torch.ones(5).to(dtype), torch.ones(()).to(dtype)):
        y = torch.zeros_like(x)
        for piece in (b.receive(y), a.send(x)):
            piece.wait()
        assert torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))


def test_a_rank_that_dies_is_named(two):
    a, b = two
    b.send(torch.ones(3)).wait()
    waiting = a.receive(torch.empty(5))
    b.socket.shutdown(socket.SHUT_RDWR)
    for piece in (waiting, a.receive(torch.empty(1))):
        with pytest.raises(RuntimeError, match=r"rank 1 of the group ended its connection \(.*\): it has died, and says"):
            piece.wait()


def test_a_rank_that_is_late_is_named(two, monkeypatch):
    monkeypatch.setattr(sockets, "_LATE", 0.05)
    a, _ = two
    with pytest.raises(RuntimeError, match=r"rank 1 of the group has neither sent nor received for"):
        a.receive(torch.empty(1)).wait()


def test_ranks_meet_and_strangers_are_turned_away():
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    where = [(*s.getsockname(), secrets.token_bytes(16)) for s in servers]
    strangers = [socket.create_connection(where[0][:2]) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\nxxxx")
    strangers[1].close()
    found = [{} for _ in servers]
    threads = [
        threading.Thread(target=lambda r=r: found[r].update(sockets.meet(servers[r], where, r))) for r in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(f) for f in found] == [[1, 2], [0, 2], [0, 1]]
    for r, f in enumerate(found):
        for other, connected in f.items():
            connected.sendall(bytes([r]))
            assert found[other][r].recv(1) == bytes([r])
    with pytest.raises(ConnectionResetError):
        strangers[0].recv(1)
    for s in (*servers, *strangers, *(connected for f in found for connected in f.values())):
        s.close()


def test_the_address_is_that_of_the_named_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert sockets.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert sockets.own_address() == "127.0.0.1"
