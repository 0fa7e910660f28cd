"""Models and adapters of a hub: downloads the needed files, or finds them in the cache.

huggingface_hub reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE. It takes 0.5 s to import,
so it is imported only for models of a hub.
"""

from __future__ import annotations

import errno
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock_shard.checkpoint.adapter_files import CONFIG
from penstock_shard.checkpoint.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from penstock_shard.checkpoint.gguf_files import is_gguf
from penstock_shard.checkpoint.tokenizer_files import is_template
from penstock_shard.checkpoint.weight_files import INDEX, WEIGHTS, unlisted, why_no_weights
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError

# A model's name, optionally followed by a colon and the name of a GGUF file.
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
# Endings of configurations, vocabularies and chat templates.
_WANTED = (".json", ".jinja", ".txt", ".model")
# A file of sentence-transformers; see `pooling_files`.
_POOLING = re.compile(r"\d+_Pooling/config\.json")
# The name of one part of a GGUF model.
_PIECE = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_ADAPTER_FILES = [CONFIG, ADAPTER_WEIGHTS]
_PROGRESS_S = 5.0


def is_hub_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def fetch_model(
    name: str, config: ShardConfig, needs_weights: bool, progress: Callable[[str], None]
) -> tuple[Path, str]:
    """Download the missing files of a model, or take the cached copy if the hub cannot be reached.
    Return a directory or a GGUF file, and the commit. Raises ModelError if that fails.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The base class of the HTTP library's errors, because releases of huggingface_hub use different
    # libraries.
    transport_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    cache = Path(config.download_dir or constants.HF_HUB_CACHE).expanduser()
    revision = config.revision or constants.DEFAULT_REVISION
    model, _, file = name.partition(":")
    hub = _Hub(model, file, revision, cache, constants.ENDPOINT)
    try:
        with _one_line(hub):
            return hub.download(needs_weights, config.trust_remote_code, progress)
    except OfflineModeIsEnabled:
        return hub.cached("HF_HUB_OFFLINE is set")
    except transport_error as error:
        return hub.cached(f"cannot reach {constants.ENDPOINT}: {error}")


def fetch_adapter(source: str, config: ShardConfig) -> Path:
    """Return an adapter's directory. Raises ModelError if it cannot be had."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    cache = Path(config.download_dir or constants.HF_HUB_CACHE).expanduser()
    hub = _Hub(source, "", constants.DEFAULT_REVISION, cache, constants.ENDPOINT)
    try:
        with _one_line(hub):
            path = snapshot_download(source, cache_dir=cache, allow_patterns=_ADAPTER_FILES)
    except OfflineModeIsEnabled as error:
        raise ModelError(f"{source} is not in {cache}, and HF_HUB_OFFLINE is set") from error
    return Path(path)


@contextmanager
def _one_line(hub: _Hub) -> Iterator[None]:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = hub.model
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms at {hub.endpoint}/{name} and set HF_TOKEN to a "
            "token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: {hub.endpoint} has no such model, or it is private: check the name and "
            "HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {hub.revision!r}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise ModelError(f"{name}: {hub.endpoint} answered with HTTP status {status}") from error
    except OfflineModeIsEnabled:
        # This is also an OSError, but not a failure yet: the cache may have a copy.
        raise
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise ModelError(f"{name}: cannot be downloaded: {error}") from error
        raise ModelError(
            f"{name}: the disk is full: {hub.cache} has "
            f"{_size(_free_bytes(hub.cache))} left; free some or give another --download-dir"
        ) from error


