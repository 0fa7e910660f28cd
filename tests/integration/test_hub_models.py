"""Hub models against a local stand-in of the hub, reached through HF_ENDPOINT.

Each environment has a process: huggingface_hub reads it when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
WEIGHTS = save({"w": np.arange(64, dtype=np.float32)})
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": WEIGHTS,
    "onnx/model.onnx": b"onnx",
    "modeling_custom.py": b"print()",
    "README.md": b"# model",
}
SCRIPT = """
import os, sys
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.checkpoint.hub import fetch_model
from penstock_shard.checkpoint.model_source import resolve_model
if os.environ.get("TEST_DISK_FULL"):
    import errno, pathlib
    def full(self, mode="r", *args, opened=pathlib.Path.open, **kwargs):
        if mode != "r" and "incomplete" in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(self, mode, *args, **kwargs)
    pathlib.Path.open = full
revision, directory, *models = sys.argv[1:]
progress = lambda line: print(line, file=sys.stderr)
failed = False
for model in models:
    config = ShardConfig(model=model, revision=revision or None, download_dir=directory or None)
    try:
        if os.environ.get("TEST_FETCHES_ONLY"):
            print(*fetch_model(model, config, True, progress))
            continue
        source = resolve_model(config, progress=progress)
        print(source.path, source.revision)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        failed = True
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(failed)
"""


@dataclass
class Hub:
    """The models that the stand-in serves, and the names of the files that it has sent."""

    url: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)


def make_handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = urlsplit(self.path).path.removeprefix("/").split("/")
            if path[:2] == ["api", "models"]:
                model, rest = "/".join(path[2:4]), path[4:]
            else:
                model, rest = "/".join(path[:2]), path[2:]
            token = self.headers.get("Authorization")
            if model not in hub.models:
                return self._refuse(404, "RepoNotFound")
            if model in hub.gated and token != f"Bearer {TOKEN}":
                return self._refuse(403 if token else 401, "GatedRepo")
            files = hub.models[model]
            if rest[1:2] and rest[1] not in ("main", "v1", COMMIT):
                return self._refuse(404, "RevisionNotFound")
            if rest[:1] == ["resolve"]:
                name = "/".join(rest[2:])
                if self.command == "GET":
                    hub.fetched.append(name)
                return self._send(files[name], etag=hashlib.sha1(files[name]).hexdigest())
            entries = [
                (name, hub.sizes.get(name, len(data)), hashlib.sha1(data).hexdigest())
                for name, data in files.items()
            ]
            if rest[:1] == ["tree"]:
                tree = [
                    {"type": "file", "path": name, "size": size, "oid": oid}
                    for name, size, oid in entries
                ]
                return self._send(json.dumps(tree).encode())
            siblings = [
                {"rfilename": name, "size": size, "blobId": oid} for name, size, oid in entries
            ]
            info = {"id": model, "modelId": model, "sha": COMMIT, "siblings": siblings}
            return self._send(json.dumps(info).encode())

        def _refuse(self, status: int, code: str) -> None:
            self._send(b"{}", status, {"X-Error-Code": code, "X-Error-Message": code})

        def _send(
            self,
            body: bytes,
            status: int = 200,
            headers: dict[str, str] | None = None,
            etag: str | None = None,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            if etag:
                self.send_header("ETag", f'"{etag}"')
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(models={"org/good": FILES})
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(
    hub: Hub,
    home: Path,
    *models: str,
    revision: str = "",
    download_dir: str = "",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    ambient = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, revision, download_dir, *models],
        env={**ambient, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line a refused model prints."""
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert "Traceback" not in result.stderr
    return lines[-1]


