"""The file of stored responses: owners, conversations, bounds, and what happens if it cannot be used."""

from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.response_store.store import Item, NewResponse, NoRoomError, ResponseStore, TooLargeError

BODY = b'{"id":"r","status":"completed"}'


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ResponseStore]:
    made = ResponseStore(tmp_path / "r.sqlite", max_bytes=20_000, max_seconds=100.0, now=clock)
    yield made
    made.close()


def new(
    id: str, previous: str | None = None, *, owner: str = "", status: str = "completed", **more: Any
) -> NewResponse:
    items = {"input": [item(f"in-{id}")], "output": [item(f"out-{id}")], **more}
    return NewResponse(owner=owner, id=id, previous=previous, model="m", status=status, body=BODY, **items)


def item(id: str, num_bytes: int = 2) -> Item:
    return Item(id=id, body=json.dumps("x" * (num_bytes - 2)).encode())


def ids(store: ResponseStore, id: str, **more: Any) -> list[str]:
    return [each.id for each in store.conversation("", id, **more).items]


def test_a_response_belongs_to_its_owner(store: ResponseStore) -> None:
    assert store.add(new("r", owner="a"))
    found = store.find("a", "r")
    assert found is not None and (found.body, found.model, found.has_ended) == (BODY, "m", True)
    assert store.find("b", "r") is None and store.find("", "r") is None
    assert store.conversation("b", "r").last is None
    assert store.item("a", "in-r") is not None and store.item("b", "in-r") is None
    assert not store.remove("b", "r") and store.cancel("b", "r") is None
    assert store.remove("a", "r") and not store.remove("a", "r")
    assert store.item("a", "in-r") is None


def test_a_conversation_is_its_responses_in_order(store: ResponseStore) -> None:
    for id, previous in (("1", None), ("2", "1"), ("3", "2"), ("other", "1")):
        store.add(new(id, previous))
    assert ids(store, "3") == ["in-1", "out-1", "in-2", "out-2", "in-3", "out-3"]
    assert ids(store, "3", with_output=False) == ["in-1", "out-1", "in-2", "out-2", "in-3"]
    assert ids(store, "other") == ["in-1", "out-1", "in-other", "out-other"]
    store.remove("", "2")
    assert store.conversation("", "3").missing == "2"
    assert ids(store, "3") == ["in-3", "out-3"]


def test_an_id_that_is_chosen_again_makes_no_endless_conversation(store: ResponseStore) -> None:
    for id, previous in (("1", None), ("2", "1"), ("1", "2")):
        store.add(new(id, previous))
    assert store.conversation("", "2").missing == "2"


def test_the_least_recently_used_of_the_largest_owner_goes(store: ResponseStore, clock: Clock) -> None:
    store.add(new("of-b", owner="b"))
    for number in range(4):
        clock.now += 1
        store.add(new(str(number), input=[item(f"i{number}", 5000)], output=()))
        if number == 2:
            clock.now += 1
            assert ids(store, "0") == ["i0"]  # which uses it
    kept = [id for id in ("0", "1", "2", "3") if store.find("", id) is not None]
    assert kept == ["0", "2", "3"]
    assert store.find("b", "of-b") is not None


def test_a_response_that_is_larger_than_all_may_be_removes_no_other(store: ResponseStore) -> None:
    store.add(new("1"))
    with pytest.raises(TooLargeError, match="20000"):
        store.add(new("2", input=[item("i", 20_000)]))
    assert store.find("", "1") is not None and store.find("", "2") is None


def test_a_response_is_kept_for_a_time_after_its_last_use(store: ResponseStore, clock: Clock) -> None:
    store.add(new("1"))
    store.add(new("2"))
    clock.now += 90
    store.conversation("", "1")
    clock.now += 20
    assert store.find("", "1") is not None
    assert store.find("", "2") is None and store.item("", "in-2") is None
    store.add(new("3"))  # removes what is too old
    assert store._do("SELECT COUNT(*) FROM items").fetchone() == (4,)
    clock.now += 101
    assert store.find("", "1") is None


def test_old_responses_are_removed_after_the_clock_was_set_back(store: ResponseStore, clock: Clock) -> None:
    clock.now += 10_000
    store.add(new("1"))
    clock.now -= 9_000
    store.add(new("2"))
    clock.now += 101
    store.add(new("3"))
    assert store._do("SELECT id FROM responses WHERE id = '2'").fetchone() is None


