"""A process that decodes images, one at a time, within its own limits.

    python -m penstock_router.images.decoder_process FD LOG_LEVEL LOG_FORMAT MAX_PIXELS MAX_BYTES

Serves the router at the socket FD until the socket is closed. An image that takes too long ends the
process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import sys
import time
from collections.abc import Sequence
from io import BufferedRWPair

from PIL.Image import Image

from penstock_common.child_process.child_end import read_exactly, stream_to_parent
from penstock_common.child_process.framing import encode_frame, receive_frame
from penstock_common.image_digest import begin_digest
from penstock_common.malloc import return_free_memory
from penstock_router.images.decoder_messages import LENGTHS, MAX_DECODE_S, Decoded, Refused
from penstock_router.images.image import ImageRefused
from penstock_router.images.pixels import decode, format_of, set_limits, strips

logger = logging.getLogger("penstock.images")

# The limit of address space: bytes for Python and Pillow, bytes per pixel (most for an animated
# WebP image: two canvases, a frame, its copy, two images), and copies of the encoded image.
_BASE_BYTES = 384 * 1024 * 1024
_BYTES_A_PIXEL = 24
_ENCODED_COPIES = 4
_MAX_FILES = 64
# Less urgent than text processes: a large image takes half a second.
_NICENESS = 10


def main(argv: Sequence[str]) -> int:
    *router, max_pixels, max_bytes = argv
    _limit(int(max_pixels), int(max_bytes))
    with stream_to_parent(*router, niceness=_NICENESS) as stream:
        _serve(stream, int(max_pixels))
    return 0


def _limit(max_pixels: int, max_bytes: int) -> None:
    set_limits(max_pixels)
    # Pillow's log lines show the content of images.
    logging.getLogger("PIL").setLevel(logging.ERROR)
    memory = _BASE_BYTES + _BYTES_A_PIXEL * max_pixels + _ENCODED_COPIES * max_bytes
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
    ):
        # Not every system has all these limits.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _serve(stream: BufferedRWPair, max_pixels: int) -> None:
    while (message := receive_frame(stream.read)) is not None:
        encoded = read_exactly(stream, LENGTHS.decode(message))
        _limit_time()
        outcome = _decode(encoded, max_pixels)
        del encoded
        if isinstance(outcome, Refused):
            stream.write(encode_frame(outcome))
        else:
            _write_pixels(stream, outcome)
        stream.flush()
        del outcome
        return_free_memory()


def _limit_time() -> None:
    """Have the kernel end the process if the next image takes more than `MAX_DECODE_S` of CPU time,
    over all threads.
    """
    until_s = math.ceil(time.process_time() + MAX_DECODE_S)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, hard))


def _decode(encoded: bytes, max_pixels: int) -> Image | Refused:
    name = format_of(encoded)
    try:
        return decode(encoded, max_pixels)
    except ImageRefused as error:
        return Refused(str(error))
    except MemoryError:
        return Refused("decoding the image takes more memory than it may")
    except Exception as error:  # noqa: BLE001 - Pillow raises anything for what is broken
        logger.debug("a %s image cannot be decoded: %s", name, type(error).__name__)
        return Refused(f"the image is not valid {name}, or is cut off")


def _write_pixels(stream: BufferedRWPair, image: Image) -> None:
    digest = begin_digest(*image.size)
    stream.write(encode_frame(Decoded(*image.size)))
    for rows in strips(image):
        digest.update(rows)
        stream.write(rows)
    stream.write(digest.digest())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
