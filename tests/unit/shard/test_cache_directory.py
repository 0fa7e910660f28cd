"""The path to a cache: others must not write to it, as they could replace kernels and loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_shard.device.cache_directory import ensure_safe, ensure_safe_directory
from penstock_shard.kv_transfer.segments import lock_directory

Check = Callable[[Path], object]
# As the kernels' and the loads' cache, a GGUF file's directory, and the disk of KV blocks ask.
CHECKS: list[Check] = [
    ensure_safe_directory,
    lambda directory: ensure_safe(directory / "file"),
    lock_directory,
]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory of ours, three levels down, with a file in it."""
    directory = tmp_path / "a" / "b" / "cache"
    directory.mkdir(mode=0o700, parents=True)
    (directory / "file").touch(0o600)
    for above in (tmp_path / "a", tmp_path / "a" / "b"):
        above.chmod(0o755)
    return directory


@pytest.fixture
def no_private_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of whatever runs the tests may have members."""
    monkeypatch.setattr(os, "getgid", lambda: 12345)


@pytest.mark.usefixtures("no_private_group")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o2775])
@pytest.mark.parametrize("level", [1, 2])
def test_a_cache_is_not_used_below_what_others_may_write_to(
    check: Check, mode: int, level: int, cache: Path
) -> None:
    above = cache.parents[level - 1]
    above.chmod(mode)
    with pytest.raises(PermissionError, match=f"{above} has mode {mode:o}; group and others"):
        check(cache)
    # In a sticky one nobody replaces what is another's.
    above.chmod(mode | 0o1000)
    check(cache)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("level", [1, 2])
def test_a_cache_is_not_used_below_what_is_another_users(
    check: Check, level: int, cache: Path
) -> None:
    above = cache.parents[level - 1]
    os.chown(above, 12345, -1)
    with pytest.raises(PermissionError, match=f"{above} belongs to user 12345"):
        check(cache)


@pytest.mark.parametrize("check", CHECKS)
def test_each_link_on_the_way_is_followed_and_looked_at(
    check: Check, cache: Path, tmp_path: Path
) -> None:
    """The last of two links is in a directory that others may write to; the ends are not."""
    between = tmp_path / "between"
    between.mkdir(mode=0o755)
    (between / "link").symlink_to(cache)
    (tmp_path / "first").symlink_to("between/../between/link")
    check(tmp_path / "first")
    between.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{between} has mode 777"):
        check(tmp_path / "first")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_link_of_another_user_is_not_followed(cache: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(cache)
    os.lchown(link, 12345, -1)
    with pytest.raises(PermissionError, match=f"{link} belongs to user 12345"):
        ensure_safe_directory(link)


def test_links_in_a_circle_are_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises((OSError, RuntimeError)):
        ensure_safe_directory(tmp_path / "one")


def test_a_users_own_group_may_write_above_a_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts volumes in such a mode, and the umask of many systems gives it."""
    cache.parent.chmod(0o2775)
    monkeypatch.setattr(os, "getgid", lambda: cache.parent.stat().st_gid)
    monkeypatch.setattr(os, "getuid", lambda: cache.parent.stat().st_gid)
    ensure_safe_directory(cache)
    cache.chmod(0o770)
    with pytest.raises(PermissionError, match=f"{cache} has mode 770"):
        ensure_safe_directory(cache)


@pytest.mark.usefixtures("no_private_group")
@pytest.mark.parametrize("check", CHECKS)
def test_others_may_write_to_what_is_above_a_cache_only_where_its_user_says_so(
    check: Check, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volumes of pods have such a mode."""
    volume, further = cache.parents[0], cache.parents[1]
    volume.chmod(0o2777)
    monkeypatch.setenv("PENSTOCK_TRUSTED_DIRECTORIES", f"/elsewhere:{volume}")
    check(cache)
    # Only that directory is trusted: none above it, and not the cache itself.
    further.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{further} has mode 777"):
        check(cache)
    further.chmod(0o755)
    cache.chmod(0o777)
    monkeypatch.setenv("PENSTOCK_TRUSTED_DIRECTORIES", f"{volume}:{cache}")
    with pytest.raises(PermissionError, match=f"{cache} has mode 777"):
        check(cache)
