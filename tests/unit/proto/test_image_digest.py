"""The digest that names an image on the wire. These values must never change."""

from __future__ import annotations

import hashlib
import struct

from penstock_common.image_digest import DIGEST_BYTES, begin_digest, image_digest

ROWS = bytes(range(24))


def test_the_digest_is_a_hash_of_prefix_size_and_rows() -> None:
    told = b"penstock image, RGB8\0" + struct.pack("<II", 4, 2) + ROWS
    assert image_digest(4, 2, ROWS) == hashlib.sha256(told).digest()
    assert len(image_digest(4, 2, ROWS)) == DIGEST_BYTES
    known = "de43c64766dcf2b5cc35b9e1f0178cd8c642030fe98971b46f06c48ac84f9e8a"
    assert image_digest(4, 2, memoryview(ROWS)).hex() == known


def test_pieces_of_any_size_give_the_same_digest() -> None:
    for num_bytes in (1, 5, 12, 24):
        digest = begin_digest(4, 2)
        for start in range(0, len(ROWS), num_bytes):
            digest.update(ROWS[start : start + num_bytes])
        assert digest.digest() == image_digest(4, 2, ROWS)


def test_the_same_bytes_in_another_shape_are_another_image() -> None:
    shapes = [(4, 2), (2, 4), (8, 1), (1, 8)]
    assert len({image_digest(*shape, ROWS) for shape in shapes}) == 4
