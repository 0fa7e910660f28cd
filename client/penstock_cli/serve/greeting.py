"""Tells how to use the router of `penstock serve` once it is ready."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shlex
import shutil
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_cli.arguments import DEFAULT_URL, open_directly

_POLL_S = 0.2
_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Access:
    """The router's address. `needs_key`: callers must send a key. `key`: the key, if known here."""

    url: str
    needs_key: bool = False
    key: str | None = None


async def greet(access: Access, models: Sequence[str] = ()) -> None:
    """Wait until the router is ready and serves all `models`, then say how to use it."""
    health = access.url + "/health"
    while not await asyncio.to_thread(_answers, health, verify=False):
        await asyncio.sleep(_POLL_S)
    while len(models) > 1 and not await asyncio.to_thread(_serves, access, models):
        await asyncio.sleep(_POLL_S)
    is_known = health.startswith("http:") or await asyncio.to_thread(_answers, health, verify=True)
    print(_greeting(access, models if len(models) > 1 else (), is_known=is_known), flush=True)


def _greeting(access: Access, models: Sequence[str], *, is_known: bool) -> str:
    needed = ["a key in PENSTOCK_API_KEY"] if access.needs_key else []
    needed += [] if is_known else ["the file of its certificate's authority in SSL_CERT_FILE"]
    first = f", with {' and '.join(needed)}" if needed else ""
    chats = "\n".join(f"  {_chat(access.url, model)}" for model in models or [""])
    return (
        f"\npenstock is ready at {access.url} (Ctrl-C ends it). "
        f"Try in another terminal{first}:\n\n{chats}\n\n"
        f"or over HTTP:\n\n{_curl(access, models[0] if models else '', is_known=is_known)}\n"
    )


def _chat(url: str, model: str) -> str:
    where = [] if url == DEFAULT_URL else ["--url", url]
    which = ["--model", model] if model else []
    return shlex.join([_command(), "chat", *where, *which])


def _command() -> str:
    """Return the command as a user can type it. It has a path if `penstock` is not on the PATH."""
    started = sys.argv[0]
    is_unknown = shutil.which("penstock") is None and os.path.basename(started) == "penstock"
    return started if is_unknown else "penstock"


def _curl(access: Access, model: str, *, is_known: bool) -> str:
    # Quoted: an IPv6 address has brackets, which are special in some shells.
    chat = shlex.quote(access.url + "/v1/chat/completions")
    which = f'"model": {json.dumps(model)}, ' if model else ""
    content = '"messages": [{"role": "user", "content": "What is penstock?"}]'
    body = f'{{{which}"stream": true, "max_tokens": 60, {content}}}'
    # Not the key itself, because the output may be a log.
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if access.needs_key else ""
    authority = "" if is_known else ' --cacert "$SSL_CERT_FILE"'
    return (
        f"  curl -N {chat}{authority} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d {shlex.quote(body)}"
    )


def _answers(url: str, *, verify: bool) -> bool:
    """True if our own router answers. `verify`: an authority known here must have signed its
    certificate.
    """
    try:
        with open_directly(url, _TIMEOUT_S, _context(verify=verify)):
            return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _serves(access: Access, models: Sequence[str]) -> bool:
    """True if all models are served, or the key is unknown."""
    headers = {"Authorization": f"Bearer {access.key}"} if access.key else {}
    request = urllib.request.Request(access.url + "/v1/models", headers=headers)
    try:
        with open_directly(request, _TIMEOUT_S, _context(verify=False)) as response:
            listed = {model["id"] for model in json.loads(response.read())["data"]}
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return listed.issuperset(models)


def _context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    # The certificate may be for another name than the address used here.
    context.check_hostname = False
    if not verify:
        context.verify_mode = ssl.CERT_NONE
    return context
