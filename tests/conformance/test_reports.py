"""Every public report is a marked test, or left out with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.left_out import LEFT_OUT

HERE = Path(__file__).parent
LEAST = 150


def listed() -> dict[str, list[str]]:
    """Id -> its origins; each line of the list is "id | owner/repository#number, #number, ... | title"."""
    lines = (HERE / "reports.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines]
    assert all(len(row) == 3 and all(row) for row in rows)
    found = {row[0]: row[1].split(", ") for row in rows}
    assert len(found) == len(rows), "an id is there twice"
    return found


def marks_of(file: Path) -> Iterator[tuple[str, str]]:
    """(id, origin) of each marker at a test function or at one of its parameters."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for part in (part for decorator in node.decorator_list for part in ast.walk(decorator)):
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "report":
                    report_id, origin = (ast.literal_eval(argument) for argument in part.args)
                    yield report_id, origin


def marked() -> set[tuple[str, str]]:
    return {mark for file in HERE.parent.rglob("test_*.py") for mark in marks_of(file)}


def test_each_report_is_tested_or_left_out() -> None:
    tested = {report_id for report_id, _ in marked()}
    assert tested | set(LEFT_OUT) == set(listed())
    assert not tested & set(LEFT_OUT)
    assert len(tested) >= LEAST


def test_origins_are_those_of_the_list() -> None:
    origins = listed()
    wrong = [mark for mark in marked() if mark[1] not in origins[mark[0]]]
    assert not wrong


def test_reasons() -> None:
    assert all(len(reason) > 20 for reason in LEFT_OUT.values())
