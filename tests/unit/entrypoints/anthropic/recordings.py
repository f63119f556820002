"""Requests that real programs have sent, with texts cut to their first words, and with few of their tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED: dict[str, dict[str, Any]] = {
    each["name"]: each for each in json.loads(Path(__file__).with_name("recorded.json").read_text("utf-8"))
}
# beside them no field of the recorded requests is ignored
IGNORED = {"context_management", "safeguards"}
