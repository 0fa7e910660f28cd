"""/admin: the fleet as an operator sees it, changes to it, and what keys have used. Closed without
--admin-key.

A change applies to all workers of the router: it is a line in a file that each of them follows. It
does not outlive the router; lasting shards belong in --shards. A shard that is added must be in the
networks of --shard-networks; its name is resolved once, and it is connected to nowhere else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from aiohttp import web

from penstock_client import Fleet, ShardState
from penstock_client.fleet.allowed_networks import Ip, locate
from penstock_client.fleet.discovery import check_address
from penstock_proto.errors import PenstockError
from penstock_router.errors import BadRequest, NotFound, Unavailable
from penstock_router.server.caller import check_admin
from penstock_router.server.parts import ROUTER
from penstock_router.server.read_body import read_object
from penstock_router.server.send import encoded_response, json_response
from penstock_router.shard_states import describe_shard

_POLL_S = 0.25


class Changes:
    """Shards that the operator added and removed, in order."""

    def __init__(self, fleet: Fleet, path: str) -> None:
        """`path` is the file that all workers share; "" where there is only this one."""
        self._fleet = fleet
        self._path = Path(path) if path else None
        self._offset = 0
        # Removals of shards not in the fleet yet: a new worker may read of one before it finds the
        # shard.
        self._removed_early: set[str] = set()

    def say(self, verb: str, address: str, ips: Sequence[Ip] = ()) -> None:
        """Make a change in all workers; `verb` is "add" or "remove". A shard that is added is at
        `ips`; without them its address says where.
        """
        if self._path is None:
            self._apply(verb, address, ips)
            return
        # A single append of a whole line: other workers may write too.
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{verb} {' '.join([address, *map(str, ips)])}\n".encode())
        self._take()

    async def follow(self) -> None:
        """Apply what other workers have written; runs until cancelled."""
        while self._path is not None:
            self._take()
            for address in self._removed_early & self._present():
                self._apply("remove", address)
            await asyncio.sleep(_POLL_S)

    def _take(self) -> None:
        assert self._path is not None
        if not self._path.exists() or os.stat(self._path).st_size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        # The last line may be incomplete while another worker writes it.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode().splitlines():
            verb, address, *ips = line.split()
            self._apply(verb, address, [ip_address(ip) for ip in ips])

    def _apply(self, verb: str, address: str, ips: Sequence[Ip] = ()) -> None:
        self._removed_early.discard(address)
        if verb == "add":
            self._fleet.add(address, ips)
        elif address in self._present():
            self._fleet.remove(address)
        else:
            self._removed_early.add(address)

    def _present(self) -> set[str]:
        return {shard.address for shard in self._fleet.shards}


CHANGES = web.AppKey("changes", Changes)


def add_routes(app: web.Application) -> None:
    """Add all of /admin."""
    app.add_routes(
        [
            web.get("/admin/shards", list_shards),
            web.post("/admin/shards", add_shard),
            web.delete("/admin/shards/{address}", remove_shard),
            web.post("/admin/shards/{address}/drain", drain_shard),
            web.get("/admin/usage", show_usage),
        ]
    )


async def list_shards(request: web.Request) -> web.Response:
    """GET /admin/shards"""
    check_admin(request)
    shards = request.app[ROUTER].fleet.shards
    return json_response({"shards": [_show_shard(shard) for shard in shards]})


async def add_shard(request: web.Request) -> web.Response:
    """POST /admin/shards {"address": "HOST:PORT"}"""
    check_admin(request)
    given = (await read_object(request)).get("address")
    if not isinstance(given, str):
        raise BadRequest("address: must be a string, HOST:PORT", param="address")
    address = _check_address(given)
    try:
        ips = await locate(address, request.app[ROUTER].config.shard_networks)
    except ValueError as error:
        raise BadRequest(f"address: {error}", param="address") from None
    request.app[CHANGES].say("add", address, ips)
    return json_response({"address": address, "status": "added"}, status=202)


async def remove_shard(request: web.Request) -> web.Response:
    """DELETE /admin/shards/{address}: its requests move or finish."""
    address = _member(request).address
    request.app[CHANGES].say("remove", address)
    return json_response({"address": address, "status": "leaving"}, status=202)


async def drain_shard(request: web.Request) -> web.Response:
    """POST /admin/shards/{address}/drain: the shard admits nothing more from anybody; every router
    sends its requests elsewhere. It cannot be undone: stop the shard afterwards.
    """
    shard = _member(request)
    try:
        async with asyncio.timeout(request.app[ROUTER].config.stall_timeout_s):
            await shard.drain()
    except PenstockError as error:
        raise Unavailable(f"{shard.address} does not drain: {error}") from None
    except TimeoutError:
        raise Unavailable(f"{shard.address} does not drain: it does not answer") from None
    return json_response({"address": shard.address, "status": "draining"}, status=202)


async def show_usage(request: web.Request) -> web.Response:
    """GET /admin/usage: tokens and requests by key and model, of all workers."""
    check_admin(request)
    return encoded_response(await request.app[ROUTER].usage.as_json())


def _member(request: web.Request) -> ShardState:
    check_admin(request)
    address = _check_address(request.match_info["address"])
    for shard in request.app[ROUTER].fleet.shards:
        if shard.address == address:
            return shard
    raise NotFound(f"{address} is not in this fleet")


def _check_address(address: str) -> str:
    try:
        return check_address(address)
    except ValueError as error:
        raise BadRequest(f"address: {error}", param="address") from None


def _show_shard(shard: ShardState) -> dict[str, Any]:
    info = shard.info
    return {
        **describe_shard(shard),
        "ready": shard.ready,
        "draining": shard.load.draining,
        "leaving": shard.leaving,
        "weights_hash": None if info is None else info.weights_hash,
        "numerics_fingerprint": None if info is None else info.numerics_fingerprint,
        "version": None if info is None else info.version,
        "in_flight_from_here": shard.in_flight,
    }
