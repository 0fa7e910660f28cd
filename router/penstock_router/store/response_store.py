"""Stores responses for all workers of a router, in one SQLite file that each worker opens.

SQLite runs in one thread of each worker, so that the event loop never waits for the disk.

The file holds at most `max_bytes` of used pages. A put that exceeds them evicts, in its
transaction, responses of the key with the most bytes: finished responses first, the oldest first.
Finished responses expire after `ttl_s`. Beyond `max_bytes`, the disk must have room for one
incoming document and SQLite's write-ahead log: some MiB, at most about twice a document.

If an open file was removed or replaced, nothing more is written, because it would be lost with the
process. Reading continues, and each heartbeat checks again.

Each worker writes a heartbeat every few seconds. A worker's unfinished responses count as failed if
its last heartbeat is older than `silent_s`, or if it closed its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from penstock_common.tasks import run_lasting
from penstock_router.store.open_files import FilesDisplaced, OpenFiles

logger = logging.getLogger(__name__)

MIN_BYTES = 1024 * 1024
# Statuses of responses that a worker still generates; all others are final.
UNFINISHED = ("queued", "in_progress")
FAILED = "failed"
# A response deleted before its end. The row stays, so that storing the end does not restore it.
_DELETED = "deleted"

# A document may take at most 1/_SHARE of the store, and must fit into an SQLite row.
_SHARE = 4
_MAX_ROW_BYTES = 500_000_000
_MAX_QUEUED = 4096
_SILENT_S = 15.0
_BEATS_IN_SILENCE = 5
_BUSY_TIMEOUT_S = 5.0
# SQLite restarts its log only when no worker reads, which may never happen under load. So a larger
# log is truncated.
_MAX_WAL_BYTES = 8 * 1024 * 1024
_WAL_TIMEOUT_S = 0.1

# "pens"; with the version, it distinguishes our files from others.
_APPLICATION_ID = 0x70656E73
_VERSION = 2
# The bytes that a response counts for its key: the documents, and SQLite's overhead of a small row.
_SIZE = "(512 + length({0}.response) + length({0}.messages))"
# Ids are blobs, because an id that a client made up may be invalid text. The large columns are
# last, so that small columns are read without them. Triggers keep each key's size, because a sum
# would read all rows.
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (
    id BLOB NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    key_name TEXT NOT NULL,
    status TEXT NOT NULL,
    running INTEGER AS (status IN {UNFINISHED}),
    cancel INTEGER NOT NULL DEFAULT 0,
    stored_s REAL NOT NULL,
    response BLOB NOT NULL,
    messages BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_age ON responses (running, stored_s);
CREATE INDEX IF NOT EXISTS by_holder ON responses (key_name, running, stored_s);
CREATE INDEX IF NOT EXISTS to_cancel ON responses (owner) WHERE cancel;
CREATE TABLE IF NOT EXISTS owners (owner TEXT NOT NULL PRIMARY KEY, beat_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS holders (key_name TEXT NOT NULL PRIMARY KEY, num_bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_size ON holders (num_bytes);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO holders VALUES (new.key_name, {_SIZE.format("new")})
        ON CONFLICT (key_name) DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF response, messages ON responses BEGIN
    UPDATE holders SET num_bytes = num_bytes + {_SIZE.format("new")} - {_SIZE.format("old")}
        WHERE key_name = new.key_name;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE holders SET num_bytes = num_bytes - {_SIZE.format("old")}
        WHERE key_name = old.key_name;
    DELETE FROM holders WHERE key_name = old.key_name AND num_bytes <= 0;
END;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
COMMIT;
"""

