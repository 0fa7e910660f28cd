"""The images for CPUs, built from the Dockerfile as it is written, and run: their own users, entry
points, ports and health checks, on a host that has no network but itself.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts.network import Host, HostsUnavailable
from integration.image_builder import Builder, BuildFailed, why_not
from integration.images import Image, image
from support.processes import wait_until

# Minutes: packages are downloaded, and a slow registry is not what is tested here.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

BUILT = ("router", "shard-cpu", "cpu")
# Not those of the machine that a process is on.
UNPRIVILEGED = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
FAKE = ("--runner", "fake", "--step-ms", "2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    if reason := why_not():
        pytest.skip(reason)
    builder = Builder(tmp_path_factory.mktemp("images"))
    yield builder
    builder.close()


@pytest.fixture
def host() -> Iterator[Host]:
    try:
        made = Host(1, has_address=False)
    except HostsUnavailable as error:
        pytest.skip(str(error))
    # As Docker has it.
    made.run(UNPRIVILEGED.write_text, "0")
    yield made
    made.close()


class Running:
    """A container as `docker run IMAGE FLAGS` starts it: with the built image's entry point."""

    def __init__(self, images: Builder, host: Host, target: str, log: Path, *flags: str) -> None:
        self._images, self._host, self._log = images, host, log
        config = images.config(target)
        assert not config["Cmd"], "what flags would replace"
        kind, *self._healthcheck = config["Healthcheck"]["Test"]
        assert kind == "CMD"
        self._container = images.container(target)
        command = images.run_command(self._container, [*config["Entrypoint"], *flags])
        with log.open("wb") as file:
            self._runner = host.run(
                subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the container's processes, the first one first."""
        below = psutil.Process(self._runner.pid).children(recursive=True)
        return [each for each in below if not each.cmdline()[:1][0].startswith("buildah")]

    def is_healthy(self) -> bool:
        """True if the image's own health check succeeds."""
        assert self._runner.poll() is None, self.log
        command = self._images.run_command(self._container, self._healthcheck)
        return self._host.run(subprocess.run, command, capture_output=True).returncode == 0

    def wait_healthy(self) -> None:
        wait_until(self.is_healthy, timeout_s=120, what="it is healthy")

    def stop(self) -> int:
        """Send SIGTERM to the first process, as `docker stop` does, and return its exit status."""
        self.processes()[0].terminate()
        return self._runner.wait(60)

    def close(self) -> None:
        if self._runner.poll() is None:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._runner.wait(60)
        self._images.call("rm", self._container)

    def ask(self, url: str, body: Any) -> Any:
        return self._host.run(_ask, url, body)


def _ask(url: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


@contextlib.contextmanager
def running(images: Builder, host: Host, target: str, log: Path, *flags: str) -> Iterator[Running]:
    started = Running(images, host, target, log, *flags)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("flags", [FAKE, ()], ids=["fake runner", "built-in model"])
def test_a_router_and_a_shard_serve_as_nobody_and_end_when_they_are_told(
    images: Builder, host: Host, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    address = ("--shards", "127.0.0.1:50051")
    with (
        running(images, host, "shard-cpu", tmp_path / "shard", *flags) as shard,
        running(images, host, "router", tmp_path / "router", *address) as router,
    ):
        shard.wait_healthy()
        router.wait_healthy()
        body = {"model": "penstock-toy", "prompt": "Once upon a time", "max_tokens": 8}
        answer = router.ask("http://127.0.0.1:8000/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["text"]
        for process in [*shard.processes(), *router.processes()]:
            assert (set(process.uids()), set(process.gids())) == ({10001}, {10001})
        assert router.stop() == 0, router.log
        assert shard.stop() == 0, shard.log


def test_the_image_for_one_machine_leaves_root_and_serves_a_model(
    images: Builder, host: Host, tmp_path: Path
) -> None:
    model = f"{_packages(images, 'cpu')}/penstock_shard/builtin_model"
    with running(images, host, "cpu", tmp_path / "log", "--model-id", model) as started:
        started.wait_healthy()
        body = {"inputs": "The sea", "parameters": {"max_new_tokens": 4}}
        assert started.ask("http://127.0.0.1:80/generate", body)["generated_text"]
        for process in started.processes():
            assert set(process.uids()) == {10001}
        assert started.stop() == 0, started.log


@pytest.mark.parametrize("target", BUILT)
def test_an_image_is_what_the_small_tests_read_in_the_dockerfile(
    images: Builder, target: str
) -> None:
    config = images.config(target)
    labels = config["Labels"]
    labels.pop("io.buildah.version")
    assert image(target) == Image(
        env=dict(pair.split("=", 1) for pair in config["Env"]),
        user=config["User"],
        ports=frozenset(int(port.removesuffix("/tcp")) for port in config["ExposedPorts"]),
        entrypoint=tuple(config["Entrypoint"]),
        healthcheck=tuple(config["Healthcheck"]["Test"][1:]),
        labels=labels,
    )


@pytest.mark.parametrize(
    ("target", "has", "has_not"),
    [
        (
            "router",
            {"penstock_router", "tokenizers", "aiohttp"},
            {"penstock_shard", "torch", "transformers", "numpy"},
        ),
        (
            "shard-cpu",
            {"penstock_shard", "grpc", "torch", "transformers"},
            {"penstock_router", "uvloop"},
        ),
        ("cpu", {"penstock_router", "penstock_shard", "torch", "uvloop"}, set()),
    ],
)
def test_an_image_has_its_own_part_and_no_compiler(
    images: Builder, target: str, has: set[str], has_not: set[str]
) -> None:
    container = images.container(target)
    found = set(images.run(container, "ls", _packages(images, target)).split())
    assert has <= found
    assert not has_not & found
    with pytest.raises(BuildFailed):
        images.run(container, "sh", "-c", "command -v cc || command -v gcc || ls /src")
    images.call("rm", container)


@pytest.mark.parametrize("target", ["shard-cpu", "cpu"])
def test_an_image_with_a_model_has_kernels_for_this_machine_that_everybody_may_read(
    images: Builder, target: str
) -> None:
    code = """if True:
        import os
        from pathlib import Path
        from penstock_shard.kernels.build_cpu import libraries, supported_levels
        kernels = Path(os.environ["PENSTOCK_CACHE"])
        found = {Path(next(libraries(level, print))) for level in supported_levels()}
        assert found <= set(kernels.iterdir()), found
        assert {path.stat().st_mode & 0o777 for path in (kernels, *kernels.iterdir())} == {0o755}
        print(len(found))
    """
    container = images.container(target)
    assert int(images.run(container, "python", "-c", code)) >= 1
    images.call("rm", container)


def _packages(images: Builder, target: str) -> str:
    """Return the folder of the packages in an image's environment."""
    container = images.container(target)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = images.run(container, "python", "-c", code).strip()
    images.call("rm", container)
    return found
