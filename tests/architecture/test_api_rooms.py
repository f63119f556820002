"""An API is a room that nothing else knows: only the table of APIs names it, and its code imports no other API's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from inflight.entrypoints.apis import APIS
from tests.architecture.source import PACKAGE, ROOT, Package, write_package

TABLE = "entrypoints/apis.py"
SHARED = ("entrypoints/http/", "entrypoints/serve/")  # no name of an API is in their code or comments
ROOMS = tuple(sorted({api.routes.split(".")[2] for api in APIS.values()}))


def room_problems(package: Package, rooms: tuple[str, ...] = ROOMS) -> list[str]:
    found = []
    for file in package.files:
        for imported in package.imports(file):
            other = next(
                (room for room in rooms if f"{imported.module}.".startswith(f"{PACKAGE}.entrypoints.{room}.")), None
            )
            if other is None or file.path.startswith(f"entrypoints/{other}/"):
                continue
            if file.path != TABLE:
                found.append(f"{file.path} imports {imported.module}")
            elif imported.module != f"{PACKAGE}.entrypoints.{other}.api":
                found.append(f"the table imports {imported.module}, which is more than a row")
    return found


def test_only_the_table_knows_a_room_of_an_api() -> None:
    assert room_problems(Package(ROOT / PACKAGE)) == []


def test_shared_code_names_no_api() -> None:
    names = re.compile("openai|anthropic|ollama", re.IGNORECASE)
    files = [file for file in Package(ROOT / PACKAGE).files if file.path.startswith(SHARED)]
    assert len(files) > 30
    assert [file.path for file in files if names.search((ROOT / PACKAGE / file.path).read_text(encoding="utf-8"))] == []


def test_what_is_found(tmp_path: Path) -> None:
    files = {
        TABLE: "from inflight.entrypoints.a import api\nimport inflight.entrypoints.a.routes",
        "entrypoints/a/api.py": "",
        "entrypoints/a/routes.py": "import inflight.entrypoints.a.api\nfrom inflight.entrypoints.b.routes import add",
        "entrypoints/b/routes.py": "",
        "entrypoints/http/app.py": "import inflight.entrypoints.b.routes",
    }
    assert sorted(room_problems(write_package(tmp_path, files), ("a", "b"))) == [
        "entrypoints/a/routes.py imports inflight.entrypoints.b.routes",
        "entrypoints/http/app.py imports inflight.entrypoints.b.routes",
        "the table imports inflight.entrypoints.a.routes, which is more than a row",
    ]


ONE_API = """
import pathlib

import inflight
from tests.unit.entrypoints.api_client import serving

assert pathlib.Path(inflight.__file__).parent == pathlib.Path("inflight").absolute()

with serving() as api:
    hello = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    assert api.post("/v1/messages", hello).json["type"] == "message"
    assert api.post("/v1/messages", {}).json["error"]["type"] == "invalid_request_error"
    assert api.post("/v1/chat/completions", hello).json["error"]["code"] == "not_found"
    assert api.get("/health").status == 200 and api.get("/openapi.json").status == 200
"""


def test_without_the_folders_of_all_others_an_api_answers(tmp_path: Path) -> None:
    package, copy = ROOT / PACKAGE, tmp_path / "inflight"
    copy.mkdir()
    for each in package.iterdir():
        if each.name not in ("entrypoints", "__pycache__"):
            (copy / each.name).symlink_to(each)
    gone = set(ROOMS) - {"anthropic"}
    shutil.copytree(package / "entrypoints", copy / "entrypoints", ignore=shutil.ignore_patterns("__pycache__", *gone))
    table = copy / "entrypoints" / "apis.py"
    rows = "|".join(gone)
    table.write_text(
        re.sub(
            rf"^(from inflight\.entrypoints\.({rows}) import|    .*: ({rows})\.API,).*\n",
            "",
            table.read_text(),
            flags=re.M,
        )
    )
    (tmp_path / "tests").symlink_to(package.parent / "tests")
    command = [sys.executable, "-c", ONE_API]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
