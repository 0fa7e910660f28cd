"""deploy/compose.yaml as users run it: images that are built here, by Docker's own engine."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compose.base_image import add_files, make_base
from compose.engine import Engine, timed
from compose.load import Load, load, requests, texts_of
from compose.programs import CommandFailed, Programs, why_not
from compose.project import SERVICES, SHARDS, Project, documented_commands
from integration.images import ROOT, system
from integration.manifests import read_compose
from integration.test_metrics import program
from support.certificates import Authority
from support.checkouts import at_revision
from support.processes import ask, wait_until

# Minutes: packages are downloaded and images built.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

TORCH = "torch==2.13.0"
README = ROOT / "deploy" / "README.md"
USER = 10001
# Long enough to be cut while it runs, of tokens that take 2 ms or more.
LONG = 1500


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if reason := why_not():
        pytest.skip(reason)
    with timed("Docker's programs"):
        programs = Programs()
    with timed("dockerd"):
        started = Engine(programs, tmp_path_factory.mktemp("docker"))
    try:
        with timed("the base image"):
            make_base(programs, started, system("router"), TORCH)
        yield started
    finally:
        with timed("the end of dockerd"):
            started.close()


@pytest.fixture(scope="module")
def started(engine: Engine) -> Iterator[Project]:
    """Started by the first commands of the document."""
    project = Project(engine, ROOT)
    first, *_ = documented_commands(README, "On one machine: compose")
    try:
        with timed("docker compose up --build --wait"):
            *_, models = project.run_documented(first).splitlines()
        assert [card["id"] for card in json.loads(models)["data"]] == ["penstock-toy"]
        yield project
    finally:
        print(project.logs())
        project.close()


@pytest.fixture
def project(started: Project) -> Project:
    """The started project, in which every service runs and is healthy."""
    started.up()
    return started


@pytest.fixture(scope="module")
def long_texts(started: Project) -> tuple[list[dict[str, Any]], list[str]]:
    """Requests, and what each gets while nothing happens."""
    started.up()
    bodies = requests(8, LONG)
    return bodies, [text.result() for text in texts_of(started.port, bodies)]


# ---- what is started -----------------------------------------------------------------------------


def test_the_commands_of_the_quick_start_answer(project: Project) -> None:
    _, models, chat = documented_commands(ROOT / "docs" / "quick-start.md", "Chat")
    assert "penstock-toy" in project.run_documented(models)
    assert project.run_documented(chat).rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_nobody_writes_nowhere_and_is_limited(
    project: Project, service: str
) -> None:
    found = project.inspect(service)
    assert found["State"]["Health"]["Status"] == "healthy"
    assert found["RestartCount"] == 0
    for process in project.processes(service):
        assert (set(process.uids()), set(process.gids())) == ({USER}, {USER})
        status = Path(f"/proc/{process.pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        assert (int(fields["CapEff"], 16), int(fields["CapBnd"], 16)) == (0, 0)
        assert fields["NoNewPrivs"] == "1"
    with pytest.raises(CommandFailed, match="Read-only file system"):
        project.compose("exec", "--user", "0", service, "touch", "/opt/penstock/new")
    limits = found["HostConfig"]
    assert limits["PidsLimit"] == 4096
    assert limits["Memory"] == (4 if service == "router" else 16) << 30


@pytest.mark.parametrize("profile", ["cpu", "gpu", "gpu-split", "vllm", "monitoring"])
def test_compose_takes_every_profile(engine: Engine, profile: str) -> None:
    """And does not find that settings contradict each other."""
    file = str(ROOT / "deploy" / "compose.yaml")
    engine.docker("compose", "--file", file, "--profile", profile, "config", "--quiet")


@pytest.mark.parametrize("shard", SHARDS)
def test_a_shard_writes_where_models_are_kept(project: Project, shard: str) -> None:
    project.compose("exec", shard, "touch", f"/var/cache/penstock/{shard}", "/tmp/file")
    for each in SHARDS:
        assert shard in project.compose("exec", each, "ls", "/var/cache/penstock").split()


def test_with_a_key_all_are_healthy_and_ask_for_it(project: Project) -> None:
    with timed("a key"):
        project.up(PENSTOCK_API_KEY="a key of the test")
    url = f"http://127.0.0.1:{project.port}/v1/models"
    assert ask(url)[0] == 401
    assert ask(url, headers={"Authorization": "Bearer a key of the test"})[0] == 200


def test_a_shard_that_cannot_start_says_why_in_its_log(project: Project) -> None:
    flags = {"PENSTOCK_SHARD_1_ARGS": "--model /models/missing"}
    services = ["--no-deps", "shard-1"]
    with pytest.raises(CommandFailed):
        project.compose("up", "--wait", "--wait-timeout", "30", *services, **flags)
    log = project.compose("logs", "--no-color", "--no-log-prefix", "shard-1")
    print(log)
    assert "/models/missing" in log.splitlines()[-1]
    # The other one serves meanwhile.
    body = {"prompt": "The sea", "max_tokens": 4}
    assert ask(f"http://127.0.0.1:{project.port}/v1/completions", body)[0] == 200


def test_two_models_are_served_at_once(project: Project) -> None:
    flags = {f"PENSTOCK_SHARD_{n}_ARGS": f"--served-model-name {n}-th" for n in (0, 1)}
    with timed("two models"):
        project.up(**flags)
    url = f"http://127.0.0.1:{project.port}"
    for name in ("0-th", "1-th"):
        body = {"model": name, "prompt": "The sea", "max_tokens": 4}
        wait_until(
            lambda name=name: name in ask(f"{url}/v1/models")[1],  # type: ignore[misc]
            timeout_s=30,
            what=name,
        )
        status, text = ask(f"{url}/v1/completions", body)
        assert (status, json.loads(text)["model"]) == (200, name)


def test_keys_a_store_an_audit_log_and_https_as_the_document_says(
    project: Project, tmp_path: Path
) -> None:
    settings = ROOT / "deploy" / ".env"
    assert not settings.exists(), "it is somebody's: move it away"
    authority = Authority(tmp_path, "ca")
    pair = authority.issue("localhost")
    shutil.copy(pair.cert, tmp_path / "router.crt")
    shutil.copy(pair.key, tmp_path / "router.key")
    shutil.copy(authority.file, tmp_path / "ca.crt")
    blocks = documented_commands(README, "With keys, a store and an audit log")
    told, keys, running, https = (
        # Files that the document has in its folder.
        block.replace("< $file", f"< {tmp_path}/$file").replace(
            "> audit.log", f"> {tmp_path}/audit.log"
        )
        for [block] in blocks
    )
    url = f"http://127.0.0.1:{project.port}"
    try:
        with timed("keys, a store and an audit log"):
            operator, alice = re.findall(r"^psk-\S+", project.run_documented([told, keys]), re.M)
        assert ask(f"{url}/v1/models")[0] == 401
        assert ask(f"{url}/admin/shards", headers=bearer(alice))[0] == 403
        assert ask(f"{url}/admin/shards", headers=bearer(operator))[0] == 200
        body = {"model": "penstock-toy", "input": "The sea", "max_output_tokens": 4}
        stored = json.loads(ask(f"{url}/v1/responses", body, bearer(alice))[1])
        said = project.run_documented([running])
        assert "penstock-toy" in said
        assert "responses.db" in said
        assert len((tmp_path / "audit.log").read_text().splitlines()) == 1
        project.compose("restart", "router")
        project.wait_healthy()
        assert ask(f"{url}/v1/responses/{stored['id']}", headers=bearer(alice))[0] == 200
        with timed("https"):
            project.run_documented([https])
        assert project.inspect("router")["State"]["Health"]["Status"] == "healthy"
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        url = f"https://localhost:{project.port}/v1/models"
        assert ask(url, headers=bearer(alice), context=context)[0] == 200
    finally:
        settings.unlink(missing_ok=True)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_commands_of_the_runbook_for_compose_work_as_typed(project: Project) -> None:
    blocks = documented_commands(ROOT / "docs" / "runbook.md", "How to type the commands", "bash")
    (commands,) = (text for [text] in blocks if text.startswith("COMPOSE="))
    before = project.container("shard-0"), project.inspect("shard-0")["State"]["StartedAt"]
    with timed("a shard that hangs"):
        said = project.run_documented([commands])
    assert "penstock-toy" in said
    project.wait_healthy()
    assert project.container("shard-0") == before[0]
    assert project.inspect("shard-0")["State"]["StartedAt"] > before[1]


# ---- what ends -----------------------------------------------------------------------------------


def kill_container(project: Project, shard: str) -> None:
    # As a crash: what `docker kill` ends is not restarted.
    project.processes(shard)[0].kill()


def kill_engine(project: Project, shard: str) -> None:
    project.engine_process(shard).kill()


@pytest.mark.parametrize("kill", [kill_container, kill_engine])
@pytest.mark.parametrize("shard", SHARDS)
def test_streams_go_on_when_a_shard_is_killed(
    project: Project,
    long_texts: tuple[list[dict[str, Any]], list[str]],
    kill: Callable[[Project, str], None],
    shard: str,
) -> None:
    bodies, expected = long_texts
    before = continued(project.port)
    under_way = texts_of(project.port, bodies)
    time.sleep(0.7)
    kill(project, shard)
    assert not any(text.done() for text in under_way), "they end before the kill"
    assert [text.result() for text in under_way] == expected
    assert continued(project.port) > before
    with timed(f"healthy after {kill.__name__}"):
        project.wait_healthy()


def continued(port: int) -> int:
    """Return the number of sequences that were continued on another shard."""
    _, text = ask(f"http://127.0.0.1:{port}/metrics")
    lines = [line for line in text.splitlines() if 'event="continued"' in line]
    return sum(int(float(line.rsplit(maxsplit=1)[1])) for line in lines)


@pytest.mark.parametrize("service", SERVICES)
def test_a_restart_under_load_breaks_no_answer(
    project: Project, long_texts: tuple[list[dict[str, Any]], list[str]], service: str
) -> None:
    bodies, expected = long_texts
    with load(project.port, bodies, [[text] for text in expected]) as arriving:
        time.sleep(2)
        with timed(f"docker compose restart {service}"):
            project.compose("restart", service)
        project.wait_healthy()
        time.sleep(2)
    check(arriving, may_refuse=service == "router")


def check(arriving: Load, *, may_refuse: bool) -> None:
    """Every answer that began is whole, and one of a shard's restart is not even refused."""
    print(dict(arriving.outcomes), "not served:", len(arriving.not_served))
    assert arriving.broken == []
    assert set(arriving.outcomes) == {"equal"}
    if not may_refuse:
        assert arriving.not_served == []


