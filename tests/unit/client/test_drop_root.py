"""A container that is started as root serves as the owner of the models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_cli import gpus
from penstock_cli.translate import drop_root


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
@pytest.mark.parametrize("owner", [0, 1234])
def test_root_becomes_the_owner_and_gives_it_only_what_is_roots(tmp_path: Path, owner: int) -> None:
    model = tmp_path / "hub" / "models--a" / "config.json"
    model.parent.mkdir(parents=True)
    for path in (model, tmp_path / "hub" / "others", tmp_path / "not of the hub"):
        path.touch()
    (tmp_path / "hub" / "link").symlink_to(tmp_path / "not of the hub")
    os.chown(tmp_path / "hub" / "others", 4321, 4321)
    os.chown(tmp_path, owner, owner)

    code = (
        "import os, sys; from pathlib import Path\n"
        "from penstock_cli.translate.drop_root import drop_root\n"
        "assert drop_root(Path(sys.argv[1])) == ''\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    user = owner or drop_root.IMAGE_USER
    assert said == f"{(user,) * 3} {(user,) * 3} []\n"
    assert {path: path.lstat().st_uid for path in tmp_path.rglob("*")} == {
        tmp_path / "hub": user,
        tmp_path / "hub" / "models--a": user,
        model: user,
        tmp_path / "hub" / "link": user,
        tmp_path / "hub" / "others": 4321,
        tmp_path / "not of the hub": 0,
        tmp_path / "modules": user,
        tmp_path / "xet": user,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
@pytest.mark.parametrize(
    ("owner", "user", "group"),
    [
        ((1000, 0), 1000, 1000),
        ((1000, 50), 1000, 50),
        ((0, 50), 10001, 10001),
        ((0, 0), 10001, 10001),
    ],
)
def test_nobody_keeps_a_group_of_roots(
    tmp_path: Path, owner: tuple[int, int], user: int, group: int
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("roots")
    secret.chmod(0o040)
    models = tmp_path / "models"
    models.mkdir()
    os.chown(models, *owner)
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_mode & 0o5 != 0o5 and each.name.startswith(("pytest", "popen", "test")):
            each.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from penstock_cli.translate.drop_root import drop_root\n"
        "os.setgroups([0, 4, 27])\n"
        "models = Path(sys.argv[1])\n"
        "assert drop_root(models) == ''\n"
        "(models / 'hub' / 'new').touch()\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups())\n"
        "print(os.access(sys.argv[2], os.R_OK))"
    )
    command = [sys.executable, "-c", code, str(models), str(secret)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"{(user,) * 3} {(group,) * 3} []\nFalse\n"
    assert {path.lstat().st_gid for path in models.iterdir()} == {group}


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_folder_that_leads_elsewhere_gives_nobody_what_is_there(tmp_path: Path) -> None:
    # The host's user made it, who is to get no file of root's by that.
    models, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    for folder in (models, elsewhere):
        folder.mkdir()
    (elsewhere / "secret").touch()
    (models / "hub").symlink_to(elsewhere)
    os.chown(models, 1234, 1234)
    code = (
        "import sys; from pathlib import Path\n"
        "from penstock_cli.translate.drop_root import drop_root\n"
        "assert drop_root(Path(sys.argv[1])) == ''"
    )
    subprocess.run([sys.executable, "-c", code, str(models)], check=True)
    assert (elsewhere / "secret").stat().st_uid == 0
    assert (models / "xet").stat().st_uid == 1234


def test_who_is_not_root_stays_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert drop_root.drop_root(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_does_not_keep_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, object] = {}

    def note(name: str) -> Callable[[object], None]:
        return lambda value: called.update({name: value})

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(Path, "mkdir", fail)
    for name in ("setgroups", "setgid", "setuid"):
        monkeypatch.setattr(os, name, note(name))
    assert drop_root.drop_root(tmp_path) == f"{tmp_path}/hub stays root's (Read-only file system)"
    user = tmp_path.stat().st_uid or drop_root.IMAGE_USER
    assert (called["setgroups"], called["setuid"]) == ([], user)


# ---- which GPUs there are --------------------------------------------------------------------


def make_driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only program there is; none without a script."""
    monkeypatch.setenv("PATH", str(folder))
    if script:
        tool = folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)


@pytest.mark.parametrize(
    ("value", "names"), [("", []), ("-1", []), ("0", ["0"]), ("2, GPU-a1", ["2", "GPU-a1"])]
)
def test_the_environment_says_which_gpus_are_to_be_used(
    value: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    make_driver(tmp_path, "echo GPU-z", monkeypatch)
    assert gpus.visible_gpus() == names


@pytest.mark.parametrize(
    ("script", "names"), [("echo GPU-a; echo GPU-b", ["GPU-a", "GPU-b"]), ("exit 9", []), ("", [])]
)
def test_else_the_driver_says_which_there_are(
    script: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    make_driver(tmp_path, script, monkeypatch)
    assert gpus.visible_gpus() == names
