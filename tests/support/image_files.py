"""Image files, made by hand or by Pillow: what is odd about them can be anything."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image

PNG_BEGINNING = b"\x89PNG\r\n\x1a\n"
GREY, RGB, PALETTE, RGBA = 0, 2, 3, 6


# ---- by hand ----


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header(
    width: int, height: int, *, bits: int = 8, colour: int = GREY, interlace: int = 0
) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlace))


def png(*chunks: bytes) -> bytes:
    return PNG_BEGINNING + b"".join(chunks) + chunk(b"IEND", b"")


@cache
def zeros(num_bytes: int) -> bytes:
    """Return `num_bytes` zeros, deflated to a thousandth."""
    deflate = zlib.compressobj(9)
    whole, rest = divmod(num_bytes, 2**20)
    pieces = [deflate.compress(bytes(2**20)) for _ in range(whole)]
    return b"".join([*pieces, deflate.compress(bytes(rest)), deflate.flush()])


def png_of_zeros(width: int, height: int, *, bits: int = 8, interlace: int = 0) -> bytes:
    """Return a black PNG file."""
    num_bytes = height * (1 + (width * bits + 7) // 8)
    head = header(width, height, bits=bits, interlace=interlace)
    return png(head, chunk(b"IDAT", zeros(num_bytes)))


def small_png(*extra: bytes, **of_header: int) -> bytes:
    """Return a PNG file of two by two grey pixels, with these chunks before them."""
    rows = zlib.compress(b"\0\x10\x20\0\x30\x40")
    return png(header(2, 2, **of_header), *extra, chunk(b"IDAT", rows))


def riff(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a WebP file."""
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def webp(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a WebP file whose VP8X chunk gives this size."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp(riff(b"VP8X", b"\x12\0\0\0" + size), *chunks)


def gif(width: int, height: int, frame: tuple[int, int], data: bytes = b"\x02\x02D\x01\0") -> bytes:
    """Return a GIF file with a screen of this size, and a frame of another."""
    palette = b"\0\0\0\xff\xff\xff" + bytes(6)
    screen = struct.pack("<HHBBB", width, height, 0x81, 0, 0) + palette
    return b"GIF89a" + screen + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + data + b";"


# ---- by Pillow ----


def picture(mode: str = "RGB", width: int = 60, height: int = 40) -> Image.Image:
    """Return a picture whose corners all differ."""
    red = Image.linear_gradient("L").resize((width, height))
    green = red.transpose(Image.Transpose.ROTATE_90).resize((width, height))
    blue = Image.radial_gradient("L").resize((width, height))
    whole = Image.merge("RGBA", (red, green, blue, green))
    if mode in ("RGBA", "LA"):
        return whole.convert(mode)
    return whole.convert("RGB").convert(mode)


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    """Return an image file whose EXIF data says that it was taken in this orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(picture(), kind, exif=exif.tobytes())


def animated(kind: str, num_frames: int) -> bytes:
    frames = [picture(width=20 + i % 2, height=12).resize((20, 12)) for i in range(num_frames)]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)


def jpeg_segments(data: bytes) -> Iterator[bytes]:
    """Yield the segments of a JPEG file, from each marker up to the next."""
    start = 0
    for at in range(2, len(data) - 1):
        if data[at] == 0xFF and data[at + 1] not in (0, 0xFF, *range(0xD0, 0xD8)):
            yield data[start:at]
            start = at
    yield data[start:]


def jpeg_with_scans(width: int, height: int, num_scans: int) -> bytes:
    """Return a progressive JPEG file that repeats its last scan `num_scans` times."""
    parts = list(jpeg_segments(saved(Image.new("L", (width, height)), "JPEG", progressive=True)))
    scans = [at for at, part in enumerate(parts) if part.startswith(b"\xff\xda")]
    return b"".join(parts[:-1]) + parts[scans[-1]] * num_scans + parts[-1]


def with_segment(jpeg: bytes, marker: int, data: bytes) -> bytes:
    """Return the JPEG file with another segment, right after its beginning."""
    return jpeg[:2] + struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data + jpeg[2:]