# True if :reader may read a response. NULL may read all; any reader may read a response without a
# key.
_IS_THEIRS = "id = :id AND (:reader IS NULL OR key_name IN ('', :reader))"
_IS_THERE = f"{_IS_THEIRS} AND status != '{_DELETED}' AND (running OR stored_s > :expired_s)"
# A finished response drops its cancel request; an unfinished one keeps it.
_PUT = f"""
INSERT INTO responses (id, owner, key_name, status, stored_s, response, messages)
    VALUES (:id, :owner, :key_name, :status, :now_s, :response, :messages)
    ON CONFLICT (id) DO UPDATE SET
        owner = excluded.owner,
        status = excluded.status,
        cancel = cancel AND excluded.status IN {UNFINISHED},
        stored_s = excluded.stored_s,
        response = excluded.response,
        messages = excluded.messages
    WHERE status != '{_DELETED}'
"""
_GET = f"SELECT response, messages, status FROM responses WHERE {_IS_THERE}"
_MEASURE = f"SELECT length(response) + length(messages) FROM responses WHERE {_IS_THERE}"
# SQLite extracts the output in its thread, so that the event loop is not blocked.
_GET_OUTPUT = f"""
SELECT CAST(json_extract(CAST(response AS TEXT), '$.output') AS BLOB) FROM responses
    WHERE {_IS_THERE}
"""
_DELETE_RUNNING = f"""
UPDATE responses
    SET status = '{_DELETED}', cancel = 1, stored_s = :now_s, response = x'', messages = x''
    WHERE {_IS_THEIRS} AND running
"""
_DELETE = f"DELETE FROM responses WHERE {_IS_THERE}"
_REQUEST_CANCEL = "UPDATE responses SET cancel = 1 WHERE id = :id AND running"
_TO_CANCEL = "SELECT id FROM responses WHERE cancel AND owner = :owner"
_BEAT = "REPLACE INTO owners VALUES (:owner, :now_s)"
_FORGET_SILENT = "DELETE FROM owners WHERE abs(beat_s - :now_s) > :silent_s"
_FORGET_OWN = "DELETE FROM owners WHERE owner = :owner"
_FAIL_OWNERLESS = f"""
UPDATE responses SET status = '{FAILED}', cancel = 0
    WHERE running AND owner NOT IN (SELECT owner FROM owners)
"""
_EXPIRE = "DELETE FROM responses WHERE running = 0 AND stored_s <= :expired_s"
# Evict the oldest response of the key with the most bytes; unfinished responses last, and never
# :id.
_EVICT = """
DELETE FROM responses WHERE rowid = (
    SELECT (
        SELECT rowid FROM responses WHERE key_name = holders.key_name AND id IS NOT :id
            ORDER BY running, stored_s, rowid LIMIT 1
    ) AS oldest
    FROM holders WHERE oldest IS NOT NULL ORDER BY num_bytes DESC LIMIT 1
)
"""
# Count pages, so that SQLite's overhead counts too.
_USED_BYTES = """
SELECT (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size
"""

# Called with the number of bytes that will be read; may raise.
Hold = Callable[[int], None]

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")


class StoreError(Exception):
    """The base of the store's errors; the text is one line."""


class StoreUnusable(StoreError):
    """The file cannot be used; the text tells the operator what to do."""


class StoreUnavailable(StoreError):
    """The store fails: a full disk, a full queue. The text and the longer `advice` are for the
    operator.
    """

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


class ResponseTooLarge(StoreError):
    """A document would take too much of the store; the text fits the client."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response. `status` is up to date. `response` is unchanged since its put, even if its
    worker died.
    """

    response: bytes
    messages: bytes
    status: str


# ---- the file ------------------------------------------------------------------------------------


@contextlib.contextmanager
def store_file(path: str | None, *, max_bytes: int) -> Iterator[str]:
    """Make and check the file before workers open it: `path`, or a temporary file that is removed
    at the end. Raise `StoreUnusable`.
    """
    with contextlib.ExitStack() as stack:
        if path is None:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
            except OSError as error:
                raise StoreUnusable(f"no temporary file: {error.strerror or error}") from None
            path = os.path.join(folder, "responses.sqlite")
        _check(path, max_bytes)
        yield path