def test_the_bytes_of_an_owner_are_those_of_its_responses(store: ResponseStore) -> None:
    store.add(new("1", status="queued", output=(), has_events=True))
    store.add_events("", "1", 0, [b"a" * 100, b"b" * 50])
    store.advance("", "1", "completed", BODY * 3, [item("o", 300)])
    texts = (
        store._do("SELECT TOTAL(LENGTH(body)), COUNT(*) FROM responses").fetchone(),
        store._do("SELECT TOTAL(LENGTH(body)), COUNT(*) FROM items").fetchone(),
        store._do("SELECT TOTAL(LENGTH(event)), COUNT(*) FROM events").fetchone(),
    )
    assert store._do("SELECT TOTAL(num_bytes) FROM responses").fetchone() == (
        sum(num_bytes + 200 * num_rows for num_bytes, num_rows in texts),
    )
    store.add(new("1"))  # replaces it
    store.add(new("2", owner="b"))
    assert (
        store._do("SELECT owner, num_bytes FROM shares").fetchall()
        == store._do("SELECT owner, SUM(num_bytes) FROM responses GROUP BY owner").fetchall()
    )
    for owner, id in (("", "1"), ("b", "2")):
        store.remove(owner, id)
    assert store._do("SELECT TOTAL(num_bytes) FROM shares").fetchone() == (0,)


def test_who_ends_a_response_first_decides(store: ResponseStore) -> None:
    for id in ("1", "2"):
        store.add(new(id, status="queued", output=(), is_background=True))
        assert store.advance("", id, "in_progress", BODY)
    assert store.ended([("", "1"), ("", "2"), ("", "3")]) == [("", "3")]
    cancelled = store.cancel("", "1")
    assert (
        cancelled is not None
        and cancelled.status == "cancelled"
        and json.loads(cancelled.body)["status"] == "cancelled"
    )
    assert not store.advance("", "1", "completed", BODY)
    assert store.advance("", "2", "completed", BODY, [item("out-2")])
    completed = store.cancel("", "2")
    assert completed is not None and completed.status == "completed"
    assert ids(store, "2") == ["in-2", "out-2"]
    assert store.ended([("", "1"), ("", "2")]) == [("", "1"), ("", "2")]


def test_a_response_that_is_computed_is_neither_replaced_nor_removed_for_room(store: ResponseStore) -> None:
    store.add(new("1", status="queued", input=[item("i", 15_000)], output=()))
    assert not store.add(new("1"))
    store.add(new("2", input=[item("j", 15_000)], output=()))
    assert store.find("", "1") is not None and store.find("", "2") is None
    assert store.is_computing(["m"]) and not store.is_computing(["n"])


