"""The synchronous twin of `ShardClient`, for scripts and services without asyncio.

Each generation is a call of its own: one request, half-closed, read to the end.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Self

from penstock_client.rpc.shard_client import (
    ADAPTER_TIMEOUT_S,
    IMAGE_TIMEOUT_S,
    call_metadata,
    new_request_id,
)
from penstock_common.tls import Tls
from penstock_proto import codec
from penstock_proto.errors import PenstockError, ShardUnavailable
from penstock_proto.facts import Adapter, ShardInfo
from penstock_proto.transport import Connector
from penstock_proto.types import EmbeddingRequest, GenerationRequest, Output, PromptImage

_UNARY_TIMEOUT_S = 10.0


class SyncShardClient:
    """Speaks to one shard, blocking. Usable from several threads."""

    def __init__(self, address: str, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        """Connect in the clear without `tls`. Raises `TlsFilesUnusable`."""
        self.address = address
        self._metadata = call_metadata(api_key)
        self._connector = Connector(tls)
        self._credentials = self._connector.credentials()
        self._channel = self._connector.open(address, self._credentials)
        self._newest_stub = codec.stub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    @property
    def _stub(self) -> Any:
        """The stub for the next call, with the certificates of now; those that run keep their
        channel.
        """
        credentials = self._connector.credentials()
        if credentials is not self._credentials:
            self._credentials = credentials
            self._channel = self._connector.open(self.address, credentials)
            self._newest_stub = codec.stub(self._channel)
        return self._newest_stub

    def generate(
        self,
        request: GenerationRequest,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Generator[Output, None, None]:
        """The outputs of one request. Closing the iterator early aborts the request.

        Raises:
            PenstockError: as `errors` lists them; `DeadlineExceeded` after `timeout_s`.
        """
        message = codec.generate_request(request, request_id or new_request_id())
        call = self._stub.Generate(iter([message]), metadata=self._metadata, timeout=timeout_s)
        try:
            with codec.errors_of(self.address):
                for response in call:
                    for item in response.outputs:
                        result = codec.output(item)
                        if isinstance(result, PenstockError):
                            raise result
                        yield result
                        if result.finish_reason is not None:
                            return
                raise ShardUnavailable(f"shard {self.address} ended the call before the request")
        finally:
            call.cancel()

    def embed(
        self, request: EmbeddingRequest, *, timeout_s: float | None = None
    ) -> list[list[float]]:
        """A vector for each of the inputs, as `ShardClient.embed` has it."""
        message = codec.embed_request(request, new_request_id())
        return codec.embeddings(self._ask("Embed", message, timeout_s))

    def put_image(
        self,
        image: PromptImage,
        pixels: bytes | memoryview,
        *,
        timeout_s: float = IMAGE_TIMEOUT_S,
    ) -> None:
        """Have the engine know the pixels of an image, as `ShardClient.put_image` has it."""
        chunks = codec.image_chunks(image, pixels, "")
        with codec.errors_of(self.address):
            self._stub.PutImage(chunks, metadata=self._metadata, timeout=timeout_s)

    def load_adapter(
        self, name: str, source: str, *, timeout_s: float = ADAPTER_TIMEOUT_S
    ) -> Adapter:
        """Have the shard load a LoRA adapter, as `ShardClient.load_adapter` has it."""
        message = codec.load_adapter_request(name, source)
        return codec.adapter(self._ask("LoadAdapter", message, timeout_s).adapter)

    def unload_adapter(self, name: str, *, timeout_s: float = _UNARY_TIMEOUT_S) -> None:
        """Give the adapter to no further request, as `ShardClient.unload_adapter` has it."""
        self._ask("UnloadAdapter", codec.unload_adapter_request(name), timeout_s)

    def abort(self, request_ids: list[str]) -> None:
        """Abort by id; unknown ids are no error."""
        self._ask("Abort", codec.abort_request(request_ids), _UNARY_TIMEOUT_S)

    def info(self, *, timeout_s: float = _UNARY_TIMEOUT_S) -> ShardInfo:
        """Ask what the shard serves."""
        answer = self._ask("GetInfo", codec.INFO_REQUEST, timeout_s)
        return codec.shard_info(answer, self.address)

    def _ask(self, method: str, message: Any, timeout_s: float | None) -> Any:
        """The answer to a call of one message. Raises as `errors` lists them."""
        call = getattr(self._stub, method)
        with codec.errors_of(self.address):
            return call(message, metadata=self._metadata, timeout=timeout_s)

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name, checked against their hashes."""
        call = self._stub.GetTokenizer(codec.TOKENIZER_REQUEST, metadata=self._metadata)
        with codec.errors_of(self.address):
            return codec.whole_files(call)
