"""python image_direct.py HOST:PORT FILE 'a question': asks a shard about a picture.

Needs `pip install '.[client,router]'`: no router runs, but its code says which tokens stand
for an image.
"""

from __future__ import annotations

import asyncio
import sys

import PIL.Image

from penstock_client import Fleet, GenerationRequest, PenstockError, PromptImage, SamplingParams
from penstock_common.image_digest import image_digest
from penstock_router.text.image_tokens.expand import encode_with_images
from penstock_router.text.image_tokens.registry import read_image_tokens
from penstock_router.text.tokenizer import load_tokenizer


async def ask(address: str, file: str, question: str) -> None:
    with PIL.Image.open(file) as opened:
        picture = opened.convert("RGB")
    rows = picture.tobytes()
    async with Fleet([address]) as fleet:
        await fleet.wait_ready(timeout_s=30)
        files = await fleet.tokenizer_files()
        tokenizer = load_tokenizer(files)
        tokens = read_image_tokens(files, tokenizer)
        if tokens is None:
            sys.exit("the model sees no images")
        # The image, then the text.
        prompt, [place] = encode_with_images(
            tokenizer,
            [tokens.written, question],
            tokens,
            (picture.size,),
            add_special_tokens=True,
            max_tokens=fleet.info().max_model_len,
        )
        digest = image_digest(*picture.size, rows)
        image = PromptImage(digest.hex(), *picture.size, place.offset, place.num_tokens)

        async def pixels(wanted: PromptImage) -> bytes:
            """Called when a shard has not got them: at first, and after it has died."""
            return rows

        request = GenerationRequest(
            prompt, SamplingParams(temperature=0), max_tokens=64, images=[image]
        )
        async for output in fleet.submit(request, pixels):
            print(tokenizer.decode(output.token_ids, skip_special_tokens=True), end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python image_direct.py HOST:PORT FILE 'a question'")
    try:
        asyncio.run(ask(*sys.argv[1:4]))
    except PenstockError as error:
        sys.exit(str(error))
