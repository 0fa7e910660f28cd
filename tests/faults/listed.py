"""The faults that are planted."""

from __future__ import annotations

from faults import client, engine, router, server

FAULTS = [*client.FAULTS, *server.FAULTS, *engine.FAULTS, *router.FAULTS]
