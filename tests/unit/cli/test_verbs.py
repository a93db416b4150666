"""Every verb on a tiny model: what it prints, in which shape, and how it fails."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Cli

from quaff import _native, load
from quaff.release import release


def assert_error(result, code: int, *words: str) -> None:  # noqa: ANN001
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    for word in words:
        assert word in result.err


# run


def test_run_streams_text_and_shows_phases_on_stderr(cli: Cli, model: Path) -> None:
    result = cli("run", model, "hello", "--max-tokens", 8)
    assert result.code == 0
    with load(model) as llm:
        from quaff import SamplingParams

        expected = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=8))
    assert result.out == expected.text + "\n"
    lines = result.err.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["phase", "load", "prefill", "decode"]
    assert lines[2].split()[1] == str(expected.prompt_tokens)


def test_run_json_is_one_object_with_the_promised_shape(cli: Cli, model: Path) -> None:
    result = cli("run", model, "hello", "--max-tokens", 5, "--json")
    report = json.loads(result.out)
    assert result.err == ""
    assert {"text", "prompt_tokens", "completion_tokens", "timings"} <= report.keys()
    speeds = ("load_seconds", "prefill_seconds", "prefill_tokens_per_second", "ttft_seconds", "decode_tokens_per_second")
    assert all(report["timings"][key] > 0 for key in speeds)
    assert 1 <= report["completion_tokens"] <= 5


def test_what_was_read_is_kept_on_disk_where_that_is_asked_for(cli: Cli, model: Path, tmp_path: Path) -> None:
    text, options = "a long story " * 30, ("--max-tokens", 5, "--json")
    without = json.loads(cli("run", model, text, *options).out)
    runs = [json.loads(cli("run", model, text, "--store", tmp_path / "store", *options).out) for _ in range(2)]
    assert [run["text"] for run in runs] == [without["text"]] * 2
    assert [run["cached_tokens"] for run in (without, *runs)] == [0, 0, without["prompt_tokens"] - 1]
    other = cli("run", model, text + "that ends in another way", "--store", tmp_path / "store")
    assert other.err.endswith("tokens came from disk\n")


def test_prompt_sources_agree_and_raw_differs_from_chat(cli: Cli, model: Path, tmp_path: Path) -> None:
    text = "naïve 水 🌊 \ttext"
    file = tmp_path / "p.txt"
    file.write_text(text, encoding="utf-8")
    options = ("--max-tokens", 6, "--json")
    by_argument = json.loads(cli("run", model, text, *options).out)
    assert json.loads(cli("run", model, "-f", file, *options).out)["text"] == by_argument["text"]
    assert json.loads(cli("run", model, *options, stdin=text.encode()).out)["text"] == by_argument["text"]
    raw = json.loads(cli("run", model, text, "--raw", *options).out)
    assert raw["prompt_tokens"] < by_argument["prompt_tokens"]


def test_no_option_but_the_seed_changes_the_text(cli: Cli, model: Path) -> None:
    def text(*options: object) -> str:
        return json.loads(cli("run", model, "hello there", "--max-tokens", 12, "--temperature", 1.5, "--json", *options).out)["text"]

    first = text("--seed", 1)
    assert text("--seed", 1) == first
    assert text("--seed", 1, "--threads", 2, "--chunk", 7) == first
    assert text("--seed", 1, "--schedule", "token") == first
    assert text("--seed", 1, "--schedule", "layer") == first
    assert text("--seed", 2) != first


def test_bad_prompts_are_refused_before_the_model_is_read(cli: Cli, tmp_path: Path) -> None:
    missing = tmp_path / "no-model.gguf"
    assert_error(cli("run", missing, ""), 1, "the prompt is empty")
    assert_error(cli("run", missing, stdin=b"\xff\xff"), 1, "not UTF-8", "byte 0")
    assert_error(cli("run", missing, "-f", tmp_path / "no-prompt.txt"), 1, "No such file", "no-prompt.txt")
    assert_error(cli("run", missing, "hi"), 1, "no-model.gguf")


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts(cli: Cli, model: Path) -> None:
    """Silent truncation (ollama 3839)."""
    assert_error(cli("run", model, "--raw", stdin=b"x" * 5000), 1, "5000", "4096")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--threads", "0"),
        ("--threads", "two"),
        ("--chunk", "0"),
        ("--schedule", "spiral"),
        ("--temperature", "-1"),
        ("--temperature", "101"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--max-tokens", "-1"),
        ("--max-tokens", str((1 << 30) + 1)),
        ("--threads", "1025"),
        ("--chunk", str((1 << 20) + 1)),
        ("--seed", "-1"),
        ("--seed", str(1 << 64)),
        ("--bogus",),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(cli: Cli, model: Path, arguments: tuple[str, ...]) -> None:
    assert_error(cli("run", *((model, "hi", *arguments) if arguments else ())), 2, "--help")


def test_no_arguments_print_help_and_nothing_else(cli: Cli) -> None:
    result = cli()
    assert result.code == 0 and "Usage: quaff" in result.out and "verify" in result.out and result.err == ""


# chat


def test_chat_answers_each_line_with_what_was_said_before(cli: Cli, model: Path) -> None:
    result = cli("chat", model, "--max-tokens", 6, stdin="first\nsecond: ünïcode\n".encode())
    assert result.code == 0
    with load(model) as llm:
        from quaff import SamplingParams

        params = SamplingParams(max_tokens=6)
        messages = [{"role": "user", "content": "first"}]
        answers = [llm.chat(messages, params).text]
        messages += [{"role": "assistant", "content": answers[0]}, {"role": "user", "content": "second: ünïcode"}]
        answers.append(llm.chat(messages, params).text)
    assert result.out == "".join(a + "\n" for a in answers)


def test_chat_names_a_bad_byte_as_run_does(cli: Cli, model: Path) -> None:
    result = cli("chat", model, "--max-tokens", 2, stdin=b"good\nba\xffd\n")
    assert result.code == 1 and result.err == "error: line 2 of standard input is not UTF-8 text: byte 2 is 0xff\n"
    assert_error(cli("chat", model, "--system", "a\udcfe"), 1, "the text of --system is not UTF-8 text: byte 1 is 0xfe")


# bench


def test_bench_json_has_the_promised_shape_and_exact_counters(cli: Cli, model: Path) -> None:
    result = cli("bench", model, "-p", 70, "-n", 3, "-t", "1,2", "-C", 32, "--schedule", "chunk,token", "-r", 2, "--json")
    assert result.code == 0
    report = json.loads(result.out)
    assert report["isa"] == _native.isa() and report["threads"] == 2 and report["model"] == str(model)
    rows = {(r["test"], r["threads"], r["schedule"]): r for r in report["results"]}
    assert set(rows) == {(t, n, s) for n in (1, 2) for t, s in (("pp70", "chunk"), ("pp70", "token"), ("tg3", "chunk"))}
    for row in rows.values():
        assert len(row["samples"]) == 2 and row["tokens_per_second"] == pytest.approx(sum(row["samples"]) / 2) and row["stddev"] >= 0
        assert {"weight_bytes_touched", "weight_bytes_loaded", "launches", "macs"} <= row["counters"].keys()
    chunk, token, tg = (rows[key]["counters"] for key in (("pp70", 2, "chunk"), ("pp70", 2, "token"), ("tg3", 2, "chunk")))
    assert token["weight_bytes_touched"] * 3 == chunk["weight_bytes_touched"] * 70  # 70 passes against ceil(70 / 32)
    assert tg["weight_bytes_touched"] * 70 == token["weight_bytes_touched"] * 3  # three rows, one at a time
    pp = rows["pp70", 2, "chunk"]["tokens_per_second"]
    assert report["phase_ratio"] == pytest.approx(pp / rows["tg3", 2, "chunk"]["tokens_per_second"])


def test_bench_names_tests_as_llama_bench_does_and_counts_every_sequence(cli: Cli, model: Path) -> None:
    options = ("-p", 40, "-n", 3, "-d", "0,100", "-np", "1,3", "-t", 1, "-C", 16, "-r", 1, "--json")
    rows = {r["test"]: r for r in json.loads(cli("bench", model, *options).out)["results"]}
    assert list(rows) == [
        *("pp40", "pp40 np3", "pp40 @ d100", "pp40 np3 @ d100"),
        *("tg3", "tg3 np3", "tg3 @ d100", "tg3 np3 @ d100"),
    ]
    assert [rows[name][key] for name, key in (("tg3 np3 @ d100", "n_gen"), ("tg3 np3 @ d100", "n_depth"), ("pp40 np3", "n_parallel"))] == [
        3,
        100,
        3,
    ]
    macs = {name: row["counters"]["macs"] for name, row in rows.items()}
    assert macs["pp40 np3"] == 3 * macs["pp40"] and macs["tg3 np3"] == 3 * macs["tg3"] and macs["pp40 @ d100"] == macs["pp40"]
    # Decoding sequences share a pass over the weights; depth costs attention only.
    touched = {name: row["counters"]["weight_bytes_touched"] for name, row in rows.items()}
    assert touched["tg3 np3"] == touched["tg3"] == touched["tg3 np3 @ d100"] and touched["pp40 np3"] * 3 == touched["pp40"] * 8
    assert rows["tg3 @ d100"]["counters"]["attention_macs"] > 30 * rows["tg3"]["counters"]["attention_macs"]
    assert all(row["counters"]["head_rows"] == (3 if "tg" in name else 1) * row["n_parallel"] for name, row in rows.items())


def test_bench_prints_the_same_rows_in_every_form(cli: Cli, model: Path) -> None:
    options = ("bench", model, "-p", 20, "-n", 2, "-t", 1, "-r", 1, "-C", 16)
    lines = [json.loads(line) for line in cli(*options, "-o", "jsonl").out.splitlines()]
    table = list(csv.DictReader(io.StringIO(cli(*options, "-o", "csv").out)))
    whole = json.loads(cli(*options, "-o", "json").out)
    for row, flat, result in zip(lines, table, whole["results"], strict=True):
        assert row["isa"] == flat["isa"] == whole["isa"] and row["test"] == flat["test"] == result["test"]
        assert row["counters"] == result["counters"] and int(flat["counters.macs"]) == result["counters"]["macs"]
    assert [row["test"] for row in lines] == ["pp20", "tg2"]


def test_bench_roofline_shows_every_level_and_the_share_of_each_test(cli: Cli, model: Path) -> None:
    options = ("bench", model, "-p", 20, "-n", 2, "-t", 1, "-r", 1, "--roofline")
    report = json.loads(cli(*options, "--json").out)
    (ceilings,) = report["ceilings"]
    assert [level["name"] for level in ceilings["levels"]][-1] == "DRAM" and len(ceilings["dram_samples"]) == 2
    assert all(level["bytes_per_second"] > 0 for level in ceilings["levels"])
    for row in report["results"]:
        assert row["ceiling"] in row["bound_seconds"] and row["ceiling_share"] > 0
        assert row["ceiling"] == max(row["bound_seconds"], key=row["bound_seconds"].get)
    text = cli(*options).out
    assert "| ceiling | share of it |" in text and "load average" in text and "DRAM" in text
    assert "share of it" not in cli(*options[:-1]).out


def test_bench_profile_names_ops_and_says_what_it_is_of(cli: Cli, model: Path) -> None:
    options = ("bench", model, "-p", 20, "-n", 2, "-t", 1, "-r", 1, "--profile")
    report = json.loads(cli(*options, "--json").out)
    assert [r["test"] for r in report["results"]] == ["pp20", "pp20 @ d1024", "tg2", "tg2 @ d1024"]  # 4096 + 20 do not fit
    for row in report["results"]:
        assert row["profile"]["scope"] == "full model, 2 layers"
        names = [op["op"] for op in row["profile"]["ops"]]
        assert {"ffn gate+up", "ffn down", "attention", "attn q+k+v", "attn output", "head", "between ops"} <= set(names)
        assert sum(op["share"] for op in row["profile"]["ops"]) == pytest.approx(1)
        macs = sum(op["macs"] for op in row["profile"]["ops"])
        assert macs == sum(row["counters"][key] for key in ("macs", "attention_macs", "head_macs"))
    assert "time by op, full model, 2 layers" in cli(*options).out


def test_bench_table_names_isa_control_and_phase_ratio(cli: Cli, model: Path) -> None:
    result = cli("bench", model, "-p", "64", "-n", "2", "-t", "1", "-C", "32", "--schedule", "chunk,token", "-r", "1")
    assert _native.isa() in result.out
    assert "| pp64 | 1 | chunk(32) |" in result.out and "| pp64 | 1 | token |" in result.out and "± 0.0" in result.out
    assert "touches 1/32 of its weight bytes" in result.out
    assert "phase ratio" in result.out and "ceilings on 1 thread" in result.out


@pytest.mark.parametrize(
    "arguments",
    [("-p", "x"), ("-p", "1,,2"), ("-t", "0"), ("--schedule", "chunk,spiral"), ("-r", "0"), ("-d", "-1"), ("-np", "0"), ("-o", "xml")]
    + [("-p", "9" * 5000), ("-p", "1048577"), ("-p", "0", "-n", "0"), ("-t", "1025"), ("-r", str(1 << 21))],
)
def test_bench_refuses_what_it_cannot_read(cli: Cli, model: Path, arguments: tuple[str, ...]) -> None:
    assert_error(cli("bench", model, *arguments), 2, arguments[0])


def test_bench_refuses_a_test_longer_than_the_context(cli: Cli, model: Path) -> None:
    assert_error(cli("bench", model, "-p", 5000), 1, "5000", "4096")
    assert_error(cli("bench", model, "-p", 100, "-d", 4000), 1, "pp100 @ d4000", "4100", "4096")


# explain


def test_explain_predicts_what_a_run_counts(cli: Cli, gemma: Path) -> None:
    plain = json.loads(cli("explain", gemma, "-p", 150, "-t", 1, "-C", 32, "--json").out)
    assert (plain["prompt_tokens"], plain["threads"], plain["chosen"]["schedule"], plain["chosen"]["chunk"]) == (150, 1, "chunk", 32)
    assert [(s["schedule"], s["chosen"], s["measured"]) for s in plain["schedules"]] == [
        ("token", False, None),
        ("chunk", True, None),
        ("layer", False, None),
    ]
    ran = json.loads(cli("explain", gemma, "-p", 150, "-t", 1, "-C", 32, "--run", "-r", 1, "--json").out)
    for before, after in zip(plain["schedules"], ran["schedules"], strict=True):
        assert after["counters"] == before["counters"] == after["measured"]["counters"] and after["measured"]["counters_as_predicted"]
        assert after["shared_weight_share"] == 1.0 and after["memory"]["weight_bytes"] == plain["weight_bytes"]
        counters = after["counters"]
        read = sum(counters[f"{part}_bytes_touched"] for part in ("weight", "embedding", "head"))
        assert after["weight_bytes_read"] == read
        assert after["arithmetic_intensity"] == (counters["macs"] + counters["attention_macs"] + counters["head_macs"]) / read
    with load(gemma) as llm:
        assert plain["weight_bytes"] == llm.weight_bytes


def test_explain_says_what_is_taken_and_why(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = cli("explain", model, "-p", 100, "-t", 1, "-C", 32).out
    assert "chunk-major with the 32 rows that were asked for is taken: it reads the weights 4 times" in text
    assert "| chunk(32) |" in text and "100 %" in text and "measured" not in text
    assert "reads the weights once" in cli("explain", model, "-p", 30, "-t", 1).out
    assert "predicted and measured" in cli("explain", model, "-p", 20, "-t", 1, "--run", "-r", 1).out
    monkeypatch.setenv("QUAFF_BATCHED_PREFILL", "0")
    assert json.loads(cli("explain", model, "-p", 20, "-t", 1, "--json").out)["chosen"]["schedule"] == "token"


def test_explain_refuses_what_cannot_be_read(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert_error(cli("explain", model, "-p", 5000), 1, "5000", "4096")
    assert_error(cli("explain", model, "-p", 0), 2, "-p")
    assert_error(cli("explain", tmp_path / "no-model.gguf"), 1, "no-model.gguf")


# verify


def test_verify_json_has_the_promised_shape(cli: Cli, model: Path) -> None:
    result = cli("verify", model, "--tokens", 150, "--json")
    assert result.code == 0
    report = json.loads(result.out)
    assert report["numerics_version"] == _native.NUMERICS_VERSION and report["isa"] == _native.isa() and report["equal"] is True
    assert len(report["paths"]) >= 12
    for key in ("logits_sha256", "kv_sha256", "text_sha256"):
        assert len({path[key] for path in report["paths"]}) == 1
        assert all(len(path[key]) == 64 for path in report["paths"])


def test_verify_prints_a_line_per_path(cli: Cli, gemma: Path) -> None:
    result = cli("verify", gemma, "--tokens", 150)
    lines = result.out.splitlines()
    assert result.code == 0 and lines[-1].startswith(f"EQUAL: {len(lines) - 2} paths")
    assert all(line.startswith("✓ ") for line in lines[1:-1])


def test_verify_refuses_a_prompt_that_does_not_fit(cli: Cli, model: Path) -> None:
    assert_error(cli("verify", model, "--tokens", 5000, "--json"), 1, "5000", "4096")
    assert_error(cli("verify", model, "--tokens", 5000), 1, "5000", "4096")


# inspect, score, pull


def test_inspect_states_what_the_file_holds(cli: Cli, model: Path) -> None:
    report = json.loads(cli("inspect", model, "--json").out)
    assert (report["architecture"], report["supported"], report["reason"], report["chat_template"]) == ("llama", True, None, True)
    assert report["file_bytes"] == model.stat().st_size
    assert report["tensor_types"]["Q4_0"]["tensors"] == 14 and report["tensor_types"]["Q8_0"]["tensors"] == 1
    with load(model) as llm:
        assert report["memory"]["weight_bytes"] == llm.weight_bytes
        assert report["context_length"] == llm.config.context_length
    need = report["memory"]
    assert (need["rows"], need["chunk"]) == (2048, 512)  # the largest step of a prompt, not one chunk of it
    text = cli("inspect", model).out
    assert "for 2,048 rows in chunks of 512" in text
    assert "Q4_0" in text and "llama" in text and "4,096 tokens" in text


def test_inspect_describes_a_family_that_is_not_supported(cli: Cli, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes().replace(b"llama", b"lemma"))
    result = cli("inspect", other, "--json")
    report = json.loads(result.out)
    assert result.code == 0 and report["supported"] is False and "lemma" in report["reason"] and report["memory"] is None
    assert report["parameters"] > 0 and report["tensor_types"]
    assert_error(cli("run", other, "hi"), 1, "lemma", "llama")


def test_score_gives_the_log_probability_of_every_token_after_the_first(cli: Cli, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the other one is here", encoding="utf-8")
    report = json.loads(cli("score", model, file, "--json").out)
    with load(model) as llm:
        expected = llm.score("the other one is here")
    assert report["logprobs"] == list(expected.logprobs) and report["tokens"] == list(expected.tokens)
    assert report["perplexity"] == pytest.approx(math.exp(-sum(expected.logprobs) / len(expected.logprobs)))
    printed = cli("score", model, file, "--each").out
    assert f"{expected.perplexity:.4f}" in printed and len(printed.splitlines()) == len(expected.logprobs) + 3
    assert_error(cli("score", model, stdin=b"a"), 1, "two tokens")


def test_pull_of_a_path_prints_it(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(cli("pull", model, "--json").out) == {"path": str(model)}
    monkeypatch.chdir(model.parent)
    assert cli("pull", f"./{model.name}").out == f"{model}\n"
    assert_error(cli("pull", "smolm2"), 1, "smollm2")


# The process


def test_version_names_numerics_and_instruction_set(cli: Cli) -> None:
    result = cli("--version")
    assert result.code == 0 and f"numerics version {_native.NUMERICS_VERSION}" in result.out and _native.isa() in result.out


def test_a_folder_that_is_not_installed_has_a_version_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert release() is None
    result = cli("--version")
    assert result.code == 0 and "quaff (not installed)" in result.out


def quaff(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quaff", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]


def test_help_starts_without_the_heavy_modules() -> None:
    code = "import sys, quaff.cli.app; print([m for m in ('numpy', 'tokenizers', 'rich.progress', 'quaff._native') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_reader_that_leaves_is_no_error_message(model: Path) -> None:
    process = quaff("run", model, "hello", "--max-tokens", 3000, "--raw")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(60) == 1 and error == b""


def test_interrupt_ends_quietly_with_130(model: Path) -> None:
    process = quaff("run", model, "hello", "--max-tokens", 3000, "--raw")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and b"Traceback" not in process.stderr.read()


def test_closed_colour_and_a_plain_locale_change_nothing(model: Path) -> None:
    environment = {**os.environ, "NO_COLOR": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    process = quaff("verify", model, "--tokens", 130, env=environment)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and b"EQUAL" in out and b"\x1b[" not in out + error


def test_text_is_utf8_whatever_the_locale_says(model: Path) -> None:
    script = "import sys; from quaff.cli.app import open_streams; open_streams(); print('h\\xe9'); print('h\\xe9', file=sys.stderr)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert (result.stdout, result.stderr) == (b"h\xc3\xa9\n", b"h\\xe9\n")


@pytest.mark.parametrize(
    ("verb", "closed", "code", "out", "err"),
    [
        ("run {model} hi --max-tokens 2", ">&-", 0, b"", b"prefill"),
        ("run {model} hi --max-tokens 2 --json", "2>&-", 0, b'"text"', b""),
        ("run {model}", "<&-", 1, b"", b"the prompt is empty"),
        ("chat {model}", "<&-", 0, b"", b""),
        ("run {model} hi --threads 0", "2>&-", 2, b"", b""),
        ("run {model} hi --threads 0", "<&- >&- 2>&-", 2, b"", b""),
        ("--version", ">&-", 0, b"", b""),
    ],
)
def test_closed_streams_are_no_traceback(model: Path, verb: str, closed: str, code: int, out: bytes, err: bytes) -> None:
    command = f'"{sys.executable}" -m quaff {verb.format(model=model)} {closed}'
    result = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert result.returncode == code and b"Traceback" not in result.stderr
    assert out in result.stdout and err in result.stderr
    assert (result.stdout == b"") == (out == b"") and (result.stderr == b"") == (err == b"")


def test_no_module_delays_the_handler_of_interrupts() -> None:
    code = "import sys; sys.modules.pop('typing', None); import quaff.cli; print([m for m in ('typing', 'typer') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_interrupt_while_modules_are_imported_ends_with_130() -> None:
    code = """
import importlib.abc, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from quaff.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


@pytest.mark.parametrize("verb", ["--version", "run {model} hi", "explain {model}"])
def test_an_unknown_instruction_set_is_one_line(model: Path, verb: str) -> None:
    process = quaff(*verb.format(model=model).split(), env={**os.environ, "QUAFF_ISA": "bogus"})
    out, error = process.communicate(timeout=60)
    assert process.returncode == 1 and out == b"" and error.startswith(b"error: ") and error.count(b"\n") == 1
    assert b"'bogus'" in error and b"scalar" in error
