"""The one writer of reports: markdown for people, csv, json and jsonl for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Output = Literal["md", "csv", "json", "jsonl"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a markdown table: its title, the text of a row's cell, and whether it stands at the right, as numbers do."""

    title: str
    text: Callable[[T], str]
    right: bool = True


def markdown(columns: Sequence[Column[T]], rows: Iterable[T]) -> list[str]:
    """Lines of a table."""
    lines = [[c.title for c in columns], ["---:" if c.right else "---" for c in columns]]
    lines += [[c.text(row).replace("|", "\\|") for c in columns] for row in rows]
    return [f"| {' | '.join(line)} |" if line is not lines[1] else f"|{'|'.join(line)}|" for line in lines]


def render(output: Output, report: Mapping[str, Any], rows: str = "", sentences: Callable[[], str] = str) -> str:
    """A report as text. `rows` names its list of results: jsonl and csv have a line for each, with the report's single values before it.

    csv flattens objects (`counters.macs`) and leaves lists out. `sentences` makes the markdown.
    """
    if output == "md":
        return sentences()
    if output == "json":
        return json.dumps(report, ensure_ascii=False, indent=2)
    single = {key: value for key, value in report.items() if not isinstance(value, list | tuple | Mapping)}
    if output == "jsonl":
        return "\n".join(json.dumps({**single, **row}, ensure_ascii=False) for row in report[rows])
    flat = [dict(_flat({**single, **row})) for row in report[rows]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        elif not isinstance(item, list | tuple):
            yield prefix + key, item
