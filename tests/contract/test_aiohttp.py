"""The inner parts of aiohttp that the router relies on, though aiohttp promises none of them.

Another release may lack one. These tests then name it, before anything fails far from here.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import aiohttp
import pytest
from aiohttp import web, web_response, web_urldispatcher
from contract.sources import product_modules

from penstock_router.server.connections import Connection

# Of web_response, in routes/response_headers.py: the Server header of what aiohttp refuses itself.
SERVER_HEADER = "SERVER_SOFTWARE"


# Of web_urldispatcher, in app.py: what happens at `Expect: 100-continue`.
EXPECT_HANDLER = "_default_expect_handler"


def _unread(module: ModuleType, name: str) -> Iterator[str]:
    """Yield a complaint if the source of `module` never reads `name`. The source is searched
    because the module itself has the name as soon as our own code is imported.
    """
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    if not any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in nodes
    ):
        yield (
            f"{module.__name__} of aiohttp {aiohttp.__version__} reads no {name}, "
            "which penstock_router sets"
        )


def test_aiohttp_takes_its_server_header_from_where_ours_is_put() -> None:
    assert list(_unread(web_response, SERVER_HEADER)) == []


def test_aiohttp_asks_our_handler_of_expectations_on_every_route() -> None:
    assert list(_unread(web_urldispatcher, EXPECT_HANDLER)) == []


def test_a_connection_has_no_field_that_aiohttps_own_has() -> None:
    ours = set(Connection.__slots__)
    theirs = {slot for kind in Connection.__mro__[1:] for slot in getattr(kind, "__slots__", ())}
    assert ours & (theirs | set(dir(web.RequestHandler))) == set()
    overridden = {"connection_made", "data_received", "connection_lost", "handle_error"}
    assert overridden <= set(dir(web.RequestHandler))


def test_what_another_aiohttp_lacks_is_named() -> None:
    [line] = _unread(web, SERVER_HEADER)
    assert line.startswith("aiohttp.web of aiohttp ")


@pytest.mark.parametrize(
    ("module", "pattern", "names"),
    [
        ("penstock_router.app", r"web_urldispatcher\.(\w+) =", {EXPECT_HANDLER}),
        ("penstock_router.routes.response_headers", r"web_response\.(\w+) =", {SERVER_HEADER}),
    ],
)
def test_no_more_than_that_is_used(module: str, pattern: str, names: set[str]) -> None:
    assert set(re.findall(pattern, product_modules()[module].source)) == names
