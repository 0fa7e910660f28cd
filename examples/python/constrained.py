"""python constrained.py HOST:PORT 'some text' PATTERN: an answer of a shard that matches a pattern.

Needs `pip install '.[client]' tokenizers`. A pattern that cannot be served is refused before
anything is computed, with the reason.
"""

from __future__ import annotations

import sys

from tokenizers import Tokenizer

from penstock_client import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    InvalidRequest,
    PenstockError,
    SamplingParams,
    SyncShardClient,
)


def ask(address: str, text: str, pattern: str) -> None:
    with SyncShardClient(address) as shard:
        files = shard.tokenizer_files()
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        request = GenerationRequest(
            tokenizer.encode(text).ids,
            SamplingParams(temperature=0),
            max_tokens=64,
            constraint=Constraint(ConstraintKind.REGEX, pattern),
        )
        try:
            for output in shard.generate(request):
                print(tokenizer.decode(output.token_ids), end="", flush=True)
        except InvalidRequest as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python constrained.py HOST:PORT 'some text' 'a regular expression'")
    try:
        ask(*sys.argv[1:4])
    except PenstockError as error:
        sys.exit(str(error))
