"""A chat model, an embedder and a reranker behind one address: what clients see, what a fault costs, what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig

import inflight
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.router.catalog import Catalog
from inflight.entrypoints.router.loaded_models import LoadedModels
from inflight.entrypoints.router.presets import Preset
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import OutOfMemoryError
from tests.conftest import FULL
from tests.e2e.serve_process import ServeProcess, serving, tree_of
from tests.e2e.test_pooling import save
from tests.e2e.test_text_pairs import SIZES, backend
from tests.support.descriptors import open_descriptors
from tests.support.waits import wait_until

CHAT = Path(inflight.__file__).parent / "demo" / "model"
SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
QUERY, DOCUMENTS = "the fox tells anna", ["a story about rivers", "mountains in one day"]
SMALL: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    (made / "chat").symlink_to(CHAT)
    for name, kind, more in (
        ("embed", AutoModel, {}),
        ("org/rerank", AutoModelForSequenceClassification, {"num_labels": 1}),
    ):
        (made / name).mkdir(parents=True)
        save(kind, BertConfig(**SIZES, **more), made / name)
        backend().save(str(made / name / "tokenizer.json"))
        (made / name / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    (made / "broken").mkdir()
    (made / "broken" / "config.json").write_text('{"model_type": "qwen3"}')
    (made / "presets.ini").write_text(
        "[*]\nctx-size = 128\nkv-cache-memory-bytes = 16M\nnum-threads = 1\n"
        "[chat]\nload-on-startup = true\nmax-model-len = 2048\n[embed]\ndtype = float32\n[org/rerank]\ndtype = float32\n"
    )
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServeProcess]:
    options = ["--models-dir", str(folder), "--models-preset", str(folder / "presets.ini"), "--models-max", "3"]
    with serving(*options, "--api-key", "a-long-secret", has_name=False) as made:
        yield made
        made.end_and_leave_nothing()


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> openai.OpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key="a-long-secret", max_retries=0, timeout=300)


def ask(server: ServeProcess, method: str, path: str, body: object = None) -> tuple[int, Any]:
    status, text = server.request(method, path, body, {"Authorization": "Bearer a-long-secret"})
    return status, json.loads(text)


def states(server: ServeProcess) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in ask(server, "GET", "/models")[1]["data"]}


def chat(client: openai.OpenAI, **more: Any) -> Any:
    fixed: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    return client.chat.completions.create(**fixed, max_tokens=8, **more)


def test_the_usual_set(server: ServeProcess, client: openai.OpenAI) -> None:
    """Each is loaded by the first request that names it, which comes while another one loads it, too."""
    assert states(server)["org/rerank"] == "unloaded"
    assert server.request("GET", "/v1/models")[0] == 401
    with ThreadPoolExecutor(8) as pool:
        chats = [pool.submit(chat, client) for _ in range(3)]
        vectors = [pool.submit(client.embeddings.create, model="embed", input=QUERY) for _ in range(2)]
        body = {"model": "org/rerank", "query": QUERY, "documents": DOCUMENTS}
        ranked = pool.submit(ask, server, "POST", "/v1/rerank", body)
    assert len({each.result().choices[0].message.content for each in chats}) == 1
    assert chats[0].result().model == "chat"
    assert vectors[0].result().data[0].embedding == vectors[1].result().data[0].embedding
    status, answer = ranked.result()
    assert status == 200 and len(answer["results"]) == 2 and answer["model"] == "org/rerank"
    assert states(server) == {"chat": "loaded", "embed": "loaded", "org/rerank": "loaded", "broken": "unloaded"}
    cards = {each["id"]: each for each in ask(server, "GET", "/v1/models")[1]["data"]}
    assert (cards["chat"]["max_model_len"], cards["embed"]["max_model_len"]) == (2048, 128)
    assert {each["name"] for each in ask(server, "GET", "/api/ps")[1]["models"]} == {"chat", "embed", "org/rerank"}
    assert ask(server, "POST", "/api/show", {"model": "chat"})[1]["capabilities"][0] == "completion"
    _, metrics = server.request("GET", "/metrics", headers={"Authorization": "Bearer a-long-secret"})
    assert metrics.count("# TYPE inflight:engine_up") == 1
    assert all(f'inflight:engine_up{{model_name="{name}"}} 1.0' in metrics for name in ("chat", "embed", "org/rerank"))


def test_stored_responses_remember_their_model(server: ServeProcess, client: openai.OpenAI) -> None:
    short: Any = {"temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(model="chat", input="What is 2 + 3?", **short)
    body = {"input": "And 7 + 5?", "previous_response_id": first.id, **short}
    key = {"Authorization": "Bearer a-long-secret"}
    status, text = server.request("POST", "/v1/responses", body, key)  # it names no model
    assert status == 200 and json.loads(text)["model"] == "chat"
    unknown = {**body, "previous_response_id": "resp_1"}
    assert server.request("POST", "/v1/responses", unknown, key)[0] == 404
    queued = client.responses.create(
        model="chat", input="x", background=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
    )
    # it is cancelled, read and listed without the model, and a model with such a response stays loaded
    server.request("POST", "/models/unload", {"model": "chat"}, key)
    assert client.responses.retrieve(queued.id).status in ("queued", "in_progress")
    assert client.responses.cancel(queued.id).status == "cancelled"
    wait_until(lambda: client.models.retrieve("chat").to_dict()["status"] == {"value": "unloaded"})
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert [item.type for item in client.responses.input_items.list(first.id)] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.models.retrieve("chat").to_dict()["status"] == {"value": "unloaded"}


def test_errors_have_their_status(server: ServeProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.embeddings.create(model="absent", input="a")
    with pytest.raises(openai.BadRequestError, match="is a path"):
        client.embeddings.create(model="../embed", input="a")
    with pytest.raises(openai.InternalServerError, match="broken") as refused:
        client.embeddings.create(model="broken", input="a")
    assert refused.value.status_code == 500
    card = ask(server, "GET", "/v1/models/broken")[1]
    assert card["status"]["value"] == "unloaded" and card["status"]["failed"]
    with pytest.raises(openai.BadRequestError):  # what the model's own server refuses stays as it is
        client.embeddings.create(model="embed", input=[])


def test_a_killed_engine_costs_no_other_model_anything(server: ServeProcess, client: openai.OpenAI) -> None:
    """The stream of the killed engine goes on with the same tokens as without the fault: its own server's promise."""
    expected = chat(client, extra_body={"ignore_eos": True, "min_tokens": 8}).choices[0].message.content
    pid = server.wait_for_child("model chat")
    [engine] = [each for each in tree_of(pid) if each != pid and title_of(each) == "inflight: engine"]
    before = client.embeddings.create(model="embed", input=QUERY).data[0].embedding
    long = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = []
    for number, event in enumerate(long):
        pieces += [event.choices[0].delta.content or ""] if event.choices else []
        if number == 5:
            os.kill(engine, signal.SIGKILL)
            assert client.embeddings.create(model="embed", input=QUERY).data[0].embedding == before
    assert "".join(pieces).startswith(expected) and event.choices[0].finish_reason == "length"


