"""`data:` URLs and files, among them those that try to leave the allowed folder."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import numpy as np
import pytest

from inflight.errors import InvalidRequestError
from inflight.multimodal import urls
from inflight.multimodal.urls import path_of_url, read_data_url, read_file, read_local_file

CONTENT = bytes(range(256)) * 3


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    "begin",
    ["data:image/png;base64,", "data:;base64,", "DATA:image/jpeg;BASE64,", "data:image/svg+xml;charset=utf-8;base64,"],
)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 600, 768])
def test_a_data_url_is_read(begin: str, size: int) -> None:
    assert read_data_url(begin + in_base64(CONTENT[:size])).tobytes() == CONTENT[:size]


def test_a_long_data_url_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_PIECE", 8)
    for size in range(40):
        assert read_data_url("data:;base64," + in_base64(CONTENT[:size])).tobytes() == CONTENT[:size]
    with pytest.raises(InvalidRequestError):
        read_data_url("data:;base64,AAAAAA==AAAA")


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,abcd",
        "data:image/png;base64",
        "data:image/png;base64,AAA",
        "data:image/png;base64,A===",
        "data:image/png;base64,AA=A",
        "data:image/png;base64,AA AA",
        "data:image/png;base64,AAAA\n",
        "data:image/png;base64,AA-_",
        "data:image/png;base64,%41%41%41%41",
        "data:image/png;base64,ÄÄÄÄ",
        "data: image/png;base64,AAAA",
        "data:" + "a" * 10_000 + ";base64,AAAA",
        "data:image/png;base64;base64;AAAA",
        "data:" + ";" * 16_000_000,
        "data:" + ";" * 2_000 + ";base64,AAAA",
    ],
)
def test_a_wrong_data_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_data_url(url)


def test_a_data_url_with_too_many_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "MAX_IMAGE_BYTES", 90)
    assert len(read_data_url("data:;base64," + in_base64(bytes(90)))) == 90
    with pytest.raises(InvalidRequestError, match="more than 90"):
        read_data_url("data:;base64," + in_base64(bytes(99)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images, and files beside it that must stay secret."""
    (tmp_path / "images" / "deep").mkdir(parents=True)
    (tmp_path / "images-secret").mkdir()
    (tmp_path / "images" / "a b.png").write_bytes(CONTENT)
    (tmp_path / "images" / "deep" / "b.png").write_bytes(CONTENT)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "images-secret" / "c.png").write_bytes(b"secret")
    (tmp_path / "images" / "inside").symlink_to("deep/b.png")
    (tmp_path / "images" / "escape").symlink_to("../secret.png")
    (tmp_path / "images" / "up").symlink_to("..")
    (tmp_path / "images" / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "images" / "pipe")
    return tmp_path / "images"


@pytest.mark.parametrize("name", ["a%20b.png", "deep/b.png", "inside", "deep/../deep/b.png", "up/images/deep/b.png"])
def test_a_file_of_the_folder_is_read(name: str, folder: Path) -> None:
    for begin in (f"file://{folder}", f"file://localhost{folder}", f"FILE://{folder}"):
        path = path_of_url(f"{begin}/{name}", folder)
        assert read_local_file(path, folder).tobytes() == CONTENT


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to("images")
    assert read_local_file(link / "inside", link).tobytes() == CONTENT


@pytest.mark.parametrize(
    "name", ["escape", "up/secret.png", "../secret.png", "../images-secret/c.png", "%2e%2e/secret.png", "loop"]
)
def test_a_file_outside_of_the_folder_is_refused(name: str, folder: Path) -> None:
    path = path_of_url(f"file://{folder}/{name}", folder)
    with pytest.raises(InvalidRequestError, match="outside of the folder"):
        read_local_file(path, folder)


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ", "/"])
def test_whether_a_file_outside_of_the_folder_exists_is_not_told(path: str, folder: Path) -> None:
    with pytest.raises(InvalidRequestError) as existing:
        read_local_file(Path(path), folder)
    with pytest.raises(InvalidRequestError) as missing:
        read_local_file(Path("/nowhere") / path[1:], folder)
    assert str(existing.value) == str(missing.value)


def test_a_link_that_changes_after_the_check_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def change_and_open(path: Path, flags: int) -> int:
        (folder / "inside").unlink()
        (folder / "inside").symlink_to("../secret.png")
        return opened(path, flags)

    monkeypatch.setattr(os, "open", change_and_open)
    with pytest.raises(InvalidRequestError, match="outside of the folder"):
        read_local_file(folder / "inside", folder)


@pytest.mark.parametrize("name", ["pipe", "deep", "missing.png", "a" * 5000])
def test_what_is_no_file_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(InvalidRequestError):
        read_local_file(folder / name, folder)


def test_a_file_that_is_too_large_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "MAX_IMAGE_BYTES", 99)
    with pytest.raises(InvalidRequestError, match="at most 99"):
        read_file(folder / "inside")


@pytest.mark.parametrize(
    "url",
    [
        "file:relative.png",
        "file:///a\0b",
        "file:///a%00b",
        "file://example.com/a.png",
        "file:///a.png?b",
        "file:///a.png#b",
        "file://[::1/a.png",
        "file:",
        "file:///" + "a/" * 7_000_000,
    ],
)
def test_a_wrong_file_url_is_refused(url: str, folder: Path) -> None:
    with pytest.raises(InvalidRequestError):
        path_of_url(url, folder)


def test_without_a_folder_no_file_is_read(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--allowed-local-media-path"):
        path_of_url(f"file://{folder}/inside", None)


def test_the_content_is_an_array(folder: Path) -> None:
    assert read_file(folder / "inside").dtype == np.uint8
