"""`penstock bench`: when it sends, what it measures, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import ssl
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.budget import budget, seeded
from support.certificates import Authority

from penstock_cli.bench import bench
from penstock_cli.bench import load as bench_load
from penstock_cli.bench.load import Answer, Lengths, Load, Plan, Server
from penstock_cli.bench.report import Objective, plot, summarize, table

_FINISH = {"choices": [{"text": "", "finish_reason": "length"}]}
_USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
_WHOLE = ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, _FINISH, _USAGE, "[DONE]")


@dataclass
class _Double:
    """A completions server that gives every request the same answer, and counts."""

    events: tuple[Any, ...] = _WHOLE
    status: int = 200
    delay_s: float = 0.0
    # All answers wait until as many requests are there at once.
    gather: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        while self.most_in_flight < self.gather:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.delay_s)
        self.in_flight -= 1
        if self.status != 200:
            return web.Response(status=self.status, text="busy")
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        return response

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app


@contextlib.contextmanager
def _serving(double: _Double) -> Iterator[str]:
    """The URL of the double, which runs in a thread: the command has a loop of its own."""
    loop = asyncio.new_event_loop()
    server = TestServer(double.app())
    loop.run_until_complete(server.start_server())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _bench(double: _Double, *flags: str) -> int:
    with _serving(double) as url:
        return bench.main(["--url", url, *flags])


async def _run(
    double: _Double, plan: Plan, rng: random.Random | None = None
) -> tuple[list[Answer], float]:
    """Return the answers to a load, and its seconds. Load and server share this loop."""
    answers: list[Answer] = []
    fields = {"stream_options": {"include_usage": True}}
    async with TestServer(double.app()) as server:
        target = Server(str(server.make_url("")).rstrip("/"), fields)
        wall_s = await bench_load.run(plan, target, rng or random.Random(0), answers)
    return answers, wall_s


def _closed(streams: int, **ends: Any) -> Plan:
    return Plan(Load(open_loop=False, level=streams), Lengths(8, 2), **ends)


def _open(rate: float, **ends: Any) -> Plan:
    return Plan(Load(open_loop=True, level=rate), Lengths(8, 2), **ends)


@pytest.mark.parametrize(
    ("speaks_tls", "reason"), [(True, "certificate is not trusted"), (False, "speaks no TLS")]
)
async def test_what_is_wrong_with_tls_is_said_with_what_to_do(
    speaks_tls: bool, reason: str, tmp_path: Path
) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    context = None
    if speaks_tls:
        pair = Authority(tmp_path, "unknown").issue("127.0.0.1")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.cert, pair.key)
    async with await asyncio.start_server(speak, "127.0.0.1", 0, ssl=context) as listener:
        url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            answer = await bench_load._complete(session, Server(url, {}), {}, 0.0)
    assert answer.error_kind == "connection"
    assert answer.error.startswith(f"no answer from {url}: ")
    assert reason in answer.error


def _answer(
    ttft_s: float = 0.1, tpot_s: float = 0.01, *, output_tokens: int = 3, error: str = ""
) -> Answer:
    answer = Answer(due_s=100.0, missing=set(), output_tokens=output_tokens, prompt_tokens=5)
    answer.first_s = 100.0 + ttft_s
    answer.gaps_s = [tpot_s] * (output_tokens - 1)
    answer.last_s = answer.ended_s = answer.first_s + sum(answer.gaps_s)
    if error:
        answer.fail(error, error)
    return answer


def _complaint(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


# ---- Arrivals ----------------------------------------------------------------------------------


async def test_a_closed_loop_keeps_as_many_in_flight_as_there_are_streams() -> None:
    double = _Double(delay_s=0.01, gather=3)
    answers, _ = await _run(double, _closed(3, requests=10))
    assert [answer.error for answer in answers] == [""] * 10
    assert double.most_in_flight == 3


async def test_an_open_loop_sends_on_while_nothing_is_answered() -> None:
    # No answer comes before all thirty are there: a loop that waits for one would wait forever.
    double = _Double(gather=30)
    answers, _ = await asyncio.wait_for(_run(double, _open(1000, requests=30)), 10)
    assert [answer.error for answer in answers] == [""] * 30


async def test_an_infinite_rate_sends_all_at_once() -> None:
    answers, _ = await _run(_Double(), _open(float("inf"), requests=20))
    assert len({answer.due_s for answer in answers}) == 1


async def test_arrivals_of_an_open_loop_are_a_poisson_process() -> None:
    count, rate = budget(300, 3000), 2000.0
    rng = seeded("arrivals")
    answers, _ = await _run(_Double(), _open(rate, requests=count), rng)
    due_s = sorted(answer.due_s for answer in answers)
    gaps_s = [b - a for a, b in itertools.pairwise(due_s)]
    # Six standard errors: of a mean of exponentials, and of a share of 1 - 1/e.
    error = 6 / len(gaps_s) ** 0.5
    assert statistics.fmean(gaps_s) * rate == pytest.approx(1.0, abs=error)
    below = sum(gap < 1 / rate for gap in gaps_s) / len(gaps_s)
    assert below == pytest.approx(0.632, abs=error / 2)


async def test_latency_counts_from_when_a_request_was_due_and_not_from_when_it_was_sent() -> None:
    class Stalling(_Double):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            if not self.bodies:
                # Load and server share this loop: meanwhile nothing can be sent.
                time.sleep(0.4)  # noqa: ASYNC251
            return await super().answer(request)

    answers, _ = await _run(Stalling(), _open(200, requests=20))
    # At 200/s all twenty were due within some 0.1 s, long before the stall was over.
    assert statistics.median(answer.ttft_s for answer in answers) > 0.2


@pytest.mark.parametrize("plan", [_closed(2, duration_s=0.3), _open(50, duration_s=0.3)])
async def test_a_duration_ends_the_sending_and_waits_for_what_is_in_flight(plan: Plan) -> None:
    answers, wall_s = await asyncio.wait_for(_run(_Double(delay_s=0.12), plan), 10)
    assert answers
    assert [answer.error for answer in answers if answer.error] == []
    first_s = min(answer.due_s for answer in answers)
    assert max(answer.due_s for answer in answers) - first_s < 0.3
    assert wall_s >= max(answer.ended_s for answer in answers) - first_s


def test_reasoning_and_calls_are_tokens_as_content_is() -> None:
    called = [{"index": 0, "function": {"arguments": "{"}}]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning": "Hm"},
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"content": "a"},
        {"tool_calls": called},
        {},
    ]
    answer = Answer(due_s=time.perf_counter(), missing=set())
    seen = []
    for delta in deltas:
        answer.take(json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode())
        seen.append((answer.first_s > 0, len(answer.gaps_s)))
    assert seen == [(False, 0), *((True, gaps) for gaps in (0, 1, 2, 3, 4, 4))]


# ---- Requests ----------------------------------------------------------------------------------


def test_fixed_lengths_are_the_same_for_each_request() -> None:
    assert {Lengths(7, 5).draw(random.Random(n)) for n in range(20)} == {(7, 5)}


def test_sharegpt_lengths_are_spread_around_their_medians_within_bounds() -> None:
    rng = seeded("lengths")
    drawn = [Lengths(64, 128, spread=True).draw(rng) for _ in range(4000)]
    for values, median, sigma in (
        ([prompt for prompt, _ in drawn], 64, 1.4),
        ([output for _, output in drawn], 128, 1.0),
    ):
        assert min(values) >= 4
        assert max(values) <= 1024
        # The median of n draws errs by 1.25 sigma / sqrt(n) of the logarithm; five times that.
        assert statistics.median(values) == pytest.approx(median, rel=6.3 * sigma / 4000**0.5)
        quarter = sorted(values)[1000]
        assert quarter == pytest.approx(median * 2.718 ** (-0.674 * sigma), rel=0.25)


def test_prompts_are_distinct_over_all_loads_of_a_run() -> None:
    double = _Double()
    assert _bench(double, "--streams", "1,2", "--requests", "5") == 0
    assert len({body["prompt"] for body in double.bodies}) == 10
    assert {len(body["prompt"].split()) for body in double.bodies} == {128}


def test_the_same_seed_sends_the_same_requests() -> None:
    runs = []
    for seed in ("1", "1", "2"):
        double = _Double()
        flags = ("--seed", seed, "--streams", "1", "--requests", "4", "--lengths", "sharegpt")
        assert _bench(double, *flags) == 0
        runs.append([(body["prompt"], body["max_tokens"]) for body in double.bodies])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_body_adds_fields_and_null_leaves_one_out() -> None:
    double = _Double(events=(*_WHOLE[:3], "[DONE]"))
    body = '{"temperature": 0, "ignore_eos": null, "stream_options": null}'
    assert _bench(double, "--requests", "1", "--model", "m", "--body", body) == 0
    (sent,) = double.bodies
    assert sent.pop("prompt")
    assert sent == {"model": "m", "max_tokens": 64, "stream": True, "temperature": 0}


def test_without_usage_events_with_text_count_as_tokens(capsys) -> None:
    double = _Double(events=(*_WHOLE[:3], "[DONE]"))
    assert _bench(double, "--requests", "1", "--json", "--body", '{"stream_options": null}') == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 2


def test_usage_may_come_with_the_last_choice(capsys) -> None:
    double = _Double(events=(*_WHOLE[:2], {**_FINISH, "usage": _USAGE["usage"]}, "[DONE]"))
    assert _bench(double, "--requests", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 2


def test_a_server_may_be_declared_to_send_no_done(capsys) -> None:
    assert _bench(_Double(events=_WHOLE[:-1]), "--requests", "1", "--no-done") == 0
    assert _bench(_Double(events=_WHOLE[:-1]), "--requests", "1") == 1
    assert "it has no [DONE]" in _complaint(capsys)


def test_a_chat_has_its_prompt_in_one_message_and_its_text_in_deltas() -> None:
    piece = {"choices": [{"delta": {"content": "a"}}]}
    end = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    double = _Double(events=(piece, piece, end, _USAGE, "[DONE]"))
    assert _bench(double, "--requests", "1", "--chat", "--prompt-words", "3") == 0
    (body,) = double.bodies
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 3
    assert "prompt" not in body


async def test_an_event_without_text_is_no_first_token() -> None:
    events = ({"choices": [{"text": ""}]}, *_WHOLE)
    (answer,), _ = await _run(_Double(events=events), _closed(1, requests=1))
    assert len(answer.gaps_s) == 1


# ---- Numbers -----------------------------------------------------------------------------------


def _summary(answers: list[Answer], **more: Any) -> dict[str, Any]:
    return summarize(Load(open_loop=False, level=4), answers, wall_s=2.0, client_cpu_s=0.5, **more)


def test_a_summary_counts_whole_answers_only() -> None:
    answers = [_answer(), _answer(), _answer(error="status 429"), _answer(error="status 429")]
    summary = _summary([*answers, _answer(error="cut off")])
    assert (summary["requests"], summary["failed"]) == (2, 3)
    assert summary["errors"] == {"status 429": 2, "cut off": 1}
    assert (summary["output_tokens"], summary["output_tokens_per_s"]) == (6, 3.0)
    assert summary["total_tokens_per_s"] == 8.0
    assert summary["requests_per_s"] == 1.0


def test_percentiles_are_those_of_the_values() -> None:
    answers = [_answer(ttft_s=n / 1000) for n in range(101)]
    ttft_ms = _summary(answers)["ttft_ms"]
    assert ttft_ms == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})


def test_one_value_is_all_its_percentiles_and_none_has_none() -> None:
    summary = _summary([_answer(output_tokens=1)])
    assert set(map(round, summary["ttft_ms"].values())) == {100}
    assert set(summary["tpot_ms"].values()) == {None}
    assert "-" in table(summary)


def test_end_to_end_goes_to_the_end_and_time_per_token_starts_at_the_first() -> None:
    summary = _summary([_answer(ttft_s=0.5, tpot_s=0.02, output_tokens=11)])
    assert summary["e2e_ms"]["p50"] == pytest.approx(700)
    assert summary["tpot_ms"]["p50"] == pytest.approx(20)


def test_goodput_is_the_share_that_kept_every_limit() -> None:
    answers = [
        _answer(ttft_s=0.1, tpot_s=0.01),
        _answer(ttft_s=0.9, tpot_s=0.01),
        _answer(ttft_s=0.1, tpot_s=0.09),
        _answer(ttft_s=0.1, tpot_s=0.01, error="cut off"),
    ]
    both = _summary(answers, objective=Objective(ttft_ms=500, tpot_ms=50))["goodput"]
    assert both == {"share": 0.25, "requests_per_s": 0.5}
    assert _summary(answers, objective=Objective(ttft_ms=500))["goodput"]["share"] == 0.5
    assert "goodput" not in _summary(answers)


# ---- Output ------------------------------------------------------------------------------------


def test_each_load_is_a_line_of_json_and_all_are_in_the_file(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.json"
    flags = ("--rate", "100,inf", "--requests", "4", "--slo-ttft-ms", "60000", "--json")
    assert _bench(_Double(), *flags, "--output", str(path)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["load"] for line in lines] == ["100 requests/s", "all at once"]
    assert [(line["open_loop"], line["level"]) for line in lines] == [(True, 100), (True, None)]
    assert [line["goodput"]["share"] for line in lines] == [1.0, 1.0]
    document = json.loads(path.read_text())
    assert document["loads"] == lines
    settings = document["settings"]
    assert (settings["lengths"], settings["prompt_words"]) == ("fixed", 128)


def test_the_table_names_load_throughput_percentiles_and_errors(capsys) -> None:
    assert _bench(_Double(), "--streams", "1", "--requests", "2") == 0
    text = capsys.readouterr().out
    assert "1 stream: 2 requests" in text
    for word in ("output tokens/s", "first token", "inter-token", "end to end", "p90"):
        assert word in text


def test_refusals_are_counted_by_status(capsys) -> None:
    assert _bench(_Double(status=429), "--requests", "3", "--json") == 1
    assert json.loads(capsys.readouterr().out)["errors"] == {"status 429": 3}


def test_progress_is_told_on_a_terminal_and_nowhere_else(monkeypatch, capsys) -> None:
    assert _bench(_Double(), "--requests", "2") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert _bench(_Double(delay_s=0.1), "--requests", "2") == 0
    line = capsys.readouterr().err
    assert "16 streams: 0 s, 0 answered, 0 failed" in line
    assert line.endswith("\r\x1b[K")


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summaries = [_summary([_answer()]), _summary([_answer(output_tokens=1)])]
    plot(summaries, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_sent(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    double = _Double()
    with pytest.raises(SystemExit) as ended:
        _bench(double, "--plot", "run.png")
    assert ended.value.code == 2
    assert "install penstock with the extra bench" in _complaint(capsys)
    assert double.bodies == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "0"], "must be a number, above 0, not '0'"),
        (["--rate", "1,nan"], "must be a number, above 0, not 'nan'"),
        (["--rate", "1,,2"], "must be a number, above 0, not ''"),
        (["--streams", "4,x"], "must be a whole number, at least 1, not 'x'"),
        (["--streams", "1", "--rate", "1"], "not allowed with argument --streams"),
        (["--requests", "1", "--duration", "1"], "not allowed with argument --requests"),
        (["--rate", "inf", "--duration", "9"], "needs --requests"),
        (["--slo-ttft-ms", "inf"], "must be a number, above 0, not 'inf'"),
        (["--body", "[1]"], "must be a JSON object, not '[1]'"),
        (["--body", "{oops"], "must be a JSON object"),
        (["--output", "no/such/folder/run.json"], "must be a file in a folder that exists"),
        (["--output", "."], "must be a file in a folder that exists"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_status_2(flags, words, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 2
    assert words in _complaint(capsys)


def test_a_file_that_cannot_be_written_is_one_line_and_status_1(capsys) -> None:
    assert _bench(_Double(), "--requests", "1", "--output", "/dev/full") == 1
    assert "No space left" in _complaint(capsys)
