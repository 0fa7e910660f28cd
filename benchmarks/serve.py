"""Loads a running server: another name of `penstock bench`.

    python benchmarks/serve.py --streams 1,4,16 --plot benchmarks/plots/serve.png

See `penstock bench --help`.
"""

from __future__ import annotations

import sys

from penstock_cli.bench.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