def _check(path: str, max_bytes: int) -> None:
    """Read each page once, because a damaged file must fail the start, not requests. This takes
    about a second per GB. Raise `StoreUnusable`.
    """
    with _reported(path), contextlib.closing(_connect(path)) as connection:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(str(found).split()))
        with _writing(connection):
            _trim(connection, max_bytes)


def _connect(path: str) -> sqlite3.Connection:
    """Open the database. Raise `StoreUnusable`, `OSError` or `sqlite3.Error` if this fails."""
    # Absolute, so that no path has a special meaning to SQLite.
    path = os.path.abspath(path)
    _make_private(path)
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        _set_up(connection, path)
    except BaseException:  # after any error, the file must be closed
        connection.close()
        raise
    return connection


def _make_private(path: str) -> None:
    """Create the file for this user only. Do not open an existing file: closing it would release
    SQLite's locks on it in this process.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise StoreUnusable(f"response store {path}: is no regular file; name another")
    if others := stat.S_IMODE(found.st_mode) & 0o077:
        raise StoreUnusable(
            f"response store {path}: is open to others (mode bits {others:03o}); move it away, or "
            "chmod 600 it if what it holds may be known"
        )


def _set_up(connection: sqlite3.Connection, path: str) -> None:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    marks = tuple(
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version")
    )
    if tables and marks != (_APPLICATION_ID, _VERSION):
        raise StoreUnusable(
            f"response store {path}: is a database of something else, or of another version of "
            "penstock; move it away, or name another"
        )
    connection.execute("PRAGMA auto_vacuum = FULL")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError("SQLite can keep no write-ahead log there")
    connection.execute("PRAGMA synchronous = NORMAL")
    if not tables:
        connection.executescript(_SCHEMA)


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Turn errors of opening a file into `StoreUnusable`."""
    try:
        yield
    except OSError as error:
        raise StoreUnusable(f"response store {path}: {error.strerror}") from None
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StoreUnusable(
                f"response store {path}: {error}; make room, and start again"
            ) from None
        raise StoreUnusable(
            f"response store {path}: {error}; it has to be a file, in a folder, that this user can "
            "write to"
        ) from None
    except sqlite3.Error as error:
        raise StoreUnusable(
            f"response store {path}: {error}; move it away, and a new one is made"
        ) from None


@contextlib.contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Begin a transaction that waits for its turn to write before it reads."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def _trim(connection: sqlite3.Connection, max_bytes: int, spared: bytes | None = None) -> None:
    while connection.execute(_USED_BYTES).fetchone()[0] > max_bytes:
        if not connection.execute(_EVICT, {"id": spared}).rowcount:
            break


def _shorten_log(connection: sqlite3.Connection, wal: str) -> None:
    if os.stat(wal).st_size > _MAX_WAL_BYTES:
        connection.execute(f"PRAGMA busy_timeout = {round(_WAL_TIMEOUT_S * 1000)}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {round(_BUSY_TIMEOUT_S * 1000)}")


# ---- the store -----------------------------------------------------------------------------------


