"""Doubles for the router's tests: fleets without shards, HTTP without sockets, tokenizers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
from aiohttp import web
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from penstock_client import Fleet, FleetStream, GenerationStream, ShardState
from penstock_client.fleet.allowed_networks import Ip
from penstock_proto.errors import InvalidRequest, NoShardAvailable, NotServed, PenstockError
from penstock_proto.facts import EmbeddingDefaults, LoadReport, ShardInfo, ShardLimits
from penstock_proto.types import (
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    Logprobs,
    Output,
    PixelSource,
    Pooling,
    Retain,
    SamplingParams,
)
from penstock_router.app import build_app, error_of_http
from penstock_router.config import RouterConfig
from penstock_router.observe.metrics import Metrics
from penstock_router.server.connections import Runner
from penstock_router.server.parts import ROUTER
from penstock_router.store.response_store import store_file

# ---- Tokenizers --------------------------------------------------------------------------------

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Pack my box with five dozen liquor jugs! How vexingly quick daft zebras jump.",
    "STOP here, stop there; stopping is not a stop. Hello world, hello there, hello.",
    "日本語のテキストです。東京は日本の首都。中文文本也在这里。",
    "emoji 😀 😃 🎉 and accents: café, naïve, Ünïcödé, Привет мир.",
] * 4

TEXT_PIECES = [
    *("Hello", " world", "STOP", " the", " fox", ".", "\n\n", " ", "  ", "<|", "stop"),
    *("日本語", "東京", "中文", "😀", "👩‍👩‍👧", "🎉", "é", "Ünï", "Привет", "ﷺ", "\t"),
]


def random_text(rng: random.Random, pieces: int) -> str:
    return "".join(rng.choice(TEXT_PIECES) for _ in range(pieces))


def byte_level_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer like those of GPT-2, Llama 3 and Qwen. One special token
    has a space and an umlaut.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<|eos|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(["<tool call>", "东"])
    tokenizer.add_special_tokens([AddedToken("<ü b>", special=True)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral. A space is ▁, one stands in front of a
    text, and characters outside the vocabulary are bytes.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS[:3],
        trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False),
    )
    parts = json.loads(tokenizer.to_str())
    # The trainer's special tokens are bytes here, not tokens to be skipped.
    parts["added_tokens"] = parts["added_tokens"][:3]
    parts["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    result = Tokenizer.from_str(json.dumps(parts))
    result.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return result


def wordpiece_tokenizer() -> Tokenizer:
    """Return a tokenizer like BERT's. The text of a token depends on whether it is the first."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer like those of T5 and XLM-R, with Metaspace and without bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300,
            special_tokens=["<unk>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def decoder_of(tokenizer: Tokenizer) -> dict[str, Any]:
    decoder: dict[str, Any] = json.loads(tokenizer.to_str())["decoder"]
    return decoder


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_files(tokenizer: Tokenizer, chat_template: str | None = CHATML) -> dict[str, bytes]:
    config: dict[str, Any] = {"eos_token": "<|eos|>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


# ---- A fleet without shards --------------------------------------------------------------------

INFO = ShardInfo(
    address="fake:1",
    schema_revision=1,
    min_schema_revision=1,
    version="0.1.0",
    instance_id="one",
    model="fake-model",
    model_aliases=("fake-alias",),
    revision="",
    architecture="fake",
    weights_hash="0123456789abcdef",
    tokenizer_hash="t",
    max_model_len=512,
    vocab_size=500,
    eos_token_ids=(0,),
    default_sampling=SamplingParams(),
    block_size=16,
    num_blocks=100,
    limits=ShardLimits(16, 2048, 1024, 100_000, 20),
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    attention_backend="none",
    capabilities=frozenset({"embed"}),
    batch_invariant=True,
    numerics_fingerprint="f",
    adapters={},
    embedding=EmbeddingDefaults(Pooling.LAST, normalize=True, size=8),
)


@dataclass
class FakeShard(ShardState):
    info: ShardInfo | None = INFO
    connected: bool = True
    ready: bool = True
    address: str = "fake:1"
    load: LoadReport = field(default_factory=LoadReport)
    in_flight: int = 0
    problem: str = ""
    leaving: bool = False
    last_info: ShardInfo | None = None

    async def drain(self) -> None:
        self.load = LoadReport(draining=True, handing_over=True)


# What a fake shard answers: token ids, or an error to raise at that point.
Script = Callable[[GenerationRequest], Sequence[int | PenstockError]]


def hashed_tokens(request: GenerationRequest) -> list[int | PenstockError]:
    """Depends on the prompt and the seed, like a model's would; never the eos id."""
    rng = random.Random(f"{list(request.prompt_token_ids)}-{request.sampling.seed}")
    return [rng.randrange(3, INFO.vocab_size) for _ in range(request.max_tokens or 16)]


@dataclass
class FakeFleet(Fleet):
    """Feeds real `FleetStream`s from a script, in bundles of `bundle` tokens a step."""

    files: Mapping[str, bytes]
    script: Script = hashed_tokens
    members: list[FakeShard] = field(default_factory=lambda: [FakeShard()])
    bundle: Callable[[], int] = lambda: 1
    step_s: float = 0.0
    requests: list[GenerationRequest] = field(default_factory=list)
    # The streams whose KV blocks are to be retained, and how.
    retained: list[tuple[str, Retain]] = field(default_factory=list)
    # What `add` was told of where shards are.
    located: dict[str, list[Ip]] = field(default_factory=dict)
    embedded: list[EmbeddingRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    refusal: PenstockError | None = None
    # Requests beyond this many are refused at submit with `refusal`.
    accepts: int = 10**9
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    stream_type: ClassVar[type[FleetStream]] = FleetStream

    @property
    def shards(self) -> list[FakeShard]:
        return self.members

    async def wait_changed(self) -> None:
        """Tests change its shards without a word, so it looks."""
        before = self._known()
        while self._known() == before:
            await asyncio.sleep(0.005)

    def _known(self) -> list[tuple[str, bool, bool, int]]:
        return [(each.address, each.ready, each.leaving, id(each.info)) for each in self.shards]

    def info(self, model: str = "") -> ShardInfo:
        infos = [shard.info for shard in self.shards if shard.ready and shard.info is not None]
        if not infos:
            raise NoShardAvailable("no shard is ready")
        for info in infos:
            if model in ("", info.model):
                return info
        raise InvalidRequest(f"model {model!r} is not served", field="model", value=model)

    async def tokenizer_files(self, model: str = "", tokenizer_hash: str = "") -> dict[str, bytes]:
        return dict(self.files)

    def add(self, address: str, ips: Sequence[Ip] = ()) -> None:
        self.located[address] = list(ips)
        self.shards.append(FakeShard(address=address))

    def remove(self, address: str) -> None:
        self.shards[:] = [shard for shard in self.shards if shard.address != address]

    def submit(
        self,
        request: GenerationRequest,
        pixels: PixelSource | None = None,
        *,
        deadline_s: float | None = None,
    ) -> FleetStream:
        if self.refusal is not None and len(self.requests) >= self.accepts:
            raise self.refusal
        self.info(request.model)
        if deadline_s is not None:
            objective = replace(request.objective, deadline_s=deadline_s)
            request = replace(request, objective=objective)
        self.requests.append(request)
        request_id = f"r{len(self.requests)}"
        stream = self.stream_type(
            *(request_id, 0, 0, self._on_cancel),
            request=request,
            _on_arrival=lambda stream, output: None,
            _on_failure=FleetStream.end,
            deadline_s=None,
        )
        stream.fingerprints = [INFO.numerics_fingerprint]
        task = asyncio.get_running_loop().create_task(self._feed(request, stream))
        self.running[request_id] = task
        task.add_done_callback(lambda _: self.running.pop(request_id))
        return stream

    def retain(self, stream: FleetStream, retain: Retain) -> bool:
        self.retained.append((stream.request_id, retain))
        return True

    async def load_adapter(self, name: str, source: str, model: str = "") -> None:
        """Refuse: the shards of this fleet have no adapters."""
        raise NotServed("adapters are not served", field="adapter")

    async def unload_adapter(self, name: str, model: str = "") -> None:
        """Refuse: the shards of this fleet have no adapters."""
        raise NotServed("adapters are not served", field="adapter")

    async def embed(self, request: EmbeddingRequest) -> list[list[float]]:
        """Vectors that depend on the ids and the pooling."""
        if self.refusal is not None and len(self.embedded) >= self.accepts:
            raise self.refusal
        infos = (shard.info for shard in self.shards if shard.ready and shard.info is not None)
        defaults = next((info.embedding for info in infos if info.embedding is not None), None)
        if defaults is None:
            raise NotServed("embed: no shard serves embeddings", field="embed")
        self.embedded.append(request)
        await asyncio.sleep(self.step_s)
        pooling = request.pooling or defaults.pooling
        normalize = defaults.normalize if request.normalize is None else request.normalize
        kept = defaults.size if request.dimensions is None else request.dimensions
        vectors = []
        for ids in request.inputs:
            rng = random.Random(f"{list(ids)}-{pooling}")
            values = [rng.uniform(-1.0, 1.0) for _ in range(defaults.size)][:kept]
            length = math.hypot(*values) if normalize else 1.0
            vectors.append([value / length for value in values])
        return vectors

    def _on_cancel(self, stream: GenerationStream) -> None:
        self.cancelled.append(stream.request_id)
        self.running[stream.request_id].cancel()

    async def _feed(self, request: GenerationRequest, stream: FleetStream) -> None:
        eos = frozenset() if request.ignore_eos else frozenset(INFO.eos_token_ids)
        stops = eos | set(request.stop_token_ids)
        tokens = list(self.script(request))
        position = 0
        while True:
            await asyncio.sleep(self.step_s)
            bundle = tokens[position : position + self.bundle()]
            if bundle and isinstance(bundle[0], PenstockError):
                stream.fail(bundle[0])
                return
            ids = [token for token in bundle if isinstance(token, int)]
            stop = next((token for token in ids if token in stops), None)
            if stop is not None:
                ids = ids[: ids.index(stop) + 1]
            output = self._output(request, ids, position)
            position += len(ids)
            if stop is not None:
                output.finish_reason, output.stop_token_id = FinishReason.STOP, stop
            elif position >= len(tokens):
                output.finish_reason = FinishReason.LENGTH
            stream.feed(output)
            if output.finish_reason is not None:
                return

    def _num_cached(self, request: GenerationRequest) -> int:
        return 0

    def _output(self, request: GenerationRequest, ids: list[int], position: int) -> Output:
        output = Output(ids, position)
        if position == 0:
            output.cached_tokens = self._num_cached(request)
            output.queue_s = 0.0
            if request.prompt_logprobs is not None:
                prompt = request.prompt_token_ids[1:]
                output.prompt_logprobs = fake_logprobs(prompt, request.prompt_logprobs)
        if request.logprobs is not None:
            output.logprobs = fake_logprobs(ids, request.logprobs, request.logprob_token_ids)
        return output


class CachingFleet(FakeFleet):
    """Finds all of a prompt but its last token cached where an earlier request had that prompt."""

    def _num_cached(self, request: GenerationRequest) -> int:
        earlier = itertools.takewhile(lambda other: other is not request, self.requests)
        if any(other.prompt_token_ids == request.prompt_token_ids for other in earlier):
            return len(request.prompt_token_ids) - 1
        return 0


def fake_logprobs(
    token_ids: Iterable[int], top_n: int, requested_ids: Sequence[int] = ()
) -> Logprobs:
    """The chosen token of even id is the best one; of odd id it is not among the best, unless all
    are asked for.
    """
    columns = Logprobs(top_n=top_n)
    for token_id in token_ids:
        best = token_id % 2 == 0
        columns.chosen.append(-0.5 if best else -5.25)
        columns.ranks.append(1 if best else 40)
        others = [
            (token_id + 3 + k) % INFO.vocab_size for k in range(min(top_n + 1, INFO.vocab_size))
        ]
        others = [other for other in others if other != token_id][:top_n]
        row = [token_id, *others][:top_n] if best or len(others) < top_n else others
        best_logprobs = [-0.5 - 0.25 * k for k in range(top_n)]
        columns.add_best(row, best_logprobs)
        known = dict(zip(row, best_logprobs, strict=True)) if top_n else {}
        known[token_id] = columns.chosen[-1]
        columns.requested += [known.get(other, -20.0 - other) for other in requested_ids]
    return columns


# ---- HTTP without sockets ----------------------------------------------------------------------


class MemoryTransport(asyncio.Transport):
    """A transport between a client in this process and the server's protocol. The socket is full
    while `unsent_bytes` is not 0.
    """

    def __init__(self, reader: asyncio.StreamReader, address: str = "") -> None:
        super().__init__()
        self.reader = reader
        self.address = address
        self.protocol: asyncio.Protocol | None = None
        self.closed = False
        self.writes = 0
        # The bytes that a real socket would not have taken yet.
        self.unsent_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed:
            self.writes += 1
            self.reader.feed_data(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.address, 0) if name == "peername" else default

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.reader.feed_eof()
            if self.protocol is not None:
                asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        return error

    @property
    def events(self) -> list[Any]:
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """The stream's data, comments left out; checks the framing as it goes."""
    events: list[Any] = []
    text = body.decode()
    assert text.endswith("\n\n"), text[-80:]
    for frame in text.removesuffix("\n\n").split("\n\n"):
        if frame.startswith(":"):
            continue
        assert frame.startswith("data: ")
        data = frame.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


class Connection:
    """An HTTP/1.1 connection to the server, in memory."""

    def __init__(self, server: web.Server, address: str = "") -> None:
        self.reader = asyncio.StreamReader(limit=2**26)
        self.transport = MemoryTransport(self.reader, address)
        self.protocol = server()
        self.transport.protocol = self.protocol
        self.protocol.connection_made(self.transport)

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: memory", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.send_raw("\r\n".join([*lines, "", ""]).encode() + body)

    def send_raw(self, data: bytes) -> None:
        self.protocol.data_received(data)

    def stop_reading(self) -> None:
        """Fill the socket, and tell the server."""
        self.transport.unsent_bytes = 2**20
        self.protocol.pause_writing()

    def go_on_reading(self) -> None:
        self.transport.unsent_bytes = 0
        self.protocol.resume_writing()

    async def read_head(self) -> tuple[int, dict[str, str]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def chunks(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(headers.get("content-length", 0)))
            return
        while True:
            size = int(await self.reader.readline(), 16)
            data = await self.reader.readexactly(size)
            await self.reader.readline()
            if size == 0:
                return
            yield data

    async def read_answer(self) -> Answer:
        status, headers = await self.read_head()
        return Answer(status, headers, b"".join([part async for part in self.chunks(headers)]))

    def close(self) -> None:
        """Close the connection, as a client that goes away does."""
        self.transport.close()


class MemoryRouter:
    """A router's application in this process, and a client of it."""

    def __init__(self, fleet: FakeFleet, app: web.Application, server: web.Server) -> None:
        self.fleet = fleet
        self.app = app
        self.server = server

    def connect(self, address: str = "") -> Connection:
        """A connection from this address; "": from none, as over a Unix socket."""
        return Connection(self.server, address)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        address: str = "",
    ) -> Answer:
        connection = self.connect(address)
        connection.send(method, path, body, headers or {})
        answer = await connection.read_answer()
        connection.close()
        return answer

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.request("GET", path, headers=headers)

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        given = {"Content-Type": "application/json", **headers}
        return await self.request("POST", path, data, given)

    async def complete(self, prompt: object = "Hello", **fields: object) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def chat(self, content: object = "Hello", **fields: object) -> Answer:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})


# A disk takes longer to store an empty file than a router to answer.
_MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None


async def _models_loaded(app: web.Application) -> None:
    """Wait until a thread has read the tokenizer of each model that is served."""
    async with asyncio.timeout(30.0):
        while app[ROUTER].models.not_ready_because == "the models are being loaded":
            await asyncio.sleep(0.001)


@asynccontextmanager
async def memory_router(fleet: FakeFleet, **settings: Any) -> AsyncIterator[MemoryRouter]:
    """Serve `fleet` in memory; fails when a sequence is left running afterwards."""
    config = replace(RouterConfig(shards="fake:1", shutdown_timeout_s=1.0), **settings)
    with (
        ThreadPoolExecutor(2) as executor,
        tempfile.TemporaryDirectory(dir=_MEMORY_FOLDER) as folder,
        store_file(
            config.response_store or f"{folder}/responses", max_bytes=config.response_store_bytes
        ) as path,
    ):
        config = replace(config, response_store=path)
        app = build_app(config, fleet, executor, Metrics())
        runner = Runner(
            app,
            max_connections=config.max_connections,
            header_timeout_s=config.header_timeout_s,
            write_timeout_s=config.write_timeout_s,
            memory=app[ROUTER].memory,
            error_response=error_of_http,
            handler_cancellation=True,
            shutdown_timeout=1,
        )
        await runner.setup()
        try:
            assert runner.server is not None
            await _models_loaded(app)
            yield MemoryRouter(fleet, app, runner.server)
        finally:
            await runner.cleanup()
    await asyncio.sleep(0)
    assert not fleet.running, "sequences were left running"
