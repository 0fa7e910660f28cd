"""The command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock_common.flags import flags_of
from penstock_router.cli import parse_config
from penstock_router.config import RouterConfig


def test_defaults_serve_on_localhost_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert parse_config(["--shards", "a:1"]) == RouterConfig(shards="a:1")


def test_shards_are_a_list_with_commas_or_given_again() -> None:
    config = parse_config(["--shards", "a:1, b:2,", "--shards", "[::1]:3,dns://name:4"])
    assert config.shards == "a:1, b:2,,[::1]:3,dns://name:4"


def test_the_key_is_the_flag_or_the_environment_and_shards_get_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "from-env")
    config = parse_config(["--shards", "a:1"])
    assert (config.api_key, config.shard_api_key) == ("from-env", "from-env")
    flags = ["--shards", "a:1", "--api-key", "flag", "--shard-api-key", "other"]
    config = parse_config(flags)
    assert (config.api_key, config.shard_api_key) == ("flag", "other")


def test_the_chat_template_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    config = parse_config(["--shards", "a:1", "--chat-template", str(file)])
    assert config.chat_template == "{{ messages }}"


def test_parsers_are_named_as_other_servers_name_them() -> None:
    flags = ["--tool-call-parser", "llama3_json", "--reasoning-parser", "deepseek-r1"]
    config = parse_config(["--shards", "a:1", *flags])
    assert (config.tool_call_parser, config.reasoning_parser) == ("llama3_json", "deepseek_r1")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--shards"),
        (["--shards", ""], "at least one"),
        (["--shards", "localhost"], "'localhost' is not HOST:PORT"),
        (["--shards", ":20051"], "is not HOST:PORT"),
        (["--shards", "a:99999"], "is not HOST:PORT"),
        (["--shards", "ftp://a:1"], "dns://NAME:PORT or file:///PATH"),
        (["--shards", "a:1", "--policy", "fastest"], "--policy: must be one of least-load"),
        (
            ["--shards", "a:1", "--port", "70000"],
            "from 0 to 65535, not '70000'",
        ),
        (
            ["--shards", "a:1", "--port", "x"],
            "--port: must be a whole number from ",
        ),
        (
            ["--shards", "a:1", "--workers", "0"],
            "from 1 to 1024, not '0'",
        ),
        (
            ["--shards", "a:1", "--response-store-bytes", "4096"],
            "from 1048576 to 1000000000000000, not '4096'",
        ),
        (
            ["--shards", "a:1", "--keep-alive-s", "nan"],
            "from 0.001 to 31536000, not 'nan'",
        ),
        (["--shards", "a:1", "--chat-template", "/no/such/file"], "No such file"),
        (["--shards", "a:1", "--tool-call-parser", "x"], "must be one of auto, none, "),
        (["--shards", "a:1", "--reasoning-parser", "x"], "must be one of auto, none, "),
        (["--shards", "a:1", "--unknown"], "--unknown"),
        (["--shards", "a:1", "--work", "2"], "unrecognized arguments: --work 2"),
        (["--shards", "::1:5"], "IPv6 as [::1]:20051"),
        (["--shards", "a:1", "--api-key", ""], "--api-key: a key is printable ASCII, not empty"),
        (["--shards", "a:1", "--api-key", "schlüssel"], "printable ASCII"),
        (["--shards", "a:1", "--shard-api-key", "a\nb"], "--shard-api-key: a key is printable"),
        (["--shards", "a:1", "--workers", "3", "--max-concurrent-requests", "2"], "--workers 3"),
        (
            ["--shards", "a:1", "--workers", "3", "--max-concurrent-requests-per-key", "2"],
            "--workers 3: more than --max-concurrent-requests-per-key (2)",
        ),
        (
            ["--shards", "a:1", "--max-concurrent-requests-per-key", "2049"],
            "--max-concurrent-requests-per-key 2049: more than --max-concurrent-requests (2048)",
        ),
        (
            ["--shards", "a:1", "--max-queued-requests", "5", "--max-queued-requests-per-key", "6"],
            "--max-queued-requests-per-key 6: more than --max-queued-requests (5)",
        ),
        (
            ["--shards", "a:1", "--max-queued-tokens-per-key", "1000001"],
            "--max-queued-tokens-per-key 1000001: more than --max-queued-tokens (1000000)",
        ),
        (
            ["--shards", "a:1", "--shard-networks", "10.0.0.0/8,10.1"],
            "--shard-networks: '10.1' is no network such as 10.0.0.0/8",
        ),
        (
            ["--shards", "a:1", "--allowed-media-domains", "a.example, https://b.example"],
            "--allowed-media-domains: 'https://b.example' is no host such as",
        ),
        (
            ["--shards", "a:1", "--allowed-media-networks", "10.1"],
            "--allowed-media-networks: '10.1' is no network",
        ),
        (["--shards", "a:1", "--resume-key", "a b "], "--resume-key: a key is printable ASCII"),
        (["--shards", "a:1", "--admin-key", ""], "--admin-key: a key is printable ASCII"),
        (["--shards", "a:1", "--stall-timeout-s", "1"], "--stall-timeout-s 1: must be above 1"),
        (
            ["--shards", "a:1", "--verify-share", "1.5"],
            "--verify-share: must be a number from 0 to 1, ",
        ),
        (["--shards", "a:1", "--audit-prompts"], "--audit-prompts: there is no --audit-log"),
        (["--shards", "a:1", "--audit-key-file", "/k"], "--audit-key-file: there is no"),
        (["--shards", "a:1", "--audit-log", "a", "--audit-key-file", "/k"], "/k: No such file"),
        (["--shards", "a:1", "--audit-log", "a", "--audit-key-file", "/dev/null"], "16 to 64"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    [line] = error.splitlines()
    assert line.startswith("penstock router: ")
    assert line.endswith("(see penstock router --help)")
    assert words in line
    assert " _" not in line


def test_the_queue_is_a_quarter_of_the_places_where_nothing_else_is_said() -> None:
    for places, queued in ((2048, 512), (64, 16), (5, 2), (1, 1)):
        config = parse_config(["--shards", "a:1", f"--max-concurrent-requests={places}"])
        assert config.max_queued_requests == queued
    assert parse_config(["--shards", "a:1", "--max-queued-requests=0"]).max_queued_requests == 0


# Every flag that is a number, with values at both of its ends.
SECONDS = ("0.001", "31536000")
COUNTS = ("1", "1000000000000000")
NUMBERS = {
    "--port": ("0", "65535"),
    "--workers": ("1", "1024"),
    "--prefill-tokens": ("1", "1000000"),
    "--tokenizer-threads": ("1", "1024"),
    "--text-processes": ("1", "1024"),
    "--stall-timeout-s": ("1.001", "31536000"),
    "--failover-timeout-s": SECONDS,
    "--first-token-allowance-s": SECONDS,
    "--shard-wait-s": SECONDS,
    "--tool-pause-s": ("0", "86400"),
    "--resume-grace-s": SECONDS,
    "--verify-share": ("0", "1"),
    "--response-store-bytes": ("1048576", "1000000000000000"),
    "--response-ttl-s": SECONDS,
    "--max-images": COUNTS,
    "--max-image-bytes": COUNTS,
    "--max-image-pixels": ("1", "268435456"),
    "--image-processes": ("1", "1024"),
    "--max-body-bytes": COUNTS,
    "--max-answer-bytes": COUNTS,
    "--max-concurrent-requests": COUNTS,
    "--max-queued-requests": ("0", "1000000000000000"),
    "--max-queued-tokens": COUNTS,
    "--max-concurrent-requests-per-key": ("1", "2048"),
    "--max-connections": COUNTS,
    "--header-timeout-s": SECONDS,
    "--max-queued-requests-per-key": ("0", "512"),
    "--max-queued-tokens-per-key": ("1", "1000000"),
    "--queue-timeout-s": SECONDS,
    "--request-timeout-s": ("0.001", "4294967"),
    "--shutdown-timeout-s": SECONDS,
    "--write-timeout-s": SECONDS,
    "--keep-alive-s": SECONDS,
    "--silence-timeout-s": SECONDS,
}
NO_NUMBERS = (
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e400",
    "x",
    "",
    " ",
    "1_0",
    "\u0665",
    "9" * 5000,
)
TOO_SMALL = ("0", "-0.0", "1e-320", "0.0000001")


def test_every_flag_that_is_a_number_is_in_the_table() -> None:
    numbers = [each for each in flags_of(RouterConfig) if str(each.type).startswith(("int", "flo"))]
    assert {f"--{each.name.replace('_', '-')}" for each in numbers} == set(NUMBERS)


@pytest.mark.parametrize("flag", NUMBERS)
def test_a_number_is_taken_between_its_bounds_and_refused_elsewhere(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in NUMBERS[flag]:
        parse_config(["--shards", "a:1", f"{flag}={value}"])
    is_zero_fine = NUMBERS[flag][0] == "0"
    for value in (*NO_NUMBERS, *(() if is_zero_fine else TOO_SMALL)):
        with pytest.raises(SystemExit) as ended:
            parse_config(["--shards", "a:1", f"{flag}={value}"])
        assert ended.value.code == 2, (flag, value)
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("penstock router: "), (flag, value)
        assert flag in line, (flag, value)
        assert len(line) < 250


def test_an_empty_key_in_the_environment_does_not_serve_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "")
    with pytest.raises(SystemExit) as ended:
        parse_config(["--shards", "a:1"])
    assert ended.value.code == 2
    assert "PENSTOCK_API_KEY: a key is" in capsys.readouterr().err


def test_the_resume_key_is_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_RESUME_KEY", "from-env")
    assert parse_config(["--shards", "a:1"]).resume_key == "from-env"
    assert parse_config(["--shards", "a:1", "--resume-key", "flag"]).resume_key == "flag"
    monkeypatch.setenv("PENSTOCK_RESUME_KEY", "")
    with pytest.raises(SystemExit):
        parse_config(["--shards", "a:1"])
    assert "PENSTOCK_RESUME_KEY: a key is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "flag", "name"),
    [
        ("PENSTOCK_ADMIN_KEY", "--admin-key", "admin_key"),
        ("PENSTOCK_SHARD_API_KEY", "--shard-api-key", "shard_api_key"),
    ],
)
def test_a_key_need_not_stand_on_the_command_line_where_everybody_sees_it(
    variable: str,
    flag: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "from-env")
    assert getattr(parse_config(["--shards", "a:1"]), name) == "from-env"
    assert getattr(parse_config(["--shards", "a:1", flag, "flag"]), name) == "flag"
    monkeypatch.setenv(variable, "")
    with pytest.raises(SystemExit):
        parse_config(["--shards", "a:1"])
    assert f"{variable}: a key is" in capsys.readouterr().err


def test_the_file_of_keys_is_the_flag_or_the_environment_and_is_read_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("")
    bad.write_text("[[keys]]\nname = 'a'\n")
    assert parse_config(["--shards", "a:1"]).api_keys_file is None
    monkeypatch.setenv("PENSTOCK_API_KEYS_FILE", str(good))
    assert parse_config(["--shards", "a:1"]).api_keys_file == str(good)
    with pytest.raises(SystemExit) as ended:
        parse_config(["--shards", "a:1", "--api-keys-file", str(bad)])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--api-keys-file {bad}: key a: hash: must be" in line


@pytest.mark.parametrize("environment", [None, ""])
def test_an_empty_name_of_a_keys_file_is_refused_and_not_taken_for_none(
    environment: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--api-keys-file", ""] if environment is None else []
    if environment is not None:
        monkeypatch.setenv("PENSTOCK_API_KEYS_FILE", environment)
    with pytest.raises(SystemExit):
        parse_config(["--shards", "a:1", *flags])
    assert "--api-keys-file : No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "origin", ["*", "https://a.example", "http://localhost:3000", "http://[::1]"]
)
def test_an_origin_is_as_browsers_write_it(origin: str) -> None:
    flags = ["--shards", "a:1", "--cors-origin", origin, "--cors-origin", "https://b.example"]
    assert parse_config(flags).cors_origins == (origin, "https://b.example")


@pytest.mark.parametrize(
    "origin", ["", "a.example", "https://", "https://A.example", "https://a.example/", "null"]
)
def test_what_no_browser_would_send_is_no_origin(
    origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--shards", "a:1", f"--cors-origin={origin}"])
    assert "is no origin" in capsys.readouterr().err


def test_the_audit_log_s_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sixteen bytes or more\n")
    config = parse_config(["--shards", "a:1", "--audit-log", "a", "--audit-key-file", str(file)])
    assert config.audit_key == b"sixteen bytes or more"


def test_a_chat_template_that_does_not_parse_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text("{% if %}")
    with pytest.raises(SystemExit) as ended:
        parse_config(["--shards", "a:1", "--chat-template", str(file)])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--chat-template" in line
    assert "bad.jinja" in line


def test_another_python_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock_router.__main__ import main

    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert main() == 2
    assert capsys.readouterr().err == (
        "penstock router: needs Python 3.11 to 3.13; this is 3.9.1\n"
    )


def test_the_router_imports_neither_torch_nor_the_shard_nor_transformers() -> None:
    code = (
        "import sys, penstock_router.app, penstock_router.workers\n"
        "bad = {'torch', 'transformers', 'penstock_shard', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_metrics_have_the_names_of_other_servers_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse_config(["--shards", "a:1"]).metrics_names == ()
    given = ["--shards", "a:1", "--metrics-names", "vllm, tgi"]
    assert parse_config(given).metrics_names == ("vllm", "tgi")
    with pytest.raises(SystemExit):
        parse_config(["--shards", "a:1", "--metrics-names", "vllm,other"])
    assert "--metrics-names: must be one of vllm, tgi, not 'other'" in capsys.readouterr().err
