"""A process that decodes images within narrower limits, so that tests need not wait for the real
ones: a second for each, and 300 MB of addresses.
"""

from __future__ import annotations

import sys

from penstock_router.images import decoder_process

if __name__ == "__main__":
    decoder_process.MAX_DECODE_S = 1.0  # type: ignore[attr-defined]
    decoder_process._BASE_BYTES = 300_000_000
    decoder_process._BYTES_A_PIXEL = 0
    sys.exit(decoder_process.main(sys.argv[1:]))
