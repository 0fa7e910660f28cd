"""`penstock keys`: makes, lists and revokes the API keys of a router's --api-keys-file.

A key is shown only when it is made; the file has its hash.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import os
import re
import secrets
import sys
from collections.abc import Sequence

from penstock_cli.arguments import parser_for
from penstock_common import key_file_format
from penstock_common.flags import OneLineParser, choice, number, short
from penstock_common.key_file_format import KeyEntry, KeyFileError

PREFIX = "psk-"
_KEY_BYTES = 32
# A shorter key could be found from its hash by brute force.
_MIN_CHARS = 20
_VARIABLE = "PENSTOCK_API_KEYS_FILE"
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_limit = number(int, at_least=1, at_most=key_file_format.MAX_LIMIT)
_DURATION = re.compile(r"(\d{1,6})([dhm])")


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
    except KeyFileError as error:
        return _fail(f"{args.file}: {error}")
    except OSError as error:
        return _fail(f"{args.file}: {error.strerror}")
    return status


def _fail(reason: str) -> int:
    print(f"penstock keys: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = parser_for("keys", "API keys of a router's --api-keys-file, which holds their hashes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=OneLineParser)
    new = commands.add_parser("new", help="make a key, show it once, and write its entry")
    new.set_defaults(run=_new)
    new.add_argument("name", metavar="NAME", help="name in logs, metrics and the console")
    _add_file(new, f"that gets the entry (default: {_VARIABLE}, or the entry is printed)")
    new.add_argument(
        "--scope",
        **choice(key_file_format.SCOPES),
        default=None,
        help="admin: all that user may, /admin and the console (default: user)",
    )
    new.add_argument(
        "--another",
        action="store_true",
        help="add a key to a name that exists, with its scope and limits; both keys hold",
    )
    new.add_argument(
        "--expires",
        type=_expiry,
        metavar="WHEN",
        help="90d, 12h, 30m, a date or a time with its zone (default: never)",
    )
    for limit in key_file_format.LIMITS:
        new.add_argument(f"--{limit.replace('_', '-')}", type=_limit, metavar="N")
    shown = commands.add_parser("list", help="the keys of a file")
    shown.set_defaults(run=_list)
    _add_file(shown, f"(default: {_VARIABLE})", required=True)
    revoked = commands.add_parser("revoke", help="take a key out of a file")
    revoked.set_defaults(run=_revoke)
    revoked.add_argument("name", metavar="NAME")
    revoked.add_argument(
        "--older", action="store_true", help="all keys of that name but the newest"
    )
    _add_file(revoked, f"(default: {_VARIABLE})", required=True)
    hashed = commands.add_parser("hash", help="the hash of a key that is read from stdin")
    hashed.set_defaults(run=_hash, file="stdin")
    return parser


def _add_file(parser: argparse.ArgumentParser, about: str, *, required: bool = False) -> None:
    default = os.environ.get(_VARIABLE)
    parser.add_argument(
        "--file", metavar="FILE", default=default, required=required and default is None, help=about
    )


# ---- Commands ----------------------------------------------------------------------------------


def _new(args: argparse.Namespace) -> int:
    limits = {limit: getattr(args, limit) for limit in key_file_format.LIMITS}
    if args.another and (args.scope, *limits.values()) != (None,) * (1 + len(limits)):
        return _fail("--another: the scope and limits are those of the name; give none")
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    entry = KeyEntry(
        name=args.name,
        digest=key_file_format.digest_of(key.encode()),
        scopes=(args.scope or "user",),
        expires=args.expires,
        **limits,
    )
    if args.file is None:
        try:
            text = key_file_format.add_entry("", entry, another=args.another)
        except KeyFileError as error:
            return _fail(str(error))
        print(f"{key}\n\n{text}", end="")
        return 0
    with key_file_format.locked(args.file) as path:
        before = key_file_format.read_text(path) if os.path.exists(path) else ""
        after = key_file_format.add_entry(before, entry, another=args.another)
        key_file_format.replace(path, after)
    print(key)
    print(
        f"added {entry.name} to {args.file}, which holds only the key's hash: copy the key now",
        file=sys.stderr,
    )
    return 0


def _list(args: argparse.Namespace) -> int:
    rows = [("NAME", "SCOPES", "EXPIRES", "CONCURRENT", "REQUESTS/MIN", "TOKENS/MIN")]
    now = datetime.datetime.now(datetime.UTC)
    for entry in key_file_format.read(args.file):
        expires = "never" if entry.expires is None else f"{entry.expires:%Y-%m-%d %H:%M %Z}"
        if entry.expires is not None and entry.expires <= now:
            expires += " (expired)"
        limits = (getattr(entry, limit) for limit in key_file_format.LIMITS)
        shown = ("-" if value is None else str(value) for value in limits)
        concurrent, requests, tokens = shown
        rows.append((entry.name, ",".join(entry.scopes), expires, concurrent, requests, tokens))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _revoke(args: argparse.Namespace) -> int:
    with key_file_format.locked(args.file) as path:
        before = key_file_format.read_text(path)
        kept = key_file_format.remove_entries(before, args.name, older=args.older)
        key_file_format.replace(path, kept)
    what = f"all but the newest key of {args.name}" if args.older else args.name
    refused = "what was removed" if args.older else "its key"
    print(f"removed {what} from {args.file}; routers refuse {refused} within two seconds")
    return 0


def _hash(args: argparse.Namespace) -> int:
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if not (key.isascii() and key.isprintable() and len(key) >= _MIN_CHARS):
        return _fail(
            f"a key is printable ASCII of at least {_MIN_CHARS} characters that nobody could guess"
        )
    print(key_file_format.hash_of(key_file_format.digest_of(key.encode())))
    return 0


# ---- Arguments ---------------------------------------------------------------------------------


def _expiry(text: str) -> datetime.datetime:
    now = datetime.datetime.now(datetime.UTC)
    if duration := _DURATION.fullmatch(text):
        until = now + datetime.timedelta(**{_UNITS[duration[2]]: int(duration[1])})
    else:
        try:
            until = datetime.datetime.fromisoformat(text)
            # The time zone may move the time out of datetime's range.
            until.astimezone(datetime.UTC)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(
                f"must be as 90d, 12h, 2027-01-01 or 2027-01-01T12:00Z, not {short(text)}"
            ) from None
        if until.tzinfo is None:
            if len(text) > len("2027-01-01"):
                raise argparse.ArgumentTypeError(f"{short(text)} has no time zone; add Z for UTC")
            until = until.replace(tzinfo=datetime.UTC)
    if until <= now:
        raise argparse.ArgumentTypeError(f"{short(text)} is in the past")
    return until
