"""From a checkpoint to one rank's model: what is refused, and that a rank reads only its own part."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import open_checkpoint
from model.checkpoint.meta.read import MetaCheckpoint
from model.config import CheckpointError, ModelConfig, parameter_shapes
from model.distributed.parallel import part_of, plan_shards
from model.kernels.linear import Linear
from model.llama import Llama
from model.loader import load_model, load_weights, resolve_device, resolve_dtype
from model.tokenizer.tokenizer import BPETokenizer
from scripts.make_synthetic_checkpoint import make
from tests.helpers.ranks import ThreadCommunicator, Weights
from tests.helpers.report import report
from tests.helpers.tiny import (
    TINY_VOCAB,
    random_weights,
    save_gguf,
    save_huggingface,
    save_meta,
    sentencepiece_fields,
    tiny_config,
    train_sentencepiece,
)
from tests.helpers.tiny_tokenizers import byte_level_document
from tests.helpers.tiny_tokenizers import save as save_tokenizer

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outside torchrun (B021), and with torch's number of threads put back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return save_meta(tmp_path_factory.mktemp("meta"), config, random_weights(config), tokenizer=True)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, *, bf16: bool = True) -> list[int]:
    """Let torch see so many GPUs; returns the list of those made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    return current


# --- device and type


def test_device_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    assert resolve_device("auto", 0) == resolve_device("cpu", 3) == CPU
    for device in ("cuda", "cuda:0"):
        with pytest.raises(CheckpointError, match=r"cuda:0 is needed .* 0 CUDA devices are visible: .* use device cpu"):
            resolve_device(device, 0)


def test_each_local_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = gpus(monkeypatch, 2)
    assert [resolve_device(name, 1) for name in ("auto", "cuda", "cuda:0")] == [
        torch.device("cuda", index) for index in (1, 1, 0)
    ]
    assert current == [1, 1, 0]
    assert resolve_device("cpu", 0) == CPU


@report("B167", "meta-llama/llama3#164")
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """B167: names both numbers and what to do."""
    gpus(monkeypatch, 2)
    with pytest.raises(CheckpointError, match=r"cuda:2 is needed for local rank 2, but 2 CUDA .* lower nproc-per-node"):
        resolve_device("cuda", 2)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda0", "CPU", "mps"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(CheckpointError, match=rf"device is '{device}', expected auto, cpu, cuda or cuda:N"):
        resolve_device(device, 0)


@report("B116", "huggingface/text-generation-inference#1104")
def test_dtype_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """B116: float16 is refused before anything is computed, and never chosen."""
    assert resolve_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(CheckpointError, match=r"float16 .* on a CPU: use bfloat16, float32 or auto"):
        resolve_dtype("float16", CPU)


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_dtype_on_a_gpu(monkeypatch: pytest.MonkeyPatch, bf16: bool, expected: torch.dtype) -> None:
    gpus(monkeypatch, 1, bf16=bf16)
    assert resolve_dtype("auto", torch.device("cuda", 0)) is expected
    assert resolve_dtype("float16", torch.device("cuda", 0)) is torch.float16


def test_unknown_dtype() -> None:
    with pytest.raises(CheckpointError, match=r"dtype is 'int7', expected auto, float32, bfloat16, float16"):
        resolve_dtype("int7", CPU)


# --- the whole model


@report("B011", "meta-llama/llama#736")
@report("B021", "pytorch/serve#2588")
@report("B279", "pytorch/serve tp_llama llama-handler.py")
def test_loads_outside_torchrun(checkpoint: Path) -> None:
    """B021, B279, B011: one process, without torchrun's variables."""
    seen: list[tuple[int, int]] = []
    model, tokenizer = load_model(
        checkpoint, device="cpu", dtype="float32", progress=lambda done, total: seen.append((done, total))
    )
    assert (model.device, model.dtype, model.comm.world_size) == (CPU, torch.float32, 1)
    assert model.max_seq_len == model.config.max_seq_len
    assert model.config.stop_ids == tokenizer.stop_ids == {2}
    assert model.config.bos_id == 1
    with open_checkpoint(checkpoint) as source:
        sizes = {name: source.stored_bytes(name) for name in parameter_shapes(model.config)}
    layers = [sum(size for name, size in sizes.items() if name.startswith(f"layers.{i}.")) for i in (0, 1)]
    steps = [0, sizes["tok_embeddings.weight"], *layers, sizes["norm.weight"] + sizes["output.weight"]]
    assert seen == [(done, sum(sizes.values())) for done in itertools.accumulate(steps)]


