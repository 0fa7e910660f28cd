"""Routes and metrics that pages, alerts and dashboards name are there: in the table that a router
resolves requests by, and among the families that routers and shards count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from contract.metrics_page import router_families, shard_families
from contract.sources import ROOT
from support.router_doubles import FakeFleet, memory_router

PAGES = (
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "deploy" / "README.md",
    ROOT / "deploy" / "prometheus" / "alerts.yml",
    ROOT / "deploy" / "helm" / "penstock" / "values.yaml",
    ROOT / "deploy" / "helm" / "penstock" / "templates" / "NOTES.txt",
    *sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")),
)
# Routes of other servers that a page says are not served.
ELSEWHERE = {"docs/migration.md": {("", "/v1/audio")}}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
_PATH = r"(/[\w.{}:%$-]*(?:/[\w.{}:%$-]+)*)"
# A request in prose or in a block: DELETE /admin/shards/HOST:PORT.
_WITH_METHOD = re.compile(rf"\b({'|'.join(METHODS)})\s+{_PATH}")
# A URL of a router; another host is somebody else's.
_HOST = r"(?:localhost|127\.0\.0\.1|\[::1\]|\$?\{?ROUTER\}?|router|penstock)(?::\$?\w+)?"
_WITH_HOST = re.compile(rf"(?:https?://{_HOST}|\$ROUTER){_PATH}")
# A path by itself, in code or in what an alert says.
_BARE = re.compile(rf"(?:`|\s|^|\"){_PATH}(?=[`\s\",;.)?]|$)", re.MULTILINE)
_METRIC = re.compile(r"\b(penstock_(?:router|shard)_[a-z]\w*)(…|\.\.\.)?(?:\{([^}`]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


# By the page's name.
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in PAGES}


# ---- routes ------------------------------------------------------------------------------------


@pytest.fixture
async def app() -> web.Application:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        return router.app


def named_routes(text: str, firsts: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each method and path that a text names; the method is "" if any will do. A bare path
    counts if it begins as a route does.
    """
    yield from _WITH_METHOD.findall(text)
    yield from (("", path) for path in _WITH_HOST.findall(text))
    yield from (("", path) for path in _BARE.findall(text) if path.split("/")[1] in firsts)


def paths_of(app: web.Application) -> set[str]:
    return {resource.canonical for resource in app.router.resources()}


async def is_there(app: web.Application, method: str, path: str) -> bool:
    begin = path.removesuffix("...").rstrip("/") + "/"
    if not method and any(known.startswith(begin) for known in paths_of(app)):
        # What several begin with: a base of URLs.
        return True
    # What stands for a value has signs that no value has.
    path = re.sub(r"\{\w+\}|\$\w+", "x", path).rstrip(".:")
    for each in [method] if method else METHODS:
        found = await app.router.resolve(make_mocked_request(each, path))
        if found.http_exception is None:
            return True
    return False


async def missing(app: web.Application, text: str) -> list[tuple[str, str]]:
    firsts = {path.split("/")[1] for path in paths_of(app)} - {""}
    named = sorted(set(named_routes(text, firsts)))
    return [each for each in named if not await is_there(app, *each)]


@pytest.mark.parametrize("page", TEXTS)
async def test_every_route_that_a_page_names_is_served(app: web.Application, page: str) -> None:
    assert set(await missing(app, TEXTS[page])) == ELSEWHERE.get(page, set())


async def test_pages_name_routes(app: web.Application) -> None:
    """Else nothing is looked at."""
    text = "\n".join(TEXTS.values())
    firsts = {path.split("/")[1] for path in paths_of(app)} - {""}
    named = {path for _, path in named_routes(text, firsts)}
    assert {"/admin/shards", "/v1/chat/completions", "/metrics", "/health"} <= named
    assert len(named) > 40


@pytest.mark.parametrize(
    "text",
    [
        "description: The router's log and its route /admin/fleet say what is wrong.",
        "see `/admin/fleet`",
        "GET /fleet",
        "POST /admin/shards/a:1/undrain",
        "DELETE /admin/usage",
        "curl http://127.0.0.1:8000/v2/models",
        'curl -H "$ADMIN" $ROUTER/admin/fleet',
        "`/v1/nothing/...`",
    ],
)
async def test_a_route_that_is_not_there_is_found(app: web.Application, text: str) -> None:
    assert len(await missing(app, text)) >= 1


# ---- metrics -----------------------------------------------------------------------------------


@cache
def series() -> dict[str, set[str]]:
    """The labels of each name that a page may use: of a series, or of its family."""
    families = [*router_families(), *shard_families()]
    return {
        name: {*family.labels} | {"le"}
        for family in families
        for name in (*family.series, family.name)
    }


def faults(text: str) -> Iterator[str]:
    for name, ellipsis, inside in _METRIC.findall(text):
        known = series().get(name)
        if ellipsis or name.endswith("_"):
            if not any(each.startswith(name) for each in series()):
                yield f"nothing begins with {name}"
        elif known is None:
            yield f"{name} is not counted"
        elif unknown := set(_LABEL.findall(re.sub(r'"[^"]*"', '""', inside))) - known:
            yield f"{name} has no {sorted(unknown)}"


# Queries of alerts and dashboards, with what Prometheus adds, are looked at by test_metrics.py.
PROSE = [page for page in TEXTS if page.endswith((".md", ".txt"))]


@pytest.mark.parametrize("page", PROSE)
def test_every_metric_that_a_page_names_is_counted_with_these_labels(page: str) -> None:
    assert list(faults(TEXTS[page])) == []


@pytest.mark.parametrize(
    "text",
    [
        "`penstock_router_request_total`",
        '`penstock_router_fleet_events_total{kind="continued"}`',
        "What `penstock_router_shards_of_…` say",
    ],
)
def test_a_metric_that_is_not_there_is_found(text: str) -> None:
    assert len(list(faults(text))) == 1
