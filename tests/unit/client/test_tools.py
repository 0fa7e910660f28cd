"""The small tools where the other side, the network or the command line is not as it should be."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from support.certificates import Authority
from support.http_stub import http_stub
from support.processes import free_port, is_alive, wait_until

from penstock_cli import chat, health, info, keys
from penstock_cli.bench import bench
from penstock_cli.serve import greeting, serve
from penstock_cli.serve.greeting import Access, greet
from penstock_client.fleet.discovery import authority

Main = Callable[[Sequence[str]], int]

_HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"
# What a gRPC server says first to whoever connects: an HTTP/2 SETTINGS frame.
_GRPC = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00@\x00\x00"
_TEXT = {"choices": [{"index": 0, "text": "a", "delta": {"content": "half an ans"}}]}
_FINISH = {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]}
_USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}


def _event(data: object) -> bytes:
    line = b"data: %s\n\n" % (data if isinstance(data, bytes) else json.dumps(data).encode())
    return b"%x\r\n%s\r\n" % (len(line), line)


_DONE = _event(b"[DONE]")
_WHOLE = _HEAD + b"".join(map(_event, (_TEXT, _FINISH, _USAGE))) + _DONE + _END
_CUT_IN_A_CHUNK = _HEAD + _event(_TEXT) + b"ff\r\ndata: {"
_CUT_BETWEEN_CHUNKS = _HEAD + _event(_TEXT)
_ENDS_WITHOUT_DONE = _HEAD + _event(_TEXT) + _END


def _status(main: Main, *arguments: str) -> int:
    """Return the exit status of a command, which may find its arguments wrong."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def _json(status: int, value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} Said\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _models(*models: dict[str, object]) -> bytes:
    return _json(200, {"object": "list", "data": models})


_MODELS = _models({"id": "toy", "root": "toy", "parent": None})


def _chat(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    with http_stub(_MODELS, answer) as port:
        return _status(chat.main, "--url", f"http://127.0.0.1:{port}")


def _bench(*answers: bytes, requests: int = 1) -> int:
    with http_stub(*answers) as port:
        url = f"http://127.0.0.1:{port}"
        return _status(bench.main, "--url", url, "--json", "--streams", "1",
                       "--requests", str(requests))  # fmt: skip


def _complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert text.strip().isprintable()
    return text


# ---- Command lines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "99999"],
        ["--port", "0"],
        ["--port", "http"],
        ["--shard-port", "-1"],
        ["--shards", "2", "--shard-port", "65535"],
    ],
)
def test_serve_on_a_port_that_cannot_be_is_one_line_and_status_2(flags, capsys) -> None:
    assert _status(serve.main, *flags) == 2
    line = _complaint(capsys)
    assert flags[-2] in line
    assert re.search("must be .*from 1 to 65535", line)


@pytest.mark.parametrize("tool", [chat, bench])
@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://", "ftp://h", "http://h:99999", "http://[::1", "http://h/a b", ""],
)
def test_a_url_that_cannot_be_is_one_line_and_status_2(tool, url, capsys) -> None:
    assert _status(tool.main, "--url", url) == 2
    assert "--url: must be http:// or https:// and a host" in _complaint(capsys)


@pytest.mark.parametrize("tool", [info, health])
@pytest.mark.parametrize("target", ["http://h/a b", "http://h:99999", "ftp://h"])
def test_a_target_that_cannot_be_is_one_line_and_status_2(tool, target, capsys) -> None:
    assert _status(tool.main, target) == 2
    assert "TARGET: must be http:// or https:// and a host" in _complaint(capsys)


@pytest.mark.parametrize("tool", [info, health])
@pytest.mark.parametrize("address", ["127.0.0.1", "x:y", "h:0", "h:99999", "::1:50051", ""])
def test_an_address_of_a_shard_that_cannot_be_is_one_line_and_status_2(
    tool, address, capsys
) -> None:
    assert _status(tool.main, address) == 2
    assert f"{address!r} is not HOST:PORT with a port from 1 to 65535" in _complaint(capsys)


@pytest.mark.parametrize("tool", [serve, chat, bench, info])
@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", "k\udce9y", " sk-5 "])
def test_a_key_that_fits_no_header_is_one_line_that_does_not_tell_it(tool, key, capsys) -> None:
    assert _status(tool.main, "--api-key", key) == 2
    line = _complaint(capsys)
    assert "--api-key" in line
    assert key not in line


