"""The file of API keys, and the command that makes, lists and revokes them."""

from __future__ import annotations

import datetime
import hashlib
import io
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from penstock_cli.keys import main
from penstock_common import key_file_format
from penstock_common.key_file_format import KeyEntry, KeyFileError

HASH = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32


def _table(**fields: str) -> str:
    given = {"name": '"alice"', "hash": f'"{HASH}"', **fields}
    return "[[keys]]\n" + "".join(f"{name} = {value}\n" for name, value in given.items() if value)


# ---- The file ----------------------------------------------------------------------------------


def test_an_entry_is_read_with_all_its_fields() -> None:
    text = _table(
        scopes='["admin", "user"]',
        expires="2027-01-01T12:00:00+01:00",
        max_concurrent_requests="3",
        requests_per_minute="60",
        tokens_per_minute="1_000_000",
    )
    (entry,) = key_file_format.parse(text)
    assert (entry.name, entry.digest) == ("alice", bytes.fromhex("ab" * 32))
    assert entry.scopes == ("user", "admin")
    assert entry.expires == datetime.datetime(2027, 1, 1, 11, tzinfo=datetime.UTC)
    limits = (entry.max_concurrent_requests, entry.requests_per_minute, entry.tokens_per_minute)
    assert limits == (3, 60, 1_000_000)


def test_what_is_left_out_is_a_users_key_without_limits_and_without_an_end() -> None:
    (entry,) = key_file_format.parse(_table())
    assert (entry.scopes, entry.expires, entry.tokens_per_minute) == (("user",), None, None)


def test_a_date_is_its_beginning_in_utc() -> None:
    (entry,) = key_file_format.parse(_table(expires="2027-01-01"))
    assert entry.expires == datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)