def refusals(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The one line that each of several refused models prints."""
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return lines


def test_a_model_is_downloaded_once_and_then_found_offline(hub: Hub, tmp_path: Path) -> None:
    first = resolve(hub, tmp_path, "org/good")
    assert first.returncode == 0, first.stderr
    path, revision = first.stdout.split()
    assert revision == COMMIT
    assert Path(path).is_relative_to(tmp_path)
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(hub.fetched) == wanted
    assert sorted(file.name for file in Path(path).iterdir()) == wanted
    assert "downloading org/good: 0.0 MB to" in first.stderr

    again = resolve(hub, tmp_path, "org/good")
    assert again.stdout == first.stdout
    assert "downloading" not in again.stderr
    assert sorted(hub.fetched) == wanted
    away = resolve(hub, tmp_path, "org/good", HF_ENDPOINT="http://127.0.0.1:9")
    assert away.stdout == first.stdout


def test_download_dir_and_revision_are_honoured(hub: Hub, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    result = resolve(hub, tmp_path / "home", "org/good", revision="v1", download_dir=str(elsewhere))
    assert Path(result.stdout.split()[0]).is_relative_to(elsewhere)
    missing = resolve(hub, tmp_path / "home", "org/good", revision="v2")
    assert "org/good has no revision 'v2'" in refusal(missing)


def test_a_gated_model_wants_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/gated"] = FILES
    hub.gated.add("org/gated")
    for token in ({}, {"HF_TOKEN": "hf_wrong"}):
        line = refusal(resolve(hub, tmp_path, "org/gated", **token))
        assert "org/gated is gated: accept its terms" in line
        assert "HF_TOKEN" in line
    assert resolve(hub, tmp_path, "org/gated", HF_TOKEN=TOKEN).returncode == 0


def test_offline_without_a_copy_is_one_line(hub: Hub, tmp_path: Path) -> None:
    offline = refusal(resolve(hub, tmp_path, "org/good", HF_HUB_OFFLINE="1"))
    assert "org/good is not in" in offline
    assert "HF_HUB_OFFLINE is set" in offline
    away = refusal(resolve(hub, tmp_path, "org/good", HF_ENDPOINT="http://127.0.0.1:9"))
    assert "cannot reach http://127.0.0.1:9" in away


def test_what_cannot_be_served_is_one_line_before_anything_is_downloaded(
    hub: Hub, tmp_path: Path
) -> None:
    hub.models["org/pickled"] = {
        name: data for name, data in FILES.items() if "safetensors" not in name
    }
    # Larger than the disk.
    hub.sizes["model.safetensors"] = 10**16
    missing, pickled, large = refusals(
        resolve(hub, tmp_path, "org/none", "org/pickled", "org/good")
    )
    assert "has no such model, or it is private" in missing
    assert "org/pickled: has its weights only as pickle (pytorch_model.bin)" in pickled
    assert "org/good needs 10000000.0 GB, but" in large
    assert hub.fetched == []


def test_parts_that_no_index_lists_are_all_downloaded(hub: Hub, tmp_path: Path) -> None:
    parts = {
        f"model-0000{part}-of-00002.safetensors": save({f"w{part}": np.zeros(4, dtype=np.float32)})
        for part in (1, 2)
    }
    whole = {name: data for name, data in FILES.items() if name != "model.safetensors"} | parts
    hub.models["org/parts"] = whole
    assert resolve(hub, tmp_path, "org/parts").returncode == 0
    assert set(parts) < set(hub.fetched)
    assert "consolidated.safetensors" not in hub.fetched
    hub.models["org/cut"] = {name: data for name, data in whole.items() if "00002-of" not in name}
    line = refusal(resolve(hub, tmp_path, "org/cut"))
    assert "1 of 2 parts of the weights are missing, model-00002-of-00002.safetensors" in line


def test_a_disk_that_fills_up_is_one_line(hub: Hub, tmp_path: Path) -> None:
    line = refusal(resolve(hub, tmp_path, "org/good", TEST_DISK_FULL="1"))
    assert "org/good: the disk is full" in line


def gguf_files(*kinds: str) -> dict[str, bytes]:
    """Return a README and a GGUF file of each kind. test_gguf.py reads files with tensors."""
    return {"README.md": b"# files", **{f"Toy-4M-{kind}.gguf": b"GGUF" for kind in kinds}}


def test_a_gguf_file_of_a_hub_model_is_named_by_its_end(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/toy-GGUF"] = gguf_files("Q8_0", "Q4_0")
    environment = {"TEST_FETCHES_ONLY": "1"}
    names = ("org/toy-GGUF:q4_0", "org/toy-GGUF:Toy-4M-Q4_0.gguf", "org/toy-GGUF:Toy-4M-Q4_0")
    found = resolve(hub, tmp_path, *names, **environment)
    assert found.returncode == 0, found.stderr
    for line in found.stdout.splitlines():
        path, commit = line.split()
        assert (Path(path).name, commit) == ("Toy-4M-Q4_0.gguf", COMMIT)
    assert found.stdout.count("\n") == len(names)
    assert hub.fetched == ["Toy-4M-Q4_0.gguf"]
    offline = resolve(hub, tmp_path, "org/toy-GGUF:Q4_0", HF_HUB_OFFLINE="1", **environment)
    assert offline.returncode == 0, offline.stderr
    refused = {
        "org/toy-GGUF": "has 2 GGUF files; name one as org/toy-GGUF:Toy-4M-Q4_0",
        "org/toy-GGUF:Q5_K": "none of its GGUF files is Q5_K: Toy-4M-Q4_0.gguf, Toy-4M-Q8_0.gguf",
        "org/good:Q4_0": "none of its GGUF files is Q4_0: it has none",
    }
    lines = refusals(resolve(hub, tmp_path, *refused))
    for line, words in zip(lines, refused.values(), strict=True):
        assert words in line


def test_the_only_gguf_file_of_a_model_needs_no_name(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/one"] = gguf_files("Q8_0")
    # In a folder, and found there offline.
    hub.models["org/deep"] = {"Q8/Toy-4M-Q8_0.gguf": b"GGUF"}
    names = ("org/one", "org/deep:Q8_0")
    for offline in ("", "1"):
        found = resolve(hub, tmp_path, *names, TEST_FETCHES_ONLY="1", HF_HUB_OFFLINE=offline)
        assert found.returncode == 0, found.stderr
        one, deep = (line.split()[0] for line in found.stdout.splitlines())
        assert one.endswith("Toy-4M-Q8_0.gguf")
        assert deep.endswith("Q8/Toy-4M-Q8_0.gguf")
    hub.models["org/parts"] = {f"m-0000{part}-of-00002.gguf": b"" for part in (1, 2)}
    line = refusal(resolve(hub, tmp_path, "org/parts:m-00001-of-00002"))
    assert "m-00001-of-00002.gguf is one of several; they are not served" in line
