"""`ResponseStore`: the SQLite file with the responses of a server. Several processes may use one file at the same time.

A response belongs to an owner, the digest of an API key; nobody else finds it. Its row has the JSON that clients get. Its items
are those of its own input, then those of its output; the input of the responses before it is found through `previous`.

    queued --> in_progress --> completed | incomplete | failed | cancelled

Only responses in the background are in the file before they have ended. Who ends one first, the process that computes it or a
client that cancels it, decides: an ended response does not change any more. If the process that computes it has died, the next
reader ends it as failed. A response that is computed now is never removed to make room. If it grows, and there is no room for
it, it ends as failed.
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
from inflight.entrypoints.response_store.tables import make_tables

UNFINISHED = ("queued", "in_progress")
_WAIT_SECONDS = 10.0  # for other processes that write, unless `wait_at_most` says otherwise
_MIN_WAIT_SECONDS = 0.1  # most transactions of other processes have ended by then
_CLEAN_SECONDS = 60.0  # time between two looks for old responses
_MOST_CHECKED_BYTES = 2**29  # half a second of one core
_ROW_BYTES = 200  # what SQLite needs for a response, an item or an event beside its texts
_DIED = "the process that computed this response has ended, for example because the server was restarted"
_IS_FULL = "there is no room to store more of this response: it is too long, or too many others are computed now"


class NoRoomError(Exception):
    """A response cannot be stored, because those that are computed now need all the room."""


class TooLargeError(NoRoomError):
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
        make_tables(self._connection)  # first of all: it refuses the file of another program, which must stay as it is
        if path.stat().st_mode & 0o077:  # it was there before
            path.chmod(0o600)
        self._do("PRAGMA journal_mode = WAL")
        self._do("PRAGMA synchronous = NORMAL")
        self._do("PRAGMA foreign_keys = ON")

    def check(self) -> None:
        """Read the file, unless it is so large that the start would wait. Raises sqlite3.DatabaseError if it is damaged."""
        if self._path.stat().st_size > _MOST_CHECKED_BYTES:
            return
        (found,) = self._do("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"the file is damaged ({str(found)[:200]})")

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
            NoRoomError: it is computed now, as are all others that are left.
        """
        items = [(item, False) for item in new.input] + [(item, True) for item in new.output]
        num_bytes = _num_bytes([new.body, *(item.body for item, _ in items)])
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
            if not self._make_room():
                raise NoRoomError(f"the responses that are computed now need all of the {self._max_bytes} bytes")
        return True

    def advance(self, owner: str, id: str, status: str, body: bytes, output: Sequence[Item] = ()) -> bool:
        """Change a response that has not ended. Returns False if it has ended, was removed, or has no room; see above."""
        with self._transaction():
            found = self._unfinished(owner, id)
            if found is None:
                return False
            number, old = found
            more = _num_bytes([item.body for item in output])
            if not self._has_room(number, old, more + len(body) - len(old)):
                return False
            self._put(number, status, body, more)
            (place,) = self._do("SELECT COUNT(*) FROM items WHERE response = ?", number).fetchone()
            self._add_items(number, [(item, True) for item in output], place)
        return True

    def add_events(self, owner: str, id: str, first: int, events: Sequence[bytes]) -> bool:
        """Add events of the stream of a response that has not ended. They have the numbers from `first` on. Returns False as
        `advance` does. So the stream of a response that was cancelled ends there, and every reader gets the same events."""
        more = _num_bytes(events)
        with self._transaction():
            found = self._unfinished(owner, id)
            if found is None:
                return False
            number, body = found
            if not self._has_room(number, body, more):
                return False
            for place, event in enumerate(events, first):
                self._do("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", number, place, event)
            self._do("UPDATE responses SET num_bytes = num_bytes + ? WHERE number = ?", more, number)
        return True

    def _unfinished(self, owner: str, id: str) -> tuple[int, bytes] | None:
        """The number and the JSON of a response that has not ended."""
        found: tuple[int, bytes] | None = self._do(
            "SELECT number, body FROM responses WHERE owner = ? AND id = ? AND status IN (?, ?)", owner, id, *UNFINISHED
        ).fetchone()
        return found

    def _has_room(self, number: int, body: bytes, more: int) -> bool:
        """Make room for so many more bytes of a response that is computed now. If there is none, it ends as failed."""
        (size,) = self._do("SELECT num_bytes FROM responses WHERE number = ?", number).fetchone()
        if more <= 0 or (size + more <= self._max_bytes and self._make_room(more)):
            return True
        self._put(number, "failed", _failed(body, _IS_FULL))
        return False

    def _put(self, number: int, status: str, body: bytes, more: int = 0) -> None:
        """Replace the JSON of a response, which has `more` further bytes."""
        self._do(
            "UPDATE responses SET status = ?, used_at = ?, num_bytes = num_bytes + ? - LENGTH(body), body = ? WHERE number = ?",
            *(status, self._now(), len(body) + more, body, number),
        )

    def _end(self, owner: str, id: str, status: str, body: bytes) -> None:
        """End a response that has not ended. It needs hardly more room for that."""
        with self._transaction():
            found = self._unfinished(owner, id)
            if found is not None:
                self._put(found[0], status, body)

    def cancel(self, owner: str, id: str) -> Found | None:
        """End a response, if it has not ended. Returns it as it is then; None if there is none."""
        found = self.find(owner, id)
        if found is None or found.has_ended:
            return found
        body = to_json({**from_json(found.body), "status": "cancelled"})
        self._end(owner, id, "cancelled", body)
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
            body = _failed(found.body, _DIED)
            with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the next reader tries again
                self._end(owner, id, "failed", body)
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

    def _make_room(self, more: int = 0) -> bool:
        """Remove what is too old, and what is too much, if `more` bytes are added. A response that is computed now is not
        removed. Returns whether there is room."""
        now = self._now()
        if abs(now - self._cleaned_at) >= _CLEAN_SECONDS:  # also after the clock was set back
            self._cleaned_at = now
            self._remove_old(now - self._max_seconds)
            self._do("DELETE FROM shares WHERE num_bytes = 0")
        while self._do("SELECT TOTAL(num_bytes) FROM shares").fetchone()[0] + more > self._max_bytes:
            owners = self._do("SELECT owner FROM shares ORDER BY num_bytes DESC").fetchall()
            if not any(self._remove_oldest(owner) for (owner,) in owners):
                return False
        return True

    def _remove_oldest(self, owner: str) -> bool:
        """Remove the response of this owner that was used least recently. False if all are computed now."""
        removed = self._do(
            "DELETE FROM responses WHERE number = (SELECT number FROM responses WHERE owner = ? AND status NOT IN (?, ?) "
            "ORDER BY used_at, number LIMIT 1)",
            *(owner, *UNFINISHED),
        )
        return removed.rowcount > 0

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


def _num_bytes(texts: Iterable[bytes]) -> int:
    """What a row for each text takes in the file."""
    return sum(_ROW_BYTES + len(text) for text in texts)


def _failed(body: bytes, message: str) -> bytes:
    """The JSON of a response that ends in this way."""
    error = {"code": "server_error", "message": message}
    return to_json({**from_json(body), "status": "failed", "error": error})
