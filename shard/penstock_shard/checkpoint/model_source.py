"""--model -> a local directory with a complete model: built in, on disk, or from the hub.

HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are read by huggingface_hub. Weights are taken as
safetensors only, since loading pickles runs what is in them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock_shard.checkpoint.adapter_files import CONFIG as ADAPTER_CONFIG
from penstock_shard.checkpoint.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from penstock_shard.checkpoint.gguf_files import is_gguf, unfold
from penstock_shard.checkpoint.weight_files import (
    GGUF,
    INDEX,
    WEIGHTS,
    read_object,
    stored_tensors,
    weight_files,
)
from penstock_shard.config import ShardConfig
from penstock_shard.errors import AdapterNotFound, ModelError

BUILTIN_MODEL = Path(__file__).parent.parent / "builtin_model"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PICKLES = (".bin", ".pt", ".pth")
# Besides weights: configurations, vocabularies, chat templates.
_WANTED = (".json", ".jinja", ".txt", ".model")
# Of sentence-transformers; see `pooling_files`.
_POOLING = re.compile(r"\d+_Pooling/config\.json")
ADAPTER_FILES = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A directory that holds a model. `revision` is the commit of a hub model, else empty."""

    path: Path
    revision: str = ""


def resolve_model(config: ShardConfig, *, progress: Callable[[str], None]) -> ModelSource:
    """Find the model that the configuration names, downloading it if need be.

    `progress` gets a line now and then. Raises ModelError if there is no such model or it is not
    complete. Weights are not asked for where none are read (fake runner, --load-format dummy).
    """
    needs_weights = config.runner != "fake" and config.load_format != "dummy"
    if config.model is None:
        source = ModelSource(BUILTIN_MODEL)
    elif _is_local(config.model):
        path = Path(config.model).expanduser()
        source = ModelSource(unfold(path) if is_gguf(path) else path)
    else:
        source = _from_hub(config.model, config, needs_weights, progress)
    check_directory(source.path, needs_weights=needs_weights)
    return source


def resolve_adapter(source: str, config: ShardConfig) -> Path:
    """The directory of an adapter, downloaded if it is a hub id. Raises ModelError."""
    # A directory that is no adapter must not hide a hub id, or show by its error that it exists.
    if _looks_local(source) or os.path.isfile(Path(source) / ADAPTER_CONFIG):
        try:
            return Path(source).expanduser()
        except RuntimeError as error:
            raise AdapterNotFound(f"{source}: there is no such user") from error
    # Here and not above: takes half a second, and local adapters do not need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    cache = Path(config.download_dir or constants.HF_HUB_CACHE).expanduser()
    hub = _Hub(source, constants.DEFAULT_REVISION, cache, constants.ENDPOINT)
    try:
        with _one_line(hub):
            path = snapshot_download(source, cache_dir=cache, allow_patterns=ADAPTER_FILES)
    except OfflineModeIsEnabled as error:
        raise ModelError(f"{source} is not in {cache}, and HF_HUB_OFFLINE is set") from error
    return Path(path)


def _is_local(model: str) -> bool:
    return _looks_local(model) or Path(model).exists()


def _looks_local(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name)


def check_directory(directory: Path, *, needs_weights: bool = True) -> None:
    """Raises ModelError if the directory does not hold a complete model."""
    try:
        if not directory.exists():
            raise ModelError(f"{directory}: there is no such directory")
        if not directory.is_dir():
            raise ModelError(f"{directory}: is a file; --model wants the model's directory")
        if not (directory / "config.json").exists():
            raise ModelError(f"{directory}: there is no config.json, so this is not a model")
        read_object(directory / "config.json")
        if needs_weights:
            _check_weights(directory)
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _check_weights(directory: Path) -> None:
    parts = weight_files(directory)
    if not parts:
        names = [path.name for path in directory.iterdir()]
        raise ModelError(f"{directory}: {_no_weights(names)}")
    missing = [part for part in parts if not part.exists()]
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} of {len(parts)} parts of the weights are missing, "
            f"{missing[0].name} for one"
        )
    for part in parts:
        if part.name != GGUF:
            stored_tensors(part)


