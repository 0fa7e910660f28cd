"""Changes from root to the owner of the models' folder, in a container that is started as root.

A host's folder that is mounted into a container keeps its owner, which is often root, since docker
creates missing folders as root. Serving needs no root, only a folder to download to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# The user of penstock's images; used if root owns the folder.
IMAGE_USER = 10001
# The folders in HF_HOME that huggingface_hub writes. Nothing else in it is touched.
_HUB_FOLDERS = ("hub", "modules", "xet")


def drop_root(folder: Path) -> str:
    """Become the owner of `folder`, to whom the hub's folders below it are given.

    Files of other users than root keep their owner. Root's group is left as root is. Does nothing
    if not run as root. Returns an error text for what failed, or ""; raises OSError if the user
    cannot be changed.
    """
    if os.geteuid() != 0:
        return ""
    owner = folder.stat()
    user, group = owner.st_uid, owner.st_gid
    if user == 0:
        user = group = IMAGE_USER
    elif group == 0:
        # Its owner needs no group for it, and root's opens much of what is in an image.
        group = user
    problem = ""
    try:
        for path in _roots_own(folder):
            os.chown(path, user, group, follow_symlinks=False)
    except OSError as error:
        # Perhaps the folder is read-only: models that are there can still be read.
        problem = f"{error.filename} stays root's ({error.strerror})"
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    return problem


def _roots_own(folder: Path) -> Iterator[Path]:
    for name in _HUB_FOLDERS:
        top = folder / name
        if top.is_symlink():
            # A symbolic link: the folder's owner could gain whatever it leads to.
            continue
        top.mkdir(exist_ok=True)
        yield from (path for path in (top, *_below(top)) if path.lstat().st_uid == 0)


def _below(top: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(top):
        for name in (*folders, *files):
            yield Path(parent, name)
