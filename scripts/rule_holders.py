"""Which tests hold a rule about a file, if neither their names nor their imports say so. `scripts/changed_tests.py` reads it.

A rule is, for example: each field of a request has a case that shows its effect, and a row in docs/server-api.md.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import PurePosixPath

_FIELDS = "tests/e2e/test_openai_fields.py"
_RESPONSES = "tests/e2e/test_responses.py"
_CASES, _ROWS = "::test_every_field_has_a_case", "::test_the_document_lists_every_field"
_PAGES = "tests/e2e/test_documented_commands.py"


@dataclass(frozen=True)
class Rule:
    """
    Attributes:
        pattern: the files, as `fnmatch` reads it.
        arguments: of pytest. {stem} stands for the name of the file without its ending, {name} for its whole name.
        why: what the test holds.
    """

    pattern: str
    arguments: str
    why: str

    @property
    def runs_apart(self) -> bool:
        """Whether the arguments choose tests with -k, so that they cannot stand beside other tests."""
        return " -k " in self.arguments

    @property
    def test_file(self) -> str:
        return self.arguments.split()[0].partition("::")[0]

    def for_file(self, path: str) -> str | None:
        """The arguments for this file; None if the rule is not about it."""
        if not fnmatch.fnmatchcase(path, self.pattern):
            return None
        pure = PurePosixPath(path)
        return self.arguments.format(stem=pure.stem, name=pure.name)


_HAS_CASE = "each field has a case and a row in the document"
RULES = (
    *(
        Rule(f"inflight/entrypoints/{file}.py", f"{_FIELDS}{test}", _HAS_CASE)
        for file in ("openai/protocol", "openai/generation_fields", "fields/messages")
        for test in (_CASES, _ROWS)
    ),
    Rule("docs/server-api.md", f"{_FIELDS}{_ROWS}", "the table has each field"),
    *(
        Rule("inflight/entrypoints/responses_api/protocol.py", f"{_RESPONSES}{test}", _HAS_CASE)
        for test in (_CASES, _ROWS)
    ),
    Rule("docs/responses-api.md", f"{_RESPONSES}{_ROWS}", "the table has each field"),
    Rule(
        "inflight/entrypoints/anthropic/protocol.py", "tests/e2e/test_anthropic_messages.py", "the API, with its client"
    ),
    Rule("inflight/entrypoints/ollama/protocol.py", "tests/e2e/test_ollama.py", "the API, with its client"),
    Rule(
        "inflight/config/families/*.py", "tests/unit/config/test_families.py", "the zoo and the page know each family"
    ),
    Rule(
        "inflight/config/families/*.py",
        "tests/e2e/test_model_parity.py -k {stem}",
        "logits and tokens equal those of transformers",
    ),
    Rule(
        "inflight/config/families/*.py",
        "tests/e2e/test_config_fields.py -k {stem}",
        "each field of config.json is read or refused",
    ),
    Rule("docs/models.md", "tests/unit/config/test_families.py", "the table has each family"),
    Rule("docs/models.md", "tests/scripts/test_model_memory.py", "the table of memory is up to date"),
    Rule("README.md", "tests/scripts/test_model_memory.py", "the table of memory is up to date"),
    Rule("docs/from-vllm.md", "tests/unit/entrypoints/cli/test_foreign_flags.py", "the tables are up to date"),
    Rule("deploy/*", "tests/unit/test_deploy.py", "the files of deploy/ are valid, and agree with the program"),
    *(Rule(pattern, f"{_PAGES} -k {{name}}", "the commands of the page run") for pattern in ("README.md", "docs/*.md")),
)
_NOT_A_FAMILY = ("__init__", "family", "family_fields")


def holders(path: str) -> list[tuple[str, Rule]]:
    """Returns (pytest's arguments, rule) for each rule about this file."""
    pure = PurePosixPath(path)
    if pure.parent.name == "families" and pure.stem in _NOT_A_FAMILY:
        return []
    found = ((rule.for_file(path), rule) for rule in RULES)
    return [(arguments, rule) for arguments, rule in found if arguments is not None]
