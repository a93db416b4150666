import csv
import io
import json

from quaff.measure.table import Column, markdown, render

REPORT = {
    "isa": "any",
    "load": 0.5,
    "results": [
        {"test": "pp1", "samples": [1.0, 2.0], "counters": {"macs": 3, "launches": 4}},
        {"test": "tg1, deep", "samples": [], "counters": {"macs": 5, "launches": 6}, "extra": None},
    ],
    "ceilings": [{"threads": 1}],
}


def test_markdown_aligns_numbers_and_escapes_bars() -> None:
    columns: list[Column[tuple[str, int]]] = [Column("name", lambda r: r[0], right=False), Column("n", lambda r: f"{r[1]:,}")]
    assert markdown(columns, [("a|b", 1234), ("c", 5)]) == ["| name | n |", "|---|---:|", "| a\\|b | 1,234 |", "| c | 5 |"]
    assert markdown(columns, []) == ["| name | n |", "|---|---:|"]


def test_json_is_the_report_and_jsonl_its_rows() -> None:
    assert json.loads(render("json", REPORT)) == REPORT
    rows = [json.loads(line) for line in render("jsonl", REPORT, "results").splitlines()]
    assert rows == [{"isa": "any", "load": 0.5, **row} for row in REPORT["results"]]


def test_csv_flattens_objects_and_leaves_lists_out() -> None:
    text = render("csv", REPORT, "results")
    assert text.splitlines()[0] == "isa,load,test,counters.macs,counters.launches,extra"
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["test"] for row in rows] == ["pp1", "tg1, deep"] and rows[1]["counters.launches"] == "6" and rows[0]["extra"] == ""


def test_markdown_is_made_only_when_asked_for() -> None:
    assert render("md", REPORT, "results", lambda: "words") == "words"
    assert "words" not in render("json", REPORT, "results", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