@pytest.mark.parametrize("tool", [chat, bench, info])
def test_a_key_from_the_environment_is_checked_too(tool, monkeypatch, capsys) -> None:
    for key in ("schlüssel", ""):
        monkeypatch.setenv("PENSTOCK_API_KEY", key)
        assert _status(tool.main) == 2
        assert "PENSTOCK_API_KEY" in _complaint(capsys)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (chat, ["--max=2"]),
        (bench, ["--request=1"]),
        (info, ["--api=k"]),
        (keys, ["list", "--file", "keys.toml", "--fil=keys.toml"]),
    ],
)
def test_a_shortened_flag_is_refused(tool, arguments, capsys) -> None:
    assert _status(tool.main, *arguments) == 2
    assert f"unrecognized arguments: {arguments[-1]}" in _complaint(capsys)


@pytest.mark.parametrize("value", ["many", "1.5", "0", "-1"])
def test_a_number_that_cannot_be_is_named_in_words_of_a_user(value, capsys) -> None:
    assert _status(bench.main, "--requests", value) == 2
    assert f"must be a whole number, at least 1, not '{value}'" in _complaint(capsys)


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1", "soon"])
def test_a_timeout_that_cannot_be_is_one_line_and_status_2(value, capsys) -> None:
    assert _status(health.main, "http://127.0.0.1:1", "--timeout", value) == 2
    assert "--timeout: must be a number, above 0, at most 86400, not " in _complaint(capsys)


# ---- The other side ----------------------------------------------------------------------------


def test_health_of_a_grpc_port_as_http_says_what_is_wrong(capsys) -> None:
    with http_stub(_GRPC) as port:
        assert _status(health.main, f"http://127.0.0.1:{port}") == 1
    assert "gRPC port" in capsys.readouterr().out


def test_a_shard_that_drains_or_loads_is_alive_and_not_healthy() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(answers := HealthServicer(), server)
    answers.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    answers.set("live", health_pb2.HealthCheckResponse.SERVING)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert _status(health.main, target) == 1
        assert _status(health.main, target, "--live") == 0
    finally:
        server.stop(None).wait()


def test_chat_with_a_grpc_port_says_what_is_wrong(monkeypatch, capsys) -> None:
    assert _chat(monkeypatch, _GRPC) == 1
    assert "gRPC port" in _complaint(capsys)


def test_bench_of_a_grpc_port_says_what_is_wrong(capsys) -> None:
    assert _bench(_GRPC) == 1
    assert "gRPC port" in json.loads(capsys.readouterr().out)["first_error"]


def test_chat_prints_a_whole_answer(monkeypatch, capsys) -> None:
    assert _chat(monkeypatch, _WHOLE) == 0
    assert "half an ans\n" in capsys.readouterr().out


def _said(**delta: object) -> bytes:
    return _event({"choices": [{"index": 0, "delta": delta}]})


def _called(index: int, **function: str) -> bytes:
    return _said(tool_calls=[{"index": index, "function": function}])


