"""`ResponseStore`: the SQLite file with the responses of a server. Several processes may use one file at the same time.

A response belongs to an owner, the digest of an API key; nobody else finds it. Its row has the JSON that clients get. Its items
are those of its own input, then those of its output; the input of the responses before it is found through `previous`.

    queued --> in_progress --> completed | incomplete | failed | cancelled

Only responses in the background are in the file before they have ended. Who ends one first, the process that computes it or a
client that cancels it, decides: an ended response does not change any more. If the process that computes it has died, the next
reader ends it as failed.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import finalize

from pydantic_core import from_json

from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.response_store.processes import is_running, own_name

UNFINISHED = ("queued", "in_progress")
_FORMAT = 0x496E_6601  # "In", "f" and the number of this form of the tables; a file of another format is not used
_WAIT_SECONDS = 10.0  # for other processes that write, unless `wait_at_most` says otherwise
_MIN_WAIT_SECONDS = 0.1  # most transactions of other processes have ended by then
_CLEAN_SECONDS = 60.0  # time between two looks for old responses
_ROW_BYTES = 200  # what SQLite needs for a response or an item beside its texts

_TABLES = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    previous TEXT,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    process TEXT NOT NULL,
    is_background INTEGER NOT NULL,
    has_events INTEGER NOT NULL,
    used_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX responses_by_use ON responses (owner, used_at);
CREATE INDEX responses_by_age ON responses (used_at);
CREATE INDEX responses_by_status ON responses (status);
CREATE TABLE items (
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE,
    place INTEGER NOT NULL,
    id TEXT NOT NULL,
    is_output INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (response, place)
) WITHOUT ROWID;
CREATE INDEX items_by_id ON items (id);
CREATE TABLE events (
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE,
    number INTEGER NOT NULL,
    event BLOB NOT NULL,
    PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE shares (owner TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    INSERT INTO shares VALUES (new.owner, new.num_bytes)
        ON CONFLICT (owner) DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER response_grown AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE shares SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE owner = new.owner;
END;
CREATE TRIGGER response_removed AFTER DELETE ON responses BEGIN
    UPDATE shares SET num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
END;
"""


class TooLargeError(Exception):
    """A response alone is larger than all may be together."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item of a conversation: its id, and its JSON."""

    id: str
    body: bytes


@dataclass(frozen=True, kw_only=True)
class NewResponse:
    """
    Attributes:
        previous: the id of the response that it continues.
        body: its JSON, as clients get it.
        input: the items of its own input, without those of the responses before it.
        has_events: whether its events are stored, too.
    """

    owner: str
    id: str
    previous: str | None
    model: str
    status: str
    body: bytes
    input: Sequence[Item]
    output: Sequence[Item] = ()
    is_background: bool = False
    has_events: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A response, as it is now."""

    number: int
    id: str
    previous: str | None
    model: str
    status: str
    is_background: bool
    has_events: bool
    body: bytes

    @property
    def has_ended(self) -> bool:
        return self.status not in UNFINISHED


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The items of a response and of all before it, from the oldest on.

    Attributes:
        last: the response; None if there is none with this id.
        missing: the id of a response before it that was removed; "" if none was. Then the items begin behind it.
        items: without the output of the last one if only its input was asked for.
    """

    last: Found | None
    missing: str = ""
    items: list[Item] = field(default_factory=list)