@dataclass(frozen=True, slots=True)
class _Hub:
    model: str
    # The GGUF file's name, or the end of its name without the suffix; empty if none is named.
    file: str
    revision: str
    cache: Path
    endpoint: str

    def download(
        self, needs_weights: bool, code: bool, progress: Callable[[str], None]
    ) -> tuple[Path, str]:
        """Report the size of the missing files, and fetch them."""
        from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
        from huggingface_hub.utils.tqdm import disable_progress_bars

        info = HfApi().model_info(self.model, revision=self.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        gguf = self._gguf(list(sizes))
        if not gguf and needs_weights and INDEX not in sizes and not unlisted(sizes):
            raise ModelError(f"{self.model}: {why_no_weights(list(sizes))}")
        wanted = [gguf] if gguf else _wanted(sizes, needs_weights, code)
        missing = sum(
            sizes[name]
            for name in wanted
            if not isinstance(
                try_to_load_from_cache(self.model, name, cache_dir=self.cache, revision=info.sha),
                str,
            )
        )
        if missing:
            self._check_room(missing)
            progress(f"downloading {self.model}: {_size(missing)} to {self.cache}")
        # Bars of several threads are unreadable in a log; `_reporting` writes lines.
        disable_progress_bars()
        with self._reporting(missing, progress):
            path = snapshot_download(
                self.model, revision=self.revision, cache_dir=self.cache, allow_patterns=wanted
            )
        return Path(path) / gguf, info.sha or ""

    def cached(self, reason: str) -> tuple[Path, str]:
        """Return the cached copy. Raises ModelError with the reason if there is none."""
        from huggingface_hub import CacheNotFound, scan_cache_dir

        try:
            copies = [
                copy
                for repo in scan_cache_dir(self.cache).repos
                if (repo.repo_id, repo.repo_type) == (self.model, "model")
                for copy in repo.revisions
                if self.revision in {*copy.refs, copy.commit_hash}
            ]
        except CacheNotFound:
            copies = []
        for copy in copies:
            names = [str(file.file_path.relative_to(copy.snapshot_path)) for file in copy.files]
            gguf = self._gguf(names)
            if gguf or "config.json" in names:
                return copy.snapshot_path / gguf, copy.commit_hash
        raise ModelError(f"{self.model} is not in {self.cache}, and {reason}")

    def _gguf(self, names: Sequence[str]) -> str:
        """Return the named GGUF file, or the only one if there are no other weights; else ''."""
        files = sorted(name for name in names if is_gguf(Path(name)))
        meant = [name for name in files if _is_meant(self.file, name)] if self.file else files
        has_others = any(name in names for name in (WEIGHTS, INDEX))
        if not self.file and (has_others or not files):
            return ""
        if len(meant) == 1:
            if _PIECE.search(meant[0]):
                raise ModelError(f"{self.model}: {meant[0]} is one of several; they are not served")
            return meant[0]
        if not self.file:
            tail = f"name one as {self.model}:{Path(files[0]).stem}"
            raise ModelError(f"{self.model}: has {len(files)} GGUF files; {tail}")
        found = f"{len(meant)} of its GGUF files are" if meant else "none of its GGUF files is"
        raise ModelError(f"{self.model}: {found} {self.file}: {_few(meant or files)}")

    def _check_room(self, needed: int) -> None:
        free = _free_bytes(self.cache)
        if needed > free:
            raise ModelError(
                f"{self.model} needs {_size(needed)}, but {self.cache} has {_size(free)} left; "
                "free some or give another --download-dir"
            )

    @contextmanager
    def _reporting(self, total: int, progress: Callable[[str], None]) -> Iterator[None]:
        blobs = self.cache / f"models--{self.model.replace('/', '--')}" / "blobs"
        before = _used_bytes(blobs)
        done = threading.Event()

        def report() -> None:
            while not done.wait(_PROGRESS_S):
                arrived = _used_bytes(blobs) - before
                progress(f"downloading {self.model}: {_size(arrived)} of {_size(total)}")

        thread = threading.Thread(target=report, name="download-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _is_meant(wanted: str, name: str) -> bool:
    """Tell whether `wanted` is a file's name, its stem, or the end of its stem, such as Q4_K_M."""
    stem, wanted = Path(name).stem.lower(), wanted.lower().removesuffix(".gguf")
    return stem == wanted or stem.endswith(("-" + wanted, "." + wanted))


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "it has none"


def _wanted(sizes: Mapping[str, int], needs_weights: bool, code: bool) -> list[str]:
    suffixes = (*_WANTED, ".py") if code else _WANTED
    wanted = [name for name in sizes if "/" not in name and name.endswith(suffixes)]
    wanted += [name for name in sizes if _POOLING.fullmatch(name) or is_template(name)]
    if needs_weights:
        # Some repositories also hold the weights as consolidated.*.
        weights = [WEIGHTS] if WEIGHTS in sizes else unlisted(sizes)
        wanted += [name for name in weights if name in sizes]
    return wanted


def _free_bytes(directory: Path) -> int:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _used_bytes(directory: Path) -> int:
    total = 0
    if directory.exists():
        for path in directory.iterdir():
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
