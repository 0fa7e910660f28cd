"""What `penstock serve` starts: whose flag goes to whom, and which shard gets which GPU."""

from __future__ import annotations

import asyncio
import sys

import pytest

from penstock_client import serve


def children(*flags: str, router: tuple[str, ...] = ()) -> list[serve._Child]:
    args, shard_flags = serve._parser().parse_known_args(flags)
    return serve._children(args, shard_flags, router)


def test_flags_after_two_dashes_are_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[serve._Child] = []

    async def note(found: list[serve._Child], *_: object) -> int:
        started.extend(found)
        return 0

    monkeypatch.setattr(serve, "_serve", note)
    monkeypatch.setattr(serve, "_first_taken", lambda *_, **__: "")
    assert serve.main(["m", "--max-num-seqs", "5", "--", "--policy", "round-robin"]) == 0
    shard, router = (child.command for child in started)
    assert shard[-4:] == ["--model", "m", "--max-num-seqs", "5"]
    assert router[-2:] == ["--policy", "round-robin"]
    assert "--policy" not in shard
    assert "--max-num-seqs" not in router


def test_the_router_gets_the_time_that_requests_may_take_and_a_little_more() -> None:
    shard, router = children("--shutdown-timeout-s", "90")
    assert router.command[-2:] == ["--shutdown-timeout-s", "90.0"]
    assert router.stop_timeout_s > 90
    assert shard.stop_timeout_s < 20


def test_nothing_is_started_where_the_router_refuses_its_flags(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_first_taken", lambda *_, **__: "")
    monkeypatch.setattr(serve, "_serve", None)
    assert serve.main(["m", "--", "--max-num-seqs", "5"]) == 2
    reason, words = capfd.readouterr().err.splitlines()
    assert reason.startswith("penstock router: unrecognized arguments: --max-num-seqs")
    assert words.startswith("penstock serve: the router could not start")


def test_help_of_the_router_is_all_that_is_done(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Also where something else has the port.
    monkeypatch.setattr(serve, "_first_taken", None)
    monkeypatch.setattr(serve, "_serve", None)
    assert serve.main(["m", "--", "--help"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("usage: penstock router")
    assert said.err == ""


@pytest.mark.parametrize(
    ("shards", "gpus", "seen"),
    [
        (1, ["a", "b"], [""]),
        (2, ["a", "b"], ["a", "b"]),
        (3, ["a", "b"], ["a", "b", "a"]),
        (2, [], ["", ""]),
    ],
)
def test_several_shards_take_the_gpus_in_turn(
    shards: int, gpus: list[str], seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "visible_gpus", lambda: gpus)
    *found, router = children("--shards", str(shards))
    assert [child.environment.get("CUDA_VISIBLE_DEVICES", "") for child in found] == seen
    assert router.environment == {}


def test_each_shard_takes_as_many_gpus_as_its_model_is_split_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "visible_gpus", lambda: ["a", "b", "c", "d", "e"])
    *found, _ = children("--shards", "2", "--tensor-parallel-size", "2")
    assert [child.environment["CUDA_VISIBLE_DEVICES"] for child in found] == ["a,b", "c,d"]
    for child in found:
        assert child.command[-2:] == ["--tensor-parallel-size", "2"]


@pytest.mark.parametrize("gpus", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_shards_of_several_gpus_are_refused_where_they_would_share_some(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(serve, "_first_taken", lambda *_, **__: "nothing is to be started here")
    with pytest.raises(SystemExit) as ended:
        serve.main(["--shards", "2", "--tensor-parallel-size", "2"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"need 4, and {len(gpus)} can be seen" in line


@pytest.mark.parametrize(
    ("shards", "size", "gpus"),
    [(2, 2, ["a", "b", "c", "d"]), (2, 2, []), (3, 1, ["a"]), (1, 4, ["a"])],
)
def test_shards_that_share_no_gpus_or_have_one_each_are_not_refused(
    shards: int, size: int, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "visible_gpus", lambda: gpus)
    assert serve._too_few_gpus(shards, size) == ""


def test_a_key_is_in_the_environment_of_all_and_on_no_command_line() -> None:
    shard, router = children("--api-key", "sk-5ecret")
    # Also where another one is in ours: the router shows shards the one it asks for.
    assert router.environment == shard.environment == {"PENSTOCK_API_KEY": "sk-5ecret"}
    assert "5ecret" not in " ".join([*shard.command, *router.command])


def test_an_empty_key_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        children("--api-key", "")
    assert ended.value.code == 2
    assert "--api-key: a key is printable ASCII, not empty" in capsys.readouterr().err


def test_a_shortened_flag_is_none_of_ours_and_goes_to_the_shards_which_refuse_it() -> None:
    shard, router = children("--work", "2")
    assert shard.command[-2:] == ["--work", "2"]
    assert router.command[router.command.index("--workers") + 1] == "1"


async def test_a_child_that_refuses_its_flags_is_not_started_again_and_it_is_said_whose_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    child = serve._Child("shard 127.0.0.1:1", [sys.executable, "-c", "raise SystemExit(2)"])
    assert await asyncio.wait_for(serve._serve([child], "http://127.0.0.1:1"), 20) == 2
    line = capsys.readouterr().err
    assert child.deaths == 1
    assert line.startswith("penstock serve: the shard 127.0.0.1:1 could not start")
    assert "flags before -- are for shards, those after it for the router" in line
