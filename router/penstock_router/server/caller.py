"""The client of a request: its names for fairness and for shards, and whether it is an admin."""

from __future__ import annotations

import hashlib
import secrets

from aiohttp import web

from penstock_router.admission.api_keys import Key
from penstock_router.errors import (
    Forbidden,
    Unauthorized,
)
from penstock_router.server.client_address import network_of
from penstock_router.server.parts import KEY, ROUTER

# Each process has its own: a shard tells clients apart only within one call.
_CALLER_KEY = secrets.token_bytes(16)
# The same text for a key that is missing, unknown, revoked or expired.
WRONG_KEY = "Unauthorized: missing or wrong API key"


def client_of(request: web.Request) -> str:
    """Return the client's name, for fairness and bounds: that of its API key, else its network. An
    unknown key is ignored, because anybody can make up a new one for each request.
    """
    key: Key | None = request.get(KEY)
    return network_of(request.remote or "") if key is None else key.name


def caller_of(request: web.Request) -> str:
    """Return the client's name for shards, which let a router's clients take turns. The name tells
    neither the key's name nor the address.
    """
    client = client_of(request).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(client, digest_size=8, key=_CALLER_KEY).hexdigest()


def check_admin(request: web.Request, what: str = "") -> None:
    """Raise `Forbidden` if the key is not an admin's or the router has no admin keys, and
    `Unauthorized` without a known key. `what` names what is asked for; the route by default.
    """
    what = what or request.path
    if not request.app[ROUTER].keys.has_admins:
        raise Forbidden(
            f"{what} is closed; start the router with --admin-key or --api-keys-file to open it"
        )
    key = request.get(KEY)
    if key is None:
        raise Unauthorized(WRONG_KEY)
    if not key.is_admin:
        raise Forbidden(f"{what} is for keys of the scope admin; this one is a user's")
