"""From root to whoever owns the models: for a container that is started as root.

A folder of the host that is mounted into a container belongs to whom it belongs to there, often to
root, since docker makes it where there is none. Serving needs no root, only a place to download to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# The user of penstock's images, where the folder is root's.
IMAGE_USER = 10001
# Of a HF_HOME: what huggingface_hub writes. Nothing else in the folder is touched.
_HUB_FOLDERS = ("hub", "modules", "xet")


def drop_root(folder: Path) -> str:
    """Become the owner of `folder`, to whom the hub's folders below it are given.

    Files of other users than root stay theirs. Does nothing without root's rights. Returns what
    could not be done; raises OSError where root cannot be left.
    """
    if os.geteuid() != 0:
        return ""
    owner = folder.stat()
    user, group = owner.st_uid, owner.st_gid
    if user == 0:
        user = group = IMAGE_USER
    problem = ""
    try:
        for path in _roots_own(folder):
            os.chown(path, user, group, follow_symlinks=False)
    except OSError as error:
        # Read-only, perhaps: models that are there can be read all the same.
        problem = f"{error.filename} stays root's ({error.strerror})"
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    return problem


def _roots_own(folder: Path) -> Iterator[Path]:
    for name in _HUB_FOLDERS:
        top = folder / name
        if top.is_symlink():
            # Whoever owns the folder made it, and might have what it leads to.
            continue
        top.mkdir(exist_ok=True)
        yield from (path for path in (top, *_below(top)) if path.lstat().st_uid == 0)


def _below(top: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(top):
        for name in (*folders, *files):
            yield Path(parent, name)
