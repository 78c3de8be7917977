"""What a model needs, what the device has, and that a model which doesn't fit is refused before it is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generation.engine.engine import agreed_cache_tokens
from model import llama, loader, memory, process
from model.config import CheckpointError, ModelConfig, parameter_shapes
from model.distributed.collectives import Communicator
from model.distributed.parallel import plan_shards
from model.kernels.linear import QUANTIZATIONS, Linear, Packed
from model.kv_cache import BLOCK_TOKENS, KVCache
from model.llama import Attention, FeedForward, Llama, TransformerBlock
from model.loader import load_model, load_weights
from model.memory import available_bytes, check_memory, kv_bytes_per_token, size, weights_bytes
from tests.helpers.ranks import Weights, make_model, on_ranks
from tests.helpers.tiny import random_weights, tiny_config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def held_bytes(model: Llama) -> int:
    """Bytes of all tensors that the model's weights lie in, each counted once."""
    found: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value.numel() * value.dtype.itemsize
        elif isinstance(value, list):
            for item in value:
                visit(item)
        elif isinstance(value, (Llama, TransformerBlock, Attention, FeedForward, Linear, Packed)):
            for name, item in vars(value).items():
                if name != "rotary":
                    visit(item)

    visit(model)
    return sum(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["onednn", "native", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_weights(dtype: torch.dtype, kind: str, tied: bool, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed beforehand is what is held afterwards, in whatever form."""
    quantization = kind if kind in QUANTIZATIONS else None
    if dtype == torch.bfloat16:
        for module in (memory, llama):
            monkeypatch.setattr(module, "packed_kind", lambda *arguments: kind)
    config = tiny_config(n_heads=8, n_kv_heads=2, tied_output=tied, hidden_dim=100)
    weights = random_weights(config)

    def on_rank(comm: Communicator) -> tuple[int, int]:
        model = Llama(config, comm, dtype, CPU, config.max_seq_len, quantization)
        load_weights(model, Weights(weights))  # type: ignore[arg-type]
        return held_bytes(model), weights_bytes(config, model.shard, dtype, CPU, quantization)

    for held, computed in on_ranks(ranks, on_rank):
        assert held == computed


def test_weights_on_a_gpu_are_plain() -> None:
    config = tiny_config()
    (shard,) = plan_shards(config, 1)
    numbers = sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values())
    norms = (2 * config.n_layers + 1) * config.dim
    assert weights_bytes(config, shard, torch.bfloat16, GPU) == 2 * numbers + 2 * norms


def test_cache() -> None:
    config = tiny_config(n_heads=8, n_kv_heads=2)
    for shard in plan_shards(config, 2):
        cache = KVCache(config, shard, 3, torch.bfloat16, CPU)
        assert kv_bytes_per_token(config, shard, torch.bfloat16) * 3 * BLOCK_TOKENS == 2 * cache.keys.nbytes


# --- what the device has


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /sys/fs/cgroup; the process's own groups are in `membership` beside it."""
    root = tmp_path / "groups"
    (root / "memory/a/b").mkdir(parents=True)
    (root / "a/b").mkdir(parents=True)

    def control_groups(controller: str) -> Iterator[Path]:
        return process.control_groups(controller, tmp_path / "membership", root)

    monkeypatch.setattr(memory, "control_groups", control_groups)
    return root


def write_group(group: Path, names: tuple[str, str], limit: str, used: int, statistics: str = "") -> None:
    (group / names[0]).write_text(f"{limit}\n", encoding="utf-8")
    (group / names[1]).write_text(f"{used}\n", encoding="utf-8")
    (group / "memory.stat").write_text(statistics, encoding="utf-8")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def test_group_of_version_2(groups: Path) -> None:
    """The least of all levels; what only caches files counts as free."""
    (groups.parent / "membership").write_text("0::/a/b\n", encoding="utf-8")
    write_group(groups / "a/b", V2, "max", 700)
    write_group(groups / "a", V2, "1000", 900, "anon 500\ninactive_file 300\nactive_file 50\nshmem 7\n")
    assert available_bytes(CPU) == 1000 - 900 + 350
    write_group(groups / "a/b", V2, "800", 700)
    assert available_bytes(CPU) == 100
    write_group(groups / "a/b", V2, "600", 700)
    assert available_bytes(CPU) == 0


def test_group_of_version_1(groups: Path) -> None:
    (groups.parent / "membership").write_text("4:cpu,memory:/a/b\n1:cpuset:/\n", encoding="utf-8")
    write_group(
        groups / "memory/a/b", V1, "1000", 900, "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 4\n"
    )
    assert available_bytes(CPU) == 134


def test_no_limit(groups: Path) -> None:
    (groups.parent / "membership").write_text("0::/a\n4:memory:/a/b\n", encoding="utf-8")
    write_group(groups / "memory/a/b", V1, str(2**63 - 4096), 900)
    assert available_bytes(CPU) > 2**20
    (groups.parent / "membership").unlink()
    assert available_bytes(CPU) > 2**20


def test_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert available_bytes(GPU) == 123


# --- what is refused


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as they are, whatever this machine's kernels want."""
    monkeypatch.setattr(memory, "packed_kind", lambda *arguments: "plain")


SEVEN_B = ModelConfig(4096, 32, 32, 32, 128, 11008, 32000)
GIB = 2**30


def refusal(available: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU, **cache: int) -> str:
    shards = plan_shards(SEVEN_B, 2)[: 2 if device == CPU else 1]
    with pytest.raises(CheckpointError) as caught:
        check_memory(SEVEN_B, shards, dtype, device, ranks=2, max_seq_len=4096, available=available, **cache)
    return str(caught.value)


@pytest.mark.usefixtures("plain")
def test_too_little_for_the_cache() -> None:
    message = refusal(16 * GIB, cache_tokens=32768)
    assert (
        "doesn't fit into the memory of cpu: 2 of 2 ranks on this host need 12.6 GiB for weights in bfloat16" in message
    )
    assert "16.0 GiB for a key/value cache of 32768 tokens, together 28.6 GiB, but 16.0 GiB are available" in message
    assert re.search(r"what would fit: a cache of at most \d+ tokens \(kv_cache_tokens\)", message)
    assert "cache of 16384 tokens" in refusal(16 * GIB, cache_memory=4 * GIB)


@pytest.mark.usefixtures("plain")
def test_too_little_for_the_weights() -> None:
    message = refusal(14 * GIB, torch.float32)
    assert "25.1 GiB for weights in float32" in message
    assert "dtype bfloat16 (12.6 GiB for weights), a smaller model, or more ranks on more machines" in message
    message = refusal(4 * GIB)
    assert "dtype bfloat16" not in message
    message = refusal(4 * GIB, device=GPU)
    assert "memory of cuda:0: 1 of 2 ranks need 6.3 GiB" in message
    assert message.endswith("a smaller model, or more ranks on more GPUs (nproc-per-node)")


def test_quantized_weights_are_proposed_where_they_fit() -> None:
    """The least quantization of those that fit, with the cache that was asked for."""
    assert re.search(r"would fit: quantization int8 \(\d\.\d GiB for weights\), a smaller model", refusal(8 * GIB))
    assert "would fit: quantization int4 (" in refusal(5 * GIB)
    assert "quantization" not in refusal(2 * GIB)
    assert re.search(
        r"at most \d+ tokens .*, quantization int8 .*, or more memory", refusal(16 * GIB, cache_tokens=16000)
    )
    assert "quantization" not in refusal(16 * GIB, cache_tokens=32768)
    assert re.search(r"would fit: dtype bfloat16 .*, quantization int8", refusal(14 * GIB, torch.float32))
    assert "quantization" not in refusal(4 * GIB, device=GPU)
    shards = plan_shards(SEVEN_B, 1)
    with pytest.raises(CheckpointError, match=r"weights in int8 .*would fit: quantization int4 \("):
        check_memory(
            SEVEN_B,
            shards,
            torch.bfloat16,
            CPU,
            ranks=1,
            max_seq_len=4096,
            quantization="int8",
            available=5 * GIB,
        )


@given(available=st.integers(0, 64 * GIB), tokens=st.integers(1, 10**6))
def test_what_is_proposed_fits(available: int, tokens: int) -> None:
    """A number of tokens is proposed only where it is less than was wanted and passes the check itself."""
    shards = plan_shards(SEVEN_B, 2)

    def check(count: int) -> None:
        check_memory(
            SEVEN_B, shards, torch.bfloat16, CPU, ranks=2, max_seq_len=4096, cache_tokens=count, available=available
        )

    try:
        check(tokens)
    except CheckpointError as error:
        proposed = re.search(r"at most (\d+) tokens", str(error))
        if proposed:
            assert int(proposed[1]) < tokens
            check(int(proposed[1]))


def test_refused_before_anything_is_allocated(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100_000)
    monkeypatch.setattr(loader, "Llama", None)
    with pytest.raises(CheckpointError, match=r"doesn't fit into the memory of cpu: 1 of 1 ranks .* 0\.10 MiB are"):
        load_model(tiny_checkpoint, device="cpu", dtype="float32")


def test_the_cache_counts_too(tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a key/value cache of 1000000000 tokens"):
        load_model(tiny_checkpoint, device="cpu", dtype="float32", kv_cache_tokens=10**9)
    with pytest.raises(CheckpointError, match=r"1024\.0 GiB for a key/value cache"):
        load_model(tiny_checkpoint, device="cpu", dtype="float32", kv_cache_memory=2**40)


def test_ranks_of_one_host_share_its_memory(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for one rank's part is not enough for two on the same host; it is for two hosts with one each."""
    config = tiny_config(n_heads=8, n_kv_heads=2)
    shards = plan_shards(config, 2)
    both = sum(weights_bytes(config, shard, torch.float32) for shard in shards) + 2 * 2**16
    monkeypatch.setattr(memory, "available_bytes", lambda device: both * 3 // 4)

    def on_rank(comm: object) -> None:
        load_model(tiny_checkpoint, device="cpu", dtype="float32", comm=comm)  # type: ignore[arg-type]

    with pytest.raises(CheckpointError, match="2 of 2 ranks on this host"):
        on_ranks(2, on_rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    on_ranks(2, on_rank)


def test_the_default_cache_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no size is set it follows from what is free once the weights are there, and may be small."""
    config = tiny_config()
    model = make_model(config, random_weights(config))
    free = 10 * BLOCK_TOKENS * kv_bytes_per_token(config, model.shard, model.dtype)
    monkeypatch.setattr("generation.engine.engine.available_bytes", lambda device: free)
    tokens = agreed_cache_tokens(model)
    assert tokens * kv_bytes_per_token(config, model.shard, model.dtype) <= 0.4 * free


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.00 MiB"), (5 * 2**20, "5.00 MiB"), (2**29, "512 MiB"), (27 * 2**29, "13.5 GiB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text
