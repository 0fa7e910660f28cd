"""Decodes images to pixels, with Pillow; only the decoding process imports this.

The content determines the format. The header is checked before anything is decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from io import BytesIO

import PIL.Image

# EXIF data needs this module. Import it now: no files can be opened later.
import PIL.TiffImagePlugin
from PIL import GifImagePlugin, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from PIL.Image import Image, Transpose

from penstock_router.images.image import MAX_RATIO, MAX_SIDE, ImageRefused

_Open = Callable[[BytesIO], ImageFile.ImageFile]
# Formats by an image's first bytes. Only these plugins of Pillow are called, directly, so that no
# other ever runs.
_FORMATS: tuple[tuple[bytes, str, _Open], ...] = (
    (b"\xff\xd8\xff", "JPEG", JpegImagePlugin.JpegImageFile),
    (b"\x89PNG\r\n\x1a\n", "PNG", PngImagePlugin.PngImageFile),
    (b"GIF87a", "GIF", GifImagePlugin.GifImageFile),
    (b"GIF89a", "GIF", GifImagePlugin.GifImageFile),
    (b"RIFF", "WebP", WebPImagePlugin.WebPImageFile),
)
# EXIF's orientation tag, and a transposition for each orientation except 1.
_ORIENTATION = 0x0112
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
# Maximum of inflated bytes of texts and profiles in a PNG file: of each, and of all.
_MAX_CHUNK_BYTES = 4 * 1024 * 1024
_MAX_CHUNKS_BYTES = 16 * 1024 * 1024
# Bytes of rows copied at once.
_STRIP_BYTES = 256 * 1024


def set_limits(max_pixels: int) -> None:
    """Set Pillow's own limits, as a second line of defense."""
    PIL.Image.MAX_IMAGE_PIXELS = max_pixels
    # Ignore other warnings: they are about metadata, and would fill the router's log.
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    PngImagePlugin.MAX_TEXT_CHUNK = _MAX_CHUNK_BYTES
    PngImagePlugin.MAX_TEXT_MEMORY = _MAX_CHUNKS_BYTES


def decode(encoded: bytes, max_pixels: int) -> Image:
    """Decode an image to mode RGB, rotated by its EXIF data, with white for transparency.

    Raises `ImageRefused`, and anything that Pillow raises for broken images.
    """
    try:
        with _open(encoded) as image:
            _check_size(*image.size, max_pixels)
            image.load()
            return _turned(_to_rgb(image), _orientation(image))
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        raise ImageRefused(_too_many(max_pixels)) from None


def format_of(encoded: bytes) -> str:
    """Return the format by an image's first bytes; "" if it is not supported."""
    for magic, name, _ in _FORMATS:
        if encoded.startswith(magic) and (name != "WebP" or encoded[8:12] == b"WEBP"):
            return name
    return ""


def strips(image: Image) -> Iterator[bytes]:
    """Yield the rows of an image in mode RGB, several at a time."""
    num_rows = max(1, _STRIP_BYTES // (3 * image.width))
    for top in range(0, image.height, num_rows):
        bottom = min(top + num_rows, image.height)
        yield image.crop((0, top, image.width, bottom)).tobytes()


def _open(encoded: bytes) -> ImageFile.ImageFile:
    name = format_of(encoded)
    for _, known, opened in _FORMATS:
        if name == known:
            return opened(BytesIO(encoded))
    raise ImageRefused("the image is none of JPEG, PNG, WebP and GIF, going by its content")


def _check_size(width: int, height: int, max_pixels: int) -> None:
    size = f"the image has {width} x {height} pixels"
    if min(width, height) < 1:
        raise ImageRefused(f"{size}; a side has at least 1")
    if max(width, height) > MAX_SIDE:
        raise ImageRefused(f"{size}; a side may have {MAX_SIDE}")
    if width * height > max_pixels:
        raise ImageRefused(f"{size}; {_too_many(max_pixels)}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageRefused(f"{size}; one side may be {MAX_RATIO} times as long as the other")


def _too_many(max_pixels: int) -> str:
    return f"an image may have {max_pixels} pixels (--max-image-pixels)"


def _orientation(image: Image) -> int:
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, OverflowError):
        # Broken metadata says nothing about the pixels.
        return 1
    return found if isinstance(found, int) else 1


def _turned(image: Image, orientation: int) -> Image:
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image) -> Image:
    if image.mode.startswith("I;16"):
        # Pillow would clip 16-bit values at 255.
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        white = PIL.Image.new("RGB", image.size, (255, 255, 255))
        white.paste(layer, mask=layer.getchannel("A"))
        return white
    # `convert` would copy an image that is already in this mode.
    return image if image.mode == "RGB" else image.convert("RGB")