def test_a_stop_lets_streams_finish_and_every_container_exits_with_0(
    project: Project, long_texts: tuple[list[dict[str, Any]], list[str]]
) -> None:
    bodies, expected = long_texts
    under_way = texts_of(project.port, bodies)
    time.sleep(0.7)
    assert not any(text.done() for text in under_way)
    began_s = time.monotonic()
    project.compose("stop")
    took_s = time.monotonic() - began_s
    print(f"docker compose stop: {took_s:.1f} s")
    assert took_s < 40
    assert [text.result() for text in under_way] == expected
    states = {service: project.inspect(service)["State"] for service in SERVICES}
    assert {name: state["ExitCode"] for name, state in states.items()} == dict.fromkeys(SERVICES, 0)
    assert not any(state["OOMKilled"] for state in states.values())


# ---- what replaces it ----------------------------------------------------------------------------


def test_an_upgrade_from_the_commit_before_under_load_breaks_no_answer(
    project: Project,
    long_texts: tuple[list[dict[str, Any]], list[str]],
    tmp_path: Path,
) -> None:
    """Service by service, as the document says, to images of another tag; then back."""
    bodies, texts_now = long_texts
    before = at_revision("HEAD~1", tmp_path / "before")
    with timed(f"images of {before.name}"):
        project.build(before.root, "before")
    project.up(PENSTOCK_VERSION="before")
    assert {project.version(service) for service in SERVICES} == {"before"}
    texts_before = [text.result() for text in texts_of(project.port, bodies)]
    expected = [{*pair} for pair in zip(texts_now, texts_before, strict=True)]
    export, build, *replace = upgrade_commands()
    assert len(replace) == len(SERVICES)
    for to in ("0.2.0", "before"):
        to_this = export.replace("0.2.0", to)
        if to == "0.2.0":
            project.run_documented([to_this, build])
        for service, command in zip(SERVICES, replace, strict=True):
            with load(project.port, bodies, expected) as arriving, timed(f"{service}: {to}"):
                project.run_documented([to_this, command])
                assert project.version(service) == to
                time.sleep(1)
            check(arriving, may_refuse=service == "router")


