"""Ranks: how they meet, hear of each other, and end."""

from __future__ import annotations

import queue
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import wait_until

from penstock_shard.config import ShardConfig
from penstock_shard.distributed import collectives, group, parallel_model
from penstock_shard.distributed.collectives import RankRendezvous, Ranks
from penstock_shard.distributed.messages import (
    FROM_RANK,
    REVISION,
    TO_RANK,
    Arrived,
    Failed,
    FromRank,
    Hello,
    Join,
    Loaded,
    MessageSocket,
    ToRank,
)
from penstock_shard.distributed.parallel_model import MirroredModel, RankFailed
from penstock_shard.distributed.rank_connections import Followers
from penstock_shard.distributed.start_ranks import RankSpec
from penstock_shard.errors import ModelError
from penstock_shard.model_loader import rank_main
from penstock_shard.models.cuda_graphs import GraphedModel


def config_of_two() -> ShardConfig:
    return ShardConfig(device="cpu", dtype="float32", threads=1, tensor_parallel_size=2)


@pytest.mark.parametrize("fails", [False, True], ids=["without a word", "with a reason"])
def test_the_end_of_a_rank_is_noticed_unless_it_has_said_why(fails: bool) -> None:
    ours, theirs = _connected()
    other: MessageSocket[ToRank] = MessageSocket(theirs, TO_RANK)
    hello = Hello(REVISION, 1, 2, 4711, "there")
    lost: list[str] = []
    followers = Followers({1: (hello, MessageSocket(ours, FROM_RANK))}, on_lost=lost.append)
    if fails:
        other.send(Failed("does not fit"))
    other.close()
    if fails:
        with pytest.raises(ModelError, match="rank 1: does not fit"):
            followers.answers(Loaded)
        assert not lost
    else:
        wait_until(lambda: bool(lost), timeout_s=10, what="noticed")
        assert lost == ["rank 1 (process 4711 on there) ended; without it nothing can be computed"]


def test_rank_0_does_not_wait_for_one_that_cannot_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other rank may be on a machine that has too few devices, or not the model."""
    ours, theirs = _connected()
    line: MessageSocket[FromRank] = MessageSocket(ours, FROM_RANK)
    lines = {1: (Hello(REVISION, 1, 2, 4711, "there"), line)}
    monkeypatch.setattr(group, "await_ranks", lambda *_: lines)
    monkeypatch.setattr(group, "start_rank", lambda *_: None)
    other: MessageSocket[ToRank] = MessageSocket(theirs, TO_RANK)
    other.send(Failed("torch finds 1 CUDA devices here"))
    with pytest.raises(ModelError, match="rank 1: torch finds 1 CUDA devices here"):
        group.gather_group(config_of_two(), tmp_path, torch.device("cpu"), lambda text: None)
    other.close()


def test_a_rank_that_fails_in_a_step_does_not_look_as_if_it_could_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody asks for the rank's answer then, so that only its end is noticed."""
    ours, theirs = _connected()

    def fail(*_: object) -> None:
        raise RankFailed("rank 0 asks for what is not known here")

    monkeypatch.setattr(rank_main, "_load", lambda *_: (SimpleNamespace(), 0))
    monkeypatch.setattr(parallel_model, "follow", fail)
    line: MessageSocket[ToRank] = MessageSocket(theirs, TO_RANK)
    join = Join(config_of_two(), str(tmp_path), 0)
    with pytest.raises(RankFailed):
        rank_main._serve(line, queue.SimpleQueue(), join, RankSpec(1, 2, 1, 2), "127.0.0.1")
    line.close()
    heard: MessageSocket[FromRank] = MessageSocket(ours, FROM_RANK)
    assert heard.receive() is None
    heard.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RankFailed("rank 0 asks for what is not known here"), "rank 0 asks for what"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), "--max-num-batched-tokens"),
        (AssertionError("a defect"), None),
    ],
)
def test_a_rank_that_cannot_go_on_says_why_and_shows_its_stack_only_for_a_defect(
    error: Exception,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank_main, "_load", lambda *_: (SimpleNamespace(), 0))
    monkeypatch.setattr(parallel_model, "follow", fail)
    join = Join(config_of_two(), str(tmp_path), 0)
    line: Any = SimpleNamespace(send=None)
    args = (line, queue.SimpleQueue[ToRank](), join, RankSpec(1, 2, 1, 2), "127.0.0.1")
    if words is None:
        with pytest.raises(AssertionError):
            rank_main._serve_or_say(*args)
    else:
        assert rank_main._serve_or_say(*args) == 1
    (record,) = caplog.records
    assert record.levelname == "CRITICAL"
    assert record.getMessage().startswith("rank 1 cannot go on")
    assert (words or "") in record.getMessage()
    assert (record.exc_info is None) is (words is not None)