_WITH_CALLS = (
    *(
        _said(role="assistant", content=""),
        _said(reasoning_content="H", reasoning="H"),
        _said(reasoning_content="m"),
        _said(reasoning="m"),
    ),
    *(
        _said(content="I look."),
        _called(0, name="look_up", arguments=""),
        _called(0, arguments='{"a"'),
    ),
    *(_called(0, arguments=": 1}"), _called(1, name="add", arguments="{}"), _event(_FINISH), _DONE),
)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_chat_dims_reasoning_and_shows_each_call_on_a_line(
    is_terminal, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert _chat(monkeypatch, _HEAD + b"".join(_WITH_CALLS) + _END) == 0
    thought = "\x1b[2mH\x1b[0m" + 2 * "\x1b[2mm\x1b[0m" if is_terminal else "Hmm"
    shown = f'{thought}\nI look.\n[calls look_up] {{"a": 1}}\n[calls add] {{}}\n'
    assert shown in capsys.readouterr().out


def test_nothing_that_a_model_writes_acts_on_the_terminal(monkeypatch, capsys) -> None:
    hostile = "a\u202eb\x1b]0;mine\x07\r\u2066"
    events = (
        _said(reasoning=hostile),
        _said(content=f"{hostile}\n\tno\u200dn"),
        _called(0, name=hostile, arguments=hostile),
    )
    assert _chat(monkeypatch, _HEAD + b"".join(events) + _event(_FINISH) + _DONE + _END) == 0
    shown = capsys.readouterr().out
    assert not re.search("[\u202e\x1b\x07\r\u2066]", shown)
    assert shown.count("a\\u202eb\\u001b]0;mine\\u0007\\u000d\\u2066") == 4
    assert "\n\tno\u200dn" in shown


def test_info_shows_names_of_a_server_on_their_lines(capsys) -> None:
    info._print([("model", "a\u202eb\x1b[2J\nstate  serving")])
    assert capsys.readouterr().out == f"{'model':<20}a\\u202eb\\u001b[2J\\u000astate  serving\n"


def test_chat_says_again_what_was_said_and_not_what_was_thought() -> None:
    pieces: list[tuple[chat._Kind, str]] = [
        *(("reasoning", "Hm"), ("content", "I "), ("content", "look.")),
        *(("call", "look_up"), ("arguments", "{}")),
    ]
    assert chat._print_answer(iter(pieces)) == "I look."


@pytest.mark.parametrize(
    "answer",
    [_CUT_IN_A_CHUNK, _CUT_BETWEEN_CHUNKS, _ENDS_WITHOUT_DONE],
    ids=["in a chunk", "between chunks", "no DONE"],
)
def test_chat_does_not_take_half_an_answer_for_a_whole_one(answer, monkeypatch, capsys) -> None:
    assert _chat(monkeypatch, answer) == 1
    out, err = capsys.readouterr()
    assert "half an ans\n" in out
    assert err == "penstock chat: the answer was cut off\n"


@pytest.mark.parametrize("data", [b"{oops", b"7", b"{}", b'{"choices": [7]}', b'{"error": "x"}'])
def test_chat_with_something_else_is_one_line_and_status_1(data, monkeypatch, capsys) -> None:
    assert _chat(monkeypatch, _HEAD + _event(data) + _DONE + _END) == 1
    assert "no chat completion" in _complaint(capsys)


def test_chat_survives_an_error_that_is_cut_off(monkeypatch, capsys) -> None:
    head = b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\n"
    assert _chat(monkeypatch, head + b'{"error"') == 1
    assert "the server answers 503" in _complaint(capsys)


@pytest.mark.parametrize(
    "bad",
    [_CUT_IN_A_CHUNK, _CUT_BETWEEN_CHUNKS, _GRPC, b""],
    ids=["in a chunk", "between chunks", "gRPC", "nothing"],
)
def test_bench_counts_one_cut_answer_as_one_failed_request(bad, capsys) -> None:
    assert _bench(_WHOLE, bad, _WHOLE, requests=3) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (2, 1, 10)
    assert summary["first_error"].isprintable()


@pytest.mark.parametrize("data", [b"{oops", b"{7}", b"{}", b'{"choices": [], "usage": 7}'])
def test_bench_counts_what_is_no_completion_as_a_failed_request(data, capsys) -> None:
    assert _bench(_HEAD + _event(data) + _DONE + _END) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["failed"]) == (0, 1)
    assert "no completion" in summary["first_error"]


@pytest.mark.parametrize("missing", ["finish_reason", "usage", "[DONE]"])
def test_bench_counts_an_answer_without_its_end_as_failed(missing, capsys) -> None:
    parts = {"finish_reason": _event(_FINISH), "usage": _event(_USAGE), "[DONE]": _DONE}
    del parts[missing]
    assert _bench(_HEAD + _event(_TEXT) + b"".join(parts.values()) + _END) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["failed"]) == (0, 1)
    assert summary["first_error"] == f"the answer was cut off: it has no {missing}"


def test_bench_with_nobody_is_one_line_and_status_1(capsys) -> None:
    assert _status(bench.main, "--url", "http://127.0.0.1:1", "--requests", "2") == 1
    reason = "no answer from http://127.0.0.1:1: connection refused: start the router, or correct"
    assert f"{reason} its address\n" in _complaint(capsys)


# ---- What is wrong, and what to do -------------------------------------------------------------


