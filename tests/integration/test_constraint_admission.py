"""Constraints that come to a real shard (fake runner) over gRPC: refused with a reason, given up
while they are tried out, and such as are meant to do harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import psutil
import pytest
from support.budget import budget
from support.processes import Router, Shard, ask, is_alive, running, wait_until

from penstock_client import (
    Constraint,
    ConstraintKind,
    DeadlineExceeded,
    GenerationRequest,
    InvalidRequest,
    Objective,
    Overloaded,
    RequestRefused,
    SamplingParams,
    ShardClient,
    ShardUnavailable,
)
from penstock_common.flags import as_size

# Some constraints take all of it.
_TIMEOUT_S = budget(2, 10) / 10
_MEMORY_BYTES = 128 << 20
# For machines that do much besides.
_SLACK_S = 20.0
_CHECK_PROCESS = "penstock_shard.structured_output.check_process"


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    flags = (
        *("--step-ms", "5", "--max-constraint-bytes", "2M"),
        *("--constraint-timeout-s", str(_TIMEOUT_S)),
        *("--constraint-memory-bytes", as_size(_MEMORY_BYTES)),
    )
    service = Shard(tmp_path_factory.mktemp("shard") / "log", *flags)
    with running(service):
        yield service


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, shard: Shard) -> Iterator[Router]:
    service = Router(tmp_path_factory.mktemp("router") / "log", [shard.address])
    with running(service):
        yield service


@pytest.fixture
async def client(shard: Shard) -> AsyncIterator[ShardClient]:
    async with ShardClient(shard.address) as client:
        yield client


def _request(constraint: Constraint | None = None, **fields: object) -> GenerationRequest:
    given = {"max_tokens": 12, "constraint": constraint, **fields}
    return GenerationRequest([1, 2], SamplingParams(seed=1), **given)  # type: ignore[arg-type]


def _regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def _schema(value: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


async def _tokens(client: ShardClient, request: GenerationRequest) -> list[int]:
    return [i async for output in client.generate(request) for i in output.token_ids]


def _check_process(shard: Shard) -> psutil.Process:
    return next(child for child in shard.children if _CHECK_PROCESS in child.cmdline())


@contextlib.contextmanager
def _held_up(shard: Shard) -> Iterator[None]:
    """No constraint gets a verdict meanwhile."""
    wait_until(
        lambda: any(_CHECK_PROCESS in child.cmdline() for child in shard.children),
        timeout_s=30,
        what="a check process",
    )
    process = _check_process(shard)
    lanes = [process, *process.children(recursive=True)]
    # Or a fork, which may end before it is stopped.
    for lane in lanes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lane.suspend()
    try:
        yield
    finally:
        for lane in lanes:
            with contextlib.suppress(psutil.NoSuchProcess):
                lane.resume()


# ---- refused, aborted, overdue ----


async def test_a_refusal_names_the_language_and_the_reason_and_the_next_request_works(
    client: ShardClient,
) -> None:
    with pytest.raises(InvalidRequest, match="regex: ") as caught:
        await _tokens(client, _request(_regex("([")))
    assert caught.value.field == "regex"
    with pytest.raises(InvalidRequest, match="regex: "):
        await _tokens(client, _request(_regex("([")))
    assert await _tokens(client, _request(_regex("[a-z]+")))
    assert len(await _tokens(client, _request())) == 12


async def test_one_that_is_too_long_is_refused_for_its_length(client: ShardClient) -> None:
    with pytest.raises(InvalidRequest, match="at most 2097152 bytes \\(--max-constraint-bytes\\)"):
        await _tokens(client, _request(_regex("x" * (2**21 + 1))))


async def test_an_abort_while_it_is_checked_leaves_nothing(
    shard: Shard, client: ShardClient
) -> None:
    with _held_up(shard):
        async with client.submit(_request(_regex("a+"), max_tokens=100)):
            await asyncio.sleep(0.1)
            assert (await anext(client.watch_load())).waiting == 1
        async with asyncio.timeout(_SLACK_S):
            while (await anext(client.watch_load())).waiting:
                await asyncio.sleep(0.02)
    assert await _tokens(client, _request(_regex("a+")))


async def test_a_deadline_passes_while_it_is_checked_and_others_go_on(
    shard: Shard, client: ShardClient
) -> None:
    with _held_up(shard):
        with pytest.raises(DeadlineExceeded):
            await _tokens(client, _request(_regex("b+"), objective=Objective(deadline_s=0.2)))
        assert len(await _tokens(client, _request())) == 12
        # Of this one the verdict is known.
        assert await _tokens(client, _request(_regex("[a-z]+")))


async def test_an_engine_that_dies_meanwhile_makes_the_request_retryable(
    shard: Shard, client: ShardClient
) -> None:
    with _held_up(shard):
        waiting = asyncio.create_task(_tokens(client, _request(_regex("c+"))))
        await asyncio.sleep(0.2)
        shard.engine.kill()
        with pytest.raises(ShardUnavailable):
            await waiting
        shard.wait_healthy()
    assert await _tokens(client, _request(_regex("c+")))
    assert await _tokens(client, _request(_regex("[a-z]+")))


async def test_one_that_is_checked_when_a_drain_begins_is_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    service = Shard(tmp_path_factory.mktemp("drained") / "log", "--step-ms", "1")
    with running(service):
        async with ShardClient(service.address) as client:
            assert await _tokens(client, _request(_regex("[a-z]+")))
            with _held_up(service):
                waiting = asyncio.create_task(_tokens(client, _request(_regex("d+"))))
                await asyncio.sleep(0.2)
                service.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
                assert not waiting.done()
            assert await waiting
        assert service.process.wait(_SLACK_S) == 0
        assert not any(is_alive(child) for child in service._seen)


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_a_refusal_is_a_400_with_the_reason(router: Router, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 5, "stream": stream}
    bad = {"structured_outputs": {"regex": "(["}}
    status, text = ask(f"{router.url}/v1/completions", {**body, **bad})
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, "structured_outputs")
    assert "unclosed" in error["message"]
    good = {"structured_outputs": {"regex": "[ab]{3}"}}
    assert ask(f"{router.url}/v1/completions", {**body, **good})[0] == 200


async def test_clients_of_one_router_take_turns_with_their_slow_constraints(
    shard: Shard, client: ShardClient, router: Router
) -> None:
    count = budget(5, 12)
    ended: list[str] = []

    async def ask_from(address: str, number: int) -> None:
        connector = aiohttp.TCPConnector(local_addr=(address, 0))
        schema = {"allOf": [_pattern(number, length) for length in range(20, 32)]}
        body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"{router.url}/v1/completions", json=body) as answer,
        ):
            await answer.read()
        ended.append(address)

    async def wait_at_shard(count: int) -> None:
        while (await anext(client.watch_load())).waiting < count:
            await asyncio.sleep(0.02)

    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        with _held_up(shard):
            for number in range(count):
                tasks.create_task(ask_from("127.0.0.2", number))
            await wait_at_shard(count)
            tasks.create_task(ask_from("127.0.0.3", count))
            await wait_at_shard(count + 1)
    # Without turns it would be the last. Answers may overtake each other on a busy machine.
    assert ended.index("127.0.0.3") <= count // 2 + 1


def _pattern(number: int, length: int) -> dict[str, str]:
    """Return the schema of a string. The check of an `allOf` of 12 of them takes nearly a second,
    and refuses it as too complex.
    """
    return {"type": "string", "pattern": f".*{number}.*[a-z]{{{length}}}"}


# ---- meant to do harm ----


def _nested(value: object, depth: int, key: str) -> str:
    opening = '{"%s": ' % key  # noqa: UP031
    return opening * depth + json.dumps(value) + "}" * depth


def _tag(depth: int) -> Constraint:
    opening = '{"type": "tag", "begin": "<a>", "end": "</a>", "content": '
    text = opening * depth + '{"type": "any_text"}' + "}" * depth
    return Constraint(
        ConstraintKind.STRUCTURAL_TAG,
        '{"type": "structural_tag", "format": %s}' % text,  # noqa: UP031
    )


def _lark(*lines: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(lines))


_WORDS = [f"word{number}" for number in range(50_000)]
_CHAIN = [f"r{n}: r{n + 1} r{n + 1}" for n in range(20_000)]
_LEXEMES = [f"T{n}: T{n + 1} T{n + 1}" for n in range(60)]
HOSTILE = {
    "schema of 1 MB": _schema(
        {"properties": {f"key {n}": {"type": "string"} for n in range(30_000)}}
    ),
    "schema of 1 MB, all required": _schema(
        {
            "type": "object",
            "properties": {f"k{n}": {"type": "string"} for n in range(25_000)},
            "required": [f"k{n}" for n in range(25_000)],
        }
    ),
    "deep schema": Constraint(ConstraintKind.JSON_SCHEMA, _nested({}, 100_000, "not")),
    "deep items": Constraint(ConstraintKind.JSON_SCHEMA, _nested({}, 900, "items")),
    "deep brackets": Constraint(ConstraintKind.JSON_SCHEMA, "[" * 100_000),
    "deep regex": _regex("(" * 100_000 + "a" + ")" * 100_000),
    "deep tag": _tag(20_000),
    "tag of some depth": _tag(300),
    "counted thrice": _regex("((a{1,1000}){1,1000}){1,1000}"),
    "counted": _regex("(.{1,1000}x){1,1000}"),
    "exponential states": _regex("(.*a.{30}|.*b.{31}|.*c.{32})+"),
    "nested stars": _regex("(((a*)*)*)*b"),
    "many words": _regex("|".join(_WORDS)),
    "many choices": Constraint(ConstraintKind.CHOICE, options=_WORDS[:1024]),
    "large enum": _schema({"enum": _WORDS}),
    "doubling references": _schema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{
                    f"d{n}": {
                        "allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]
                    }
                    for n in range(40)
                },
                "d40": {"type": "integer"},
            },
        }
    ),
    "combinations": _schema(
        {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(40)]}
    ),
    "references in a circle": _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "references to itself": _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}
    ),
    "the whole in itself": _schema({"items": {"$ref": "#"}, "minItems": 1, "type": "array"}),
    "long string": _schema({"type": "string", "minLength": 10**9}),
    "many items": _schema({"type": "array", "items": {}, "minItems": 10**7}),
    "hostile pattern": _schema({"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"}),
    "left recursion": _lark('start: start "a" | start start | "a"'),
    "endless rules": _lark("start: a", "a: b", "b: a"),
    "empty loops": _lark("start: a*", "a: b*", 'b: a* | ""'),
    "ambiguous": _lark("start: e", 'e: e e e | e e | /[a-z]*/ | "a"?'),
    "doubling rules": _lark("start: r0", *_CHAIN, 'r20000: "a"'),
    "doubling lexemes": _lark("start: T0", *_LEXEMES, 'T60: "a"'),
    "deep grammar": _lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "null bytes": _lark("start: \x00"),
    "null bytes in a regex": _regex("\x00+\x00{3}"),
    "half a pair": Constraint(ConstraintKind.JSON_SCHEMA, '{"const": "\\ud800"}'),
    "half a pair in a key": Constraint(
        ConstraintKind.JSON_SCHEMA, '{"properties": {"\\udc00": {}}, "required": ["\\udc00"]}'
    ),
    "no number": Constraint(ConstraintKind.JSON_SCHEMA, '{"minimum": 1e999, "type": "number"}'),
    "long number": Constraint(
        ConstraintKind.JSON_SCHEMA,
        '{"type": "integer", "minimum": %s}' % ("9" * 100_000),
    ),
    "nothing": _regex("a&b" + "[^\\x00-\\U0010ffff]"),
    "no JSON": Constraint(ConstraintKind.STRUCTURAL_TAG, "{" * 10),
    "not a tag": Constraint(ConstraintKind.STRUCTURAL_TAG, "[[], 1]"),
}


class _Memory:
    """The largest sizes of a shard's processes: its server's, and those of all that check."""

    def __init__(self, shard: Shard) -> None:
        self._server = psutil.Process(shard.process.pid)
        self._checking = _check_process(shard)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.server_bytes = 0
        self.checking_bytes = 0

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.server_bytes = max(self.server_bytes, self._server.memory_info().rss)
                for process in (self._checking, *self._checking.children(recursive=True)):
                    self.checking_bytes = max(self.checking_bytes, process.memory_info().rss)


async def test_no_constraint_does_harm(shard: Shard, client: ShardClient) -> None:
    instance_id = (await client.info()).instance_id
    await _tokens(client, _request(_regex("x+")))
    bystander = asyncio.create_task(_stream(client))
    base_bytes = _check_process(shard).memory_info().rss
    server_bytes = psutil.Process(shard.process.pid).memory_info().rss
    took: dict[str, float] = {}
    with _Memory(shard) as memory:
        for name, constraint in HOSTILE.items():
            started_s = time.monotonic()
            outcome = await _outcome(client, constraint)
            took[name] = time.monotonic() - started_s
            print(f"{name:30} {took[name]:6.3f} s  {outcome}")
            assert len(await _tokens(client, _request())) == 12, name
    print(f"checking: {memory.checking_bytes - base_bytes:,} bytes more")
    print(f"server: {memory.server_bytes - server_bytes:,} bytes more")
    assert max(took.values()) < 3 * _TIMEOUT_S + _SLACK_S
    assert memory.checking_bytes < base_bytes + _MEMORY_BYTES + (16 << 20)
    assert memory.server_bytes < server_bytes + (64 << 20)
    bystander.cancel()
    # Nothing died of them, and what is good is served as before.
    assert (await client.info()).instance_id == instance_id
    assert await _tokens(client, _request(_regex("y+")))


async def _stream(client: ShardClient) -> None:
    while True:
        await _tokens(client, _request(max_tokens=100))


async def _outcome(client: ShardClient, constraint: Constraint) -> str:
    try:
        return f"{len(await _tokens(client, _request(constraint)))} tokens"
    except (RequestRefused, Overloaded, ShardUnavailable) as error:
        text = str(error)
        if isinstance(error, ShardUnavailable):
            # Its constraint became too much for what is shared of it.
            assert "given back" in text
        assert "\n" not in text
        assert len(text) < 500
        return text
