"""In a container started as root, changes the user to the owner of the models' folder.

A mounted host folder keeps its owner: often root, because docker creates missing folders as root.
Serving does not need root, only a folder for downloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# The images' user, used if root owns the folder.
IMAGE_USER = 10001
# Folders in HF_HOME that huggingface_hub writes. Nothing else in it is touched.
_HUB_FOLDERS = ("hub", "modules", "xet")


def drop_root(folder: Path) -> str:
    """Become the owner of `folder`, and make that user the owner of the hub's folders in it. Do
    nothing if the user is not root.

    Other users' files keep their owner. Root's group is dropped too. Return an error text or "";
    raise OSError if the user cannot be changed.
    """
    if os.geteuid() != 0:
        return ""
    owner = folder.stat()
    user, group = owner.st_uid, owner.st_gid
    if user == 0:
        user = group = IMAGE_USER
    elif group == 0:
        # The owner does not need root's group, which gives access to much of an image.
        group = user
    problem = ""
    try:
        for path in _roots_own(folder):
            os.chown(path, user, group, follow_symlinks=False)
    except OSError as error:
        # The folder may be read-only: existing models can still be read.
        problem = f"{error.filename} stays root's ({error.strerror})"
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    return problem


def _roots_own(folder: Path) -> Iterator[Path]:
    for name in _HUB_FOLDERS:
        top = folder / name
        if top.is_symlink():
            # Skip a symbolic link: the folder's owner could gain its target.
            continue
        top.mkdir(exist_ok=True)
        yield from (path for path in (top, *_below(top)) if path.lstat().st_uid == 0)


def _below(top: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(top):
        for name in (*folders, *files):
            yield Path(parent, name)