def _said_by(tool: Any, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of a tool that cannot do its work."""
    flags = ["--requests", "1"] if tool is bench else []
    where = [url] if tool in (info, health) else ["--url", url]
    assert _status(tool.main, *where, *flags) == 1
    out, err = capsys.readouterr()
    line = str(out if tool is health else err)
    assert line.count("\n") == 1
    assert "_ssl.c" not in line
    return line


@pytest.mark.parametrize("tool", [chat, bench, info, health])
def test_a_certificate_that_is_not_trusted_is_told_with_what_to_do(tool, tmp_path, capsys) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    pair = Authority(tmp_path, "unknown").issue("127.0.0.1")
    context.load_cert_chain(pair.cert, pair.key)
    with http_stub(_MODELS, tls=context) as port:
        line = _said_by(tool, f"https://127.0.0.1:{port}", capsys)
    assert "its certificate is not trusted here (" in line
    assert "name a file with its authority's in SSL_CERT_FILE" in line


def test_a_certificate_that_has_expired_is_told_so_and_not_to_be_trusted_is_no_advice(
    tmp_path, capsys, monkeypatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority = Authority(tmp_path, "known")
    pair = authority.issue("127.0.0.1", expired=True)
    context.load_cert_chain(pair.cert, pair.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with http_stub(_MODELS, tls=context) as port:
        line = _said_by(health, f"https://127.0.0.1:{port}", capsys)
    assert "its certificate is not valid now (certificate has expired)" in line
    assert "SSL_CERT_FILE" not in line


@pytest.mark.parametrize("tool", [chat, bench, info, health])
def test_a_trusted_certificate_of_another_name_is_told_so(
    tool, tmp_path, capsys, monkeypatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority = Authority(tmp_path, "known")
    pair = authority.issue("other.example")
    context.load_cert_chain(pair.cert, pair.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    # aiohttp makes its context when it is imported.
    own = ssl.create_default_context()
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", own)
    with http_stub(_MODELS, tls=context) as port:
        line = _said_by(tool, f"https://127.0.0.1:{port}", capsys)
    assert "use a name that its certificate has" in line


@pytest.mark.parametrize("tool", [chat, bench, info, health])
def test_plain_http_to_a_port_that_speaks_tls_is_told_what_to_try(tool, tmp_path, capsys) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    pair = Authority(tmp_path, "unknown").issue("127.0.0.1")
    context.load_cert_chain(pair.cert, pair.key)
    with http_stub(_MODELS, tls=context) as port:
        line = _said_by(tool, f"http://127.0.0.1:{port}", capsys)
    assert f"if it speaks TLS, try https://127.0.0.1:{port}" in line


@pytest.mark.parametrize("tool", [chat, bench, info, health])
def test_tls_to_a_port_that_speaks_plain_http_is_told_what_to_try(tool, capsys) -> None:
    with http_stub(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n") as port:
        line = _said_by(tool, f"https://127.0.0.1:{port}", capsys)
    assert f"it speaks no TLS: try http://127.0.0.1:{port}" in line


@pytest.mark.parametrize("tool", [chat, bench, info])
def test_a_router_that_wants_a_key_is_told_with_how_to_give_it(tool, capsys) -> None:
    with http_stub(_json(401, {"error": {"message": "missing or wrong API key"}})) as port:
        line = _said_by(tool, f"http://127.0.0.1:{port}", capsys)
    assert "missing or wrong API key; give the right one with --api-key or PENSTOCK_API_KEY" in line
    assert "{" not in line


@pytest.mark.parametrize("tool", [info, health])
def test_a_routers_port_instead_of_a_shards_is_told_so(tool, capsys) -> None:
    with http_stub(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n") as port:
        assert _status(tool.main, f"127.0.0.1:{port}") == 1
    said = capsys.readouterr()
    line = said.out + said.err
    assert f"an HTTP server answers there: ask a router as http://127.0.0.1:{port}" in line
    assert line.count("\n") == 1


# ---- Info of a router --------------------------------------------------------------------------


def _card(name: str, root: str, **more: object) -> dict[str, object]:
    """Return a model's card, as a router sends it."""
    card: dict[str, object] = {"id": name, "root": root, "parent": None, "max_model_len": 4096}
    read: dict[str, object] = {"tool_call_parser": None, "reasoning_parser": None}
    read["chat_template_notes"] = []
    return {**card, "input_modalities": ["text"], **read, **more}


_VERSION = _json(200, {"version": "1.2.3"})
_NO_ROUTER = " is no penstock router, or one of another version: correct the address"
_HEALTHY = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def test_info_of_a_router_has_a_block_for_each_model(capsys) -> None:
    read = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    sees = {"input_modalities": ["text", "image"]}
    cards = [
        _card("toy", "toy", **read, **sees),
        _card("other-toy", "toy", **read, **sees),
        _card("big", "big", chat_template_notes=["It loses this.", "And that."]),
        _card("sql", "toy", parent="toy"),
        _card("math", "toy", parent="toy"),
    ]
    with http_stub(_models(*cards), _VERSION, _HEALTHY) as port:
        assert _status(info.main, f"http://127.0.0.1:{port}/") == 0
    assert capsys.readouterr() == (
        """\
version             1.2.3
state               serving

model               toy, other-toy
adapters            sql, math
context             4096 tokens
input               text, image
tool calls          hermes
reasoning           think

model               big
adapters            none
context             4096 tokens
input               text
tool calls          not known: calls stay text (--tool-call-parser)
reasoning           none
chat template       It loses this.
chat template       And that.
""",
        "",
    )


def test_info_of_a_router_that_is_not_ready_says_why(capsys) -> None:
    loading = _json(503, {"error": {"message": "not ready: the models are being loaded"}})
    with http_stub(_models(_card("toy", "toy")), _VERSION, loading) as port:
        assert _status(info.main, f"http://127.0.0.1:{port}") == 0
    assert "state               not ready: the models are being loaded\n" in capsys.readouterr().out


@pytest.mark.parametrize("key", [[], ["--api-key", "sesame"]])
def test_info_sends_the_key_to_a_router(key, monkeypatch, capsys) -> None:
    answers = {
        "/v1/models": json.dumps({"data": [_card("toy", "toy")]}),
        "/version": '{"version": "1"}',
        "/health": "",
    }
    sent = []

    def urlopen(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        assert timeout > 0
        sent.append(request.get_header("Authorization"))
        return io.BytesIO(answers[request.selector].encode())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    assert _status(info.main, "https://router.example", *key) == 0
    assert sent == 3 * ["Bearer sesame" if key else None]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([_json(503, {"error": {"message": "no shard serves yet"}})], "no shard serves yet"),
        ([_json(200, {"hello": "world"})], _NO_ROUTER),
        ([_HEAD + _event(b"{oops") + _END], _NO_ROUTER),
        (
            [_models({"id": "toy", "root": "toy"})],
            _NO_ROUTER,
        ),
        (
            [_models(_card("toy", "toy")), _json(200, [])],
            _NO_ROUTER,
        ),
        ([_models(_card("toy", "toy")), _json(404, {})], "the server answers 404"),
        ([_GRPC], "is it the gRPC port of a shard?"),
    ],
)
def test_info_of_what_is_no_router_that_serves_is_one_line_and_status_1(
    answers, words, capsys
) -> None:
    with http_stub(*answers) as port:
        assert _status(info.main, f"http://127.0.0.1:{port}") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock info: ")
    assert words in err
    assert err.count("\n") == 1


