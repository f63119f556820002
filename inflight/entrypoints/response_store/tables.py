"""`make_tables`: the tables of the file of stored responses. Triggers keep the sum of each owner's bytes."""

import sqlite3
from collections.abc import Iterable

_FORMAT = 0x496E_6601  # "In", "f" and the number of this form of the tables; a file of another format is not used

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


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables in a new file. Call it outside of a transaction.

    Raises:
        sqlite3.Error: the file has other contents, or cannot be written. It stays as it is.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        (known,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if known == 0 and num_tables == 0:
            for statement in _statements(_TABLES):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")
        elif known != _FORMAT:
            raise sqlite3.DatabaseError("the file has other contents, or was written by another version")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterable[str]:
    """The statements of a script. Those of a trigger stay together."""
    statement = ""
    for line in script.strip().splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
