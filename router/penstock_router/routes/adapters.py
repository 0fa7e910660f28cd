"""/v1/load_lora_adapter and /v1/unload_lora_adapter, under vLLM's names: for the operator.

An adapter is loaded by every ready shard of its model. Only shards read its path, which names a
directory on their machines. Closed without an admin's key.
"""

from __future__ import annotations

from aiohttp import web

from penstock_proto.errors import PenstockError, RequestRefused
from penstock_proto.limits import (
    MAX_ADAPTER_NAME_CHARACTERS,
    MAX_ADAPTER_SOURCE_CHARACTERS,
)
from penstock_router.errors import BadRequest, NotFound, Unavailable
from penstock_router.json_fields import (
    BOOLEAN,
    STRING,
    Field,
    not_served,
    read_fields,
    string,
    table,
)
from penstock_router.server.caller import check_admin
from penstock_router.server.parts import ROUTER
from penstock_router.server.read_body import read_object

_NAME = Field(
    "lora_name",
    string(1, MAX_ADAPTER_NAME_CHARACTERS),
    "What requests call it, as their model.",
    required=True,
)
_MODEL = Field("base_model_name", STRING, "Only shards of this model; needed where there are more.")
LOAD_FIELDS = table(
    [
        _NAME,
        Field(
            "lora_path",
            string(1, MAX_ADAPTER_SOURCE_CHARACTERS),
            "A directory on the shards' machines, or a hub id.",
            required=True,
        ),
        _MODEL,
        not_served("load_inplace", BOOLEAN, False),
    ]
)
UNLOAD_FIELDS = table([_NAME, _MODEL])
# Shards' names of the fields, and the names in bodies.
_FIELDS = {"name": "lora_name", "adapter": "lora_name", "source": "lora_path"}


async def load_adapter(request: web.Request) -> web.Response:
    """POST /v1/load_lora_adapter {"lora_name": "mine", "lora_path": "/adapters/mine"}"""
    check_admin(request)
    asked = read_fields(LOAD_FIELDS, await read_object(request))
    router, name = request.app[ROUTER], asked["lora_name"]
    model = router.models.info(asked.get("base_model_name", "")).model
    served = router.models.names().get(name)
    if served is not None and served[1] != name:
        # Requests with this name would never reach the adapter.
        what = f"another name of {served[1]}" if served[1] else "a model's name"
        raise BadRequest(f"lora_name: {name} is {what}; choose another", param="lora_name")
    try:
        await router.fleet.load_adapter(name, asked["lora_path"], model)
    except PenstockError as error:
        raise _for_operator(error) from None
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /v1/unload_lora_adapter {"lora_name": "mine"}: running requests keep it to their end."""
    check_admin(request)
    asked = read_fields(UNLOAD_FIELDS, await read_object(request))
    router, name = request.app[ROUTER], asked["lora_name"]
    info = router.models.info(asked.get("base_model_name", ""))
    if name not in router.models.adapters_of(info):
        raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
    try:
        await router.fleet.unload_adapter(name, info.model)
    except PenstockError as error:
        raise _for_operator(error) from None
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _for_operator(error: PenstockError) -> Exception:
    """The error with the shards' own text, which an admin may see."""
    if isinstance(error, RequestRefused):
        return BadRequest(str(error), param=_FIELDS.get(error.field))
    return Unavailable(f"the adapter was not changed at every shard: {error}")
