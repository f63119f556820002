"""The address and the key of the server under test, which `run.py` starts. These tests do not import Inflight."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """The server's address without a path, as http://127.0.0.1:1234."""
    return os.environ["INFLIGHT_CLIENT_TESTS_URL"]


@pytest.fixture(scope="session")
def images_url() -> str:
    """That of the server whose model reads images."""
    return os.environ["INFLIGHT_CLIENT_TESTS_IMAGES_URL"]


@pytest.fixture(scope="session")
def base_url(url: str) -> str:
    return f"{url}/v1"


@pytest.fixture(scope="session")
def api_key() -> str:
    return os.environ["INFLIGHT_CLIENT_TESTS_KEY"]
