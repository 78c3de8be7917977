"""The page of results: targets judged by hand-made numbers, tables, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts.benchmark.report.document import document, main
from scripts.benchmark.report.targets import TARGETS, bandwidth_share, context_share, engine, ratio, rows


def row(streams: int, rate: float, prompt: int = 128, **more: object) -> dict[str, Any]:
    times = {"p50": 1.0, "p99": 2.0}
    found = {"streams": streams, "prompt_tokens": prompt, "decode_tok_s": rate, "prefill_tok_s": 10 * rate}
    return found | {"ttft_ms": times, "inter_token_ms": times} | more


def mine(streams: int, rate: float, prompt: int = 128, ranks: int = 2, kind: str = "none") -> dict[str, Any]:
    more = {"step_bytes": 10**8, "kv_bytes_per_token": 1000}
    return row(streams, rate, prompt, ranks=ranks, quantization=kind, **more)


def result(rounds: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    first = rounds[0]
    machine = {"cpu": "Some CPU", "features": ["avx2"], "cores": 2, "memory_gb": 24, "gpus": []}
    found = {
        "title": "Demo",
        "model": "m.gguf",
        "dtype": "bfloat16",
        "quantization": "none",
        "ranks": 2,
        "parameters": 135_000_000,
        "new_tokens": 64,
        "llama_cpp_weights": "Q4_1",
        "date": "2026-01-02",
        "hardware": machine,
        "versions": {"python": "3.12", "torch": "2", "vllm": "0.32.0", "torchserve": "0.12.0"},
        "engine": first.get("engine", []),
        "server": first.get("server", []),
        "peers": {"vllm": first.get("vllm", []), "transformers": []},
        "open_loop": first.get("open_loop", []),
        "read_gb_s": first["memory"][0]["read_gb_s"],
        "ready_s": None,
        "load_average": 0.1,
        "failed": {},
        "rounds": rounds,
    }
    return found | more


def one_round(rate: float, other: float) -> dict[str, Any]:
    return {"memory": [{"read_gb_s": 20.0}], "engine": [mine(1, rate), mine(8, 80)], "vllm": [row(1, other)]}


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """3, 2 and 2.5; the quotient of the medians would be 3.75."""
    found = result([one_round(30, 10), one_round(100, 50), one_round(100, 40)])
    case = {"streams": 1, "prompt_tokens": 128}
    assert ratio(found, engine(found, **case), rows("vllm", **case)) == 2.5
    assert ratio(found, engine(found, **case), rows("vllm", streams=8)) is None


def test_shares_of_the_bandwidth() -> None:
    """100 steps of 0.1 GB are 10 of 20 GB/s. 8 x 1000 more tokens of 1000 bytes in 4 ms more are 2 of 20 GB/s."""
    rounds = [{"memory": [{"read_gb_s": 20.0}], "engine": [mine(1, 100), mine(8, 8 / 0.010), mine(8, 8 / 0.014, 1128)]}]
    found = result(rounds)
    assert bandwidth_share(found, engine(found, streams=1)) == pytest.approx(0.5)
    assert context_share(found, 8, 128, 1128) == pytest.approx(0.1)
    assert context_share(found, 8, 128, 4096) is None


def test_targets_say_what_is_missing() -> None:
    text = document([result([one_round(230, 100)], ready_s=9.5)])
    lines = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "2.30, not measured, not measured | yes, -, -" in lines["| bf16 decode / vLLM bf16: 1, 8, 32 streams"]
    assert "9.50 | yes |" in lines["| process start to ready, warm caches, 2 ranks: seconds"]
    assert "not measured | - |" in lines["| 1.1B shape, 1 stream: share of the read bandwidth, bf16, int8"]


def test_a_target_that_is_not_reached() -> None:
    text = document([result([one_round(100, 100)], ready_s=10.5)])
    assert "1.00, not measured, not measured | no, -, -" in text
    assert "10.50 | no |" in text


def test_large_models_have_their_own_targets() -> None:
    big = result([one_round(170, 100)], parameters=1_100_000_000)
    found = {target.text: target.values([big]) for target in TARGETS}
    assert found["1.1B shape, 1 stream: share of the read bandwidth, bf16, int8"] == [pytest.approx(0.85), None]
    assert found["bf16 decode / vLLM bf16: 1, 8, 32 streams"] == [None, None, None]


def test_a_section_tells_machine_tables_and_failures() -> None:
    wave = {"rate": 2.0, "requests": 24, "failed": 1, "prompt_tokens": 128, "new_tokens": 64, "tok_s": 99.0}
    wave |= {"ttft_ms": {"p50": 5.0, "p99": 6.0}, "inter_token_ms": {"p50": 7.0, "p99": 8.0}}
    first = one_round(100, 50) | {"open_loop": [wave], "server": [row(1, 90, ranks=2, quantization="none")]}
    lookup = [{"prompt": "copy", "lookup": True, "decode_tok_s": 12.0}]
    failed = {"llama.cpp": "no network"}
    text = document([result([first], failed=failed, ready_s=8.0, lookup=lookup)], notes="## Notes\n\nBy hand.")
    for part in (
        "2026-01-02: Some CPU, 2 cores (avx2), 24 GB",
        "| engine, bfloat16, 2 ranks | 1 | 128 | 100 | 1000 | 1 / 2 | 1.0 / 2.0 | 10.0 (0.50) |",
        "| vLLM | 1 | 128 | 50.0 | 500 |",
        "| engine, bfloat16, 2 ranks | 1 | 128 | 1.11 / 1.11 | 2.00 / 2.00 |",
        "| 2 | 24 | 1 | 99 | 5 / 6 | 7.0 / 8.0 |",
        "llama.cpp could not be measured here: no network",
        "| copy | yes | 12.0 |",
    ):
        assert part in text
    assert text.endswith("By hand.\n")
    assert "Other programs were running" not in text
    assert "Other programs were running (load average 3.5)." in document(
        [result([first], ready_s=8.0, load_average=3.5)]
    )


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(result([one_round(100, 50)])), encoding="utf-8")
    assert main([str(good), "--notes", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.startswith("# Performance\n")
    monkeypatch.setattr("scripts.benchmark.report.document.FOLDER", tmp_path)
    assert main([str(good), "--write"]) == 0
    page = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert page.startswith("# Performance\n")
    assert "![decode rates](performance/good.svg)" in page
    plot = ElementTree.fromstring((tmp_path / "performance" / "good.svg").read_text(encoding="utf-8"))
    widths = [float(bar.get("width", 0)) for bar in plot.findall("{http://www.w3.org/2000/svg}rect")][1:]
    assert len(widths) == 3  # 1 stream of the engine and of vLLM, 8 streams of the engine
    assert sorted(widths)[0] == pytest.approx(sorted(widths)[1] / 2)
    for text, why in (("{", "bad.json"), ("{}", "no rounds")):
        bad.write_text(text, encoding="utf-8")
        assert main([str(bad)]) == 1
        assert why in capsys.readouterr().err
