"""`penstock serve`: what it starts, which process gets which flag, and which shard which GPU."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import sys
from pathlib import Path

import pytest
from support.certificates import Authority
from support.http_stub import http_stub
from support.processes import free_port

from penstock_cli.serve import child_flags, greeting, serve
from penstock_cli.serve.child_flags import Unusable
from penstock_cli.serve.greeting import Access, greet
from penstock_cli.serve.models import check_models, split_models
from penstock_common.shared_flags import SHARD_PORT


def children(*flags: str, router: tuple[str, ...] = ()) -> list[serve._Child]:
    models, rest = split_models(flags)
    config, shard_flags = serve._parsed(rest, len(models))
    ports = serve._usual_ports(config, len(models) * config.shards)
    return serve._children(config, models, shard_flags, router, ports)


def test_flags_after_two_dashes_are_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[serve._Child] = []

    async def note(found: list[serve._Child], *_: object, **__: object) -> int:
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


def test_the_router_listens_where_it_is_told_to() -> None:
    given = ["--host", "::1", "--port", "8123", "--workers", "2", "--shutdown-timeout-s", "7.0"]
    [_, router] = children(*given, "--ssl-certfile", "a.pem", "--ssl-keyfile", "b.pem")
    flags = ["--host", "::1", "--port", "8123", "--workers", "2"]
    files = ["--tls-cert-file", "a.pem", "--tls-key-file", "b.pem"]
    assert router.command[5:] == [*flags, *files, "--shutdown-timeout-s", "7.0"]


def test_the_router_gets_the_time_that_requests_may_take_and_a_little_more() -> None:
    shard, router = children("--shutdown-timeout-s", "90")
    assert router.command[-2:] == ["--shutdown-timeout-s", "90.0"]
    assert router.stop_timeout_s > 90
    assert shard.stop_timeout_s < 20


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["m", "--", "--max-num-seqs", "5"],
            "--max-num-seqs is a flag of the shard: put it before -- (see penstock shard --help)",
        ),
        (
            ["m", "--max-concurrent-requests", "5"],
            "--max-concurrent-requests is a flag of the router: put it after -- "
            "(see penstock router --help)",
        ),
        (
            ["--prot", "8001", "--runner", "fake"],
            "unrecognized arguments: --prot 8001; did you mean --port? "
            "(see penstock serve --help and penstock shard --help)",
        ),
        (
            ["--shard", "2", "--runner", "fake"],
            "unrecognized arguments: --shard 2; did you mean --shards? "
            "(see penstock serve --help and penstock shard --help)",
        ),
        (
            ["--max-num-seq=2"],
            "unrecognized arguments: --max-num-seq=2; did you mean --max-num-seqs? "
            "(see penstock serve --help and penstock shard --help)",
        ),
        (
            ["--audit-promts"],
            "unrecognized arguments: --audit-promts; did you mean --audit-prompts after --? "
            "(see penstock serve --help and penstock shard --help)",
        ),
        (
            ["--xyzzy"],
            "unrecognized arguments: --xyzzy (see penstock serve --help and penstock shard --help)",
        ),
        (
            ["--", "--prot", "8001"],
            "unrecognized arguments: --prot 8001 after --; did you mean --port? "
            "(see penstock serve --help and penstock router --help)",
        ),
        (
            ["--runner", "fake", "m"],
            "unrecognized arguments: m (a MODEL comes first: penstock serve MODEL ...)",
        ),
        (
            ["--step-ms", "quick"],
            "argument --step-ms: must be a number, at least 0, not 'quick' "
            "(see penstock shard --help)",
        ),
        (
            ["--", "--queue-timeout-s", "long"],
            "argument --queue-timeout-s: must be a number from 0.001 to 31536000, not 'long' "
            "(see penstock router --help)",
        ),
    ],
)
def test_nothing_is_started_where_a_flag_is_refused_and_it_is_said_of_what_was_typed(
    flags: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "_first_taken", lambda *_, **__: "")
    monkeypatch.setattr(serve, "_serve", None)
    assert serve.main(list(flags)) == 2
    assert capfd.readouterr() == ("", f"penstock serve: {said}\n")


def test_what_is_not_installed_is_one_line_and_no_success(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_flags, "_READ_FLAGS", "import of_{process}_there_is_none")
    assert serve.main(["m"]) == 2
    assert capfd.readouterr().err == (
        "penstock serve: the shard cannot start: "
        "ModuleNotFoundError: No module named 'of_shard_there_is_none'\n"
    )


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


async def test_a_child_that_cannot_start_is_not_started_again_and_it_is_said_which_line_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = serve._Child("shard 127.0.0.1:1", [sys.executable, "-m", "penstock_shard"])
    monkeypatch.setattr(serve, "with_parent", lambda _: ["sh", "-c", "exit 2"])
    assert await asyncio.wait_for(serve._serve([child], Access("http://127.0.0.1:1")), 20) == 2
    assert child.deaths == 1
    assert capsys.readouterr().err == (
        "penstock serve: ended, as the shard 127.0.0.1:1 cannot start: the line above that begins "
        "`penstock shard:` says why\n"
    )


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("exit 1", "ended with status 1"),
        ("kill -9 $$", "was killed (by somebody, or by the system if memory ran out)"),
        ("kill -SEGV $$", "was ended by SIGSEGV"),
    ],
)
async def test_a_child_that_dies_again_and_again_is_told_with_how(
    end: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_FIRST_BACK_OFF_S", 0.0)
    monkeypatch.setattr(serve, "with_parent", lambda command: command)
    child = serve._Child("router", ["sh", "-c", end])
    assert await asyncio.wait_for(serve._serve([child], Access("http://127.0.0.1:1")), 20) == 1
    *starts, last = capsys.readouterr().err.splitlines()
    assert set(starts) == {f"penstock serve: the router {words}, starting it again in 0 s"}
    assert last == (
        f"penstock serve: ended, as the router died 5 times in a row; the last time it {words}; "
        "its lines above say more"
    )


# ---- Models ------------------------------------------------------------------------------------


def test_each_model_has_its_shards_and_all_have_one_router() -> None:
    *shards, router = children("org/a", "b=./x/b", "--shards", "2", "--max-num-seqs", "5")
    words = [shard.command[5:] for shard in shards]
    rest = ["--max-num-seqs", "5"]
    assert words[0] == words[1] == ["--model", "org/a", *rest]
    assert words[2] == words[3] == ["--model", "./x/b", "--served-model-name", "b", *rest]
    addresses = [f"127.0.0.1:{shard.command[4]}" for shard in shards]
    assert len(set(addresses)) == 4
    assert router.command[4] == ",".join(addresses)


def test_only_shards_of_one_model_are_peers_of_each_other() -> None:
    *shards, _ = children("a", "b", "--shards", "2", "--kv-host-bytes", "1G")
    ports = [shard.command[4] for shard in shards]
    peers = [shard.command[shard.command.index("--kv-peers") + 1 :] for shard in shards]
    assert peers == [[f"127.0.0.1:{ports[other]}"] for other in (1, 0, 3, 2)]
    keys = [shard.environment["PENSTOCK_KV_PEER_KEY"] for shard in shards]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    *lone, _ = children("a", "b", "--kv-host-bytes", "1G")
    assert not [shard for shard in lone if "--kv-peers" in shard.command]


def test_models_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "visible_gpus", lambda: ["x", "y"])
    *shards, _ = children("a", "b", "--api-key", "k")
    seen = [shard.environment for shard in shards]
    assert seen == [{"CUDA_VISIBLE_DEVICES": gpu, "PENSTOCK_API_KEY": "k"} for gpu in ("x", "y")]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["penstock-toy"]),
        (["org/a"], ["org/a"]),
        (["/models/a", "./b/", "~/c.gguf"], ["a", "b", "c"]),
        (["x=/models/a", "y=org/a"], ["x", "y"]),
        (["./k=v"], ["k=v"]),
        (["=a"], ["=a"]),
    ],
)
def test_a_model_has_the_name_that_is_given_or_its_own(words: list[str], names: list[str]) -> None:
    models, rest = split_models([*words, "--port", "1"])
    assert [model.name for model in models] == names
    assert rest == ["--port", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["/one/a", "/two/a"],
            "/one/a and /two/a are both named a: name one of them otherwise, as NAME=/two/a",
        ),
        (
            ["a", "a"],
            "a and a are both named a: name one of them otherwise, as NAME=a",
        ),
        (
            ["a", "b", "--served-model-name", "c"],
            "--served-model-name: is for one model; name each of several as NAME=MODEL",
        ),
        (["a", "b", "--model=c"], "--model: is for one model; name each of several as NAME=MODEL"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused_in_one_line_before_anything_starts(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "_serve", None)
    assert serve.main(words) == 2
    assert capsys.readouterr().err == f"penstock serve: {said}\n"


def test_two_models_of_other_names_are_told_apart() -> None:
    check_models(split_models(["/one/a", "b=/two/a"])[0], [])


# ---- Ports -------------------------------------------------------------------------------------


def listening(flags: list[str]) -> list[int]:
    """The ports of the shards that would be started."""
    config = serve._parsed(flags)[0]
    return serve._shard_ports(config, config.shards)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> int:
    """A usual first port of shards, for tests that run beside other servers."""
    port = free_port(in_a_row=4)
    monkeypatch.setattr(serve, "SHARD_PORT", port)
    return port


def test_the_usual_ports_are_none_that_systems_give_to_outgoing_connections() -> None:
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(ports.read_text().split()[0]) if ports.exists() else 32768
    # Below those that Kubernetes gives out, too.
    assert 1024 < SHARD_PORT < SHARD_PORT + serve._MOST_PORTS < min(first, 30000)


def test_where_the_usual_ports_are_free_nothing_is_said_of_them(
    usual: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listening(["--shards", "2"]) == [usual, usual + 1]
    assert capsys.readouterr().err == ""


def test_where_none_was_asked_for_a_taken_port_is_left_out_and_named(
    usual: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", usual + 1)):
        assert listening(["--shards", "3"]) == [usual, usual + 2, usual + 3]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"penstock serve: port {usual + 1} is taken")
    assert line.endswith(f"; ports of the shards: {usual}, {usual + 2}, {usual + 3}")
    if sys.platform == "linux":
        assert f"(process {os.getpid()});" in line


def test_a_taken_port_that_was_asked_for_is_refused_with_who_has_it(usual: int) -> None:
    with (
        socket.create_server(("127.0.0.1", usual + 1)),
        pytest.raises(
            Unusable, match=f"cannot listen on 127.0.0.1:{usual + 1}: Address"
        ) as refused,
    ):
        listening(["--shards", "2", "--shard-port", str(usual)])
    assert str(refused.value).endswith("; give another --shard-port")
    if sys.platform == "linux":
        assert f"(process {os.getpid()});" in str(refused.value)


def test_ports_for_shards_are_not_sought_without_end(
    usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_MOST_PORTS", 2)
    with pytest.raises(Unusable, match=r"fewer than 3 ports .* say with --shard-port"):
        listening(["--shards", "3"])


async def _greeted(url: str, monkeypatch: pytest.MonkeyPatch, models: tuple[str, ...] = ()) -> None:
    monkeypatch.setattr(greeting, "_answers", lambda _, verify: True)
    monkeypatch.setattr(greeting, "_serves", lambda *_: True)
    await greet(Access(url), models)


@pytest.mark.parametrize(
    ("url", "models", "first"),
    [
        ("http://127.0.0.1:8000", ("a",), ["  penstock chat"]),
        ("http://127.0.0.1:8001", ("a",), ["  penstock chat --url http://127.0.0.1:8001"]),
        (
            "http://127.0.0.1:8000",
            ("a", "b c"),
            ["  penstock chat --model a", "  penstock chat --model 'b c'"],
        ),
    ],
)
async def test_the_first_that_is_to_be_tried_is_a_chat_with_each_model(
    url: str,
    models: tuple[str, ...],
    first: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/penstock")
    await _greeted(url, monkeypatch, models)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"penstock is ready at {url} (Ctrl-C ends it). Try in another terminal:"
    assert lines[3 : 3 + len(first)] == first
    assert lines[3 + len(first)] == ""


async def test_a_command_that_another_terminal_does_not_know_is_suggested_by_its_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "argv", [".venv/bin/penstock", "serve"])
    await _greeted("http://127.0.0.1:8000", monkeypatch)
    assert "\n  .venv/bin/penstock chat\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "is_served"),
    [
        (b"200 OK", False),
        (b"401 Unauthorized", True),
        (b"503 Service Unavailable", False),
    ],
)
def test_several_models_are_waited_for_as_far_as_they_can_be_seen(
    answer: bytes, is_served: bool
) -> None:
    body = b'{"data": [{"id": "a"}]}'
    head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (answer, len(body))
    with http_stub(head + body) as port:
        assert greeting._serves(Access(f"http://127.0.0.1:{port}"), ["a", "b"]) == is_served
        assert greeting._serves(Access(f"http://127.0.0.1:{port}"), ["a"]) == (
            answer != b"503 Service Unavailable"
        )


@pytest.mark.parametrize("needs_key", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
async def test_what_to_try_first_has_the_key_and_the_authority_that_are_needed_but_never_a_key(
    needs_key: bool,
    is_known: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(greeting, "_answers", lambda _, verify: is_known or not verify)
    await greet(Access("https://127.0.0.1:8000", needs_key))
    said = capsys.readouterr().out
    assert ('-H "Authorization: Bearer $PENSTOCK_API_KEY"' in said) == needs_key
    assert ("a key in PENSTOCK_API_KEY" in said) == needs_key
    assert ('--cacert "$SSL_CERT_FILE"' in said) == (not is_known)
    assert ("authority in SSL_CERT_FILE" in said) == (not is_known)


@pytest.mark.parametrize(
    ("key", "flags", "variable", "needed"),
    [
        (None, [], "HOME", False),
        (None, ["--policy", "round-robin"], "HOME", False),
        ("sk-1", [], "HOME", True),
        (None, ["--api-keys-file", "keys.toml"], "HOME", True),
        (None, ["--api-keys-file=keys.toml"], "HOME", True),
        (None, ["--api-key", "sk-1"], "HOME", True),
        (None, [], "PENSTOCK_API_KEY", True),
        (None, [], "PENSTOCK_API_KEYS_FILE", True),
    ],
)
def test_a_key_is_needed_wherever_one_or_a_file_of_them_is_given(
    key: str | None,
    flags: list[str],
    variable: str,
    needed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PENSTOCK_API_KEY", "PENSTOCK_API_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "given")
    assert serve._needs_key(key, flags) == needed


def test_an_authority_that_is_not_known_here_is_told_from_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "ours")
    pair = authority.issue("another.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with http_stub(ok, tls=context) as port:
        url = f"https://127.0.0.1:{port}/health"
        assert greeting._answers(url, verify=False)
        assert not greeting._answers(url, verify=True)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert greeting._answers(url, verify=True)


def test_shards_with_memory_for_copies_of_blocks_are_peers_of_each_other() -> None:
    *shards, router = children("--shards", "3", "--kv-host-bytes", "1G")
    ports = [child.command[child.command.index("--port") + 1] for child in shards]
    for port, child in zip(ports, shards, strict=True):
        peers = child.command[child.command.index("--kv-peers") + 1 :]
        assert peers == [f"127.0.0.1:{other}" for other in ports if other != port]
    (key,) = {child.environment["PENSTOCK_KV_PEER_KEY"] for child in shards}
    assert len(key) == 64
    assert "PENSTOCK_KV_PEER_KEY" not in router.environment


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-host-bytes", "1G"],
        ["--shards", "2"],
        ["--shards", "2", "--kv-host-bytes=1G", "--kv-peers", "10.0.0.1:1"],
    ],
)
def test_peers_are_not_chosen_where_there_are_none_or_somebody_has(flags: list[str]) -> None:
    first, *_ = children(*flags)
    assert first.command.count("--kv-peers") == flags.count("--kv-peers")
    assert "PENSTOCK_KV_PEER_KEY" not in first.environment