class ResponseStore:
    """Used by one thread.

    Args:
        max_bytes: of all responses together. If there are more, those of the owner with the most bytes go, the least recently
            used ones first.
        max_seconds: how long a response is kept since it was used last. One that is computed now is kept.
        now: the clock.

    Raises:
        sqlite3.Error, OSError: the file cannot be read or written. All methods may raise these.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 2**28,
        max_seconds: float = 30 * 24 * 3600.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._now = now
        self._cleaned_at = now()
        self._process = own_name()
        path.touch(mode=0o600)  # texts of users: for nobody else
        self._path = path
        self._file = path.stat()
        self._connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        self.close = finalize(self, self._connection.close)
        self._make_tables()  # first of all: it refuses the file of another program, which must stay as it is
        if path.stat().st_mode & 0o077:  # it was there before
            path.chmod(0o600)
        self._do("PRAGMA journal_mode = WAL")
        self._do("PRAGMA synchronous = NORMAL")
        self._do("PRAGMA foreign_keys = ON")

    def _make_tables(self) -> None:
        with self._transaction():
            (known,) = self._do("PRAGMA user_version").fetchone()
            (num_tables,) = self._do("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if known == 0 and num_tables == 0:
                for statement in _statements(_TABLES):
                    self._do(statement)
                self._do(f"PRAGMA user_version = {_FORMAT}")
            elif known != _FORMAT:
                raise sqlite3.DatabaseError("the file has other contents, or was written by another version")

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that was opened. If somebody has removed or replaced it, what is stored
        here is lost, and another process that opens the path sees other responses."""
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        return (now.st_dev, now.st_ino) == (self._file.st_dev, self._file.st_ino)

    def wait_at_most(self, seconds: float) -> None:
        """From now on, wait no longer than this for other processes that write; but 0.1 s at least."""
        self._do(f"PRAGMA busy_timeout = {int(1000 * max(seconds, _MIN_WAIT_SECONDS))}")

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(self, new: NewResponse) -> bool:
        """Add a response. A client that chooses ids may choose one again: then the response is replaced. If that one is
        computed now, nothing is added, and False returned.

        Raises:
            TooLargeError: it is larger than all responses may be.
        """
        items = [(item, False) for item in new.input] + [(item, True) for item in new.output]
        num_bytes = _ROW_BYTES + len(new.body) + sum(_ROW_BYTES + len(item.body) for item, _ in items)
        if num_bytes > self._max_bytes:
            raise TooLargeError(
                f"a response of {num_bytes} bytes is larger than all may be together, {self._max_bytes}"
            )
        with self._transaction():
            before = self._do(
                "SELECT process FROM responses WHERE owner = ? AND id = ? AND status IN (?, ?)",
                *(new.owner, new.id, *UNFINISHED),
            ).fetchone()
            if before is not None and is_running(before[0]):
                return False
            self._do("DELETE FROM responses WHERE owner = ? AND id = ?", new.owner, new.id)
            number = self._do(
                "INSERT INTO responses (owner, id, previous, model, status, process, is_background, has_events, used_at, "
                "num_bytes, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(new.owner, new.id, new.previous, new.model, new.status, self._process),
                *(new.is_background, new.has_events, self._now(), num_bytes, new.body),
            ).lastrowid
            assert number is not None
            self._add_items(number, items, 0)
            self._make_room()
        return True

    def advance(self, owner: str, id: str, status: str, body: bytes, output: Sequence[Item] = ()) -> bool:
        """Change a response that has not ended. Returns False if it has ended, or was removed."""
        with self._transaction():
            row = self._do(
                "SELECT number FROM responses WHERE owner = ? AND id = ? AND status IN (?, ?)", owner, id, *UNFINISHED
            ).fetchone()
            if row is None:
                return False
            more = sum(_ROW_BYTES + len(item.body) for item in output)
            self._do(
                "UPDATE responses SET status = ?, used_at = ?, num_bytes = num_bytes + ? + ? - LENGTH(body), body = ? "
                "WHERE number = ?",
                *(status, self._now(), more, len(body), body, row[0]),
            )
            (place,) = self._do("SELECT COUNT(*) FROM items WHERE response = ?", row[0]).fetchone()
            self._add_items(row[0], [(item, True) for item in output], place)
            self._make_room()
        return True

    def add_events(self, owner: str, id: str, first: int, events: Sequence[bytes]) -> None:
        """Add events of a response's stream, which have the numbers from `first` on. Nothing if the response was removed or has
        ended: the stream of a response that was cancelled ends there, and every reader gets the same events."""
        with self._transaction():
            row = self._do(
                "SELECT number FROM responses WHERE owner = ? AND id = ? AND status IN (?, ?)", owner, id, *UNFINISHED
            ).fetchone()
            if row is None:
                return
            for place, event in enumerate(events, first):
                self._do("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", row[0], place, event)
            size = sum(map(len, events))
            self._do("UPDATE responses SET num_bytes = num_bytes + ? WHERE number = ?", size, row[0])

    def cancel(self, owner: str, id: str) -> Found | None:
        """End a response, if it has not ended. Returns it as it is then; None if there is none."""
        found = self.find(owner, id)
        if found is None or found.has_ended:
            return found
        body = to_json({**from_json(found.body), "status": "cancelled"})
        self.advance(owner, id, "cancelled", body)
        return self.find(owner, id)

    def remove(self, owner: str, id: str) -> bool:
        """Returns False if there is none."""
        with self._transaction():
            return self._do("DELETE FROM responses WHERE owner = ? AND id = ?", owner, id).rowcount > 0

    # -- reading -------------------------------------------------------------------------------------------------------

    def find(self, owner: str, id: str) -> Found | None:
        columns = "number, id, previous, model, status, is_background, has_events, body, process"
        row = self._do(
            f"SELECT {columns} FROM responses WHERE owner = ? AND id = ? AND (used_at >= ? OR status IN (?, ?))",
            *(owner, id, self._now() - self._max_seconds, *UNFINISHED),
        ).fetchone()
        if row is None:
            return None
        *values, process = row
        names = ("number", "id", "previous", "model", "status", "is_background", "has_events", "body")
        found = Found(**dict(zip(names, values, strict=True)))
        if not found.has_ended and not is_running(process):
            message = "the process that computed this response has ended, for example because the server was restarted"
            error = {"code": "server_error", "message": message}
            body = to_json({**from_json(found.body), "status": "failed", "error": error})
            with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the next reader tries again
                self.advance(owner, id, "failed", body)
            return replace(found, status="failed", body=body)
        return found

    def conversation(self, owner: str, id: str, *, with_output: bool = True) -> Conversation:
        """Read a conversation. All its responses count as used now, if the file can be written."""
        last = self.find(owner, id)
        if last is None:
            return Conversation(last=None)
        chain: dict[int, None] = {}  # numbers, from the last one on
        previous: str | None = id
        missing = ""
        items: list[Item] = []
        with self._transaction("DEFERRED"):
            while previous is not None:
                row = self._do(
                    "SELECT number, previous FROM responses WHERE owner = ? AND id = ? AND (used_at >= ? OR status IN (?, ?))",
                    *(owner, previous, self._now() - self._max_seconds, *UNFINISHED),
                ).fetchone()
                if row is None or row[0] in chain:
                    missing = previous
                    break
                chain[row[0]] = None
                previous = row[1]
            if last.number not in chain:  # it was removed just now
                return Conversation(last=None)
            for number in reversed(chain):
                rows = self._do(
                    "SELECT id, body FROM items WHERE response = ? AND is_output <= ? ORDER BY place",
                    *(number, with_output or number != last.number),
                )
                items += [Item(id=name, body=body) for name, body in rows]
        with contextlib.suppress(sqlite3.OperationalError), self._transaction():  # a full disk
            for number in chain:
                self._do("UPDATE responses SET used_at = ? WHERE number = ?", self._now(), number)
        return Conversation(last=last, missing=missing, items=items)

    def item(self, owner: str, id: str) -> Item | None:
        """The newest item with this id."""
        row = self._do(
            "SELECT items.body FROM items JOIN responses ON responses.number = items.response "
            "WHERE items.id = ? AND owner = ? AND used_at >= ? ORDER BY number DESC LIMIT 1",
            *(id, owner, self._now() - self._max_seconds),
        ).fetchone()
        return None if row is None else Item(id=id, body=row[0])

    def events(self, number: int, first: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        """Events of the stream of a response, from the number `first` on, with their numbers."""
        return self._do(
            "SELECT number, event FROM events WHERE response = ? AND number >= ? ORDER BY number LIMIT ?",
            *(number, first, limit),
        ).fetchall()

    def num_events(self, number: int) -> int:
        """How many events of a response's stream are stored, without the last one, which its status says."""
        (count,) = self._do("SELECT COUNT(*) FROM events WHERE response = ?", number).fetchone()
        return int(count)

    def is_computing(self, models: Iterable[str]) -> bool:
        """Whether a living process computes a response of a model with one of these names in the background."""
        names = set(models)
        rows = self._do("SELECT model, process FROM responses WHERE status IN (?, ?)", *UNFINISHED).fetchall()
        return any(model in names and is_running(process) for model, process in rows)

    def ended(self, ids: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of these (owner, id) that have ended or were removed."""
        found = []
        for owner, id in ids:
            row = self._do(
                "SELECT 1 FROM responses WHERE owner = ? AND id = ? AND status IN (?, ?)", owner, id, *UNFINISHED
            ).fetchone()
            if row is None:
                found.append((owner, id))
        return found

    # -- the file ------------------------------------------------------------------------------------------------------

    def _add_items(self, number: int, items: Iterable[tuple[Item, bool]], first: int) -> None:
        for place, (item, is_output) in enumerate(items, first):
            self._do("INSERT INTO items VALUES (?, ?, ?, ?, ?)", number, place, item.id, is_output, item.body)

    def _make_room(self) -> None:
        """Remove what is too old, and what is too much. A response that is computed now is not removed."""
        now = self._now()
        if abs(now - self._cleaned_at) >= _CLEAN_SECONDS:  # also after the clock was set back
            self._cleaned_at = now
            self._remove_old(now - self._max_seconds)
            self._do("DELETE FROM shares WHERE num_bytes = 0")
        while self._do("SELECT TOTAL(num_bytes) FROM shares").fetchone()[0] > self._max_bytes:
            (owner,) = self._do("SELECT owner FROM shares ORDER BY num_bytes DESC LIMIT 1").fetchone()
            removed = self._do(
                "DELETE FROM responses WHERE number = (SELECT number FROM responses WHERE owner = ? AND status NOT IN (?, ?) "
                "ORDER BY used_at, number LIMIT 1)",
                *(owner, *UNFINISHED),
            ).rowcount
            if not removed:
                return

    def _remove_old(self, oldest: float) -> None:
        self._do("DELETE FROM responses WHERE used_at < ? AND status NOT IN (?, ?)", oldest, *UNFINISHED)
        unfinished = self._do(
            "SELECT number, process FROM responses WHERE used_at < ? AND status IN (?, ?)", oldest, *UNFINISHED
        ).fetchall()
        for number, process in unfinished:
            if not is_running(process):
                self._do("DELETE FROM responses WHERE number = ?", number)

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """All or nothing of the statements of a `with` block. With "DEFERRED", they read the file as it is at one moment."""
        self._do(f"BEGIN {kind}")
        try:
            yield
            self._do("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._do("ROLLBACK")

    def _do(self, statement: str, *values: str | float | bytes | None) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)


def _statements(script: str) -> Iterable[str]:
    """The statements of a script. Those of a trigger stay together."""
    statement = ""
    for line in script.strip().splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
