"""Flags of TLS, of each process and of the tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.certificates import Authority, Pair

from penstock_cli.arguments import add_shard_tls, parser_for, shard_tls
from penstock_cli.serve import serve
from penstock_cli.serve.models import Model
from penstock_common.tls import Tls
from penstock_router import cli as router_command_line
from penstock_shard import cli as shard_command_line

_SHARDS = ["--shards", "127.0.0.1:1"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "a")


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("127.0.0.1")


def test_a_router_is_told_of_its_certificate_by_either_name(pair: Pair) -> None:
    other_names = ["--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(pair.key)]
    for flags in (pair.server_flags, other_names):
        config = router_command_line.parse_config([*_SHARDS, *flags])
        assert (config.tls_cert_file, config.tls_key_file) == (str(pair.cert), str(pair.key))
    assert router_command_line.parse_config(_SHARDS).tls_cert_file is None


def test_a_router_is_told_how_to_speak_to_shards(authority: Authority, pair: Pair) -> None:
    flags = ["--shard-tls-ca-file", str(authority.file), "--shard-tls-server-name", "shard.example"]
    shown = ["--shard-tls-cert-file", str(pair.cert), "--shard-tls-key-file", str(pair.key)]
    config = router_command_line.parse_config([*_SHARDS, *flags, *shown])
    assert config.shard_tls == authority.tls(pair, "shard.example")
    assert router_command_line.parse_config(_SHARDS).shard_tls is None


def test_a_shard_is_told_whom_to_ask_for_a_certificate(authority: Authority, pair: Pair) -> None:
    flags = [*pair.server_flags, "--tls-client-ca-file", str(authority.file)]
    config = shard_command_line.parse_config(flags)
    assert config.tls_client_ca_file == str(authority.file)
    assert (config.tls_cert_file, config.tls_key_file) == (str(pair.cert), str(pair.key))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tls-cert-file", "c"], "--tls-cert-file and --tls-key-file: give both or neither"),
        (["--shard-tls-cert-file", "c"], "--shard-tls-cert-file: without --shard-tls-ca-file"),
        (
            ["--shard-tls-ca-file", "c", "--shard-tls-key-file", "k"],
            "--shard-tls-cert-file and --shard-tls-key-file: give both or neither",
        ),
        (["--shard-tls-ca-file", "/nowhere"], "TLS to shards: /nowhere: No such file"),
    ],
)
def test_half_of_what_tls_needs_ends_a_routers_start(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        router_command_line.parse_config([*_SHARDS, *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tls-key-file", "k"], "--tls-cert-file and --tls-key-file: give both or neither"),
        (["--tls-client-ca-file", "c"], "--tls-client-ca-file: without --tls-cert-file"),
        (["--tls-cert-file", "/nowhere", "--tls-key-file", "k"], "TLS: /nowhere: No such file"),
    ],
)
def test_half_of_what_tls_needs_ends_a_shards_start(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        shard_command_line.parse_config(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def _tool(*flags: str) -> Tls | None:
    parser = parser_for("tool", "")
    add_shard_tls(parser)
    return shard_tls(parser, parser.parse_args(flags))


def test_tools_take_files_from_flags_or_the_environment(
    authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _tool() is None
    assert _tool("--tls-ca-file", str(authority.file)) == authority.tls()
    monkeypatch.setenv("PENSTOCK_SHARD_TLS_CA_FILE", str(authority.file))
    monkeypatch.setenv("PENSTOCK_SHARD_TLS_CERT_FILE", str(pair.cert))
    monkeypatch.setenv("PENSTOCK_SHARD_TLS_KEY_FILE", str(pair.key))
    monkeypatch.setenv("PENSTOCK_SHARD_TLS_SERVER_NAME", "shard.example")
    assert _tool() == authority.tls(pair, "shard.example")


def test_tools_end_with_one_line_for_half_of_what_they_need(
    authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (
        ["--tls-server-name", "x"],
        ["--tls-ca-file", str(authority.file), "--tls-key-file", "k"],
        ["--tls-ca-file", "/nowhere"],
    ):
        with pytest.raises(SystemExit):
            _tool(*flags)
        said = capsys.readouterr().err
        assert said.startswith("penstock tool: --tls-ca-file")
        assert said.count("\n") == 1


def test_serve_hands_its_certificate_to_the_router_alone(pair: Pair) -> None:
    config, others = serve._parsed([*pair.server_flags, "--runner", "fake"])
    [shard, router] = serve._children(config, [Model()], others, [], serve._usual_ports(config, 1))
    assert router.command[-6:-2] == pair.server_flags
    assert not set(pair.server_flags) & set(shard.command)
