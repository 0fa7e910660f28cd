"""Images that are valid, and odd."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import partial

from support import image_files as files
from support.image_files import PALETTE, RGB, chunk, header, picture, png, saved, small_png, turned

Make = Callable[[], bytes]


def _frames_without_end() -> bytes:
    control = chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))
    return small_png(control)[:-12] + chunk(b"fcTL", bytes(26))


_XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="6"/>'
    b"</rdf:RDF></x:xmpmeta>"
)


def _palette(transparent: bool) -> Make:
    def make() -> bytes:
        how = {"transparency": bytes(range(0, 256))} if transparent else {}
        return saved(picture("P"), "PNG", **how)

    return make


def _interlaced() -> bytes:
    """Adam7: an image of 1 x 1 has its one pixel in the first pass."""
    rows = chunk(b"IDAT", zlib.compress(b"\0\x80\x40\x20"))
    return png(header(1, 1, colour=RGB, interlace=1), rows)


def _deep(colour: int, samples: int) -> Make:
    """Sixteen bits a sample, and each value of the higher eight once in grey."""

    def make() -> bytes:
        values = [(i * 257 + 100) % 65_536 for i in range(256 * samples)]
        rows = b"".join(
            b"\0" + struct.pack(f">{16 * samples}H", *values[at : at + 16 * samples])
            for at in range(0, len(values), 16 * samples)
        )
        return png(header(16, 16, bits=16, colour=colour), chunk(b"IDAT", zlib.compress(rows)))

    return make


def _in_parts() -> bytes:
    """Return a PNG file whose pixels come in many chunks of seven bytes."""
    data = zlib.compress(b"".join(b"\0" + bytes([i % 256] * 50) for i in range(50)), 0)
    return png(header(50, 50), *[chunk(b"IDAT", data[i : i + 7]) for i in range(0, len(data), 7)])


def _polyglot() -> bytes:
    """A GIF that is a page too."""
    data = saved(picture("P"), "GIF")
    return data[:-1] + b"!\xfe\x20<script>alert(document)</script>\0;<html></html>"


VALID: dict[str, Make] = {
    "one pixel": lambda: saved(picture(width=1, height=1), "PNG"),
    "200 x 1": lambda: saved(picture(width=200, height=1), "PNG"),
    "CMYK": lambda: saved(picture("CMYK"), "JPEG"),
    "grey JPEG": lambda: saved(picture("L"), "JPEG"),
    "progressive JPEG": lambda: saved(picture(), "JPEG", progressive=True),
    "JPEG with restarts": lambda: saved(picture(), "JPEG", restart_marker_blocks=1),
    "JPEG with half of its colours": lambda: saved(picture(), "JPEG", subsampling=2),
    "JPEG with a profile": lambda: saved(picture(), "JPEG", icc_profile=bytes(200_000)),
    "JPEG with broken EXIF data": lambda: saved(
        picture(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"
    ),
    "JPEG with EXIF data of nothing": lambda: saved(picture(), "JPEG", exif=b"Exif\0\0"),
    "JPEG with EXIF data of an unknown order": lambda: saved(
        picture(), "JPEG", exif=b"Exif\0\0XX" + bytes(60)
    ),
    "JPEG with large EXIF data": lambda: saved(
        picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\x10\0" + bytes(60_000)
    ),
    "JPEG with a thousand comments": lambda: _with_comments(1000),
    "JPEG with a junk segment": lambda: files.with_segment(
        saved(picture(), "JPEG"), 0xE5, bytes(60_000)
    ),
    "JPEG turned by XMP": lambda: saved(picture(), "JPEG", xmp=_XMP),
    "two images in one (MPO)": lambda: saved(
        picture(), "MPO", save_all=True, append_images=[picture("L")]
    ),
    "PNG of one bit": lambda: saved(picture("1"), "PNG"),
    "PNG with grey and alpha": lambda: saved(picture("LA"), "PNG"),
    "PNG with alpha": lambda: saved(picture("RGBA"), "PNG"),
    "PNG with a palette": _palette(False),
    "PNG with a transparent palette": _palette(True),
    "PNG with a transparent colour": lambda: saved(
        picture(), "PNG", transparency=picture().getpixel((3, 3))
    ),
    "grey PNG with a transparent colour": lambda: saved(
        picture("L"), "PNG", transparency=picture("L").getpixel((3, 3))
    ),
    "PNG of sixteen bits, colour": _deep(RGB, 3),
    "PNG of sixteen bits, alpha": _deep(files.RGBA, 4),
    "PNG of four bits": lambda: png(
        header(2, 1, bits=4, colour=PALETTE),
        chunk(b"PLTE", bytes(range(48))),
        chunk(b"IDAT", zlib.compress(b"\0\x1f")),
    ),
    "interlaced PNG": _interlaced,
    "PNG with fewer rows than it says": lambda: png(
        header(2, 200), chunk(b"IDAT", zlib.compress(b"\0\1\2"))
    ),
    "PNG in many chunks": _in_parts,
    "PNG with trailing junk": lambda: saved(picture(), "PNG") + b"junk" * 1000,
    "PNG with a long text": lambda: small_png(chunk(b"tEXt", b"a\0" + b"x" * 500_000)),
    "PNG with an unknown chunk": lambda: small_png(chunk(b"abCd", bytes(1000))),
    "PNG with frames without end": _frames_without_end,
    "PNG with a broken palette of EXIF": lambda: small_png(
        chunk(b"eXIf", b"MM\0*\xff\xff\xff\xff")
    ),
    "animated PNG of 60 frames": lambda: files.animated("PNG", 60),
    "animated GIF of 60 frames": lambda: files.animated("GIF", 60),
    "animated WebP of 60 frames": lambda: files.animated("WEBP", 60),
    "GIF with a transparent colour": lambda: saved(picture("P"), "GIF", transparency=7),
    "GIF that is HTML too": _polyglot,
    "GIF whose frame is larger than its screen": lambda: files.gif(
        1, 1, (2, 2), b"\x02\x03\x44\x34\x05\0"
    ),
    "lossless WebP with alpha": lambda: saved(picture("RGBA"), "WEBP", lossless=True),
    "WebP with alpha": lambda: saved(picture("RGBA"), "WEBP"),
    "WebP": lambda: saved(picture(), "WEBP"),
    **{f"JPEG turned {n}": partial(turned, "JPEG", n) for n in range(10)},
    **{f"PNG turned {n}": partial(turned, "PNG", n) for n in (3, 6)},
    **{f"WebP turned {n}": partial(turned, "WEBP", n) for n in (4, 5)},
}


def _with_comments(count: int) -> bytes:
    data = saved(picture(), "JPEG")
    for _ in range(count):
        data = files.with_segment(data, 0xFE, b"comment")
    return data
