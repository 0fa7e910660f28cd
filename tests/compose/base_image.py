"""Stand-ins for images that come from a registry: a Debian that debootstrap installs.

Its Python is older than that of the real base image, but one that penstock works with.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from compose.engine import Engine
from compose.programs import Programs, cache, mirror, output_of
from integration.image_builder import pip_options
from integration.images import SYSTEM_PATH

_SUITE = "bookworm"
_PYTHON = "3.11"
_PACKAGES = ("ca-certificates", "python3", "python3-distutils", "python3-venv")
# An index of torch's CPU builds, for TORCH_INDEX_URL.
TORCH_INDEX = "file:///opt/torch"
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


def make_base(programs: Programs, engine: Engine, name: str, torch: str) -> None:
    """Make the image that the Dockerfile asks for, with an index that has this torch."""
    system = shlex.quote(str(_install(programs)))
    imported = f"docker import --change 'ENV PATH={SYSTEM_PATH}' - {_SUITE}"
    output_of(["bash", "-eo", "pipefail", "-c", f"tar -C {system} -c . | {imported}"], engine.env)
    with tempfile.TemporaryDirectory() as folder:
        _add_settings(Path(folder) / "files", torch)
        add_files(engine, Path(folder), name)


def add_files(engine: Engine, folder: Path, name: str, *instructions: str) -> None:
    """Make an image of Debian, the files below `files` in a folder, and further instructions."""
    lines = [f"FROM {_SUITE}", "COPY files /", *instructions]
    (folder / "Dockerfile").write_text("\n".join(lines))
    # The client's own builder: the other one is a plugin.
    engine.docker("build", "--tag", name, str(folder), DOCKER_BUILDKIT="0")


def _install(programs: Programs) -> Path:
    """A folder that is kept for later runs."""
    system = cache() / _SUITE
    if not system.exists():
        new = system.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        packages = f"--include={','.join(_PACKAGES)}"
        command = ["debootstrap", "--variant=minbase", packages, _SUITE, str(new), mirror()]
        output_of(command, programs.env)
        # Where the images of Python have it.
        (new / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        new.rename(system)
    return system


def _add_settings(folder: Path, torch: str) -> None:
    """The certificates and the index of this machine, and torch's wheel."""
    certificates = folder / _CERTIFICATES
    certificates.parent.mkdir(parents=True)
    certificates.write_bytes(Path("/", _CERTIFICATES).read_bytes())
    lines = ["[global]\n"]
    for option, value in dict(pip_options()).items():
        # Folders of this machine are not in the image.
        words = [word for word in value.split() if not word.startswith(("/", "file:"))]
        if option == "cert":
            words = [f"/{_CERTIFICATES}"]
        lines += [f"{option} = {' '.join(words)}\n"] if words else []
    (folder / "etc/pip.conf").write_text("".join(lines))
    index = folder / "opt/torch/torch"
    index.mkdir(parents=True)
    wanted = ["--no-deps", "--only-binary", ":all:", "--python-version", _PYTHON, torch]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    output_of([*pip, "--dest", str(index), *wanted])
    (wheel,) = index.glob("*.whl")
    (index / "index.html").write_text(
        f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>'
    )