def test_a_file_without_keys_is_a_file_with_no_keys() -> None:
    assert key_file_format.parse("") == key_file_format.parse("# none\n") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[keys]\n", "not TOML: .*at line 1"),
        ("a = " + "[" * 5000, "not TOML"),
        ("a = " + "1" * 5000, "not TOML: it has a number that is too long"),
        ("keys = 1\n", "keys must be tables"),
        ("keys = [1]\n", "keys must be tables"),
        ("[other]\n", "'other' is unknown"),
        (_table(name=""), "key number 1: name: must be 1 to 64"),
        (_table(name='"a b"'), "key number 1: name: must be 1 to 64"),
        (_table(name='"--api-key"'), "key number 1: name: must be 1 to 64"),
        (_table(name='"' + "a" * 65 + '"'), "key number 1: name: must be 1 to 64"),
        (_table(name='"a\\n"'), "key number 1: name: must be 1 to 64"),
        (_table(hash=""), "key alice: hash: must be sha256: and 64"),
        (_table(hash='"md5:00"'), "key alice: hash: must be sha256: and 64"),
        (_table(hash=f'"{HASH}0"'), "key alice: hash: must be sha256: and 64"),
        (_table(scopes="[]"), 'key alice: scopes: must be a list of "user", "admin"'),
        (_table(scopes='"admin"'), "key alice: scopes: must be a list"),
        (_table(scopes='["root"]'), "key alice: scopes: must be a list"),
        (_table(scopes="[[]]"), "key alice: scopes: must be a list"),
        (_table(expires='"2027"'), "key alice: expires: must be a date or a time"),
        (_table(expires="2027-01-01T00:00:00"), "key alice: expires: has no time zone"),
        (_table(requests_per_minute="0"), "key alice: requests_per_minute: must be a whole"),
        (_table(tokens_per_minute="1.5"), "key alice: tokens_per_minute: must be a whole"),
        (_table(max_concurrent_requests="true"), "key alice: max_concurrent_requests: must be"),
        (_table(max_concurrent_requests=str(10**13)), "key alice: max_concurrent_requests: must"),
        (_table(limit="5"), "key alice: 'limit': is unknown; there are name, hash"),
        (_table() + _table(), "key alice: hash: is that of alice too"),
        (
            _table() + _table(hash=f'"{OTHER}"', requests_per_minute="5"),
            "key alice: requests_per_minute: must be the same in all entries of the name",
        ),
        (
            _table() + _table(hash=f'"{OTHER}"', scopes='["admin"]'),
            "key alice: scopes: must be the same",
        ),
        (_table() + _table(name='"bob"'), "key bob: hash: is that of alice too"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_key_and_the_field(text: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=words) as raised:
        key_file_format.parse(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", [_table(hash='"{0}"'), '{0} = "alice"', "[{0}]\n[{0}]", "keys = {{{0} = 1, {0} = 2}}"]
)
def test_a_key_that_stands_where_something_else_belongs_is_not_repeated(text: str) -> None:
    key = "psk-" + "Q" * 43
    with pytest.raises(KeyFileError) as raised:
        key_file_format.parse(text.format(key))
    # What is left out takes more than a guess.
    assert "Q" * 20 not in str(raised.value)


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="No such file"):
        key_file_format.read(str(tmp_path / "nothing"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(KeyFileError, match="not a regular file"):
            key_file_format.read(str(path))
    (tmp_path / "text").write_bytes(b"# \xff")
    with pytest.raises(KeyFileError, match="byte 3 is not UTF-8"):
        key_file_format.read(str(tmp_path / "text"))
    (tmp_path / "long").write_bytes(b"#" * (key_file_format.MAX_FILE_BYTES + 1))
    with pytest.raises(KeyFileError, match="longer than"):
        key_file_format.read(str(tmp_path / "long"))


def test_neither_a_hash_nor_a_digest_shows_in_an_entrys_repr() -> None:
    (entry,) = key_file_format.parse(_table())
    assert "abab" not in repr(entry)
    assert str(entry.digest) not in repr(entry)


def test_what_is_written_is_what_is_read() -> None:
    until = datetime.datetime(2027, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    entry = KeyEntry(
        name="a.b@c-d_e",
        digest=bytes(32),
        scopes=("user", "admin"),
        expires=until,
        max_concurrent_requests=1,
        tokens_per_minute=2,
    )
    assert key_file_format.parse(key_file_format.entry_text(entry)) == (entry,)


COMMENTED = f"""\
# Keys of the house.

[[keys]]
name = "first"  # and foremost
hash = "{HASH}"

# Of the second.
[[ keys ]]
hash = "{OTHER}"
name = "second"
# Its last line is a comment.
"""


def test_an_entry_is_taken_out_and_all_else_stays() -> None:
    assert key_file_format.remove_entries(COMMENTED, "first") == (
        f'# Keys of the house.\n\n\n# Of the second.\n[[ keys ]]\nhash = "{OTHER}"\n'
        'name = "second"\n# Its last line is a comment.\n'
    )
    rest = key_file_format.remove_entries(COMMENTED, "second")
    assert [entry.name for entry in key_file_format.parse(rest)] == ["first"]
    assert "# Its last line is a comment." in rest


def test_what_is_not_there_or_written_unusually_is_not_taken_out() -> None:
    with pytest.raises(KeyFileError, match="there is no key 'third'"):
        key_file_format.remove_entries(COMMENTED, "third")
    inline = f'keys = [{{name = "first", hash = "{HASH}"}}]\n'
    with pytest.raises(KeyFileError, match="take it out by hand"):
        key_file_format.remove_entries(inline, "first")


def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key_file_format.replace(str(path), "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    key_file_format.replace(str(path), "two")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("two", 0o640)
    assert list(tmp_path.iterdir()) == [path]


# ---- The command -------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PENSTOCK_API_KEYS_FILE", raising=False)
    return tmp_path / "keys.toml"


def test_a_new_key_is_shown_once_and_only_its_hash_is_written(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--file", str(file), "--scope", "admin", "--expires", "90d"]
    limits = ["--requests-per-minute", "60", "--max-concurrent-requests", "4"]
    assert main(["new", "alice", *flags, *limits]) == 0
    key = capsys.readouterr().out.strip()
    assert re.fullmatch(r"psk-[A-Za-z0-9_-]{43}", key)
    (entry,) = key_file_format.read(str(file))
    assert entry.digest == hashlib.sha256(key.encode()).digest()
    assert (entry.scopes, entry.requests_per_minute) == (("admin",), 60)
    assert entry.max_concurrent_requests == 4
    assert entry.expires is not None
    left = entry.expires - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=89.9) < left <= datetime.timedelta(days=90)
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_are_never_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        main(["new", f"k{number}", "--file", str(file)])
    assert len(set(capsys.readouterr().out.split())) == 20
    assert len(key_file_format.read(str(file))) == 20


def test_without_a_file_the_entry_is_printed(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    assert main(["new", "alice"]) == 0
    key, _, text = capsys.readouterr().out.partition("\n\n")
    (entry,) = key_file_format.parse(text)
    assert entry.digest == hashlib.sha256(key.encode()).digest()


def test_a_file_that_is_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file.symlink_to(tmp_path / "elsewhere" / "real")
    assert main(["new", "alice", "--file", str(file)]) == 0
    assert file.is_symlink()
    assert len(key_file_format.read(str(file))) == 1


def test_keys_are_listed_and_revoked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "alice", "--file", str(file), "--tokens-per-minute", "1000"])
    main(["new", "bob", "--file", str(file), "--scope", "admin", "--expires", "2999-01-01"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"added bob to {file}, which holds only the key's hash: copy the key now"
    assert main(["list", "--file", str(file)]) == 0
    head, alice, bob = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:3] == ["NAME", "SCOPES", "EXPIRES"]
    assert (alice[:3], alice[-1]) == (["alice", "user", "never"], "1000")
    assert bob[:3] == ["bob", "admin", "2999-01-01"]
    assert main(["revoke", "alice", "--file", str(file)]) == 0
    assert [entry.name for entry in key_file_format.read(str(file))] == ["bob"]
    said = capsys.readouterr().out
    assert said == f"removed alice from {file}; routers refuse its key within two seconds\n"
    assert main(["revoke", "alice", "--file", str(file)]) == 2
    assert "there is no key 'alice'" in capsys.readouterr().err


def test_a_key_is_changed_without_a_gap(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--file", str(file)]
    main(["new", "alice", *flags, "--scope", "admin", "--tokens-per-minute", "1000"])
    main(["new", "bob", *flags])
    capsys.readouterr()
    assert main(["revoke", "alice", *flags, "--older"]) == 2
    assert "none is older" in capsys.readouterr().err
    assert main(["new", "alice", *flags, "--another", "--expires", "2999-01-01"]) == 0
    new = capsys.readouterr().out.strip()
    first, bob, second = key_file_format.read(str(file))
    assert [entry.name for entry in (first, bob, second)] == ["alice", "bob", "alice"]
    assert (second.scopes, second.tokens_per_minute) == (first.scopes, 1000)
    assert (first.expires, second.expires is None) == (None, False)
    assert main(["revoke", "alice", *flags, "--older"]) == 0
    assert capsys.readouterr().out == (
        f"removed all but the newest key of alice from {file}; "
        "routers refuse what was removed within two seconds\n"
    )
    left = key_file_format.read(str(file))
    assert [entry.name for entry in left] == ["bob", "alice"]
    assert left[1].digest == key_file_format.digest_of(new.encode())


def test_who_revokes_a_name_revokes_all_of_its_keys(file: Path) -> None:
    main(["new", "alice", "--file", str(file)])
    main(["new", "alice", "--file", str(file), "--another"])
    main(["new", "bob", "--file", str(file)])
    assert main(["revoke", "alice", "--file", str(file)]) == 0
    assert [entry.name for entry in key_file_format.read(str(file))] == ["bob"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "there is no key 'carol' that this could be another of"),
        (["--scope", "user"], "the scope and limits are those of the name"),
        (["--requests-per-minute", "5"], "the scope and limits are those of the name"),
    ],
)
def test_another_key_is_one_of_a_name_that_is_there_and_as_that_is(
    flags: list[str], words: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "carol", "--file", str(file), "--another", *flags]) == 2
    said = capsys.readouterr()
    assert (words in said.err, said.out) == (True, "")


def test_an_expired_key_is_listed_as_that(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(_table(expires="2020-01-01"))
    main(["list", "--file", str(file)])
    assert "(expired)" in capsys.readouterr().out


def test_the_file_may_come_from_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEYS_FILE", str(file))
    assert main(["new", "alice"]) == 0
    assert main(["list"]) == 0
    assert "alice" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["psk-" + "x" * 43, "  psk-" + "x" * 43 + "\n"])
def test_a_key_from_stdin_is_hashed(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(key))
    assert main(["hash"]) == 0
    wanted = "sha256:" + hashlib.sha256(key.strip().encode()).hexdigest()
    assert capsys.readouterr().out.strip() == wanted


@pytest.mark.parametrize("key", ["", "hunter2", "a key with a ü in it, which no header has"])
def test_what_could_be_guessed_or_sent_by_nobody_is_not_hashed(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(key))
    assert main(["hash"]) == 2
    said = capsys.readouterr()
    assert "at least 20 characters" in said.err
    assert not (key and key in said.err + said.out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["new"], "NAME"),
        (["new", "x", "--scope", "root"], "--scope"),
        (["new", "x", "--expires", "2020-01-01"], "is in the past"),
        (["new", "x", "--expires", "soon"], "must be as 90d"),
        (["new", "x", "--expires", "9999-12-31T23:59-14:00"], "must be as 90d"),
        (["new", "x", "--expires", "2999-01-01T10:00"], "no time zone"),
        (["new", "x", "--requests-per-minute", "0"], "a whole number from 1 to "),
        (["new", "x", "--tokens-per-minute", "\u0665"], "a whole number from 1 to "),
        (["list"], "--file"),
        (["revoke", "x"], "--file"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], words: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("command", [["list"], ["revoke", "x"], ["new", "x"]])
def test_a_file_that_is_wrong_is_one_line_and_stays_as_it_is(
    command: list[str], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("[[keys]]\nname = 5\n")
    assert main([*command, "--file", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"penstock keys: {file}: key number 1: name:")
    assert file.read_text() == "[[keys]]\nname = 5\n"


def test_a_name_that_is_taken_or_unusable_makes_no_key(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", "alice", "--file", str(file)])
    capsys.readouterr()
    assert main(["new", "alice", "--file", str(file)]) == 2
    said = capsys.readouterr()
    assert ("there is a key alice already" in said.err, said.out) == (True, "")
    for name in ("a b", 'a"b', "a\nb"):
        assert main(["new", name]) == 2
        said = capsys.readouterr()
        assert ("name: must be 1 to 64 letters" in said.err, said.out) == (True, "")
