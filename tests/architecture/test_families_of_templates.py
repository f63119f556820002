"""Each family of docs/models.md that makes text is tried with real chat templates, by `make test-clients`."""

from __future__ import annotations

import re

from tests.architecture.source import ROOT
from tests.clients.real_templates import FAMILIES


def test_each_family_of_the_docs_is_named() -> None:
    of_text, _ = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("### Models that read images")
    rows = re.findall(r"^\| ([^|]+?) \| `\w+For", of_text, re.MULTILINE)
    assert rows == list(FAMILIES), (
        "FAMILIES in tests/clients/real_templates.py has the names and order of docs/models.md"
    )
