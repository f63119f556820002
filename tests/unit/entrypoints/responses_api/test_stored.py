"""Stored responses over a played engine: conversations, the endpoints below /v1/responses/ID, and the background."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.response_store.store import ResponseStore
from inflight.errors import ErrorKind
from inflight.interface.request import FinishReason
from tests.unit.entrypoints.api_client import SETTINGS, Api, serving

PATH = "/v1/responses"
KEYS = ("key-of-one", "key-of-two")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    path = tmp_path_factory.mktemp("responses") / "r.sqlite"
    with serving(replace(SETTINGS, response_store=str(path), response_store_bytes=2**20)) as made:
        yield made


@pytest.fixture(autouse=True)
def plays(api: Api) -> None:
    api.core.texts, api.core.held = ("Hi!",), False


def create(api: Api, **body: Any) -> Any:
    answer = api.post(PATH, {"input": "x", **body})
    assert answer.status == 200, answer.text
    return answer.json


def stored(api: Api, id: str) -> Any:
    answer = api.get(f"{PATH}/{id}")
    assert answer.status == 200, answer.text
    return answer.json


def prompt(api: Api) -> str:
    return bytes(api.core.prompts[-1]).decode()


def test_a_response_is_read_again_as_it_was(api: Api) -> None:
    made = create(api, metadata={"a": "b"})
    assert made["store"] is True and stored(api, made["id"]) == made
    events = api.post(PATH, {"input": "x", "stream": True}).events
    assert stored(api, events[-1]["response"]["id"]) == events[-1]["response"]


def test_store_false_stores_nothing(api: Api) -> None:
    made = create(api, store=False)
    assert made["store"] is False
    answer = api.get(f"{PATH}/{made['id']}")
    assert (answer.status, answer.error["type"], answer.error["code"]) == (
        404,
        "invalid_request_error",
        "response_not_found",
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_goes_on_without_its_instructions(api: Api, is_stream: bool) -> None:
    first = create(api, input="one", instructions="Be short.")
    assert prompt(api) == "<system>Be short.<user>one<assistant>"
    api.core.texts = ("Ho!",)
    second = create(api, input=[{"role": "user", "content": "two"}], previous_response_id=first["id"])
    assert prompt(api) == "<user>one<assistant>Hi!<user>two<assistant>"
    assert second["previous_response_id"] == first["id"]
    body = {"input": "three", "previous_response_id": second["id"], "instructions": "Now long.", "stream": is_stream}
    assert api.post(PATH, body).status == 200
    assert prompt(api) == "<system>Now long.<user>one<assistant>Hi!<user>two<assistant>Ho!<user>three<assistant>"
    count = api.post(f"{PATH}/input_tokens", {"input": "three", "previous_response_id": second["id"]})
    assert count.json["input_tokens"] == len("<user>one<assistant>Hi!<user>two<assistant>Ho!<user>three<assistant>")


def test_a_deleted_response_cannot_be_continued_and_not_what_continued_it(api: Api) -> None:
    first = create(api)
    second = create(api, previous_response_id=first["id"])
    answer = api.get(f"{PATH}/{first['id']}", method="DELETE")
    assert answer.json == {"id": first["id"], "object": "response", "deleted": True}
    assert api.get(f"{PATH}/{first['id']}", method="DELETE").status == 404
    assert stored(api, second["id"]) == second
    for previous in (first["id"], second["id"], "resp_none"):
        answer = api.post(PATH, {"input": "x", "previous_response_id": previous})
        assert (answer.status, answer.error["param"], answer.error["code"]) == (
            404,
            "previous_response_id",
            "previous_response_not_found",
        )


def test_what_is_wrong_in_a_continued_request_has_its_own_place(api: Api) -> None:
    first = create(api)
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
    answer = api.post(PATH, {"input": [image], "previous_response_id": first["id"]})
    assert (answer.status, answer.error["param"].partition(".")[0]) == (400, "input[0]")


def test_a_conversation_that_is_too_long(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.entrypoints.responses_api.kept.MAX_MESSAGES", 4)
    first = create(api)
    assert api.post(PATH, {"input": "x", "previous_response_id": first["id"]}).status == 200
    answer = api.post(PATH, {"input": [{"role": "user", "content": "x"}] * 2, "previous_response_id": first["id"]})
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")


def test_a_reference_stands_for_a_stored_item(api: Api) -> None:
    first = create(api, input="one")
    (said,) = first["output"]
    (asked,) = api.get(f"{PATH}/{first['id']}/input_items").json["data"]
    references = [{"type": "item_reference", "id": each["id"]} for each in (asked, said)]
    second = create(api, input=[*references, {"role": "user", "content": "two"}])
    assert prompt(api) == "<user>one<assistant>Hi!<user>two<assistant>"
    listed = api.get(f"{PATH}/{second['id']}/input_items?order=asc").json["data"]
    assert [each["id"] for each in listed[:2]] == [asked["id"], said["id"]]
    unknown = [{"type": "item_reference", "id": "msg_none"}, {"role": "user", "content": "x"}]
    answer = api.post(PATH, {"input": unknown})
    assert (answer.status, answer.error["param"]) == (404, "input[0].id")


def test_the_input_is_listed_page_by_page(api: Api) -> None:
    first = create(api, input=[{"role": "user", "content": "one"}, {"role": "developer", "content": "two"}])
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_own"}
    result = {"type": "function_call_output", "call_id": "c", "output": "done"}
    second = create(api, input=[call, result], previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    whole = api.get(f"{path}?order=asc").json
    assert [each["type"] for each in whole["data"]] == ["message"] * 3 + ["function_call", "function_call_output"]
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert whole["data"][2] == first["output"][0] and whole["data"][3]["id"] == "fc_own"
    names = [each["id"] for each in whole["data"]]
    assert len(set(names)) == 5 and (whole["has_more"], whole["first_id"], whole["last_id"]) == (
        False,
        names[0],
        names[-1],
    )
    assert [each["id"] for each in api.get(path).json["data"]] == names[::-1]
    page = api.get(f"{path}?order=asc&limit=2").json
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (names[:2], True)
    page = api.get(f"{path}?order=asc&limit=3&after={names[1]}").json
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (names[2:], False)
    assert api.get(f"{path}?after={names[0]}").json == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("end", "method", "status", "param"),
    [
        ("/input_items?order=up", "GET", 400, "order"),
        ("/input_items?limit=0", "GET", 400, "limit"),
        ("/input_items?limit=101", "GET", 400, "limit"),
        ("/input_items?limit=x", "GET", 400, "limit"),
        ("/input_items?after=msg_none", "GET", 404, "after"),
        ("?stream=yes", "GET", 400, "stream"),
        ("?stream=true", "GET", 400, "stream"),
        ("?starting_after=1", "GET", 400, "starting_after"),
        ("?stream=true&starting_after=-1", "GET", 400, "starting_after"),
        ("/cancel", "POST", 400, "response_id"),
    ],
)
def test_what_is_refused(api: Api, end: str, method: str, status: int, param: str) -> None:
    made = create(api)
    answer = api.get(f"{PATH}/{made['id']}{end}", method=method)
    assert (answer.status, answer.error["param"]) == (status, param)


@pytest.mark.parametrize(("end", "method"), [("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")])
def test_a_response_of_another_key_is_not_there(tmp_path: Path, end: str, method: str) -> None:
    settings = replace(SETTINGS, api_keys=KEYS, response_store=str(tmp_path / "r.sqlite"))
    own, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    with serving(settings) as api:
        made = api.post(PATH, {"input": "x"}, own).json
        (asked,) = api.get(f"{PATH}/{made['id']}/input_items", own).json["data"]
        answer = api.get(f"{PATH}/{made['id']}{end}", other, method=method)
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
        assert api.post(PATH, {"input": "y", "previous_response_id": made["id"]}, other).status == 404
        referred = {"input": [{"type": "item_reference", "id": asked["id"]}]}
        assert api.post(PATH, referred, other).status == 404 and api.post(PATH, referred, own).status == 200
        assert api.get(f"{PATH}/{made['id']}", own).json == made


def test_a_response_in_the_background(api: Api) -> None:
    api.core.held = True
    queued = create(api, background=True)
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    api.until(lambda: api.num_running == 1)
    answer = api.post(PATH, {"input": "x", "previous_response_id": queued["id"]})
    assert (answer.status, answer.error["code"]) == (400, "previous_response_not_completed")
    assert stored(api, queued["id"])["status"] in ("queued", "in_progress")
    api.do(lambda: api.core.emit(len(api.core.sequences) - 1, "Hi!\0", FinishReason.STOP))
    api.until(lambda: not api.num_running)
    api.until(lambda: stored_status(api, queued["id"]) == "completed")
    done = stored(api, queued["id"])
    assert done["output"][0]["content"][0]["text"] == "Hi!" and done["completed_at"] is not None
    assert api.get(f"{PATH}/{queued['id']}/cancel", method="POST").json == done  # it has ended already
    api.core.held = False
    create(api, input="y", previous_response_id=queued["id"])
    assert prompt(api) == "<user>x<assistant>Hi!<user>y<assistant>"


def stored_status(api: Api, id: str) -> str:
    """Without the app, so that it can be asked on the app's event loop."""
    store = ResponseStore(Path(api.settings.response_store))
    found = store.find("", id)
    store.close()
    return "" if found is None else found.status


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_response_in_the_background_is_ended(api: Api, method: str) -> None:
    api.core.held = True
    queued = create(api, background=True)
    api.core.aborted.clear()
    path = f"{PATH}/{queued['id']}"
    answer = api.get(f"{path}/cancel" if method == "POST" else path, method=method)
    assert answer.status == 200
    api.until(lambda: api.core.aborted)
    api.until(lambda: not api.num_running)
    if method == "POST":
        assert answer.json["status"] == stored(api, queued["id"])["status"] == "cancelled"
        assert api.get(f"{path}/cancel", method="POST").json["status"] == "cancelled"
    else:
        assert api.get(path).status == 404


