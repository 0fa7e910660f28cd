"""Runs `python -m penstock_router` and returns its exit status.

Checks the version before it imports anything that an older Python cannot read.
"""

import importlib.util
import sys


def main():  # type: () -> int
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        found = ".".join(str(part) for part in sys.version_info[:3])
        print("penstock router: needs Python 3.11 to 3.13; this is " + found, file=sys.stderr)
        return 2
    from penstock_common.shared_flags import USAGE_STATUS, quiet_grpc
    from penstock_common.version import why_not_imported

    quiet_grpc()
    try:
        # Image processes import Pillow later; check for it now.
        if importlib.util.find_spec("PIL") is None:
            raise ModuleNotFoundError(name="PIL")
        from penstock_router import workers
        from penstock_router.cli import parse_config
    except ImportError as error:
        print("penstock router: " + why_not_imported(error, "router"), file=sys.stderr)
        return USAGE_STATUS
    return workers.run(parse_config(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
