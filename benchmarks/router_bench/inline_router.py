"""A router that handles all text on its event loop, as a baseline for text processes and threads.

Start it instead of `python -m penstock_router`, with the same flags.
"""

from __future__ import annotations

import sys

from penstock_router.__main__ import main
from penstock_router.offload import dispatch


def _keep_all_text_here() -> None:
    for name in ("LONG_BYTES", "SHORT_BYTES", "MANY_VALUES", "MANY_ENFORCED_VALUES"):
        if not hasattr(dispatch, name):
            raise SystemExit(f"{dispatch.__name__}.{name} is gone: this would measure nothing")
        setattr(dispatch, name, sys.maxsize)


if __name__ == "__main__":
    _keep_all_text_here()
    sys.exit(main())