def test_a_killed_server_is_loaded_again(server: ServeProcess, client: openai.OpenAI) -> None:
    expected = chat(client).choices[0].message.content
    os.kill(server.wait_for_child("model chat"), signal.SIGKILL)
    wait_until(lambda: states(server)["chat"] == "unloaded")
    assert states(server)["embed"] == "loaded"
    assert chat(client).choices[0].message.content == expected


def test_a_stream_outlives_that_its_model_is_unloaded(server: ServeProcess, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="chat", prompt="Once", max_tokens=800, stream=True, temperature=0, extra_body={"ignore_eos": True}
    )
    next(stream)
    assert ask(server, "POST", "/models/unload", {"model": "chat"}) == (200, {"success": True})
    assert states(server)["chat"] == "unloading"
    assert list(stream)[-1].choices[0].finish_reason == "length"
    wait_until(lambda: states(server)["chat"] == "unloaded")
    assert ask(server, "POST", "/models/load", {"model": "chat"}) == (200, {"success": True})
    wait_until(lambda: states(server)["chat"] == "loaded")
    status, answer = ask(server, "POST", "/api/generate", {"model": "chat", "keep_alive": 0})
    assert status == 200 and answer["done"]
    wait_until(lambda: states(server)["chat"] == "unloaded")


def title_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return next((word for word in words if word.startswith("inflight: ")), "")