def test_progress_counts_a_layer_when_it_is_packed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing takes most of the time."""
    events: list[str] = []
    pack = Linear.pack

    def noted(linear: Linear) -> None:
        events.append("pack")
        pack(linear)

    monkeypatch.setattr(Linear, "pack", noted)
    load_model(checkpoint, device="cpu", quantization="int4", progress=lambda done, total: events.append("told"))
    layer = [*["pack"] * 4, "told"]
    assert events == ["told", "told", *layer, *layer, "pack", "told"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_only_on_a_terminal(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of several ranks one shows it; who brings a progress of their own sees no bar."""
    load_model(checkpoint, device="cpu", dtype="float32")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    for shown, arguments in ((True, {}), (False, {"progress": lambda done, total: None})):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        load_model(checkpoint, device="cpu", dtype="float32", **arguments)
        assert ("Loading" in terminal.getvalue()) == shown
    assert capfd.readouterr().out == ""
    second = ThreadCommunicator(1, threading.Barrier(2), [None, None])
    monkeypatch.setattr(second, "barrier", lambda: None)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    load_model(checkpoint, device="cpu", dtype="float32", comm=second)
    assert terminal.getvalue() == ""


def test_shorter_context(checkpoint: Path) -> None:
    model, _ = load_model(checkpoint, device="cpu", dtype="float32", max_seq_len=32)
    assert model.max_seq_len == len(model.rotary) == 32


@report("B043", "meta-llama/llama#446")
def test_tokenizer_of_another_model(checkpoint: Path, tmp_path: Path) -> None:
    """B043: found while loading, not when its last token is used."""
    other = train_sentencepiece(tmp_path / "tokenizer.model", TINY_VOCAB + 1)
    with pytest.raises(CheckpointError, match=rf"{TINY_VOCAB + 1} ids, but the embedding only {TINY_VOCAB} rows"):
        load_model(checkpoint, device="cpu", tokenizer_path=other)


def test_smaller_tokenizer_is_fine(checkpoint: Path, tmp_path: Path) -> None:
    other = train_sentencepiece(tmp_path / "tokenizer.model", TINY_VOCAB - 1)
    model, tokenizer = load_model(checkpoint, device="cpu", dtype="float32", tokenizer_path=other)
    assert (tokenizer.n_words, model.config.vocab_size) == (TINY_VOCAB - 1, TINY_VOCAB)


@pytest.mark.parametrize(
    ("arguments", "message", "when"),
    [
        ({"dtype": "float16"}, "float16 has no fast kernels on a CPU", "before"),
        ({"dtype": "half"}, "dtype is 'half'", "before"),
        ({"max_seq_len": 0}, "max_seq_len is 0, expected at least 1", "opened and closed"),
        ({"device": "tpu"}, "device is 'tpu'", "before"),
        ({"quantization": "int3"}, "quantization is 'int3', expected none, int8, int4", "before"),
    ],
)
def test_bad_arguments(
    checkpoint: Path, arguments: dict[str, Any], message: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []
    close = MetaCheckpoint.close

    def noted(self: MetaCheckpoint) -> None:
        closed.append(self.path)
        close(self)

    monkeypatch.setattr(MetaCheckpoint, "close", noted)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint, **{"device": "cpu", **arguments})
    assert closed == ([checkpoint] if "opened" in when else [])


def test_missing_checkpoint(tmp_path: Path) -> None:
    """B008."""
    with pytest.raises(CheckpointError, match=r"nowhere: no such file or directory"):
        load_model(tmp_path / "nowhere", device="cpu")


def test_weights_are_loaded_once(checkpoint: Path) -> None:
    model, _ = load_model(checkpoint, device="cpu", dtype="float32")
    model.layers[0].attention.wo.weight = None  # as packing leaves it
    with pytest.raises(RuntimeError, match="loaded once"):
        load_weights(model, Weights(random_weights(model.config)))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["tok_embeddings.weight", "layers.1.attention.wk.weight", "norm.weight"])
def test_broken_numbers(tmp_path: Path, name: str, value: float) -> None:
    """NaN and infinite weights in any format: tensor and file are named."""
    config = tiny_config(n_heads=8, n_kv_heads=2)
    weights = random_weights(config)
    weights[name].view(-1)[-1] = value
    save_meta(tmp_path / "meta", config, weights, shards=2, tokenizer=True)
    fields = sentencepiece_fields(tmp_path / "meta/tokenizer.model")
    save_gguf(tmp_path / "model.gguf", config, weights, "F16", fields=fields)
    shutil.copy(tmp_path / "meta/tokenizer.model", save_huggingface(tmp_path / "hf", config, weights))
    shard = "consolidated.00.pth" if name == "norm.weight" else "consolidated.01.pth"
    files = {"meta": f"meta/{shard}", "hf": "hf/model.safetensors", "model.gguf": "model.gguf"}
    for path, file in files.items():
        for dtype in ("float32", "bfloat16"):
            with pytest.raises(CheckpointError, match=rf"{file}: {name} holds NaN or infinite numbers"):
                load_model(tmp_path / path, device="cpu", dtype=dtype)


