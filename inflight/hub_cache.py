"""The models in the cache of the hub library, which other programs fill, too: lists them, checks their files, removes them.

    models--org--name/refs/main                 the commit that a download without a revision gives
    models--org--name/snapshots/COMMIT/FILE     a link to a blob
    models--org--name/blobs/DIGEST              the contents of a file

A file that is stored in Git LFS has the SHA-256 digest of its contents as its blob's name, any other file the digest that Git
gives it. So damage is found without asking the hub.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from inflight.errors import CheckpointError, ModelNotFoundError
from inflight.hub import GGUF_SUFFIX, MMPROJ, gguf_parts, without_later_parts
from inflight.model_advice import near_models, unfinished_download

_LFS_NAME = re.compile(r"[0-9a-f]{64}")
_GIT_NAME = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class CachedModel:
    """
    Attributes:
        name: as `inflight serve` takes it: "org/name", or "org/name:FILE.gguf".
        num_bytes: what the model takes on the disk.
        modified: when a file of it was last written, in seconds since 1970.
        is_whole: whether no download of the repository is unfinished.
    """

    name: str
    num_bytes: int
    modified: float
    is_whole: bool


def cached_models() -> list[CachedModel]:
    """All models, sorted by name. A repository with GGUF files has one model for each; other repositories have one if they
    contain safetensors. Repositories that only have a tokenizer, or weights that Inflight does not read, are left out."""
    found = []
    for repository in _repositories():
        newest = _snapshot(repository)
        files = {file.file_path.relative_to(newest.snapshot_path).as_posix(): file for file in newest.files}
        is_whole = not unfinished_download(newest.snapshot_path)
        for name, parts in _models_in(repository.repo_id, list(files)):
            chosen = [files[part] for part in parts if part in files]
            found.append(
                CachedModel(
                    name,
                    sum(file.size_on_disk for file in chosen),
                    max(file.blob_last_modified for file in chosen),
                    is_whole and len(chosen) == len(parts),
                )
            )
    return sorted(found, key=lambda model: model.name)


def remove_model(name: str) -> int:
    """Remove a model from the cache, and return how many bytes that gave back. "org/name" is the whole repository with all its
    revisions. "org/name:FILE.gguf" is one file, and if it is split, all its parts.

    Raises:
        ModelNotFoundError: the cache has no such model.
    """
    repo_id, _, file = name.partition(":")
    repository = next((each for each in _repositories() if each.repo_id == repo_id), None)
    if repository is None:
        hint = "; it is a folder or file of yours, which this command never removes" if Path(name).exists() else ""
        raise ModelNotFoundError(f"the hub's cache has no model {name!r}{hint or near_models(name)}")
    if not file:
        # The library removes revisions by their commits, of all repositories: copies of a repository have the same ones.
        shutil.rmtree(repository.repo_path)
        return int(repository.size_on_disk)
    wanted = {part.as_posix() for part in gguf_parts(PurePosixPath(file))}
    files = [(revision, each) for revision in repository.revisions for each in revision.files]
    chosen = {
        each.file_path: each
        for revision, each in files
        if each.file_path.relative_to(revision.snapshot_path).as_posix() in wanted
    }
    if not file.endswith(GGUF_SUFFIX) or not chosen:
        names = sorted(
            model.name for model in cached_models() if model.name.partition(":")[0] == repo_id and ":" in model.name
        )
        raise ModelNotFoundError(
            f"the hub's cache has no GGUF file {name!r}; it has {', '.join(names) or f'{repo_id} without GGUF files'}"
        )
    used = {each.blob_path for _, each in files if each.file_path not in chosen}
    blobs = {each.blob_path: each.size_on_disk for each in chosen.values() if each.blob_path not in used}
    for path in (*chosen, *blobs):
        path.unlink(missing_ok=True)
    return sum(blobs.values())


def check_files(source: Path) -> int:
    """Compare the contents of a downloaded model's files with their digests. Returns how many were compared: none if the
    folder is not one of the cache. A damaged file is removed, so that the next download gets it again.

    Args:
        source: a folder, or a GGUF file, as `resolve_model_folder` returns it.

    Raises:
        CheckpointError: a file is damaged.
    """
    paths = gguf_parts(source) if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    damaged, count = list[Path](), 0
    for path in paths:
        blob = path.resolve()
        if blob.parent.name != "blobs" or (digest := _digest_for(blob)) is None:
            continue
        count += 1
        if digest != blob.name:
            damaged.append(path)
            blob.unlink()
            path.unlink()
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(
            f"{names}: the contents differ from the hub's digest, so the disk or the transfer damaged them; removed, "
            "download again"
        )
    return count


def size_text(num_bytes: float) -> str:
    """As "1.4 GB": the hub and file managers count in powers of 1,000."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _digest_for(blob: Path) -> str | None:
    """The digest of the contents, of the kind that the blob's name is; None if the name is no digest."""
    if _LFS_NAME.fullmatch(blob.name):
        digest = hashlib.sha256()
    elif _GIT_NAME.fullmatch(blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return None
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _models_in(repo_id: str, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The name of each model of a repository with these files, and the files that it consists of."""
    paths = [PurePosixPath(name) for name in names]
    ggufs = [path for path in paths if path.suffix == GGUF_SUFFIX and not path.name.startswith(MMPROJ)]
    if any(path.suffix == ".safetensors" for path in paths):
        yield repo_id, names
    for path in without_later_parts(sorted(ggufs)):
        yield f"{repo_id}:{path}", [part.as_posix() for part in gguf_parts(path)]


def _repositories() -> list[Any]:  # Any: `CachedRepoInfo` of the hub library
    from huggingface_hub import scan_cache_dir  # optional at run time
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:  # nothing was downloaded yet
        return []
    return [each for each in found if each.repo_type == "model" and each.revisions]


def _snapshot(repository: Any) -> Any:  # Any: `CachedRepoInfo`, `CachedRevisionInfo` of the hub library
    """The revision that a download without a revision gives; if there is none, the newest."""
    main = repository.refs.get("main")
    return main if main is not None else max(repository.revisions, key=lambda revision: revision.last_modified)
