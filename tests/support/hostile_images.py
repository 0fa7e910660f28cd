"""Images that are refused, or that nobody should have to decode, with words of the refusal."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import cache

from PIL import Image

from support import image_files as files
from support.image_files import chunk, header, picture, png, saved, small_png

Make = Callable[[], bytes]

_NOT_PNG = "the image is not valid PNG, or is cut off"
_NOT_JPEG = "the image is not valid JPEG, or is cut off"
_NOT_GIF = "the image is not valid GIF, or is cut off"
_NOT_WEBP = "the image is not valid WebP, or is cut off"
_NO_FORMAT = "none of JPEG, PNG, WebP and GIF"
_PIXELS = "may have 33554432 pixels (--max-image-pixels)"
_SIDE = "a side may have 16384"
_RATIO = "one side may be 200 times as long as the other"


@cache
def _bomb() -> bytes:
    return zlib.compress(bytes(100_000_000), 9)


def _cut(kind: str, keep: float, **how: object) -> Make:
    def make() -> bytes:
        data = saved(picture(), kind, **how)
        return data[: int(len(data) * keep)]

    return make


def _second_header() -> bytes:
    rows = chunk(b"IDAT", zlib.compress(b"\0\x10\x20\0\x30\x40"))
    return png(header(2, 2), header(30_000, 30_000), rows)


def _bad_checksum() -> bytes:
    data = bytearray(small_png())
    data[29] ^= 1
    return bytes(data)


REFUSED: dict[str, tuple[Make, str]] = {
    "a bomb of 50,000 x 50,000": (lambda: files.png_of_zeros(50_000, 50_000, bits=1), _SIDE),
    "an interlaced bomb": (lambda: files.png_of_zeros(50_000, 50_000, bits=1, interlace=1), _SIDE),
    "1 x 100,000": (lambda: files.png_of_zeros(1, 100_000), _SIDE),
    "100,000 x 1": (lambda: files.png_of_zeros(100_000, 1), _SIDE),
    "a side of a pixel too much": (lambda: files.png_of_zeros(16_385, 100), _SIDE),
    "a side of 2^31 - 1": (lambda: png(header(2**31 - 1, 1), chunk(b"IDAT", b"")), _SIDE),
    "too long for its width": (lambda: files.png_of_zeros(16_281, 81), _RATIO),
    "201 x 1": (lambda: files.png_of_zeros(201, 1), _RATIO),
    "a row of pixels too much": (lambda: files.png_of_zeros(5793, 5793), _PIXELS),
    "16,384 x 16,384": (lambda: files.png_of_zeros(16_384, 16_384, bits=1), _PIXELS),
    "a JPEG of 65,500 x 1": (lambda: saved(Image.new("L", (65_500, 1)), "JPEG"), _SIDE),
    "a JPEG of 8000 x 8000": (lambda: saved(Image.new("L", (8000, 8000)), "JPEG"), _PIXELS),
    "a GIF's screen of 65,535 x 65,535": (lambda: files.gif(65_535, 65_535, (1, 1)), _SIDE),
    "a GIF's frame of 65,535 x 65,535": (lambda: files.gif(1, 1, (65_535, 65_535)), _PIXELS),
    "a WebP canvas of 16,384 x 16,384": (lambda: files.webp_canvas(16_384, 16_384), _PIXELS),
    "a WebP canvas of 2^24 x 255": (lambda: files.webp_canvas(2**24, 255), _PIXELS),
    "a WebP canvas without an image": (lambda: files.webp_canvas(10, 10), _NOT_WEBP),
    "a WebP file of 16,383 x 16,383": (
        lambda: files.webp(
            files.riff(b"VP8L", b"\x2f" + struct.pack("<I", 16_382 << 14 | 16_382) + bytes(9))
        ),
        _PIXELS,
    ),
    "no width": (lambda: png(header(0, 10), chunk(b"IDAT", zlib.compress(b""))), _NOT_PNG),
    "no height": (lambda: png(header(10, 0), chunk(b"IDAT", zlib.compress(b""))), _NOT_PNG),
    "a GIF without size": (lambda: files.gif(0, 0, (0, 0)), _NOT_GIF),
    "nothing": (lambda: b"", "the image is empty"),
    "a PNG file's beginning": (lambda: files.PNG_BEGINNING, _NOT_PNG),
    "a PNG file cut in its header": (lambda: small_png()[:20], _NOT_PNG),
    "a PNG file cut in its pixels": (_cut("PNG", 0.5), _NOT_PNG),
    "a PNG file cut near its end": (_cut("PNG", 0.95), _NOT_PNG),
    "a JPEG file's beginning": (lambda: b"\xff\xd8\xff", _NOT_JPEG),
    "a JPEG file cut in its tables": (_cut("JPEG", 0.1), _NOT_JPEG),
    "a JPEG file cut in its scan": (_cut("JPEG", 0.7), _NOT_JPEG),
    "a progressive JPEG file cut": (_cut("JPEG", 0.8, progressive=True), _NOT_JPEG),
    "a GIF file's beginning": (lambda: b"GIF89a", _NOT_GIF),
    "a GIF file cut in its pixels": (_cut("GIF", 0.6), _NOT_GIF),
    "a WebP file's beginning": (lambda: b"RIFF\x10\0\0\0WEBPVP8 ", _NOT_WEBP),
    "a WebP file cut in its pixels": (_cut("WEBP", 0.5), _NOT_WEBP),
    "an SVG": (
        lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        _NO_FORMAT,
    ),
    "an SVG that reads files": (
        lambda: b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/hostname">]><svg>&b;</svg>',
        _NO_FORMAT,
    ),
    "a TIFF": (lambda: saved(picture(), "TIFF"), _NO_FORMAT),
    "a BMP": (lambda: saved(picture(), "BMP"), _NO_FORMAT),
    "an ICO": (lambda: saved(picture(), "ICO"), _NO_FORMAT),
    "a PPM": (lambda: saved(picture(), "PPM"), _NO_FORMAT),
    "a PDF": (lambda: saved(picture(), "PDF"), _NO_FORMAT),
    "an EPS": (lambda: saved(picture(), "EPS"), _NO_FORMAT),
    "a PSD": (lambda: b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 9, 9, 8, 3), _NO_FORMAT),
    "a JPEG 2000": (lambda: saved(picture(), "JPEG2000"), _NO_FORMAT),
    "a TGA": (lambda: saved(picture(), "TGA"), _NO_FORMAT),
    "HTML": (lambda: b"<html><img src=x></html>", _NO_FORMAT),
    "sound": (lambda: b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), _NO_FORMAT),
    "a ZIP archive": (lambda: b"PK\3\4" + bytes(26), _NO_FORMAT),
    "bytes without sense": (lambda: zlib.compress(b"x") * 50, _NO_FORMAT),
    "a text that inflates to 100 MB": (
        lambda: small_png(chunk(b"zTXt", b"a\0\0" + _bomb())),
        _NOT_PNG,
    ),
    "an international one": (
        lambda: small_png(chunk(b"iTXt", b"a\0\1\0\0\0" + _bomb())),
        _NOT_PNG,
    ),
    "texts that inflate to 100 MB together": (
        lambda: small_png(*[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(4_000_000)))] * 25),
        _NOT_PNG,
    ),
    "a profile that inflates to 100 MB": (
        lambda: small_png(chunk(b"iCCP", b"a\0\0" + _bomb())),
        _NOT_PNG,
    ),
    "a PNG file with a second header": (_second_header, _SIDE),
    "a PNG file with a bad checksum": (_bad_checksum, _NOT_PNG),
    "a PNG file without its header": (lambda: png(chunk(b"IDAT", b"")), _NOT_PNG),
    "a PNG file of three bits": (lambda: small_png(bits=3), _NOT_PNG),
    "a PNG file whose pixels do not inflate": (
        lambda: png(header(2, 2), chunk(b"IDAT", b"\xff" * 40)),
        _NOT_PNG,
    ),
    "a chunk that says it has 2 GB": (
        lambda: files.PNG_BEGINNING + header(2, 2) + b"\x7f\xff\xff\xffIDAT" + bytes(100),
        _NOT_PNG,
    ),
    "a lossless JPEG": (
        lambda: saved(picture(), "JPEG").replace(b"\xff\xc0", b"\xff\xc3"),
        _NOT_JPEG,
    ),
    "a JPEG file without tables": (
        lambda: saved(picture(), "JPEG").replace(b"\xff\xdb", b"\xff\xfe"),
        _NOT_JPEG,
    ),
    "a JPEG file of twelve bits": (
        lambda: saved(picture(), "JPEG").replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c"),
        _NOT_JPEG,
    ),
    "a JPEG file without height": (
        lambda: saved(picture(), "JPEG").replace(
            b"\xff\xc0\0\x11\x08\0\x28", b"\xff\xc0\0\x11\x08\0\0"
        ),
        _NOT_JPEG,
    ),
    "a JPEG file of nothing but comments": (
        lambda: b"\xff\xd8" + (b"\xff\xfe\xff\xff" + bytes(65_533)) * 200,
        _NOT_JPEG,
    ),
}
