"""The runbook's commands work as typed: those for a machine of one's own run here, with real
processes; those for Kubernetes name what the chart makes. tests/compose runs those for compose.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.manifests import find, pod_templates, render
from integration.test_metrics import program
from support.processes import Router, Shard, running, wait_until

from penstock_client.audit_log import AuditLog, AuditRecord
from penstock_common.logs import JsonFormatter
from penstock_proto.types import GenerationRequest

PAGE = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SPANS = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
KEY = "a key of the test"


def section(heading: str) -> str:
    return PAGE.partition(f"### {heading}\n")[2].partition("\n### ")[0]


def commands(begin: str) -> list[str]:
    """Return each command in the page's text that begins with these words."""
    return sorted({span for span in SPANS if span.startswith(begin)})


# ---- parsed ------------------------------------------------------------------------------------

# What stands for something that the reader puts in.
_PROGRAMS = (
    *("cat", "curl", "df", "dmesg", "docker", "findmnt", "iostat", "journalctl", "jq", "kill"),
    *("kubectl", "ls", "mount", "nvidia-smi", "openssl", "penstock", "ps", "systemctl", "top"),
)


@pytest.mark.parametrize("text", [*BLOCKS, *(s for s in SPANS if s.split()[0] in _PROGRAMS)])
def test_a_shell_understands_every_command(text: str) -> None:
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (parsed.returncode, parsed.stderr) == (0, "")


def test_every_command_of_penstock_is_one() -> None:
    texts = [*BLOCKS, *SPANS]
    called = [
        match
        for text in texts
        for match in re.findall(r"(?:^|exec \S+ (?:-- )?)penstock (\w+)", text)
    ]
    assert {"info", "health"} <= {*called}
    for name in {*called}:
        helped = penstock(name, "--help")
        assert helped.returncode == 0, name


def penstock(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock_cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# ---- logs --------------------------------------------------------------------------------------

REQUEST = {
    **{"request_id": "r1", "model": "NAME", "route": "/v1/chat/completions", "status": 503},
    **{"outcome": "error", "error": "ServiceUnavailableError"},
}
LINES: list[tuple[str, str, dict[str, object]]] = [
    ("penstock.requests", "request", REQUEST),
    ("penstock.requests", "request", {**REQUEST, "status": 200, "outcome": "stop"}),
    ("penstock_client.fleet.shard_state", "shard ADDRESS: connection refused", {}),
    ("penstock_client.fleet.shard_state", "shard 10.0.0.9:1: ready", {}),
]


@pytest.fixture
def router_log(tmp_path: Path) -> Path:
    """A log as a router writes it, also with lines that are not JSON."""
    lines = ["penstock router: cannot listen on 127.0.0.1:8000", "", "7"]
    for name, message, extra in LINES:
        record = logging.LogRecord(name, logging.INFO, "", 0, message, None, None)
        vars(record).update(extra)
        lines.append(JsonFormatter().format(record))
    file = tmp_path / "router.log"
    file.write_text("\n".join(lines) + "\n")
    return file


def of_logs() -> list[str]:
    return [span for span in commands("jq ") if "router.log" in span]


def test_logs_are_asked_by_every_entry_that_needs_them() -> None:
    assert len(of_logs()) >= 4


@pytest.mark.parametrize("command", of_logs())
def test_a_question_to_a_routers_log_finds_what_it_is_for(command: str, router_log: Path) -> None:
    program("jq", "jq")
    asked = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=router_log.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.returncode, asked.stderr) == (0, "")
    found = asked.stdout.splitlines()
    # Neither all lines nor none.
    assert 1 <= len(found) < len(LINES)
    assert any(word in asked.stdout for word in ("503", "ADDRESS"))


def test_fields_of_the_log_that_commands_name_are_documented() -> None:
    named = {name for span in of_logs() for name in re.findall(r"(?<![\w)])\.(\w+)", span)} - {
        "log"
    }
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text("utf-8")
    assert {name for name in named if f"`{name}`" not in page} == set()