def _no_weights(names: Sequence[str]) -> str:
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return (
            f"has its weights only as pickle ({pickles[0]}), which can run code when it is read; "
            "only safetensors are loaded (a hub model may have a converted --revision refs/pr/N)"
        )
    return f"there are no weights ({WEIGHTS} or {INDEX})"


def _from_hub(
    model: str, config: ShardConfig, needs_weights: bool, progress: Callable[[str], None]
) -> ModelSource:
    """Download what is missing of a hub model, or take the cached copy if the hub is away."""
    # Here and not above: takes half a second, and local models do not need it.
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The base class of the HTTP library's errors; which library that is differs by release.
    transport_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    cache = Path(config.download_dir or constants.HF_HUB_CACHE).expanduser()
    revision = config.revision or constants.DEFAULT_REVISION
    hub = _Hub(model, revision, cache, constants.ENDPOINT)
    try:
        with _one_line(hub):
            return hub.download(needs_weights, config.trust_remote_code, progress)
    except OfflineModeIsEnabled:
        return hub.cached("HF_HUB_OFFLINE is set")
    except transport_error as error:
        return hub.cached(f"cannot reach {constants.ENDPOINT}: {error}")


@contextmanager
def _one_line(hub: _Hub) -> Iterator[None]:
    """The hub's refusals and a full disk as ModelError."""
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
        # An OSError too, but not the end: there may be a copy in the cache.
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
    """One model on one hub, kept in one cache directory."""

    model: str
    revision: str
    cache: Path
    endpoint: str

    def download(
        self, needs_weights: bool, code: bool, progress: Callable[[str], None]
    ) -> ModelSource:
        """Fetch the files that are wanted and not there; says their size first."""
        from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
        from huggingface_hub.utils.tqdm import disable_progress_bars

        info = HfApi().model_info(self.model, revision=self.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if needs_weights and not any(name in sizes for name in (WEIGHTS, INDEX)):
            raise ModelError(f"{self.model}: {_no_weights(list(sizes))}")
        wanted = _wanted(sizes, needs_weights, code)
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
        return ModelSource(Path(path), info.sha or "")

    def cached(self, reason: str) -> ModelSource:
        """The copy in the cache. Raises ModelError with the reason if there is none."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            self.model, "config.json", cache_dir=self.cache, revision=self.revision
        )
        if not isinstance(found, str):
            raise ModelError(f"{self.model} is not in {self.cache}, and {reason}")
        path = Path(found).parent
        return ModelSource(path, path.name)

    def _check_room(self, needed: int) -> None:
        free = _free_bytes(self.cache)
        if needed > free:
            raise ModelError(
                f"{self.model} needs {_size(needed)}, but {self.cache} has {_size(free)} left; "
                "free some or give another --download-dir"
            )

    @contextmanager
    def _reporting(self, total: int, progress: Callable[[str], None]) -> Iterator[None]:
        """A line every few seconds while files arrive, measured on disk."""
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


def _wanted(sizes: Mapping[str, int], needs_weights: bool, code: bool) -> list[str]:
    """Files that serving needs: of the repository's top level, and how embeddings are pooled."""
    suffixes = (*_WANTED, ".py") if code else _WANTED
    wanted = [name for name in sizes if "/" not in name and name.endswith(suffixes)]
    wanted += [name for name in sizes if _POOLING.fullmatch(name)]
    if needs_weights:
        # Some repositories hold the same weights twice, the second time as consolidated.*.
        weights = [name for name in sizes if re.fullmatch(r"model[\w.-]*\.safetensors", name)]
        wanted += [WEIGHTS] if WEIGHTS in weights else weights
    return wanted


def _free_bytes(directory: Path) -> int:
    """Free space where the directory is or would be made."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _used_bytes(directory: Path) -> int:
    """Size of the files in a directory that others write to meanwhile."""
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