def test_a_stream_in_the_background_outlives_its_client(api: Api) -> None:
    api.core.held = True
    exchange = api.open(PATH, {"input": "x", "background": True, "stream": True})
    exchange.until(lambda: "response.in_progress" in exchange.answer.text)
    number = len(api.core.sequences) - 1
    api.do(lambda: api.core.emit(number, "Hi"))
    exchange.until(lambda: "output_text.delta" in exchange.answer.text)
    exchange.leave()
    seen = exchange.answer.events
    id = seen[0]["response"]["id"]
    assert [each["type"] for each in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    follower = api.open(f"{PATH}/{id}?stream=true&starting_after={seen[-1]['sequence_number']}", method="GET")
    api.do(lambda: api.core.emit(number, "!\0", FinishReason.STOP))
    rest = follower.end().events
    assert [each["sequence_number"] for each in [*seen, *rest]] == list(range(len(seen) + len(rest)))
    assert rest[-1]["type"] == "response.completed" and rest[-1]["response"] == stored(api, id)
    again = api.get(f"{PATH}/{id}?stream=true")
    assert again.events == [*seen, *rest] and again.text.endswith("data: [DONE]\n\n")
    assert api.get(f"{PATH}/{id}?stream=true&starting_after=999").text == "data: [DONE]\n\n"
    texts = [each["delta"] for each in again.events if each["type"] == "response.output_text.delta"]
    assert "".join(texts) == "Hi!"


def test_a_stream_of_a_response_that_is_cancelled_ends(api: Api) -> None:
    api.core.held = True
    exchange = api.open(PATH, {"input": "x", "background": True, "stream": True})
    exchange.until(lambda: "response.in_progress" in exchange.answer.text)
    id = next(line for line in exchange.answer.text.split('"') if line.startswith("resp-"))
    assert api.get(f"{PATH}/{id}/cancel", method="POST").json["status"] == "cancelled"
    last = exchange.end().events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.cancelled", "cancelled")


def test_a_failure_in_the_background_is_the_response(api: Api) -> None:
    api.core.held = True
    queued = create(api, background=True)
    api.do(lambda: api.core.fail(len(api.core.sequences) - 1, "the grammar is too complex", ErrorKind.REQUEST))
    api.until(lambda: stored_status(api, queued["id"]) == "failed")
    failed = stored(api, queued["id"])
    assert failed["error"] == {"code": "invalid_request_error", "message": "the grammar is too complex"}


@pytest.mark.parametrize("body", [{"input": "x" * 10_000}, {"temperature": "1"}, {"model": "third"}, {"store": False}])
def test_a_wrong_request_in_the_background_is_refused_at_once(api: Api, body: dict[str, Any]) -> None:
    answer = api.post(PATH, {"input": "x", "background": True, **body})
    assert 400 <= answer.status < 500 and answer.error["param"] in (*body, "background")


def test_an_id_of_the_clients_choice_is_taken_while_it_is_computed(api: Api) -> None:
    api.core.held = True
    mine = {"x-request-id": "mine"}
    assert api.post(PATH, {"input": "x", "background": True}, mine).status == 200
    answer = api.post(PATH, {"input": "x", "background": True}, mine)
    assert (answer.status, answer.error["code"]) == (409, "response_exists")
    assert api.get(f"{PATH}/resp-mine", method="DELETE").status == 200
    api.until(lambda: not api.num_running)


def test_if_nothing_can_be_stored_the_answer_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    with serving(replace(SETTINGS, response_store=str(folder / "r.sqlite"))) as api:
        for _ in range(2):
            made = create(api)
            assert made["output"][0]["content"][0]["text"] == "Hi!"
            # whether a response is there is not known: a 404 would say that it is not
            for end, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
                answer = api.get(f"{PATH}/{made['id']}{end}", method=method)
                assert (answer.status, answer.error["code"]) == (503, "response_store_failed")
        assert api.post(PATH, {"input": "x", "stream": True}).events[-1]["type"] == "response.completed"
        reference = [{"type": "item_reference", "id": "msg_1"}]
        for more in ({"background": True}, {"previous_response_id": made["id"]}, {"input": reference}):
            answer = api.post(PATH, {"input": "x", **more})
            assert (answer.status, answer.error["code"]) == (503, "response_store_failed")
        api.until(lambda: not api.num_running)
    assert [record.message for record in caplog.records if "responses cannot be" in record.message][1:] == []
    assert "responses cannot be stored" in caplog.text


def test_a_response_in_the_background_outlasts_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.entrypoints.response_store.responses.WAIT_SECONDS", 0.0)
    monkeypatch.setattr("inflight.entrypoints.responses_api.background.RETRY_SECONDS", 0.05)
    path = tmp_path / "r.sqlite"
    with serving(replace(SETTINGS, response_store=str(path))) as api:
        api.core.texts, api.core.held = ("Hi!",), True
        exchange = api.open(PATH, {"input": "x", "background": True, "stream": True})
        exchange.until(lambda: "response.in_progress" in exchange.answer.text)
        id = exchange.answer.events[0]["response"]["id"]
        number = len(api.core.sequences) - 1
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # no other process can write
            api.do(lambda: api.core.emit(number, "Hi"))
            api.do(lambda: api.core.emit(number, "!\0", FinishReason.STOP))
            api.until(lambda: not api.num_running)
            api.core.held = False
            assert create(api)["status"] == "completed"
            assert stored(api, id)["status"] == "in_progress"
            other.execute("ROLLBACK")
        events = exchange.end().events
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed" and events[-1]["response"] == stored(api, id)
        texts = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
        assert "".join(texts) == "Hi!"


def test_a_stream_that_cannot_be_read_any_more_ends_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    with serving(replace(SETTINGS, response_store=str(path))) as api:
        api.core.held = True
        exchange = api.open(PATH, {"input": "x", "background": True, "stream": True})
        exchange.until(lambda: "response.in_progress" in exchange.answer.text)
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("ALTER TABLE events RENAME TO damaged")
        last = exchange.end().events[-1]
        assert (last["type"], last["code"]) == ("error", "response_store_failed")


def test_what_is_larger_than_all_may_be_is_answered_and_not_stored(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    other = create(api)
    large = {"input": "x", "metadata": {"a": "x" * 2**20}}
    made = create(api, **large)
    assert made["output"][0]["content"][0]["text"] == "Hi!"
    assert api.get(f"{PATH}/{made['id']}").status == 404
    answer = api.post(PATH, {**large, "background": True})
    assert (answer.status, answer.error["code"]) == (400, "response_too_large")
    assert str(2**20) in answer.error["message"]
    api.until(lambda: not api.num_running)
    assert stored(api, other["id"]) == other
    assert "responses cannot be" not in caplog.text, "the file can be used"
    assert "is not stored" in caplog.text


def test_a_conversation_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    with serving(replace(SETTINGS, response_store=str(path))) as api:
        first = create(api)
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE items SET body = ?", (b'{"type":"message"}',))
        answer = api.post(PATH, {"input": "y", "previous_response_id": first["id"]})
        assert (answer.status, answer.error["code"]) == (500, "response_store_failed")
        assert len(api.core.prompts) == 1


def test_a_server_that_stores_nothing(tmp_path: Path) -> None:
    with serving(replace(SETTINGS, response_store="none")) as api:
        made = create(api, store=True)
        assert made["store"] is False
        answer = api.get(f"{PATH}/{made['id']}")
        assert answer.status == 404 and "--response-store none" in answer.error["message"]
        answer = api.post(PATH, {"input": "x", "background": True})
        assert (answer.status, answer.error["param"]) == (400, "background")
