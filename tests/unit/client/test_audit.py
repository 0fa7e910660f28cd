"""The audit log: nothing of a request is lost, nobody else reads it, and what is changed shows."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_client import audit_log
from penstock_client.audit_log import (
    AuditLog,
    AuditRecord,
    WithheldPrompt,
    prompt_hash,
    read_audit,
    read_key,
)
from penstock_client.dataclass_json import compact_json, from_plain, plain_ids, to_plain
from penstock_proto.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerationRequest,
    Objective,
    SamplingParams,
)

KEY = b"sixteen bytes or more"


def _plain(request: GenerationRequest) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(GenerationRequest, request)
    return plain


def _request(data: object) -> GenerationRequest:
    request: GenerationRequest = from_plain(GenerationRequest, data, "request")
    return request


def _every_field(of: type) -> st.SearchStrategy[Any]:
    """Instances with a value for each field, found from the field's type."""
    return st.builds(of, **{field.name: ... for field in dataclasses.fields(of)})


st.register_type_strategy(SamplingParams, _every_field(SamplingParams))
st.register_type_strategy(
    Constraint, st.builds(Constraint, st.sampled_from(ConstraintKind), options=...)
)
st.register_type_strategy(Objective, _every_field(Objective))
st.register_type_strategy(GenerationRequest, _every_field(GenerationRequest))
st.register_type_strategy(float, st.floats(allow_nan=False))