# ---- The first line of a chat ------------------------------------------------------------------


def test_a_chat_opens_with_whom_it_talks_to(monkeypatch, capsys) -> None:
    assert _chat(monkeypatch, _WHOLE) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first.startswith("toy at http://127.0.0.1:")
    assert first.endswith(". An empty line ends the chat, Ctrl-C an answer.")
    assert rest.startswith("> ")


def _opened(monkeypatch: pytest.MonkeyPatch, answer: bytes, *flags: str) -> int:
    """Return the exit status of a chat, which may not come to its first prompt."""
    monkeypatch.setattr("builtins.input", lambda _: "")
    with http_stub(answer) as port:
        return _status(chat.main, "--url", f"http://127.0.0.1:{port}", *flags)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_json(503, {"error": {"message": "no shard serves at present"}}), "no shard serves"),
        (_json(200, {"hello": "world"}), "is no router: it lists no models"),
        (_models(), "no model is served"),
        (_models({"id": "a", "root": "a"}, {"id": "b", "root": "b"}), "choose with --model: a, b"),
    ],
)
def test_a_server_that_cannot_be_talked_to_is_told_before_the_first_prompt(
    answer, words, monkeypatch, capsys
) -> None:
    assert _opened(monkeypatch, answer) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_other_names_of_a_model_and_its_adapters_are_no_choice(monkeypatch, capsys) -> None:
    names: list[dict[str, object]] = [
        {"id": "toy", "root": "toy"},
        {"id": "alias", "root": "toy"},
        {"id": "sql", "root": "toy", "parent": "toy"},
    ]
    assert _opened(monkeypatch, _models(*names)) == 0
    assert capsys.readouterr().out.startswith("toy at ")
    two = _models(*names, {"id": "big", "root": "big"})
    for name in ("big", "alias", "sql"):
        assert _opened(monkeypatch, two, "--model", name) == 0
        assert capsys.readouterr().out.startswith(f"{name} at ")


