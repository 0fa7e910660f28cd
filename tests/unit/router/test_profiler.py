"""The flame graph: stacks to a tree to an SVG, and to whom it is shown."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import pytest
from unit.router.router_doubles import FakeFleet, memory_router

from penstock_router.observe.profiler import (
    STYLE,
    Frame,
    Profile,
    Sampler,
    Stack,
    build_tree,
    cut_label,
    is_waiting,
    lay_out,
    render,
    shown_place,
)

KEY = {"x-api-key": "operator"}
SVG = "{http://www.w3.org/2000/svg}"


def frame(name: str) -> Frame:
    return Frame(name, f"/srv/penstock_router/{name}.py", 7)


def profile_of(stacks: dict[Stack, int], num_waiting: int = 0) -> Profile:
    num_samples = sum(stacks.values()) + num_waiting
    return Profile(stacks, num_samples, num_waiting, duration_s=2.0, cpu_s=0.5)


A, B, C = (frame(name) for name in "abc")
STACKS: dict[Stack, int] = {(A, B): 6, (A,): 1, (A, C): 2, (C,): 1}


# ---- Pure parts --------------------------------------------------------------------------------


def test_stacks_that_begin_alike_share_their_nodes() -> None:
    root = build_tree(STACKS)
    assert root.num_samples == 10
    assert {f: node.num_samples for f, node in root.children.items()} == {A: 9, C: 1}
    under_a = root.children[A]
    assert {f: node.num_samples for f, node in under_a.children.items()} == {B: 6, C: 2}
    assert (root.num_own, under_a.num_own, under_a.children[B].num_own) == (0, 1, 6)


def test_boxes_lie_under_their_callers_side_by_side_the_most_seen_first() -> None:
    boxes = {
        (box.node.frame, box.depth): (round(box.left, 6), round(box.width, 6))
        for box in lay_out(build_tree(STACKS))
        if box.depth
    }
    assert boxes == {
        (A, 1): (0.0, 0.9),
        (C, 1): (0.9, 0.1),
        (B, 2): (0.0, 0.6),
        (C, 2): (0.6, 0.2),
    }


def test_a_box_that_is_too_narrow_to_see_is_left_out() -> None:
    boxes = lay_out(build_tree(STACKS), min_width=0.15)
    shown = {(box.node.frame, box.depth) for box in boxes if box.depth}
    assert shown == {(A, 1), (B, 2), (C, 2)}


def test_a_stack_deeper_than_python_can_recurse_is_drawn() -> None:
    deep = tuple(frame(f"f{level}") for level in range(sys.getrecursionlimit() + 10))
    svg = ElementTree.fromstring(render(profile_of({deep: 3}), "deep"))
    assert len(svg.findall(f"{SVG}g")) == len(deep) + 1


def test_the_picture_is_xml_that_loads_nothing_and_says_what_each_function_took() -> None:
    text = render(profile_of(STACKS, num_waiting=30), "process 5")
    svg = ElementTree.fromstring(text)
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "", 1)
    assert "<script" not in text
    assert 'style="' not in text
    titles = [group.findtext(f"{SVG}title") or "" for group in svg.findall(f"{SVG}g")]
    assert len(titles) == 5
    (of_b,) = (title for title in titles if title.startswith("b\n"))
    assert of_b == (
        "b\npenstock_router/b.py:7\n60.0% of what ran, 15.0% of the time (6 samples); itself 60.0%"
    )
    assert "waited in 75.0% of them" in text
    assert "used 25.0% of a core" in text


def test_names_that_xml_does_not_allow_are_shown_all_the_same() -> None:
    odd = Frame("<lambda> & \x00\ud800 \"'", "/a/<b>&.py", 1)
    svg = ElementTree.fromstring(render(profile_of({(odd,): 1}), "<title> & \x1b"))
    titles = [title.text or "" for title in svg.iter(f"{SVG}title")]
    assert any(title.startswith("<lambda> & \ufffd\ufffd \"'\na/<b>&.py:1\n") for title in titles)


def test_a_profile_of_nothing_is_a_picture_that_says_so() -> None:
    text = render(profile_of({}, num_waiting=4), "idle")
    ElementTree.fromstring(text)
    assert "Nothing ran" in text
    assert "waited in 100.0%" in text


@pytest.mark.parametrize(
    ("width_px", "label"),
    [(300, "handle a.py:1 5.0%"), (60, "handle"), (40, "han…"), (20, ""), (0.5, "")],
)
def test_a_label_is_cut_to_its_box(width_px: float, label: str) -> None:
    assert cut_label("handle", "a.py:1 5.0%", width_px) == label


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/x/router/penstock_router/server/sse.py", ("ours", "penstock_router/server/sse.py:3")),
        (
            "/v/lib/python3.11/site-packages/penstock_client/a.py",
            ("ours", "penstock_client/a.py:3"),
        ),
        ("/v/lib/python3.11/site-packages/aiohttp/web.py", ("library", "aiohttp/web.py:3")),
        ("/usr/lib/python3.11/asyncio/runners.py", ("standard", "asyncio/runners.py:3")),
        ("<frozen codecs>", ("standard", "<frozen codecs>:3")),
        ("/some/where/else.py", ("other", "where/else.py:3")),
        ("<string>", ("other", "<string>:3")),
        ("", ("other", "")),
    ],
)
def test_a_path_is_shown_without_where_it_is_installed(path: str, shown: tuple[str, str]) -> None:
    assert shown_place(Frame("f", path, 3)) == shown


def test_threads_that_wait_are_told_from_those_that_work() -> None:
    waiting = [
        *(("selectors.py", "select"), ("threading.py", "wait"), ("queue.py", "get")),
        *(("concurrent/futures/thread.py", "_worker"), ("asyncio/runners.py", "run")),
    ]
    for path, name in waiting:
        assert is_waiting(f"/usr/lib/python3.11/{path}", name), (path, name)
        assert not is_waiting(f"/usr/lib/python3.11/{path}", "other")
    assert not is_waiting("/srv/my_selectors.py", "select")


# ---- Samples -----------------------------------------------------------------------------------


def busy_work(sampler: Sampler) -> None:
    """Until it was looked at often enough, however long that takes here."""
    while sampler._num_samples < 40:
        sum(range(50))


def functions_of(profile: Profile) -> dict[str, set[str]]:
    """What was seen in each thread."""
    seen: dict[str, set[str]] = {}
    for stack in profile.stacks:
        seen.setdefault(stack[0].function, set()).update(part.function for part in stack[1:])
    return seen


def test_work_of_any_thread_is_seen_and_waiting_is_not() -> None:
    before = (threading.active_count(), sys.getswitchinterval())
    with ThreadPoolExecutor(2, "pool") as pool:
        # One of the two has nothing to do.
        pool.submit(time.sleep, 0).result()
        sampler = Sampler(200)
        sampler.start()
        began_s = time.perf_counter()
        pool.submit(busy_work, sampler).result()
        took_s = time.perf_counter() - began_s
        profile = sampler.stop()
    assert (threading.active_count(), sys.getswitchinterval()) == before
    seen = functions_of(profile)
    assert "busy_work" in seen["pool_0"]
    assert all("wait" not in stack[-1].function for stack in profile.stacks)
    assert profile.num_samples >= 40
    assert profile.num_waiting > profile.num_samples / 2
    assert profile.duration_s >= took_s


def test_work_of_the_main_thread_is_work_of_its_own() -> None:
    sampler = Sampler(200)
    sampler.start()
    busy_work(sampler)
    profile = sampler.stop()
    own = sum(n for stack, n in profile.stacks.items() if stack[-1].function == "busy_work")
    assert own > profile.num_samples / 2
    assert profile.num_waiting < profile.num_samples / 2


# ---- Over HTTP ---------------------------------------------------------------------------------


async def test_without_a_key_of_the_router_s_there_is_no_profile() -> None:
    async with memory_router(FakeFleet({}), api_key="clients") as router:
        answer = await router.get("/debug/profile", **{"x-api-key": "clients"})
        assert answer.status == 403
        assert "--admin-key" in answer.error["message"]


@pytest.mark.parametrize(
    ("given", "status"),
    [({}, 401), ({"x-api-key": "clients"}, 403), ({"Authorization": "operator"}, 401)],
)
async def test_without_the_key_there_is_no_profile(given: dict[str, str], status: int) -> None:
    async with memory_router(FakeFleet({}), api_key="clients", admin_key="operator") as router:
        assert (await router.get("/debug/profile", **given)).status == status


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("seconds=0", "seconds: must be at least 1"),
        ("seconds=61", "seconds: must be at most 60"),
        ("seconds=1.5", "seconds: must be an integer; given: '1.5'"),
        ("rate=0", "rate: must be at least 1"),
        ("rate=1001", "rate: must be at most 1000"),
        ("rate=", "rate: must be an integer"),
    ],
)
async def test_a_number_out_of_its_bounds_is_one_line(query: str, words: str) -> None:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        answer = await router.get(f"/debug/profile?{query}", **KEY)
        assert (answer.status, words in answer.error["message"]) == (400, True)


async def test_one_profile_at_a_time_is_taken_and_it_is_a_picture_that_may_load_nothing() -> None:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        first = asyncio.create_task(router.get("/debug/profile?seconds=1", **KEY))
        await asyncio.sleep(0.1)
        refused = await router.get("/debug/profile?seconds=1", **KEY)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        answer = await first
        assert answer.status == 200
        assert answer.headers["content-type"] == "image/svg+xml; charset=utf-8"
        text = answer.body.decode()
        ElementTree.fromstring(text)
        assert f"process {os.getpid()}" in text
        policy = answer.headers["content-security-policy"]
        (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
        assert style == STYLE
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        assert f"default-src 'none'; style-src 'sha256-{digest}';" in policy


async def test_a_client_that_leaves_ends_its_profile() -> None:
    async with memory_router(FakeFleet({}), admin_key="operator") as router:
        connection = router.connect()
        connection.send("GET", "/debug/profile?seconds=60", b"", KEY)
        await until_sampling(True)
        connection.close()
        await until_sampling(False)
        assert (await router.get("/debug/profile?seconds=1", **KEY)).status == 200


async def until_sampling(wanted: bool) -> None:
    async with asyncio.timeout(5):
        while wanted != any(thread.name == "profiler" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
