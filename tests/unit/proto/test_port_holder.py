"""The process that holds a port, found in this machine's real /proc."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest
from support.processes import free_port

from penstock_common import port_holder
from penstock_common.port_holder import holder_of, why_not

UNBUFFERED = {**os.environ, "PYTHONUNBUFFERED": "1"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def test_a_port_that_this_process_listens_on_is_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        assert holder_of(held.getsockname()[1]).endswith(f" (process {os.getpid()})")


def test_a_connection_from_a_port_holds_it_too() -> None:
    """The system may give a port to a connection; then nobody listens there."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        assert holder_of(connection.getsockname()[1]).endswith(f" (process {os.getpid()})")


def test_a_python_is_told_with_its_module_and_without_its_other_arguments() -> None:
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=UNBUFFERED) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().partition(" port ")[2].split()[0])
            name, _, rest = holder_of(port).partition(" ")
            assert name.startswith("python")
            assert rest == f"-m http.server (process {process.pid})"
        finally:
            process.kill()


def test_a_port_that_nobody_has_has_no_holder() -> None:
    assert holder_of(free_port()) == ""


def test_why_it_failed_names_the_holder_only_where_one_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_use = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        said = why_not(in_use, port)
        assert said.startswith("Address already in use by ")
        assert said.endswith(f" (process {os.getpid()})")
        assert why_not(OSError(errno.EACCES, "Permission denied"), port) == "Permission denied"
        # Of a process that one may not look into.
        monkeypatch.setattr(port_holder, "_open_files", lambda _: iter(()))
        assert why_not(in_use, port) == "Address already in use"
        # Not Linux.
        monkeypatch.setattr(port_holder, "_TABLES", ("/nowhere",))
        assert why_not(in_use, port) == "Address already in use"