def test_a_model_that_is_not_served_is_refused_before_the_first_prompt(monkeypatch, capsys) -> None:
    answer = _models({"id": "toy", "root": "toy"}, {"id": "sql", "root": "toy", "parent": "toy"})
    assert _opened(monkeypatch, answer, "--model", "gpt-4") == 1
    assert capsys.readouterr() == (
        "",
        "penstock chat: --model gpt-4: not served; choose one of: toy, sql\n",
    )


def test_ctrl_c_at_the_prompt_leaves_the_shell_a_line_of_its_own(monkeypatch, capsys) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    with http_stub(_MODELS) as port, pytest.raises(KeyboardInterrupt):
        chat.main(["--url", f"http://127.0.0.1:{port}"])
    assert capsys.readouterr().out.endswith("an answer.\n\n")


# ---- serve -------------------------------------------------------------------------------------


@pytest.fixture
def ipv6() -> None:
    """The IPv6 loopback. Without it, as in some containers, the test is skipped."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")


def test_serve_looks_at_a_port_of_an_ipv6_host(ipv6) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as held:
        port = held.getsockname()[1]
        assert f"cannot listen on [::1]:{port}: Address already in use" in serve._first_taken(
            "::1", port, "--port"
        )
    assert serve._first_taken("::1", port, "--port") == ""


def test_serve_blames_a_host_that_is_no_host_and_not_the_port() -> None:
    wrong = "argument --host: 'no.invalid' is no name or address of a host"
    assert serve._first_taken("no.invalid", 8000, "--port") == wrong
    # Too long for a part of a name.
    long = "a" * 70
    wrong = f"argument --host: '{long}' is no name or address of a host"
    assert serve._first_taken(long, 8000, "--port") == wrong
    # Of TEST-NET-1, which is nobody's.
    assert "give another --host" in serve._first_taken("192.0.2.1", 8000, "--port")


async def test_serve_waits_for_an_ipv6_router_and_prints_its_url(ipv6, capsys) -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with http_stub(ok, host="::1") as port:
        await asyncio.wait_for(greet(Access("http://" + authority("::1", port))), 5)
    out = capsys.readouterr().out
    assert f"penstock is ready at http://[::1]:{port} " in out
    # Quoted: to some shells brackets are a pattern.
    assert f"curl -N 'http://[::1]:{port}/v1/chat/completions'" in out
    assert f"penstock chat --url 'http://[::1]:{port}'" in out


def test_a_router_is_probed_without_the_proxies_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers are given proxies for the internet, and no proxy knows a container's own ports."""
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with http_stub(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") as port:
        url = f"http://127.0.0.1:{port}"
        assert _status(health.main, url) == 0
        assert greeting._answers(url + "/health", verify=False)
    assert capsys.readouterr().out == f"{url}: healthy\n"


def test_serve_waits_on_while_something_else_answers() -> None:
    with http_stub(_GRPC) as port:
        assert not greeting._answers(f"http://127.0.0.1:{port}/health", verify=False)


_SERVE = """
import asyncio, signal, sys
from penstock_cli.serve import serve

# Whoever runs this test may have it ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
child = serve._Child("sleeper", ["sh", "-c", "echo up; exec sleep 60"])
sys.exit(asyncio.run(serve._serve([child], "http://127.0.0.1:" + sys.argv[1])))
"""


def test_a_closed_terminal_ends_serve_and_its_children() -> None:
    command = [sys.executable, "-c", _SERVE, str(free_port())]
    reader, writer = os.pipe()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer) as process:
        os.close(writer)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (child,) = psutil.Process(process.pid).children()
        # What is said of the end can no longer be written.
        os.close(reader)
        try:
            process.send_signal(signal.SIGHUP)
            assert process.wait(30) == 0
            wait_until(lambda: not is_alive(child), timeout_s=30, what="the child is gone")
        finally:
            process.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_serve_says_how_to_end_at_once_when_it_is_interrupted() -> None:
    command = [sys.executable, "-c", _SERVE, str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        try:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert said.decode() == (
        "penstock serve: ending as soon as running requests have; Ctrl-C again ends them at once\n"
    )


def test_serve_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in serve._stop_signals()
        assert signal.SIGTERM in serve._stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