@pytest.mark.parametrize("what", ["events", "output", "body"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_response_for_which_there_is_no_room_ends_as_failed(
    store: ResponseStore, clock: Clock, what: str, is_alone: bool
) -> None:
    """Alone it may have 20,000 bytes; beside another one that is computed, less. Events have a size of their own."""
    store.add(new("done", owner="c"))
    if not is_alone:
        store.add(new("other", owner="b", status="in_progress", input=[item("i", 15_000)], output=()))
    store.add(new("1", status="in_progress", output=(), is_background=True))
    large = 20_000 if is_alone else 5000
    grown = {
        "events": lambda: store.add_events("", "1", 0, [b"e"] * (large // 200)),
        "output": lambda: store.advance("", "1", "completed", BODY, [item("o", large)]),
        "body": lambda: store.advance("", "1", "completed", b"{%s}" % (b" " * large)),
    }[what]()
    assert not grown
    found = store.find("", "1")
    assert found is not None and found.status == "failed" and "no room" in json.loads(found.body)["error"]["message"]
    assert store.num_events(found.number) == 0 and ids(store, "1") == ["in-1"]
    assert (store.find("c", "done") is not None) == is_alone  # it helps nobody if one that is too large removes others
    assert not is_alone or store._do("SELECT TOTAL(num_bytes) FROM shares").fetchone()[0] <= 20_000
    assert not store.add_events("", "1", 0, [b"e"])
    assert store.ended([("", "1")]) == [("", "1")]


def test_room_is_made_by_any_owner_that_has_ended_responses(store: ResponseStore) -> None:
    store.add(new("running", owner="a", status="in_progress", input=[item("i", 12_000)], output=()))
    store.add(new("ended", owner="b", input=[item("j", 5000)], output=()))
    assert store.add_events("a", "running", 0, [b"e" * 4000])
    assert store.find("b", "ended") is None and store.find("a", "running") is not None
    with pytest.raises(NoRoomError, match="20000"):
        store.add(new("late", owner="b", status="queued", input=[item("k", 5000)], output=()))
    assert store.find("b", "late") is None
    assert store.advance("a", "running", "completed", BODY)
    assert store.add(new("late", owner="b", status="queued", input=[item("k", 5000)], output=()))


def test_a_response_can_be_cancelled_when_there_is_no_room(store: ResponseStore) -> None:
    store.add(new("1", status="queued", input=[item("i", 19_450)], output=()))
    assert store._do("SELECT num_bytes FROM responses").fetchone()[0] > 19_500
    found = store.cancel("", "1")
    assert found is not None and found.status == "cancelled"


def test_a_response_that_is_computed_does_not_grow_old(store: ResponseStore, clock: Clock) -> None:
    store.add(new("1", status="in_progress", output=()))
    store.add(new("dead", status="in_progress", output=()))
    store._do("UPDATE responses SET process = 'x' WHERE id = 'dead'")
    clock.now += 101  # longer than responses are kept
    found = store.find("", "1")
    assert found is not None and found.status == "in_progress"
    store.add(new("2"))  # removes what is too old
    assert store._do("SELECT id FROM responses ORDER BY number").fetchall() == [("1",), ("2",)]
    assert not store.add(new("1"))
    assert store.advance("", "1", "completed", BODY)
    clock.now += 101
    assert store.find("", "1") is None


DIES = """
import sys
from pathlib import Path
from inflight.entrypoints.response_store.store import NewResponse, ResponseStore

body = b'{"id":"r","status":"in_progress","error":null}'
new = NewResponse(owner="", id="r", previous=None, model="m", status="in_progress", body=body, input=(), is_background=True)
ResponseStore(Path(sys.argv[1])).add(new)
"""


def test_a_response_of_a_process_that_has_died_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    subprocess.run([sys.executable, "-c", DIES, str(path)], check=True)
    store = ResponseStore(path)
    assert not store.is_computing(["m"])
    found = store.find("", "r")
    assert found is not None and found.status == "failed"
    body = json.loads(found.body)
    assert body["status"] == "failed" and body["error"]["code"] == "server_error"
    assert "restarted" in body["error"]["message"]
    store.close()


def test_events_have_numbers(store: ResponseStore) -> None:
    store.add(new("1", status="queued", has_events=True))
    store.add_events("", "1", 0, [b"a", b"b"])
    store.add_events("", "1", 2, [b"c"])
    store.add_events("", "gone", 0, [b"d"])
    found = store.find("", "1")
    assert found is not None and store.num_events(found.number) == 3
    store.cancel("", "1")
    store.add_events("", "1", 3, [b"e"])  # readers have seen the end
    assert store.num_events(found.number) == 3
    assert store.events(found.number, 1) == [(1, b"b"), (2, b"c")]


def test_several_processes_share_a_file_that_only_the_user_can_read(
    store: ResponseStore, tmp_path: Path, clock: Clock
) -> None:
    store.add(new("1"))
    path = tmp_path / "r.sqlite"
    other = ResponseStore(path, now=clock)
    other.add(new("2", "1"))
    assert ids(store, "2") == ids(other, "2") == ["in-1", "out-1", "in-2", "out-2"]
    other.close()
    for each in tmp_path.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600, each


def test_a_full_disk_changes_nothing(store: ResponseStore) -> None:
    store.add(new("1"))
    (pages,) = store._do("PRAGMA page_count").fetchone()
    store._do(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.add(new("2", input=[item("i", 15_000)]))
    assert store.find("", "1") is not None and store.find("", "2") is None
    store._do("PRAGMA max_page_count = 1000000")
    assert store.add(new("2"))


def test_a_file_that_can_only_be_read_is_read(store: ResponseStore) -> None:
    store.add(new("1"))
    store.add(new("2", "1"))
    store.add(new("dead", "2", status="in_progress", output=()))
    store._do("UPDATE responses SET process = 'x' WHERE id = 'dead'")
    store._do("PRAGMA query_only = 1")
    assert ids(store, "2") == ["in-1", "out-1", "in-2", "out-2"]
    found = store.find("", "dead")
    assert found is not None and found.status == "failed"
    with pytest.raises(sqlite3.OperationalError):
        store.remove("", "1")


@pytest.mark.parametrize("version", [0, 1])
def test_the_file_of_another_program_is_refused_and_stays_as_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "other.sqlite"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE responses (id)")
    other.execute(f"PRAGMA user_version = {version}")
    other.close()
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(sqlite3.DatabaseError, match="other contents"):
        ResponseStore(path)
    assert path.read_bytes() == before and stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_that_others_could_read_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.touch()
    path.chmod(0o644)
    store = ResponseStore(path)
    store.add(new("1"))
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}
    store.close()


def test_a_text_is_not_used(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(sqlite3.DatabaseError):
        ResponseStore(text)
    assert text.read_text() == "not a database " * 100
