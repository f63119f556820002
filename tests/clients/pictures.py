"""Images for the clients: PNG files that are made without any package."""

from __future__ import annotations

import base64
import struct
import zlib

QUESTION = "What is it?"


def png(seed: int, width: int = 40, height: int = 30) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(
        b"\0" + bytes((x * 7 + y * 3 * seed + channel * 80) % 256 for x in range(width) for channel in range(3))
        for y in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64_of(content)}"
