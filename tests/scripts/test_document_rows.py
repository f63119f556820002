"""What a test says about a table in a page that is not of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.document_rows import row_problems

HEADING = ["| field | |", "|---|---|"]
PAGE = "# Title\n\n| field | |\n|---|---|\n| x | 1 |\n| y | 2 |\n\nmore | text\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["| x | 1 |", "| y | 2 |"], ""),
        (["| x | 1 |"], "remove these rows:\n| y | 2 |"),
        (["| x | 1 |", "| y | 2 |", "| z | 3 |"], "add these rows:\n| z | 3 |"),
        (["| x | 1 |", "| y | 3 |"], "add these rows:\n| y | 3 |\npage.md: remove these rows:\n| y | 2 |"),
        (["| y | 2 |", "| x | 1 |"], "the rows of the table are in another order, or twice"),
    ],
)
def test_only_the_rows_that_differ_are_named(tmp_path: Path, rows: list[str], said: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert row_problems(page, HEADING, rows) == (said and f"page.md: {said}")


def test_a_page_without_the_table(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Title\n")
    assert "no table" in row_problems(tmp_path / "page.md", HEADING, [])