def upgrade_commands() -> list[str]:
    blocks = documented_commands(README, "On one machine: compose")
    (found,) = (block for block in blocks if block[0].startswith("export PENSTOCK_VERSION=0.2.0"))
    return found


# ---- what watches it -----------------------------------------------------------------------------


def test_prometheus_sees_every_container_and_no_alert_fires(
    project: Project, tmp_path: Path
) -> None:
    make_prometheus(project.engine, tmp_path)
    with timed("prometheus"):
        project.up("prometheus")
    assert {process.uids().real for process in project.processes("prometheus")} == {65534}
    url = "http://127.0.0.1:9090/api/v1"

    def targets() -> dict[str, str]:
        """Return the health of each target that Prometheus scrapes, by its address."""
        found = json.loads(ask(f"{url}/targets")[1])["data"]["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in found}

    expected = dict.fromkeys(("router:8000", "shard-0:9464", "shard-1:9464"), "up")
    wait_until(lambda: targets() == expected, timeout_s=60, what="all targets are up")
    assert json.loads(ask(f"{url}/rules")[1])["data"]["groups"]
    # Before the first scrape one is pending: there is no router yet.
    wait_until(
        lambda: json.loads(ask(f"{url}/alerts")[1])["data"]["alerts"] == [],
        timeout_s=60,
        what="no alert is pending",
    )
    project.compose("rm", "--stop", "--force", "prometheus")


def make_prometheus(engine: Engine, folder: Path) -> None:
    """The image that the compose file names, with the programs that are installed here."""
    name = read_compose(ROOT / "deploy/compose.yaml", {}, "monitoring")["prometheus"]["image"]
    programs = folder / "files/usr/local/bin"
    programs.mkdir(parents=True)
    for each in ("prometheus", "promtool"):
        shutil.copy(program(each), programs)
    own = "RUN install --directory --owner=65534 --group=65534 /prometheus"
    add_files(engine, folder, name, own, 'ENTRYPOINT ["prometheus"]')
