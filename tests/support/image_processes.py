"""The processes that decode images for this one."""

from __future__ import annotations

import contextlib

import psutil


def image_processes() -> list[psutil.Process]:
    """Return the image processes that this process started, not those of tests beside it."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("decoder_process" in part for part in child.cmdline()):
                found.append(child)
    return found