def _as_read(value: Any) -> Any:
    """Return the value as it is read back: each sequence but text becomes a tuple."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value)(**{name: _as_read(getattr(value, name)) for name in names})
    if isinstance(value, Mapping):
        return {key: _as_read(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_as_read(each) for each in value)
    return value


def _record(index: int = 0, **changes: Any) -> AuditRecord:
    request = GenerationRequest((7, 8, 9), SamplingParams(seed=index), label="mine")
    values: dict[str, Any] = {
        "request_id": f"request-{index}",
        "request": request,
        "output_token_ids": (1, 2, index),
        "finish_reason": FinishReason.STOP,
        "model": "m",
        "weights_hash": "w",
        "numerics_fingerprints": ("f", ""),
        "approximate": True,
        "attempts": 2,
    }
    return AuditRecord(**{**values, **changes})


def _write(path: Path, records: Sequence[AuditRecord], **options: Any) -> None:
    log = AuditLog(path, **{"prompts": True, **options})
    for record in records:
        log.record(record)
    log.close()
    assert log.dropped_total == 0


def _read(path: Path, key: bytes | None = None) -> tuple[list[AuditRecord], list[str]]:
    problems: list[str] = []
    return list(read_audit(path, problems.append, key=key)), problems


def _ids(records: Sequence[AuditRecord]) -> list[int]:
    return [int(record.request_id.rpartition("-")[2]) for record in records]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


# ---- requests as JSON ----


@given(_every_field(GenerationRequest))
def test_every_field_of_a_request_comes_back(request: GenerationRequest) -> None:
    text = json.dumps(_plain(request), allow_nan=False)
    assert _request(json.loads(text)) == _as_read(request)


def test_a_request_as_a_dict_names_each_of_its_fields() -> None:
    plain = _plain(GenerationRequest([1]))
    assert list(plain) == [field.name for field in dataclasses.fields(GenerationRequest)]
    assert list(plain["sampling"]) == [field.name for field in dataclasses.fields(SamplingParams)]


def test_numbers_that_json_has_no_word_for_come_back() -> None:
    sampling = SamplingParams(temperature=float("nan"), top_p=float("-inf"), seed=2**64 - 1)
    plain = json.loads(compact_json(_plain(GenerationRequest([1], sampling))))
    again = _request(plain).sampling
    assert again.temperature != again.temperature
    assert (again.top_p, again.seed) == (float("-inf"), 2**64 - 1)


def test_a_field_of_a_type_that_cannot_be_written_is_refused() -> None:
    new_field = dataclasses.make_dataclass("New", [("of", set)])
    with pytest.raises(TypeError, match="no way to write"):
        to_plain(new_field, new_field({1}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": "9"}, "request.max_tokens"),
        ({"ignore_eos": 1}, "request.ignore_eos"),
        ({"stop_token_ids": [1, True]}, "request.stop_token_ids"),
        ({"sampling": {"temperature": "hot"}}, "request.sampling.temperature"),
        ({"of_tomorrow": 1}, "of_tomorrow"),
        ({"constraint": {"kind": "poem"}}, "poem"),
    ],
)
def test_what_is_no_request_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _request({**_plain(GenerationRequest([1])), **change})


def test_a_request_without_its_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids"):
        _request({})


def test_fields_of_later_versions_may_be_absent_from_earlier_logs() -> None:
    assert _request({"prompt_token_ids": [1]}) == GenerationRequest((1,))


def test_many_ids_are_written_as_few_are() -> None:
    ids = list(range(100_000))
    assert compact_json({"ids": plain_ids(range(100_000))}) == json.dumps(
        {"ids": ids}, separators=(",", ":")
    )
    assert from_plain(Sequence[int], ids, "") == tuple(ids)


# ---- what is written ----


@given(_every_field(GenerationRequest))
def test_a_record_is_read_as_it_was_written(request: GenerationRequest) -> None:
    record = _record(request=request)
    line = compact_json(to_plain(AuditRecord, record))
    assert from_plain(AuditRecord, json.loads(line), "record") == _as_read(record)


def test_records_are_json_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    _write(path, [_record(i) for i in range(5)])
    entries = [json.loads(line) for line in _lines(path)]
    assert [entry["sequence"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["previous"] for entry in entries[1:]] == [e["chain"] for e in entries[:-1]]
    records, problems = _read(path)
    assert (_ids(records), problems) == ([0, 1, 2, 3, 4], [])
    assert records[0] == dataclasses.replace(_record(0), when=records[0].when)


def test_a_record_says_when_in_utc() -> None:
    assert _record().when.endswith("+00:00")


def test_prompts_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    prompt = (123456, 234567)
    request = GenerationRequest(prompt, SamplingParams(seed=1), output_token_ids=(5,))
    _write(path, [_record(request=request)], prompts=False, key=KEY)
    assert b"123456" not in path.read_bytes()
    (record,), _ = _read(path, KEY)
    assert record.request == dataclasses.replace(request, prompt_token_ids=())
    assert record.withheld_prompt == WithheldPrompt(2, prompt_hash(prompt, KEY))


def test_without_a_key_the_hash_of_a_prompt_cannot_be_computed_again(tmp_path: Path) -> None:
    hashes = []
    for name in ("a", "b"):
        _write(tmp_path / name, [_record(0), _record(1)], prompts=False)
        (first, second), _ = _read(tmp_path / name)
        assert first.withheld_prompt == second.withheld_prompt
        hashes.append(first.withheld_prompt)
    assert hashes[0] != hashes[1]
    assert prompt_hash((7, 8, 9), KEY) != prompt_hash((7, 8, 9), KEY + b"2")


def test_the_sequence_and_the_chain_go_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    for index in range(3):
        _write(path, [_record(index)])
    assert [json.loads(line)["sequence"] for line in _lines(path)] == [1, 2, 3]
    assert _read(path)[1] == []


def test_a_last_line_longer_than_the_tail_that_is_read_first_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    _write(path, [_record(0, output_token_ids=tuple(range(100_000)))])
    assert path.stat().st_size > 4 * audit_log._TAIL_BYTES
    _write(path, [_record(1)])
    assert _read(path)[1] == []


def test_a_full_file_is_moved_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    _write(path, [_record(i) for i in range(5)], max_bytes=1, keep=2)
    names = ["audit.2", "audit.1", "audit"]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert [_ids(_read(tmp_path / name)[0]) for name in names] == [[2], [3], [4]]
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names} == {0o600}
    joined = tmp_path / "joined"
    joined.write_bytes(b"".join((tmp_path / name).read_bytes() for name in names))
    assert _read(joined)[1] == []


def test_a_file_is_filled_before_it_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    _write(path, [_record(0)])
    size = path.stat().st_size
    _write(path, [_record(i) for i in range(1, 4)], max_bytes=2 * size)
    assert [len(_lines(tmp_path / name)) for name in ("audit.1", "audit")] == [2, 2]


def test_a_log_that_lost_its_newest_file_while_rotating_goes_on_with_its_chain(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit"
    _write(path, [_record(0)])
    path.rename(tmp_path / "audit.1")
    _write(path, [_record(1)])
    assert json.loads(_lines(path)[0])["sequence"] == 2


# ---- whose file it is ----


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_its_owner_may_read_it_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        _write(tmp_path / "audit", [_record()])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "audit"
    _write(path, [_record()])
    path.chmod(mode)
    with pytest.raises(OSError, match="is open to others"):
        AuditLog(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("target_exists", [True, False])
def test_a_symbolic_link_is_not_followed(tmp_path: Path, target_exists: bool) -> None:
    target, path = tmp_path / "target", tmp_path / "audit"
    if target_exists:
        _write(target, [_record()])
    before = target.read_bytes() if target_exists else None
    path.symlink_to(target)
    with pytest.raises(OSError, match=f"{path}: is a symbolic link"):
        AuditLog(path)
    assert (target.read_bytes() if target.exists() else None) == before


def test_a_link_put_there_while_it_rotates_is_not_followed(tmp_path: Path, caplog: Any) -> None:
    path, target = tmp_path / "audit", tmp_path / "target"
    target.touch(0o600)
    log = AuditLog(path, max_bytes=1)
    log.record(_record(0))
    _wait(lambda: path.stat().st_size > 0)
    path.unlink()
    path.symlink_to(target)
    log.record(_record(1))
    log.record(_record(2))
    log.close()
    assert target.read_bytes() == b""


def test_a_fifo_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "audit", 0o600)
    with pytest.raises(OSError, match="is no regular file"):
        AuditLog(tmp_path / "audit")


def test_another_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"dear diary\n")
    path.chmod(0o600)
    with pytest.raises(OSError, match="is no audit log"):
        AuditLog(path)
    assert path.read_bytes() == b"dear diary\n"


def test_two_logs_do_not_share_a_file(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    with pytest.raises(OSError, match="is written to by another log"):
        AuditLog(tmp_path / "audit")
    log.close()
    AuditLog(tmp_path / "audit").close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere/audit: No such file"):
        AuditLog(tmp_path / "nowhere" / "audit")


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"keep": 0}, {"key": b"short"}])
def test_options_out_of_bounds_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|16 to 64 bytes"):
        AuditLog(tmp_path / "audit", **options)
    assert not (tmp_path / "audit").exists()


def test_a_key_is_read_without_the_newline_after_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_key(tmp_path / "key") == KEY


# ---- when it cannot be written ----


def _wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


class _Disk:
    """Stands in for os.write: stuck or full on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        self.stuck_in = threading.Event()
        self.full = False
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: Any) -> int:
        if not self.free.is_set():
            self.stuck_in.set()
            self.free.wait()
        if self.full:
            self._write(fd, bytes(data[:10]))  # as much as there is room for
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(fd, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> _Disk:
    return _Disk(monkeypatch)


def test_a_full_disk_drops_records_says_so_once_and_goes_on(
    tmp_path: Path, disk: _Disk, caplog: pytest.LogCaptureFixture
) -> None:
    dropped: list[int] = []
    log = AuditLog(tmp_path / "audit", on_drop=dropped.append)
    log.record(_record(0))
    _wait(lambda: (tmp_path / "audit").stat().st_size > 0)
    disk.full = True
    for index in range(1, 11):
        log.record(_record(index))
    _wait(lambda: log.dropped_total == 10)
    disk.full = False
    log.record(_record(11))
    log.close()
    assert log.dropped_total == sum(dropped) == 10
    assert [line.getMessage().partition(":")[2] for line in caplog.records] == [
        " [Errno 28] No space left on device"
    ]
    records, problems = _read(tmp_path / "audit")
    assert _ids(records) == [0, 11]
    assert problems == [f"{tmp_path}/audit:2: 10 records before it were dropped by the writer"]


def test_when_a_disk_takes_records_again_it_says_which_are_missing(
    tmp_path: Path, disk: _Disk, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(audit_log, "_OVER_S", 0.0)
    log = AuditLog(tmp_path / "audit")
    log.record(_record(0))
    _wait(lambda: (tmp_path / "audit").stat().st_size > 0)
    disk.full = True
    for index in range(1, 11):
        log.record(_record(index))
    _wait(lambda: log.dropped_total == 10)
    disk.full = False
    for index in range(11, 14):
        log.record(_record(index))
    log.close()
    assert [line.getMessage() for line in caplog.records][1:] == [
        f"audit log {tmp_path}/audit writes again: 10 records are missing, of the numbers 2 to 11"
    ]


def test_records_missing_at_the_end_are_counted_there_as_no_number_tells(
    tmp_path: Path, disk: _Disk, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path / "audit")
    log.record(_record(0))
    _wait(lambda: (tmp_path / "audit").stat().st_size > 0)
    disk.full = True
    for index in range(1, 8):
        log.record(_record(index))
    log.close()
    assert caplog.records[-1].getMessage() == (
        f"audit log {tmp_path}/audit ends without its last 7 records; its numbers do not show that,"
        " as the next start goes on with 2"
    )


@pytest.mark.parametrize(
    ("displace", "said"),
    [
        (Path.unlink, "the file was removed while it is written to"),
        (
            lambda path: path.replace(path.with_name("moved")) and path.touch(),
            "the file is another file now while it is written to",
        ),
    ],
)
def test_a_file_that_was_removed_or_replaced_takes_nothing_and_says_how_to_put_it_back(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    displace: Callable[[Path], object],
    said: str,
) -> None:
    path = tmp_path / "audit"
    log = AuditLog(path)
    log.record(_record(0))
    _wait(lambda: path.stat().st_size > 0)
    displace(path)
    log.record(_record(1))
    _wait(lambda: log.dropped_total == 1)
    line = caplog.records[0].getMessage()
    assert said in line
    os.system(line.partition("it is lost: ")[2])
    log.close()
    records, problems = _read(path)
    assert (_ids(records), problems) == ([0], [])


def test_a_gap_is_not_told_while_records_are_still_dropped(
    tmp_path: Path, disk: _Disk, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(audit_log, "_MAX_QUEUED_RECORDS", 3)
    monkeypatch.setattr(audit_log, "_OVER_S", 0.0)
    log = AuditLog(tmp_path / "audit")
    disk.free.clear()
    log.record(_record(0))
    assert disk.stuck_in.wait(10)
    for index in range(1, 101):
        log.record(_record(index))
    disk.free.set()
    _wait(lambda: len(_lines(tmp_path / "audit")) == 4)
    # Those were queued before the others were dropped.
    assert "writes again" not in caplog.text
    log.record(_record(101))
    log.close()
    assert "97 records are missing, of the numbers 5 to 101" in caplog.text


def test_a_disk_too_slow_drops_records_and_holds_up_nobody(
    tmp_path: Path, disk: _Disk, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(audit_log, "_MAX_QUEUED_RECORDS", 3)
    log = AuditLog(tmp_path / "audit")
    disk.free.clear()
    log.record(_record(0))
    assert disk.stuck_in.wait(10)
    for index in range(1, 101):
        log.record(_record(index))
    assert log.dropped_total == 97
    disk.free.set()
    log.close()
    assert _ids(_read(tmp_path / "audit")[0]) == [0, 1, 2, 3]
    assert sum("drops records" in line for line in caplog.messages) == 1
    assert "too slow" in caplog.text


def test_the_queue_is_bounded_in_tokens_too(
    tmp_path: Path, disk: _Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "_MAX_QUEUED_TOKENS", 10)
    log = AuditLog(tmp_path / "audit")
    disk.free.clear()
    log.record(_record(0))
    assert disk.stuck_in.wait(10)
    for index in range(1, 5):
        log.record(_record(index))  # six tokens each
    disk.free.set()
    log.close()
    assert (log.dropped_total, _ids(_read(tmp_path / "audit")[0])) == (2, [0, 1, 2])


def test_closing_gives_up_on_a_disk_that_is_stuck(
    tmp_path: Path, disk: _Disk, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path / "audit")
    disk.free.clear()
    log.record(_record(0))
    assert disk.stuck_in.wait(10)
    log.record(_record(1))
    log.close(timeout_s=0.05)
    assert log.dropped_total == 1
    assert "within 0.05 s" in caplog.text
    disk.free.set()
    log._thread.join(10)


def test_a_record_that_cannot_be_written_is_dropped_alone(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", prompts=True)
    log.record(_record(0, output_token_ids=("a",)))
    log.record(_record(1, output_token_ids=None))
    log.record(_record(2, request=GenerationRequest([1], SamplingParams(top_p="a"))))  # type: ignore[arg-type]
    log.record(_record(3, request=GenerationRequest([-1, 2**70])))
    log.close()
    assert log.dropped_total == 3
    assert _ids(_read(tmp_path / "audit")[0]) == [3]


def test_a_record_after_the_end_is_dropped(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    log.close()
    log.close()
    log.record(_record())
    assert log.dropped_total == 1


# ---- what was done to a file shows ----


@pytest.fixture(params=[None, KEY], ids=["plain", "keyed"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    found: bytes | None = request.param
    return found


@pytest.fixture
def path(tmp_path: Path, key: bytes | None) -> Path:
    path = tmp_path / "audit"
    _write(path, [_record(i) for i in range(6)], key=key)
    assert _read(path, key)[1] == []
    return path


def test_an_edited_line_is_found_and_the_rest_is_read(path: Path, key: bytes | None) -> None:
    path.write_bytes(path.read_bytes().replace(b'"request-2"', b'"request-9"'))
    records, problems = _read(path, key)
    assert _ids(records) == [0, 1, 3, 4, 5]
    assert [problem.rpartition(f"{path}:3: ")[2] for problem in problems] == [
        "was edited, or has another key" if key else "was edited"
    ]


def test_any_changed_byte_is_found(path: Path, key: bytes | None) -> None:
    whole = path.read_bytes()
    line_length = len(_lines(path)[0])
    for position in range(line_length, 2 * line_length, 7):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert _read(path, key)[1], position


def test_a_line_taken_out_is_found(path: Path, key: bytes | None) -> None:
    lines = _lines(path)
    path.write_bytes(b"".join(lines[:2] + lines[4:]))
    records, problems = _read(path, key)
    assert _ids(records) == [0, 1, 4, 5]
    assert problems == [f"{path}:3: 2 records before it are missing: lines were taken out"]


def test_lines_that_changed_places_are_found(path: Path, key: bytes | None) -> None:
    lines = _lines(path)
    path.write_bytes(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))
    assert "two logs in one, or moved" in _read(path, key)[1][1]


def test_a_last_line_that_is_cut_off_is_found(path: Path, key: bytes | None) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    records, problems = _read(path, key)
    assert _ids(records) == [0, 1, 2, 3, 4]
    assert problems == [f"{path}:6: is cut off"]


def test_a_log_goes_on_after_a_line_that_is_cut_off(path: Path, key: bytes | None) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    _write(path, [_record(6)], key=key)
    records, problems = _read(path, key)
    assert _ids(records) == [0, 1, 2, 3, 4, 6]
    assert problems == [f"{path}:6: is no line of an audit log, or not all of one"]


def test_a_line_that_is_not_json_is_found_and_the_rest_is_read(
    path: Path, key: bytes | None
) -> None:
    lines = _lines(path)
    path.write_bytes(b"".join([*lines[:2], b'{nonsense,"chain":"%s"}\n' % (b"0" * 64), *lines[3:]]))
    records, problems = _read(path, key)
    assert _ids(records) == [0, 1, 3, 4, 5]
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:3: is not JSON: ")


def test_lines_missing_beside_a_damaged_one_are_counted(path: Path, key: bytes | None) -> None:
    lines = _lines(path)
    path.write_bytes(b"".join([*lines[:2], b"nonsense\n", *lines[5:]]))
    assert _read(path, key)[1][1:] == [
        f"{path}:4: 2 records before it are missing: lines were taken out"
    ]


def _sign(entry: dict[str, Any], key: bytes = b"") -> bytes:
    """A line as the log would write it."""
    body = compact_json(entry).encode()
    return body[:-1] + b',"chain":"%s"}\n' % audit_log._chain(body, key).encode()


def _forged(line: bytes, **changes: Any) -> bytes:
    entry = json.loads(line)
    del entry["chain"]
    return _sign({**entry, **changes})


def test_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    _write(path, [_record(i) for i in range(3)])
    lines = _lines(path)
    path.write_bytes(b"".join([lines[0], _forged(lines[1], version=2), lines[2]]))
    records, problems = _read(path)
    assert _ids(records) == [0, 2]
    assert problems == [f"{path}:2: has version 2; only 1 is known here"]


def test_a_replaced_line_with_a_right_hash_breaks_the_chain(path: Path, key: bytes | None) -> None:
    lines = _lines(path)
    record = to_plain(AuditRecord, _record(9))
    path.write_bytes(b"".join([*lines[:2], _forged(lines[2], record=record), *lines[3:]]))
    _, problems = _read(path, key)
    if key is None:
        assert problems == [
            f"{path}:4: does not follow the line before it: one of them was replaced"
        ]
    else:
        assert problems == [f"{path}:3: was edited, or has another key"]


def test_only_a_key_shows_that_everything_was_written_anew(path: Path, key: bytes | None) -> None:
    anew, previous = [], "0" * 64
    for line in _lines(path):
        forged = _forged(line, previous=previous, keyed=False)
        previous = json.loads(forged)["chain"]
        anew.append(forged)
    path.write_bytes(b"".join(anew))
    records, problems = _read(path, key)
    if key is None:
        assert (len(records), problems) == (6, [])
    else:
        assert (len(records), len(problems)) == (0, 6)
        assert problems[0].endswith("was written without a key")


def test_a_keyed_log_is_read_without_the_key_and_says_so(tmp_path: Path) -> None:
    _write(tmp_path / "audit", [_record(0), _record(1)], key=KEY)
    records, problems = _read(tmp_path / "audit")
    assert _ids(records) == [0, 1]
    assert problems == [
        f"{tmp_path}/audit:1: was written with a key; edits are not found without it"
    ]


def test_a_record_with_an_unknown_field_is_named(path: Path) -> None:
    lines = _lines(path)
    record = {**json.loads(lines[0])["record"], "of_tomorrow": 1}
    path.write_bytes(_forged(lines[0], record=record, keyed=False))
    assert _read(path)[1] == [f"{path}:1: record: 'of_tomorrow' is not known here"]


def test_an_empty_file_has_no_records_and_no_problems(tmp_path: Path) -> None:
    (tmp_path / "audit").touch()
    assert _read(tmp_path / "audit") == ([], [])


def test_all_constraint_kinds_come_back() -> None:
    for kind in ConstraintKind:
        request = GenerationRequest((1,), constraint=Constraint(kind, "v", ("a", "b")))
        assert _request(_plain(request)) == request