def test_memory_that_ends_while_graphs_are_recorded_ends_the_engine() -> None:
    """The others wait for this rank in the middle of it: there is no going on without graphs."""
    ours, theirs = _connected()
    line: MessageSocket[FromRank] = MessageSocket(ours, FROM_RANK)
    lines = {1: (Hello(REVISION, 1, 2, 4711, "there"), line)}
    model = MirroredModel(WithoutMemory(), Ranks(0, 2), Followers(lines, on_lost=lambda _: None))
    with pytest.raises(RankFailed, match="--enforce-eager"):
        model.capture([], 16, [0])
    theirs.close()


class WithoutMemory(GraphedModel):
    """A model whose graphs cannot be recorded."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def capture(self, *_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")


# ---- where ranks meet --------------------------------------------------------------------------


def refused(*words: str) -> Any:
    """Expect a ModelError of one line that has these words in this order."""
    return pytest.raises(ModelError, match=r"^(?!.*\n)" + ".*".join(words))


def test_a_rank_that_never_comes_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_MEET_S", 0.1)
    rendezvous = RankRendezvous(2, alone=True)
    with refused("rank 1 of 2 did not come", f"port {rendezvous.port}", "within 0.1 s"):
        rendezvous.await_others(lambda: None)


def test_a_rank_that_cannot_come_says_why_while_rank_0_waits_for_it() -> None:
    ours, theirs = _connected()
    lines = {1: (Hello(REVISION, 1, 2, 4711, "there"), MessageSocket[FromRank](ours, FROM_RANK))}
    followers = Followers(lines, on_lost=lambda _: None)
    other: MessageSocket[ToRank] = MessageSocket(theirs, TO_RANK)
    other.send(Failed("cannot reach where the 2 ranks meet"))
    with refused("rank 1: cannot reach where the 2 ranks meet"):
        RankRendezvous(2, alone=True).await_others(followers.check)
    other.close()


def test_a_rank_that_finds_nobody_where_ranks_meet_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "_FIND_S", timedelta(milliseconds=100))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with refused("cannot reach where the 2 ranks meet", f"127.0.0.1:{port}", "--master-addr"):
        collectives.join(torch.device("cpu"), 1, 2, "127.0.0.1", port)


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("cpu", RuntimeError("connectFullMesh failed.\nException raised"), "GLOO_SOCKET_IFNAME"),
        ("cuda", ValueError("no GPUs found!"), "no GPUs found!; NCCL_SOCKET_IFNAME"),
    ],
)
def test_ranks_that_cannot_exchange_tensors_say_so_in_one_line(
    device: str, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", fail)
    with refused("rank 0 cannot exchange tensors", words):
        RankRendezvous(1, alone=True).join(torch.device(device))


def test_a_rank_that_cannot_exchange_tensors_ends_rank_0_which_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 is within torch then, for as long as the longest step may take."""
    ours, theirs = _connected()
    lines = {1: (Hello(REVISION, 1, 2, 4711, "there"), MessageSocket[FromRank](ours, FROM_RANK))}
    other: MessageSocket[ToRank] = MessageSocket(theirs, TO_RANK)
    lost: list[str] = []

    def meet(*_: object, **__: object) -> None:
        other.send(Failed("cannot exchange tensors"))
        other.close()
        wait_until(lambda: bool(lost), timeout_s=10, what="noticed")

    monkeypatch.setattr(group, "await_ranks", lambda *_: lines)
    monkeypatch.setattr(group, "start_rank", lambda *_: None)
    monkeypatch.setattr(Followers, "_end", lambda _, reason: lost.append(reason))
    monkeypatch.setattr(RankRendezvous, "await_others", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", meet)
    other.send(Arrived())
    group.gather_group(config_of_two(), tmp_path, torch.device("cpu"), lambda text: None)
    assert lost == ["rank 1 (process 4711 on there): cannot exchange tensors"]


def test_a_rank_that_came_first_waits_for_one_that_has_to_fetch_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL asks where ranks meet for what rank 0 puts there when all have come."""
    waits: list[timedelta] = []

    def meet(*_: object, store: Any, **__: object) -> None:
        waits.append(store.timeout)

    monkeypatch.setattr(dist, "init_process_group", meet)
    rendezvous = RankRendezvous(2, alone=True)
    collectives.join(torch.device("cpu"), 1, 2, "127.0.0.1", rendezvous.port)
    rendezvous.join(torch.device("cpu"))
    assert waits == [timedelta(hours=2)] * 2


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs
