"""Docker's and Compose's programs, from Debian's packages: nothing of them is installed.

They are downloaded once, by an apt configuration of its own from the mirror that apt has here, and
unpacked below a folder outside of the repository (`PENSTOCK_DOCKER_CACHE`).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_HERE = "bookworm"
_NEXT = "trixie"
# The engine of the present release does not know `start_interval`; the next release's runc wants a
# newer libc.
_PACKAGES = {
    _NEXT: ("docker.io", "docker-cli", "docker-compose", "containerd"),
    _HERE: (
        *("runc", "tini", "debootstrap", "iptables", "libip4tc2", "libip6tc2", "libnfnetlink0"),
        *("libnetfilter-conntrack3", "libnftnl11", "libxtables12"),
    ),
}
_LINKS = {
    **{f"usr/sbin/{name}": "xtables-nft-multi" for name in ("iptables", "ip6tables")},
    **{f"usr/sbin/iptables-{name}": "xtables-nft-multi" for name in ("save", "restore")},
}


class CommandFailed(Exception):
    """A command failed; the message has its status and the end of its output."""


def why_not() -> str:
    """Why Docker cannot run here; empty where it can."""
    if (
        platform.system() != "Linux"
        or platform.machine() != "x86_64"
        or not shutil.which("apt-get")
    ):
        return "Docker's programs are taken from Debian's packages for x86-64: there is no apt-get"
    if (release := platform.freedesktop_os_release().get("VERSION_CODENAME")) != _HERE:
        return f"Docker's programs are put together for Debian's release {_HERE}: this is {release}"
    if os.geteuid() != 0:
        return "Docker's engine needs root"
    if Path("/sys/class/net/docker0").exists():
        return "another engine of Docker has the network docker0"
    return ""


def cache() -> Path:
    return Path(os.environ.get("PENSTOCK_DOCKER_CACHE") or Path.home() / ".cache/penstock-docker")


def output_of(
    command: Sequence[str], env: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    """Run a command in a folder, and return its stdout. Raises `CommandFailed`."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, cwd=folder
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise CommandFailed(f"{' '.join(command)}: status {done.returncode}: {said}")
    return done.stdout


class Programs:
    """A folder that holds them."""

    def __init__(self) -> None:
        """Downloads what is not there, some 90 MB."""
        self.root = cache() / "programs"
        if not self.root.exists():
            self._unpack(_download(cache() / "packages"))

    @property
    def env(self) -> dict[str, str]:
        """The environment of this process, changed so that these programs and their libraries are
        found first.
        """
        libraries = self.root / "usr/lib/x86_64-linux-gnu"
        found = [str(self.root / "usr" / name) for name in ("sbin", "bin")]
        return {
            **os.environ,
            "PATH": os.pathsep.join([*found, os.environ["PATH"]]),
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
            "DEBOOTSTRAP_DIR": str(self.root / "usr/share/debootstrap"),
        }

    @property
    def plugins(self) -> Path:
        """The folder of the client's plugins, which are Compose alone."""
        return self.root / "usr/libexec/docker/cli-plugins"

    def _unpack(self, packages: Path) -> None:
        new = self.root.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        for package in packages.glob("*.deb"):
            output_of(["dpkg", "-x", str(package), str(new)])
        for link, program in _LINKS.items():
            (new / link).unlink(missing_ok=True)
            (new / link).symlink_to(program)
        new.rename(self.root)


def _download(folder: Path) -> Path:
    """The folder with the packages."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("lists/partial", "archives/partial", "none"):
        (folder / name).mkdir(parents=True)
    keys = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    lines = [f"deb {keys} {mirror()} {suite} main\n" for suite in _PACKAGES]
    (folder / "sources.list").write_text("".join(lines))
    # What is installed here counts for nothing: packages are only downloaded.
    (folder / "status").touch()
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": folder / "none",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": folder / "status",
        "Dir::Cache": folder,
        "APT::Sandbox::User": "root",
        "APT::Update::Post-Invoke-Success": "",
    }
    apt = ["apt-get", *(f"-o{name}={value}" for name, value in settings.items())]
    output_of([*apt, "update"])
    wanted = [f"{name}/{suite}" for suite, names in _PACKAGES.items() for name in names]
    subprocess.run([*apt, "-qq", "download", *wanted], cwd=folder, check=True)
    return folder


def mirror() -> str:
    """The address of Debian's packages, as apt has it here."""
    fields = ["$(REPO_URI)", "Created-By: Packages", f"Release: {_HERE}", "Component: main"]
    found, *_ = output_of(["apt-get", "indextargets", "--format", *fields]).splitlines()
    return found
