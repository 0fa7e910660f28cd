"""python stream.py HOST:PORT 'some text': streams a completion from a shard, without a router.

Needs `pip install '.[client]' tokenizers`. Leaving the loop early, or Ctrl-C, aborts it.
"""

from __future__ import annotations

import asyncio
import sys

from tokenizers import Tokenizer

from penstock_client import (
    GenerationRequest,
    InvalidRequest,
    PenstockError,
    SamplingParams,
    ShardClient,
)


async def stream(address: str, text: str, *, temperature: float = 0.0, limit_s: float = 30) -> None:
    async with ShardClient(address) as shard:
        files = await shard.tokenizer_files()
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        request = GenerationRequest(
            tokenizer.encode(text).ids, SamplingParams(temperature=temperature), max_tokens=64
        )
        try:
            async with asyncio.timeout(limit_s):
                async for output in shard.generate(request):
                    print(tokenizer.decode(output.token_ids), end="", flush=True)
        except InvalidRequest as error:
            print(f"{error.field} is {error.value}; it must be {error.bound}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python stream.py HOST:PORT 'some text'")
    try:
        asyncio.run(stream(sys.argv[1], sys.argv[2]))
    except PenstockError as error:
        sys.exit(str(error))
