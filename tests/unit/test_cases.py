"""docs/cases.md: every kind of fault has tests, and each of them is there and says which kind it is of."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LINES = (TESTS.parent / "docs/cases.md").read_text("utf-8").splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if "::" in line]
LISTED = {kind: re.findall(r"`([^`]+)`", tests) for kind, _, _, tests in ROWS}


def sayings(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring in lower case) of the tests of a file."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield f"{path.relative_to(TESTS).as_posix()}::{node.name}", (ast.get_docstring(node) or "").lower()


@pytest.mark.parametrize(("kind", "reports"), [row[:2] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_kind_is_named_by_its_tests(kind: str, reports: str) -> None:
    there = {name: said for path in {test.partition("::")[0] for test in LISTED[kind]} for name, said in sayings(TESTS / path)}
    for test in LISTED[kind]:
        assert kind in there[test], test
    for report in reports.split(", "):
        assert any(report.split()[-1] in there[test] for test in LISTED[kind]), report


def test_every_test_that_names_a_kind_is_listed() -> None:
    assert len(ROWS) >= 12
    for path in TESTS.rglob("test_*.py"):
        for name, said in sayings(path):
            kind = said.partition(" (")[0]
            assert kind not in LISTED or name in LISTED[kind], name
