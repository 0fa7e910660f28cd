"""A router and shards with a tiny model that sees images, and what transformers answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer

from penstock_common.shared_flags import model_name
from support.budget import in_soak
from support.processes import Router, Shard, running

NUM_TOKENS = 10
# Each takes minutes.
SITE_FAMILIES = [
    "qwen3_vl",
    *map(in_soak, ("gemma3", "glm46v", "glm4v", "idefics3", "internvl", "llava", "llava_next")),
    *map(in_soak, ("mistral3", "pixtral", "qwen2_5_vl", "qwen3_5", "smolvlm")),
]


def data_url(encoded: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(encoded).decode()}"


def pixels_of(encoded: bytes) -> Image.Image:
    """Return the pixels as Pillow decodes them by the documented rules: upright, over white."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(encoded)))
    if image.has_transparency_data:
        layer, image = image.convert("RGBA"), Image.new("RGB", image.size, "white")
        image.paste(layer, mask=layer.getchannel("A"))
    return image.convert("RGB")


@dataclass
class SeeingShards:
    """Shards of one model, and the model itself."""

    shards: list[Shard]
    family: str
    directory: Path
    # As transformers computes it.
    whole: Any
    known: dict[Any, list[int]] = field(default_factory=dict)


@dataclass
class ImageSite:
    """A router that is asked, and the shards behind it."""

    router: Router
    behind: SeeingShards

    @property
    def shards(self) -> list[Shard]:
        return self.behind.shards

    @property
    def family(self) -> str:
        return self.behind.family

    @property
    def directory(self) -> Path:
        return self.behind.directory

    @property
    def name(self) -> str:
        return model_name(str(self.directory))

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens as answers show it, without a broken character at its end."""
        return self.tokenizer.decode(list(token_ids)).rstrip("\ufffd")

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """Return the JSON of an answer, which must have this status."""
        got, text = self.router.ask(path, body)
        assert got == status, text
        return json.loads(text)

    def events(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream, or its lines."""
        if path in ("/v1/chat/completions", "/invocations"):
            body = {**body, "stream_options": {"include_usage": True}}
        got, text = self.router.ask(path, body)
        assert got == 200, text
        lines = (line.removeprefix("data:").strip() for line in text.splitlines())
        return [json.loads(line) for line in lines if line.startswith("{")]

    def answer_to(
        self, messages: Any, files: Iterable[bytes], num_tokens: int = NUM_TOKENS
    ) -> tuple[str, int]:
        """Return the text that transformers gives for a chat with these images, and the number of
        prompt tokens.
        """
        token_ids = self.post("/tokenize", {"model": self.name, "messages": messages})["tokens"]
        return self.text(self.expected(token_ids, files, num_tokens)), len(token_ids)

    def expected(
        self, token_ids: Sequence[int], files: Iterable[bytes], num_tokens: int = NUM_TOKENS
    ) -> list[int]:
        """Return the ids that transformers generates after these ids and the files' pixels."""
        from models.image_prompts import together
        from models.tiny_vision import generate

        from penstock_shard.images.families import family_of
        from penstock_shard.images.image_processor import ImageProcessor
        from penstock_shard.model_loader.transformers_loader import load_config

        files = list(files)
        key = tuple(token_ids), tuple(files), num_tokens
        known = self.behind.known
        if key not in known:
            config = load_config(self.directory, trust_remote_code=False)
            processor = ImageProcessor(self.directory, family_of(config).options(config))
            inputs = [
                processor.process(each.tobytes(), each.width, each.height)
                for each in map(pixels_of, files)
            ]
            made = together(inputs) if inputs else {}
            known[key] = generate(self.behind.whole, token_ids, made, num_tokens)
        return known[key]


@contextmanager
def web_folder(folder: Path) -> Iterator[str]:
    """The URL, on loopback, under which the files of a folder are."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_seeing_model(directory: Path, family: str, text: dict[str, Any] | None = None) -> Any:
    """A model whose every token has a text of its own; `text` are other values of its decoder."""
    from models.tiny_vision import make_whole_vision

    whole = make_whole_vision(directory, family, text)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    size = whole.config.get_text_config().vocab_size
    missing = range(tokenizer.get_vocab_size(), size)
    tokenizer.add_tokens([AddedToken(f"<{token_id}>", normalized=False) for token_id in missing])
    tokenizer.save(str(path))
    context = {"max_position_embeddings": 2048} | (text or {})
    new = {
        "eos_token_id": tokenizer.token_to_id("</s>"),
        "max_position_embeddings": context["max_position_embeddings"],
    }
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        values = json.loads(path.read_text())
        for part in (values, values.get("text_config", {})):
            part |= {name: new[name] for name in new if name in part}
        values["eos_token_id"] = new["eos_token_id"]
        path.write_text(json.dumps(values))
    return whole


@contextmanager
def seeing_shards(folder: Path, family: str, count: int, *flags: str) -> Iterator[SeeingShards]:
    """Yield `count` shards of one model, with these flags."""
    directory = folder / "model"
    whole = write_seeing_model(directory, family)
    flags = "--dtype", "float32", "--threads", "1", "--check-integrity", *flags
    shards: list[Shard] = []
    with ExitStack() as stack:
        # Start one after the other: the next uses what the first has kept while it loaded.
        for number in range(count):
            shards.append(Shard(folder / f"shard{number}", "--model", str(directory), *flags))
            stack.enter_context(running(shards[-1]))
        yield SeeingShards(shards, family, directory, whole)


@contextmanager
def image_site(folder: Path, behind: SeeingShards, *flags: str) -> Iterator[ImageSite]:
    """A router with these flags before shards."""
    router = Router(folder / "router", [shard.address for shard in behind.shards], *flags)
    with running(router):
        yield ImageSite(router, behind)