def test_a_gap_of_the_audit_log_is_found_across_its_files(tmp_path: Path) -> None:
    program("jq", "jq")
    (command,) = commands("cat PATH.1 PATH |")
    log = AuditLog(tmp_path / "PATH", max_bytes=20_000)
    for number in range(40):
        log.record(AuditRecord(f"r{number}", GenerationRequest((1, 2))))
    log.close()
    files = [tmp_path / "PATH.1", tmp_path / "PATH"]
    texts = [file.read_text().splitlines() for file in files]
    assert min(map(len, texts)) > 1, "it has rotated"
    kept = [[json.loads(line)["sequence"] for line in text] for text in texts]
    # Two in a row that were dropped, one of them at the end of a file.
    gone = {kept[0][-1], kept[1][0]}
    for file, lines in zip(files, texts, strict=True):
        left = [line for line in lines if json.loads(line)["sequence"] not in gone]
        file.write_text("".join(f"{line}\n" for line in left))
    found = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{min(gone)}-{max(gone)}\n"


# ---- a fleet -----------------------------------------------------------------------------------


class Keyed(Router):
    def environment(self, log_file: Path) -> dict[str, str]:
        keys = {"PENSTOCK_ADMIN_KEY": KEY, "PENSTOCK_SHARD_API_KEY": "of shards"}
        return {**super().environment(log_file), **keys}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Keyed, Shard]]:
    folder = tmp_path_factory.mktemp("fleet")
    shard = Shard(folder / "shard", "--api-key", "of shards")
    router = Keyed(folder / "router", [shard.address])
    with running(shard, router):
        yield router, shard


def run_as_typed(fleet: tuple[Keyed, Shard], command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the variables of the page's first block. They have this fleet's values,
    and none for TLS.
    """
    router, shard = fleet
    setting = [
        line for line in BLOCKS[0].splitlines() if "FILE" not in line and "BUNDLE" not in line
    ]
    lines = "\n".join(setting).replace("http://127.0.0.1:8000", router.url)
    lines = lines.replace("10.0.0.5:20051", shard.address).replace(
        "API_KEY=...", "API_KEY='of shards'"
    )
    # The command of this checkout.
    defined = f'penstock() {{ {sys.executable} -m penstock_cli.main "$@"; }}'
    script = "\n".join([defined, lines, command.replace("HOST:PORT", "127.0.0.1:9")])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={"PATH": os.environ["PATH"], "PENSTOCK_ADMIN_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def of_this_machine() -> list[str]:
    return [span for span in [*commands("curl "), *commands("penstock ")] if "$" in span]


def test_there_are_commands_to_run() -> None:
    assert len(of_this_machine()) >= 6


@pytest.mark.parametrize("command", of_this_machine())
def test_a_command_for_a_machine_of_ones_own_works_as_typed(
    fleet: tuple[Keyed, Shard], command: str
) -> None:
    program("curl", "curl")
    router, shard = fleet
    done = run_as_typed(fleet, command.replace("curl ", "curl --fail-with-body --silent "))
    assert done.returncode == 0, done.stdout + done.stderr
    if "DELETE" in command:
        # Back for the next.
        body = json.dumps({"address": shard.address}).encode()
        asked = urllib.request.Request(f"{router.url}/admin/shards", body)
        asked.add_header("Authorization", f"Bearer {KEY}")
        asked.add_header("Content-Type", "application/json")
        wait_until(lambda: is_taken(asked), timeout_s=30, what="the shard is back")
        wait_until(router.healthy, timeout_s=30, what="it serves")


def is_taken(asked: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return bool(answer.status < 300)
    except OSError:
        return False


# ---- Kubernetes --------------------------------------------------------------------------------


def test_commands_for_kubernetes_name_what_the_chart_makes() -> None:
    (block,) = (block for block in BLOCKS if block.startswith("kubectl"))
    values = {"shardTls": {"existingSecret": "shards"}}
    resources = render(values, "demo")
    (service,) = re.findall(r"port-forward service/(\S+) (\d+)", block)
    found = find(resources, "Service", service[0])
    assert [port["port"] for port in found["spec"]["ports"]] == [int(service[1])]
    (label,) = {*re.findall(r"-l (\S+)", block)}
    name, _, value = label.partition("=")
    pods = [pod for each in resources for pod in pod_templates(each)]
    assert {pod["metadata"]["labels"][name] for pod in pods} == {value}
    (router,) = {*re.findall(r"exec deploy/(\S+) ", block)}
    (container,) = find(resources, "Deployment", router)["spec"]["template"]["spec"]["containers"]
    for flag in ("tls-ca-file", "tls-server-name"):
        (given,) = re.findall(rf"--{flag} (\S+)", block)
        assert container["args"][container["args"].index(f"--shard-{flag}") + 1] == given