async def spare_processes(models: LoadedModels) -> set[int]:
    """The processes that wait for the next model, when both have imported their libraries."""
    while (spare := models._spare._spare) is None or not spare.is_ready:
        await asyncio.sleep(0.02)
    return tree_of(spare.process.pid)


@pytest.mark.parametrize("has_spare", [False, True])
def test_swaps(folder: Path, has_spare: bool) -> None:
    """The model that was used least recently makes room; no process and no memory stays behind. The processes that wait for the
    next model become its server and its engine."""

    async def run() -> None:
        settings = ServerSettings(models_dir=str(folder), models_max=1, models_spare=has_spare)
        models = LoadedModels(settings, EngineArgs(**SMALL), lambda _: False)
        models.start_looking()
        known = Catalog(folder, {}, has_cache=False).models()
        before, files = model_processes(), list[int]()
        try:
            for number in range(100 if FULL and not has_spare else 3):
                name = "embed" if number % 2 else "org/rerank"
                spare = await spare_processes(models) if has_spare else set()
                async with models.use(known[name]) as slot:
                    titles = {title_of(pid) for pid in spare}
                    assert not has_spare or {"inflight: engine", f"inflight: model {name}"} <= titles
                    loaded = [each for each in models.slots().values() if each.state == "loaded"]
                    assert loaded == [slot] and len(model_processes() - before) == 1
                    files.append(len(open_descriptors(os.getpid())))
        finally:
            await models.close()
        assert files[-1] - files[0] < len(files) - 1, "each swap leaves descriptors open"
        assert model_processes() == before

    asyncio.run(run())


def test_pins_and_memory(folder: Path) -> None:
    """A pinned model is never the one that makes room. Without memory the idle ones go first, and then it is an error."""

    async def run() -> None:
        settings = ServerSettings(models_dir=str(folder), models_max=2, models_spare=False)
        presets = {
            "embed": Preset(is_pinned=True),
            "huge": Preset(model=str(folder / "chat"), engine={"kv_cache_memory_bytes": 1 << 50}),
        }
        models = LoadedModels(settings, EngineArgs(**SMALL), lambda _: False)
        models.start_looking()
        known = Catalog(folder, presets, has_cache=False).models()
        before = model_processes()
        try:
            for name in ("embed", "org/rerank"):
                async with models.use(known[name]):
                    pass
            with pytest.raises(OutOfMemoryError, match="GiB"):
                async with models.use(known["huge"]):
                    pass
            assert {name: str(each.state) for name, each in models.slots().items()} == {
                "embed": "loaded",
                "org/rerank": "unloaded",
                "huge": "unloaded",
            }
        finally:
            await models.close()
        assert model_processes() == before

    asyncio.run(run())


def model_processes() -> set[int]:
    found = set()
    for pid in tree_of(os.getpid()):
        with contextlib.suppress(OSError):
            if title_of(pid).startswith("inflight: model "):
                found.add(pid)
    return found


@pytest.mark.full
def test_a_load_beside_streams(folder: Path) -> None:
    """Prints how much longer the longest gaps of 8 streams are while another model is loaded."""
    options = ["--models-dir", str(folder), "--models-preset", str(folder / "presets.ini")]
    with serving(*options, has_name=False) as made:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{made.port}/v1", api_key="-", max_retries=0, timeout=300)
        chat(client)

        def gaps(_: int) -> list[float]:
            times = [
                time.monotonic()
                for _ in client.completions.create(
                    model="chat", prompt="Once", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
                )
            ]
            return [later - earlier for earlier, later in itertools.pairwise(times)]

        found = []
        for loads in (False, True):
            with ThreadPoolExecutor(9) as pool:
                loading = pool.submit(client.embeddings.create, model="embed", input="a") if loads else None
                every = torch.tensor([gap for each in pool.map(gaps, range(8)) for gap in each])
                assert loading is None or loading.result().data
            found.append(float(torch.quantile(every, 0.99)))
        print(f"p99 of the gaps: {found[0] * 1e3:.1f} ms, {found[1] * 1e3:.1f} ms beside a load")
