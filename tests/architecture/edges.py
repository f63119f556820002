"""The edges that a row of a table plugs in, and copies of the package without some of them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.config.families import NAMES as FAMILIES
from inflight.config.families import VISION_NAMES as VISION_FAMILIES
from inflight.engine.request.answer_parts import ANSWER_PARTS
from inflight.entrypoints.apis import APIS
from inflight.executor.selector import OWN as EXECUTORS
from inflight.interface.part_kinds import PART_KINDS
from inflight.kv_connector.tier_selector import TIERS
from inflight.model_loader.gguf_blocks import UNPACKERS
from inflight.models.layer_kinds import MIXERS, MLPS
from inflight.models.vision.towers import TOWERS
from inflight.parsers.reasoning_families import REASONING
from inflight.parsers.selector import TOOL_PARSERS
from tests.architecture.source import PACKAGE, Package

# What the small engine of the test computes: a model of the family qwen3 with the layers of a plain decoder
OF_THE_ENGINE = frozenset(
    {"config/families/qwen3.py", "config/families/qwen2.py", "layers/decoder_attention.py", "layers/gated_mlp.py"}
)


@dataclass(frozen=True)
class Edge:
    """
    Attributes:
        files: its files. A folder ends with a slash. All are relative to the package.
        tables: the files that have its row. Only these import its files.
        rows: the keys of its rows, where a row does not name its files.
    """

    kind: str
    name: str
    files: frozenset[str]
    tables: frozenset[str]
    rows: frozenset[str] = frozenset()

    def owns(self, path: str) -> bool:
        return path in self.files or any(each.endswith("/") and path.startswith(each) for each in self.files)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def all_edges() -> list[Edge]:
    """Each edge by itself. `with_dependents` adds what is built on it."""

    def edge(kind: str, name: str, files: Sequence[str], tables: Sequence[str], rows: Sequence[str] = ()) -> Edge:
        return Edge(kind, name, frozenset(files), frozenset(tables), frozenset(rows))

    apis = [edge("API", name, [_folder(api.routes)], ["entrypoints/apis.py"]) for name, api in APIS.items()]
    tools, thoughts = "parsers/selector.py", "parsers/reasoning_families.py"
    of_both = _files_of(markup.whole_parser for markup in REASONING.values() if markup.whole_parser is not None)
    parsers = [
        edge("tool parser", file, [file], [tools, thoughts] if file in of_both else [tools])
        for file in _files_of(TOOL_PARSERS.values())
    ]
    reasoning = [edge("reasoning parser", name, [], [thoughts], [name]) for name in REASONING]
    tiers = [
        edge("tier", name, [_file(place.partition(":")[0])], ["kv_connector/tier_selector.py"])
        for name, place in TIERS.items()
    ]
    executors = [
        edge("executor", name, [_file(place.partition(":")[0])], ["executor/selector.py"])
        for name, place in EXECUTORS.items()
    ]
    families = [
        edge("model family", name, [f"config/families/{name}.py"], ["config/families/__init__.py"], [name])
        for name in (*FAMILIES, *VISION_FAMILIES)
    ]
    layers = [
        edge("layer", file, [file], ["models/layer_kinds.py"]) for file in _files_of((*MIXERS.values(), *MLPS.values()))
    ]
    part_tables = ["interface/part_kinds.py", "worker/parts/row_parts.py"]
    answers = ["engine/request/answer_parts.py"]  # some parts only change the model's input
    parts = [
        edge(
            *("request part", kind, [f"interface/{kind}.py", f"worker/parts/{kind}.py"]),
            part_tables + (answers if kind in ANSWER_PARTS else []),
        )
        for kind in PART_KINDS
        # prompts and the scheduler's plan have places for images, as for text; see `images` below
        if kind != "images"
    ]
    # What reads and processes images. Without it, models answer to text only. Their towers are edges of their own.
    images = [edge("images", "as a whole", ["multimodal/"], ["engine/request/image_support.py"])]
    tower_files = sorted({_file(place.partition(":")[0]) for place in TOWERS.values()})
    towers = [edge("tower", file, [file], ["models/vision/towers.py"]) for file in tower_files]
    unpackers = ["model_loader/gguf_blocks.py"]
    gguf_types = [edge("type of GGUF tensors", name, [], unpackers, [name]) for name in UNPACKERS]
    found = [*apis, *parsers, *reasoning, *tiers, *executors, *families, *layers, *images, *towers, *parts, *gguf_types]
    return [each for each in found if not each.files & OF_THE_ENGINE]


def with_dependents(edge: Edge, edges: Iterable[Edge], importers: Mapping[str, set[str]]) -> Edge:
    """The edge with all of its kind that are built on it: no file of another part is left that imports its files."""
    same_kind = [each for each in edges if each.kind == edge.kind]
    while True:
        outside = strangers(edge, importers)
        built_on = [each for each in same_kind if not each.files <= edge.files and any(map(each.owns, outside))]
        if not built_on:
            return edge
        edge = replace(
            edge,
            files=edge.files.union(*(each.files for each in built_on)),
            rows=edge.rows.union(*(each.rows for each in built_on)),
        )


def strangers(edge: Edge, importers: Mapping[str, set[str]]) -> set[str]:
    """The files that import files of the edge, and are neither its own nor tables with its row."""
    found = {path for file, paths in importers.items() if edge.owns(file) for path in paths}
    return {path for path in found if not edge.owns(path) and path not in edge.tables}


def importers_of(package: Package) -> dict[str, set[str]]:
    """file -> the files that import it."""
    found: dict[str, set[str]] = {}
    for file in package.files:
        for each in package.imports(file):
            if each.module in package.by_module:
                found.setdefault(package.by_module[each.module].path, set()).add(file.path)
    return found


def copy_without(edges: Sequence[Edge], package: Path, to: Path) -> None:
    """Make `to` a package like `package`, without the files and the rows of the edges. What does not change is linked.

    Raises:
        ValueError: a table has no row of an edge.
    """
    tables = frozenset[str]().union(*(edge.tables for edge in edges))
    for folder, folders, files in os.walk(package):
        here = Path(folder)
        (to / here.relative_to(package)).mkdir(exist_ok=True)
        for name in [*files, *folders]:
            path = (here / name).relative_to(package).as_posix()
            if any(edge.owns(path) or edge.owns(f"{path}/") for edge in edges) or path in tables:
                continue
            if name in files or name == "__pycache__":
                (to / path).symlink_to(here / name)
        folders[:] = [
            name
            for name in folders
            if name != "__pycache__"
            and not any(edge.owns(f"{(here / name).relative_to(package).as_posix()}/") for edge in edges)
        ]
    for table in sorted(tables):
        text = (package / table).read_text(encoding="utf-8")
        for edge in edges:
            if table in edge.tables:
                text = without_rows(text, edge)
        (to / table).write_text(text, encoding="utf-8")


def without_rows(text: str, edge: Edge) -> str:
    """The text of a table without the rows of the edge.

    Raises:
        ValueError: there are none.
    """
    remover = _RowRemover(edge)
    tree = remover.visit(ast.parse(text))
    if not remover.num_removed:
        raise ValueError(f"a table has no row of the {edge}")
    return ast.unparse(ast.fix_missing_locations(tree))


class _RowRemover(ast.NodeTransformer):
    """Removes what names a file of an edge, or a key of its rows: imports, and then classes, entries of dictionaries and
    tuples, and words of strings that are split. What is in a function stays."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._gone = set[str]()  # names that the removed imports and classes defined
        self.num_removed = 0

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        kept = []
        for alias in node.names:
            if self._owns_module(node.module or "") or self._owns_module(f"{node.module}.{alias.name}"):
                self._gone.add(alias.asname or alias.name)
            else:
                kept.append(alias)
        return ast.ImportFrom(node.module, kept, node.level) if kept else None

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        if not self._names_gone(node):
            return node
        self._gone.add(node.name)
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # no table

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        entries = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not self._is_row(key) and not self._is_row(value) and not self._names_gone(value)
        ]
        self.num_removed += len(node.keys) - len(entries)
        node.keys, node.values = [key for key, _ in entries], [self.visit(value) for _, value in entries]
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        kept = [each for each in node.elts if not self._names_gone(each)]
        self.num_removed += len(node.elts) - len(kept)
        node.elts = [self.visit(each) for each in kept]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node.func:
            case ast.Attribute(value=ast.Constant(value=str(text)) as words, attr="split"):
                kept = [each for each in text.split() if each not in self._edge.rows]
                self.num_removed += len(text.split()) - len(kept)
                words.value = " ".join(kept)
                return node
        return self.generic_visit(node)

    def _is_row(self, node: ast.expr | None) -> bool:
        """Whether a key, or a value, is a row: a key of it, a tuple that begins with one, or the name of a file's class."""
        match node:
            case ast.Constant(value=str(text)) | ast.Tuple(elts=[ast.Constant(value=str(text)), *_]):
                return text in self._edge.rows or self._owns_module(text.partition(":")[0])
        return False

    def _names_gone(self, node: ast.AST) -> bool:
        return any(isinstance(each, ast.Name) and each.id in self._gone for each in ast.walk(node))

    def _owns_module(self, module: str) -> bool:
        return module.startswith(f"{PACKAGE}.") and (self._edge.owns(_file(module)) or self._edge.owns(_folder(module)))


def _file(module: str) -> str:
    return "/".join(module.split(".")[1:]) + ".py"


def _folder(module: str) -> str:
    return "/".join(module.split(".")[1:-1]) + "/"


def _files_of(classes: Iterable[object]) -> list[str]:
    """The files of classes, each once."""
    return sorted({_file(each.__module__) for each in classes})
