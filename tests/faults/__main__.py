"""`python -m faults TITLE`: plants faults whose titles begin so, and tells what notices them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from faults.listed import FAULTS
from faults.trial import SEEDS, copy_tree, is_caught, seeds_until_found


def main() -> int:
    flags = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    flags.add_argument("title", help="how the titles begin; '' for all")
    flags.add_argument("--seeds", type=int, default=SEEDS, help="how many histories to try")
    asked = flags.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for fault in (fault for fault in FAULTS if fault.title.startswith(asked.title)):
            missed += bool(fault.caught_by) and not is_caught(fault, Path(folder))
            if fault.simulated:
                found = seeds_until_found(fault, Path(folder), asked.seeds)
                print(f"{fault.title}: fails history {found}", flush=True)
                missed += found is None
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
