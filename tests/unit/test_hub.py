"""Where models are found: folders, the embedded one, and a hub cache laid out by hand. No network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight import hub
from inflight.errors import ConfigError, ModelNotFoundError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub with one model, org/name. The hub reads its variables when it is imported, so they are set there."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    repository = cache / "models--org--name"
    _model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.chdir(tmp_path)
    return cache


def test_none_is_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "EMBEDDED_MODEL", tmp_path / "model")
    with pytest.raises(ModelNotFoundError, match="embedded model"):
        hub.resolve_model_folder(None, None)
    _model(tmp_path / "model")
    assert hub.resolve_model_folder(None, None) == tmp_path / "model"


def test_the_embedded_model_is_package_data() -> None:
    assert Path(hub.__file__).parent / "demo" / "model" == hub.EMBEDDED_MODEL


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model_folder(str(_model(tmp_path / "m")), None) == tmp_path / "m"


def test_a_name_that_can_be_no_model_is_refused_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a server listens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_download", lambda *_args, **_options: pytest.fail("the hub was asked"))
    for model in (None, str(_model(tmp_path / "m")), "m", "org/name", "org/name:Q4_K_M"):
        hub.check_model_name(model)
    for model in ("nope", "llama3:8b", "./org/name", "/org/name:Q4"):
        with pytest.raises(ModelNotFoundError, match="there is no folder"):
            hub.check_model_name(model)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        hub.resolve_model_folder(str(tmp_path), None)


def test_a_tokenizer_needs_no_config(tmp_path: Path) -> None:
    assert hub.resolve_tokenizer_folder(str(tmp_path)) == tmp_path


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"is a file.*\*\.gguf"):
        hub.resolve_model_folder(str(path), None)


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    assert hub.resolve_model_folder(str(path)) == path
    assert hub.resolve_model_folder(str(tmp_path)) == path


def test_a_folder_of_safetensors_is_one_whatever_else_it_holds(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m")
    for name in ("model.gguf", "other.gguf", "model.safetensors"):
        (folder / name).write_bytes(b"")
    assert hub.resolve_model_folder(str(folder)) == folder


def test_the_first_part_of_a_split_model_is_the_model(tmp_path: Path) -> None:
    for name in ("m-00002-of-00003.gguf", "m-00001-of-00003.gguf"):
        (tmp_path / name).touch()
    assert hub.resolve_model_folder(str(tmp_path)) == tmp_path / "m-00001-of-00003.gguf"
    assert [path.name for path in hub.gguf_parts(tmp_path / "m-00001-of-00003.gguf")] == [
        f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    for whole in ("m.gguf", "m-00004-of-00003.gguf", "m-00000-of-00000.gguf", "m-1-of-3.gguf"):
        assert hub.gguf_parts(tmp_path / whole) == [tmp_path / whole]


def test_several_gguf_files_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"\(a\.gguf, b\.gguf\)"):
        hub.resolve_model_folder(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["/no/such", "./x/y", "../y", "~/nowhere/x", "a/b/c", "plain", "a/..", "./a", "a/", ""]
)
def test_a_path_that_is_absent_never_asks_the_hub(model: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", None)
    with pytest.raises(ModelNotFoundError):
        hub.resolve_model_folder(model, None)


def test_a_hub_id_is_its_snapshot(hub_cache: Path) -> None:
    snapshot = hub_cache / "models--org--name" / "snapshots" / COMMIT
    assert hub.resolve_model_folder("org/name", None) == snapshot
    assert hub.resolve_model_folder("org/name", COMMIT) == snapshot


def test_a_folder_goes_before_the_hub(hub_cache: Path, tmp_path: Path) -> None:
    _model(tmp_path / "org" / "name")
    assert hub.resolve_model_folder("org/name", None) == Path("org/name")


@pytest.mark.parametrize(("model", "revision"), [("org/other", None), ("org/name", "v2")])
def test_what_is_not_cached_is_one_clear_error(hub_cache: Path, model: str, revision: str | None) -> None:
    with pytest.raises(ModelNotFoundError, match="not in the hub's cache"):
        hub.resolve_model_folder(model, revision)


def test_an_invalid_hub_id(hub_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nor a valid hub id"):
        hub.resolve_model_folder("org/na me", None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("RepositoryNotFoundError", "no such model"),
        ("RevisionNotFoundError", "check the branch"),
        ("GatedRepoError", "HF_TOKEN"),
    ],
)
def test_answers_of_the_hub(hub_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> None:
    import huggingface_hub.errors

    def refuse(*_args: object, **_kwargs: object) -> str:
        kind = getattr(huggingface_hub.errors, name)
        raise kind.__new__(kind)  # its constructor wants the response of whichever HTTP library is in use

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=says):
        hub.resolve_model_folder("org/name", "v1")


def test_a_full_disk(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_args: object, **_kwargs: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match="No space left"):
        hub.resolve_model_folder("org/name", None)


FILES = """config.json model.safetensors model-00001-of-00002.safetensors model-00002-of-00002.safetensors
    model.safetensors.index.json chat_template.jinja additional_chat_templates/tool_use.jinja params.json tekken.json
    consolidated.safetensors original/config.json original/model.safetensors onnx/config.json onnx/model.onnx model.bin
    model.py""".split()


@pytest.mark.parametrize("has_index", [False, True])
def test_what_is_downloaded_of_a_repository_that_has_the_model_in_several_forms(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, has_index: bool
) -> None:
    import huggingface_hub
    from huggingface_hub.utils._paths import filter_repo_objects

    folder = hub_cache / "models--org--name" / "snapshots" / COMMIT
    downloaded: list[str] = []

    def download(_model: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert revision == "v1"
        downloaded.extend(filter_repo_objects(FILES, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.resolve_tokenizer_folder("org/name", "v1")
    texts = ["config.json", "model.safetensors.index.json", "chat_template.jinja"]
    texts += ["additional_chat_templates/tool_use.jinja", "params.json", "tekken.json"]
    assert downloaded == texts
    downloaded.clear()
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    if has_index:
        names = {"a": weights[0], "b": weights[1], "c": weights[1]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    hub.resolve_model_folder("org/name", "v1")
    assert downloaded == [*texts, *([] if has_index else ["model.safetensors"]), *weights]
    downloaded.clear()
    hub.resolve_model_folder("org/name", "v1", with_code=True)
    assert "model.py" in downloaded


@pytest.fixture
def gguf_cache(hub_cache: Path) -> Path:
    """An offline hub whose cache has some GGUF files of org/quants, and no config.json."""
    repository = hub_cache / "models--org--quants"
    snapshot = repository / "snapshots" / COMMIT
    for name in (
        "m-Q4_K_M.gguf",
        "m-IQ4_K_M.gguf",
        "m-Q8_0.gguf",
        "mmproj-Q8_0.gguf",
        "big/m-F16-00001-of-00002.gguf",
        "big/m-F16-00002-of-00002.gguf",
        "big/m-F32-00001-of-00002.gguf",
    ):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(b"GGUF")
    (snapshot / "folder-Q5_0.gguf").mkdir()  # no file
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("IQ4_K_M", "m-IQ4_K_M.gguf"),
        ("m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("m-Q8_0", "m-Q8_0.gguf"),
        ("Q8_0", "m-Q8_0.gguf"),
        ("mmproj-Q8_0.gguf", "mmproj-Q8_0.gguf"),
        ("F16", "big/m-F16-00001-of-00002.gguf"),
        ("big/m-F16-00001-of-00002.gguf", "big/m-F16-00001-of-00002.gguf"),
    ],
)
@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_one_gguf_file_of_a_hub_id(gguf_cache: Path, wanted: str, name: str, revision: str | None) -> None:
    assert hub.resolve_model_folder(f"org/quants:{wanted}", revision) == gguf_cache / name


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "org/quants:Q5_0",
            r"has no GGUF file 'Q5_0'; give one of its GGUF files as 'org/quants:FILE\.gguf': big/m-F16-",
        ),
        ("org/quants:Q4_K", "no GGUF file 'Q4_K'"),
        ("org/quants:../../x.gguf", "no GGUF file"),
        ("org/quants:m", "has 5 GGUF files with 'm' in their names"),
        ("org/quants:F32", r"is the first of 2 parts of a model, but .* lacks big/m-F32-00002-of-00002\.gguf"),
        (
            "org/quants:big/m-F16-00002-of-00002.gguf",
            r"is one of 2 parts of a model; give the first part, 'org/quants:big/m-F16-00001-of-00002\.gguf'",
        ),
        ("org/quants:", r"no GGUF file ''|GGUF files with ''"),
        ("org/name:Q4_0", "no GGUF file 'Q4_0'.*there are none"),
        ("org/absent:Q4_0", "'org/absent', it is not in the hub's cache"),
        ("org/quants", r"several GGUF files \(m-IQ4_K_M\.gguf, .*name the one to serve as 'org/quants:FILE\.gguf'"),
        ("./quants:Q4_0", "there is no folder './quants:Q4_0'"),
        ("plain:Q4_0", "there is no folder 'plain:Q4_0'"),
    ],
)
def test_a_gguf_file_that_is_not_there_is_one_clear_error(gguf_cache: Path, model: str, says: str) -> None:
    with pytest.raises(ModelNotFoundError, match=says):
        hub.resolve_model_folder(model)


def test_one_gguf_file_alone_is_downloaded(gguf_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[object] = []

    def record(model: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert not ignore_patterns
        asked.append((model, revision, allow_patterns))
        return str(gguf_cache)

    parts = ["m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"]
    names = ["README.md", "m-Q4_0.gguf", "m[1]-Q8_0.gguf", *parts]
    siblings = [SimpleNamespace(rfilename=name) for name in names]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_args, **_options: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    assert hub.resolve_model_folder("org/quants:Q4_0", "v1") == gguf_cache / "m-Q4_0.gguf"
    hub.resolve_model_folder("org/quants:Q8_0")
    assert asked == [("org/quants", "v1", ["m-Q4_0.gguf"]), ("org/quants", None, ["m[[]1]-Q8_0.gguf"])]
    assert hub.resolve_model_folder("org/quants:BF16") == gguf_cache / parts[0]
    assert asked[2] == ("org/quants", None, parts)
    with pytest.raises(
        ModelNotFoundError,
        match=r"org/quants has no GGUF file 'Q6_K'.*: m-BF16-00001-of-00002\.gguf, m-Q4_0\.gguf, m\[1\]-Q8_0\.gguf",
    ):
        hub.resolve_model_folder("org/quants:Q6_K")
    (gguf_cache / "empty").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_args, **_fields: str(gguf_cache / "empty"))
    with pytest.raises(ModelNotFoundError, match=r"no config\.json.*GGUF .*'org/q:FILE\.gguf': .*m-Q4_0\.gguf"):
        hub.resolve_model_folder("org/q")


def test_a_local_path_with_a_colon_goes_before_the_hub(gguf_cache: Path, tmp_path: Path) -> None:
    folder = _model(tmp_path / "org" / "quants:Q4_K_M")
    assert hub.resolve_model_folder("org/quants:Q4_K_M") == folder.relative_to(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_broken_json(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        hub.read_config(tmp_path)


def test_json_files_of_a_model(tmp_path: Path) -> None:
    assert hub.read_config(_model(tmp_path / "m")) == {"model_type": "llama"}
    assert hub.read_generation_config(tmp_path / "m") is None
    (tmp_path / "m" / "generation_config.json").write_text('{"top_k": 5}')
    assert hub.read_generation_config(tmp_path / "m") == {"top_k": 5}
    with pytest.raises(ConfigError, match="does not exist"):
        hub.read_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        hub.read_json(tmp_path)


@pytest.mark.parametrize("model", ["org/absent", "org/absent:Q4_0"])
def test_a_hub_that_cannot_be_reached_is_one_error_at_once(tmp_path: Path, model: str) -> None:
    """In another process, which reads the hub's address when it starts. Nobody listens on port 9."""
    program = (
        "import atexit, time\nfrom huggingface_hub import model_info, snapshot_download  # takes seconds on a busy machine\n"
        "from inflight.hub import resolve_model_folder\nbegin = time.monotonic()\n"
        f"atexit.register(lambda: print(time.monotonic() - begin))\nresolve_model_folder({model!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert float(done.stdout) < 15  # with retries: 24 s
    assert "the hub cannot be reached" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("model", ["org/absent", "org/absent:Q4_0"])
def test_a_hub_that_never_answers_is_one_error(tmp_path: Path, model: str) -> None:
    """`inflight pull` in another process, which reads the hub's address when it starts."""
    program = (
        "import sys\nfrom inflight import hub\nfrom inflight.entrypoints.cli.main import main\n"
        f"hub.LIST_SECONDS = 0.5\nsys.argv = ['inflight', 'pull', {model!r}]\nmain()"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts connections, and nobody reads them
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode != 0 and f"{address} has not answered for 0.5 s" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_download_that_comes_to_a_halt_says_so(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadTimeout(Exception):
        """As httpx has it."""

    def fail(*_args: object, **_kwargs: object) -> str:
        raise ReadTimeout("The read operation timed out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=r"'org/name' could not be downloaded: https?://.* for 10 s"):
        hub.resolve_model_folder("org/name")


def test_only_this_thread_and_only_requests_without_a_limit_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(event_hooks={"request": []})
    monkeypatch.setattr("huggingface_hub.get_session", lambda: client)
    request = SimpleNamespace(extensions={"timeout": {"read": None, "connect": 7.0}})
    with hub._limited_silence():
        [hook] = client.event_hooks["request"]
        other = threading.Thread(target=hook, args=(request,))
        other.start()
        other.join()
        assert request.extensions["timeout"] == {"read": None, "connect": 7.0}
        hook(request)
    assert request.extensions["timeout"] == {"read": hub.LIST_SECONDS, "connect": 7.0}
    assert client.event_hooks == {"request": []}


def test_a_file_for_images_beside_the_model_is_no_second_model(tmp_path: Path) -> None:
    for name in ("model.gguf", "mmproj-model-f16.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert hub.resolve_model_folder(str(tmp_path)) == tmp_path / "model.gguf"


def test_a_folder_with_an_adapter_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="is an adapter"):
        hub.resolve_model_folder(str(tmp_path))
