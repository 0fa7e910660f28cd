"""The shard's command line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock_common.shared_flags import SHARD_API_KEY
from penstock_shard.cli import parse_config
from penstock_shard.config import ShardConfig


def test_a_step_has_a_row_of_logits_for_each_sequence_and_each_draft() -> None:
    assert parse_config(["--max-num-seqs", "8"]).max_step_logits == 8
    flags = ["--max-num-seqs", "8", "--speculative-tokens"]
    assert parse_config([*flags, "4"]).max_step_logits == 16
    assert parse_config([*flags, "10"]).max_step_logits == 18


def test_no_flags_are_the_defaults_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHARD_API_KEY:
        monkeypatch.delenv(name, raising=False)
    assert parse_config([]) == ShardConfig()


def test_a_published_launch_line_is_understood() -> None:
    line = (
        "--max-num-seqs 500 --trust-remote-code --enforce-eager --max-num-batched-tokens 512 "
        "--enable-chunked-prefill --tensor-parallel-size 1"
    )
    config = parse_config(line.split())
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (500, 512)
    assert config.trust_remote_code
    assert config.enforce_eager


def test_the_key_comes_from_the_environment_when_no_flag_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "env")
    assert parse_config([]).api_key == "env"
    assert parse_config(["--api-key", "flag"]).api_key == "flag"
    # As the router sends it.
    monkeypatch.setenv("PENSTOCK_SHARD_API_KEY", "of shards")
    assert parse_config([]).api_key == "of shards"
    assert parse_config(["--api-key", "flag"]).api_key == "flag"


def test_an_empty_key_in_the_environment_does_not_serve_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "")
    with pytest.raises(SystemExit) as ended:
        parse_config([])
    assert ended.value.code == 2
    assert "PENSTOCK_API_KEY: a key is printable ASCII, not empty" in capsys.readouterr().err


def test_a_shard_on_all_addresses_has_its_machines_name_in_its_log() -> None:
    """Containers listen on all addresses, which would look the same in every log."""
    here = socket.gethostname()
    for host in ("0.0.0.0", "::"):
        assert parse_config(["--host", host, "--port", "5"]).log_name == f"{here}:5"
    assert parse_config(["--host", "10.0.0.5", "--port", "5"]).log_name == "10.0.0.5:5"


def test_the_model_is_served_under_its_first_name() -> None:
    assert parse_config([]).model_name == "penstock-toy"
    assert parse_config(["--model", "org/m"]).model_name == "org/m"
    assert parse_config(["--model", "org/m", "--served-model-name", "a", "b"]).model_name == "a"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/llama", "llama"),
        ("/models/llama/", "llama"),
        ("./llama", "llama"),
        ("here/llama", "llama"),
        ("here", "here"),
        (".", "folder"),
        ("~/llama", "llama"),
        ("/models/llama-Q4_K.gguf", "llama-Q4_K"),
        ("org/llama", "org/llama"),
        ("org/llama-GGUF:Q4_K", "org/llama-GGUF:Q4_K"),
        ("/cache/models--org--llama/snapshots/0f3c2a1b", "org/llama"),
        ("/", "/"),
    ],
)
def test_a_model_that_is_given_by_its_path_is_served_under_the_name_of_its_directory(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    (folder / "here" / "llama").mkdir(parents=True)
    monkeypatch.chdir(folder)
    config = parse_config(["--model", model])
    assert (config.model_name, config.served_model_names) == (name, (name,))
    # And no longer asks the disk: what was there may be gone.
    monkeypatch.chdir("/")
    assert config.model_name == name
    assert parse_config(["--model", model, "--served-model-name", "x"]).served_model_names == ("x",)


def test_the_full_path_is_a_name_where_it_is_told_to_be() -> None:
    given = ["--model", "/models/llama", "--served-model-name", "llama", "/models/llama"]
    assert parse_config(given).served_model_names == ("llama", "/models/llama")


def test_a_number_of_bytes_is_told_how_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--kv-memory", "--load-cache"):
        with pytest.raises(SystemExit):
            parse_config([flag, "2147483648"])
        must = "must have its unit, K, M or G, as in 512M or 2G, not '2147483648'"
        said = f"argument {flag}: {must}; as many bytes are 2G"
        assert capsys.readouterr().err == f"penstock shard: {said} (see penstock shard --help)\n"
    assert parse_config(["--kv-host-bytes", "0"]).kv_host_bytes == 0


def test_what_is_called_otherwise_than_its_flag_is_told_too() -> None:
    line = "--lora a=one --lora b=two --kv-memory 1G --otlp-endpoint http://collector:4317"
    config = parse_config(line.split())
    assert config.loras == (("a", "one"), ("b", "two"))
    assert config.kv_memory_bytes == 2**30
    assert config.tracing is not None
    assert config.tracing.url.startswith("http://collector:4317")


@pytest.mark.parametrize("flag", ["--quantization", "--quantize"])
def test_quantization_has_two_spellings(flag: str) -> None:
    for kind in ("int8", "fp8", "int4"):
        assert parse_config([flag, kind]).quantization == kind


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--port 70000", ["--port", "70000", "65535"]),
        ("--max-num-seqs 0", ["--max-num-seqs", "0", "at least 1"]),
        ("--speculative-tokens 65", ["--speculative-tokens", "65", "from 0 to 64"]),
        ("--max-num-seqs many", ["--max-num-seqs", "many"]),
        ("--step-ms nan", ["--step-ms", "nan"]),
        ("--fake-eos-rate 2", ["--fake-eos-rate", "2", "from 0 to 1"]),
        ("--gpu-memory-utilization 0", ["--gpu-memory-utilization", "above 0"]),
        ("--constraint-timeout-s 0", ["--constraint-timeout-s", "above 0"]),
        ("--constraint-threads 0", ["--constraint-threads", "at least 1"]),
        ("--constraint-memory-bytes lots", ["--constraint-memory-bytes", "512M"]),
        ("--max-constraint-bytes 0", ["--max-constraint-bytes", "0"]),
        ("--kv-memory lots", ["--kv-memory", "lots", "512M"]),
        ("--kv-memory 1G --kv-blocks 4", ["--kv-blocks", "--kv-memory"]),
        ("--kv-disk /d --kv-host-bytes 1G", ["--kv-disk", "--kv-disk-bytes", "both"]),
        ("--kv-disk-bytes 1G --kv-host-bytes 1G", ["--kv-disk", "--kv-disk-bytes", "both"]),
        ("--kv-disk /d --kv-disk-bytes 1G", ["--kv-disk /d", "--kv-host-bytes"]),
        ("--kv-disk-salted", ["--kv-disk-salted", "--kv-disk"]),
        ("--kv-disk-age-s 1e308", ["--kv-disk-age-s", "1e308", "1000000000"]),
        ("--kv-peers host:99999", ["--kv-peers host:99999", "65535"]),
        ("--kv-peers a:1,b:1", ["--kv-peers a:1,b:1", "spaces"]),
        ("--kv-peers http://host:1", ["--kv-peers http://host:1", "HOST:PORT"]),
        ("--kv-peer-server-name x", ["--kv-peer-server-name", "--kv-peer-ca-file"]),
        ("--role decode", ["--role decode", "--kv-peers"]),
        ("--block-size 24", ["--block-size", "24", "multiple of 16"]),
        ("--tensor-parallel-size 2 --runner fake", ["--tensor-parallel-size", "2", "fake"]),
        ("--tensor-parallel-size 0", ["--tensor-parallel-size", "0", "at least 1"]),
        ("--master-port 70000", ["--master-port", "70000", "65535"]),
        ("--tensor-parallel-size 3 --nnodes 2", ["--tensor-parallel-size", "3", "--nnodes"]),
        ("--tensor-parallel-size 4 --nnodes 2", ["--nnodes", "2", "--master-addr"]),
        ("--node-rank 1", ["--node-rank", "1", "--nnodes"]),
        ("--master-addr host", ["--master-addr", "host", "--nnodes"]),
        ("--max-num-batched-tokens 8", ["--max-num-batched-tokens", "8", "--max-num-seqs"]),
        ("--dtype float8", ["--dtype", "float8"]),
        ("--quantize int3", ["--quantize", "int3", "int8"]),
        ("--kv-cache-dtype fp4", ["--kv-cache-dtype", "fp4", "float16", "fp8"]),
        ("--no-such-flag", ["--no-such-flag"]),
        ("--max-num-s 4", ["unrecognized arguments: --max-num-s 4"]),
        ("--api-key schlüssel", ["--api-key", "a key is printable ASCII"]),
        ("--api-key=", ["--api-key", "not empty"]),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it(
    flags: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(flags.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in error for word in words), error


def test_what_a_constraint_may_take_is_told() -> None:
    line = (
        "--max-constraint-bytes 1M --constraint-timeout-s 0.5 --constraint-memory-bytes 1G "
        "--constraint-threads 3"
    )
    config = parse_config(line.split())
    assert (config.max_constraint_bytes, config.constraint_timeout_s) == (2**20, 0.5)
    assert (config.constraint_memory_bytes, config.constraint_threads) == (2**30, 3)


def test_the_level_of_the_log_is_told() -> None:
    assert parse_config([]).log_level == "info"
    assert parse_config(["--log-level", "error"]).log_level == "error"