class ResponseStore:
    """A worker's access to the responses of all workers. Belongs to one event loop.

    Every method may raise `StoreUnavailable`. A call is carried out even if its caller is
    cancelled.
    """

    def __init__(
        self,
        path: str,
        *,
        max_bytes: int,
        ttl_s: float,
        owner: str,
        silent_s: float = _SILENT_S,
        clock: Callable[[], float] = time.time,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare access. `owner` names this worker. `clock` returns seconds on which all workers
        agree. `on_failure` is called for each `StoreUnavailable`. Raise `ValueError` if `max_bytes`
        is below `MIN_BYTES`.
        """
        if max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes {max_bytes} is below {MIN_BYTES}")
        self._path, self._wal = path, os.path.abspath(path) + "-wal"
        self._max_bytes = max_bytes
        self._max_document_bytes = min(max_bytes // _SHARE, _MAX_ROW_BYTES)
        self._ttl_s, self._silent_s = ttl_s, silent_s
        self._owner = owner
        self._clock = clock
        self._on_failure = on_failure
        # Only the store's thread uses these two.
        self._connection: sqlite3.Connection
        self._files: OpenFiles
        self._thread = ThreadPoolExecutor(1, "response store")
        self._queued = 0
        # Each client has at most one call in the thread's queue, so that it hardly delays other
        # clients.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> ResponseStore:
        await self.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the file. Raise `StoreUnusable` if this fails."""
        try:
            await self._call(self._open)
        except StoreUnusable:
            self._thread.shutdown()
            raise
        self._beating = asyncio.create_task(
            run_lasting(self._keep_beating, "beating in the response store")
        )

    def _open(self) -> None:
        with _reported(self._path):
            self._connection = _connect(self._path)
            self._beat_s = self._clock()
            try:
                self._files = OpenFiles(os.path.abspath(self._path))
                # If an owner's name is used again, its former worker has ended.
                self._change((_FORGET_OWN, _FAIL_OWNERLESS))
                self._beat()
            except BaseException:  # after any error, the file must be closed
                self._connection.close()
                raise

    async def close(self) -> None:
        """Close the file. This worker's unfinished responses then count as failed, at the latest
        when its heartbeat is too old.
        """
        self._beating.cancel()
        await asyncio.wait([self._beating])
        try:
            await self._call(self._close)
        except StoreUnavailable as error:
            logger.warning("%s", error)
        finally:
            self._thread.shutdown()

    def _close(self) -> None:
        with contextlib.closing(self._connection), contextlib.suppress(FilesDisplaced):
            self._change((_FORGET_OWN, _FAIL_OWNERLESS))

    async def put(
        self,
        response_id: str,
        response: bytes,
        messages: bytes,
        *,
        status: str,
        key_name: str = "",
    ) -> None:
        """Store a response, or replace the response with the same id. Do nothing if this id was
        deleted.

        `messages` is the conversation with this answer. Only the key `key_name` may read it; ""
        allows any. Raise `ResponseTooLarge`.
        """
        key = _key(response_id)
        size_bytes = len(key) + len(response) + len(messages)
        if size_bytes > self._max_document_bytes:
            raise ResponseTooLarge(
                f"the response and its conversation take {size_bytes} bytes; at most "
                f"{self._max_document_bytes} can be stored; send store: false, or a shorter input"
            )
        await self._call(self._put, key, response, messages, status, key_name)

    def _put(
        self, key: bytes, response: bytes, messages: bytes, status: str, key_name: str
    ) -> None:
        given = {"response": response, "messages": messages, "status": status, "key_name": key_name}
        with self._changing():
            self._connection.execute(_PUT, self._given(key) | given)
            _trim(self._connection, self._max_bytes, key)
        _shorten_log(self._connection, self._wal)

    async def get(
        self,
        response_id: str,
        reader: str | None = None,
        client: str = "",
        hold: Hold = lambda num_bytes: None,
    ) -> StoredResponse | None:
        """Return the response; None if it is unknown, deleted, expired, evicted or belongs to
        another key than the reader's. The reader None may read all. Raise what `hold` raises.
        """
        key = _key(response_id)
        async with self._turn_of(client):
            for (num_bytes,) in await self._call(self._select, _MEASURE, key, reader):
                hold(num_bytes)
            rows = await self._call(self._select, _GET, key, reader)
        return StoredResponse(*rows[0]) if rows else None

    async def get_output(
        self, response_id: str, reader: str | None = None, client: str = ""
    ) -> bytes | None:
        """Return the response's output items as JSON; None if `get` returns None."""
        async with self._turn_of(client):
            rows = await self._call(self._select, _GET_OUTPUT, _key(response_id), reader)
        return rows[0][0] if rows else None

    async def delete(self, response_id: str, reader: str | None = None, client: str = "") -> bool:
        """Delete a response; false if this reader could not read it. An unfinished response will be
        cancelled, and its end not stored.
        """
        deletions = (_DELETE_RUNNING, _DELETE)
        async with self._turn_of(client):
            return await self._call(self._change, deletions, _key(response_id), reader) > 0

    def _turn_of(self, client: str) -> asyncio.Lock:
        return self._turns.setdefault(client, asyncio.Lock())

    async def request_cancel(self, response_id: str) -> bool:
        """Ask the worker that generates the response to stop; false if no worker generates it."""
        return await self._call(self._change, (_REQUEST_CANCEL,), _key(response_id)) > 0

    async def cancel_requested(self, response_ids: Collection[str]) -> set[str]:
        """Return the responses that must be cancelled, out of those that this worker generates."""
        to_cancel = {*await self._call(self._select, _TO_CANCEL)}
        return {response_id for response_id in response_ids if (_key(response_id),) in to_cancel}

    async def beat(self) -> None:
        """Write this worker's heartbeat and clean up. The store calls it regularly."""
        await self._call(self._beat)

    def _beat(self) -> None:
        now_s = self._clock()
        # After the machine was suspended or its clock was set, all owners seem to be dead.
        on_time = abs(now_s - self._beat_s) < self._silent_s / 2
        self._beat_s = now_s
        clearing = (_FORGET_SILENT, _FAIL_OWNERLESS) if on_time else ()
        self._change((_BEAT, *clearing, _EXPIRE))

    async def _keep_beating(self) -> None:
        trouble = ""
        while True:
            await asyncio.sleep(self._silent_s / _BEATS_IN_SILENCE)
            try:
                await self.beat()
            except StoreUnavailable as error:
                told = f"{error}; {error.advice}" if error.advice else str(error)
                if told != trouble:
                    logger.error("%s", told)
                trouble = told
            else:
                if trouble:
                    logger.info("response store %s: works again", self._path)
                trouble = ""

    # These methods run in the thread:

    def _select(self, statement: str, key: bytes = b"", reader: str | None = None) -> list[Any]:
        return self._connection.execute(statement, self._given(key, reader)).fetchall()

    def _change(
        self, statements: Iterable[str], key: bytes = b"", reader: str | None = None
    ) -> int:
        given = self._given(key, reader)
        with self._changing():
            return sum(self._connection.execute(one, given).rowcount for one in statements)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Begin a transaction, unless the file was removed or replaced."""
        self._files.check()
        with _writing(self._connection):
            yield

    def _given(self, key: bytes, reader: str | None = None) -> dict[str, object]:
        now_s = self._clock()
        return {
            **{"id": key, "reader": reader, "owner": self._owner},
            **{"now_s": now_s, "expired_s": now_s - self._ttl_s, "silent_s": self._silent_s},
        }

    async def _call(self, work: Callable[[*_Arguments], _T], *arguments: *_Arguments) -> _T:
        """Run `work` in the thread, after earlier calls."""
        if self._queued >= _MAX_QUEUED:
            raise self._unavailable(f"{self._queued} calls wait for it")
        self._queued += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        future.add_done_callback(self._done)
        try:
            # Do not cancel the call with its caller, so that `_queued` stays the length of the
            # thread's queue.
            return await asyncio.shield(future)
        except FilesDisplaced as error:
            raise self._unavailable(str(error), error.advice) from error
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(str(error)) from error
        finally:
            # Break the reference cycle of frame, future and error.
            del future

    def _unavailable(self, why: str, advice: str = "") -> StoreUnavailable:
        self._on_failure()
        return StoreUnavailable(f"response store {self._path}: {why}", advice)

    def _done(self, future: asyncio.Future[_T]) -> None:
        self._queued -= 1


def _key(response_id: str) -> bytes:
    # An id from a client's JSON may have half of a surrogate pair.
    return response_id.encode("utf-8", "surrogatepass")