def test_tokenizer_in_hugging_faces_form(tmp_path: Path) -> None:
    """Meta's Llama 3 comes with a tiktoken vocabulary: its tokenizer.json is named, by its directory, or lies there."""
    config = tiny_config(vocab_size=1024)
    directory = save_meta(tmp_path / "model", config, random_weights(config))
    (directory / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: a tiktoken vocabulary .* tokenizer\.json"):
        load_model(directory, device="cpu", dtype="float32")
    elsewhere = tmp_path / "tokenizer"
    for place, given in ((elsewhere, elsewhere), (elsewhere, elsewhere / "tokenizer.json"), (directory, None)):
        save_tokenizer(place, byte_level_document("llama3"))
        model, tokenizer = load_model(directory, device="cpu", dtype="float32", tokenizer_path=given)
        assert isinstance(tokenizer, BPETokenizer)
        assert model.config.stop_ids == tokenizer.stop_ids


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("to", ["meta", "huggingface", "gguf"])
def test_peak_memory(tmp_path: Path, to: str) -> None:
    """What loading takes beside the weights themselves is a tensor or two: not the file, not a second copy."""
    config = ModelConfig(512, 16, 8, 4, 64, 2048, 8192)
    target = tmp_path / ("model.gguf" if to == "gguf" else "model")
    make(target, config, to, "F16")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmark.load", str(target)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    largest = config.vocab_size * config.dim * 4 / 2**20
    libraries = 24  # what they keep for themselves, whatever the model's size
    assert found["peak_mb"][0] < 1.2 * found["needed_mb"][0] + largest + libraries
    assert found["needed_mb"][0] > 120


# --- a rank's part


class Recorder(Weights):
    """Notes how many numbers of each parameter were read."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.sizes: dict[str, int] = {}

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        assert name not in self.sizes, f"{name} was read twice"
        part = super().read(name, dim, start, stop)
        self.sizes[name] = part.numel()
        return part


def read_by(config: ModelConfig, world_size: int, rank: int, weights: dict[str, torch.Tensor]) -> dict[str, int]:
    comm = ThreadCommunicator(rank, threading.Barrier(world_size), [None] * world_size)
    model = Llama(config, comm, torch.float32, CPU, config.max_seq_len)
    recorder = Recorder(weights)
    load_weights(model, recorder)  # type: ignore[arg-type]
    return recorder.sizes


@report("B014", "meta-llama/llama#856")
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_only_its_part(tied: bool) -> None:
    """B014, B166: of 8 ranks each reads an eighth of every matrix, once; norms are whole everywhere."""
    config = tiny_config(n_heads=8, n_kv_heads=8, hidden_dim=256, tied_output=tied)
    weights = random_weights(config)
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    for rank in range(8):
        read = read_by(config, 8, rank, weights)
        assert read == {name: size if "norm" in name else size // 8 for name, size in sizes.items()}


@report("B271", "huggingface/transformers#48307")
@pytest.mark.parametrize(("heads", "kv_heads", "world_size"), [(9, 3, 2), (8, 2, 8), (12, 4, 3), (8, 1, 5)])
def test_parts_cover_each_parameter_once(heads: int, kv_heads: int, world_size: int) -> None:
    """Uneven deals; key/value heads are on several ranks only where there are fewer of them than ranks (B271)."""
    config = tiny_config(n_heads=heads, n_kv_heads=kv_heads, hidden_dim=200, vocab_size=389)
    shards = plan_shards(config, world_size)
    for name, shape in parameter_shapes(config).items():
        parts = [part_of(name, shard, config.head_dim) for shard in shards]
        if len(shape) == 1:
            assert parts == [None] * world_size
            continue
        ranges = [part for part in parts if part is not None]
        assert len(ranges) == world_size
        assert len({dim for dim, _, _ in ranges}) == 1
        spans = sorted({(start, stop) for _, start, stop in ranges})
        assert len(spans) == min(world_size, kv_heads) if name.split(".")[-2] in ("wk", "wv") else world_size
        assert [i for start, stop in spans for i in range(start, stop)] == list(range(shape[ranges[0][0]]))
