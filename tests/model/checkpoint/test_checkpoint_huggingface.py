"""Hugging Face directories: logits as transformers computes them, any part, and an error that helps for all else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from model.checkpoint import open_checkpoint
from model.checkpoint.huggingface.read import HuggingFaceCheckpoint, huggingface_name, meta_name
from model.config import CheckpointError, parameter_shapes
from model.distributed.collectives import init_communicator
from model.kv_cache import KVCache, make_batch
from model.llama import Llama
from model.loader import load_model, load_weights
from tests.helpers.report import report
from tests.helpers.tiny import (
    huggingface_tensors,
    random_weights,
    save_gguf,
    save_huggingface,
    tiny_config,
    train_sentencepiece,
)

CONFIG = tiny_config(n_heads=6, n_kv_heads=2, norm_eps=1e-6)
WEIGHTS = random_weights(CONFIG)
WQ, WK = "layers.1.attention.wq.weight", "layers.1.attention.wk.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CPU = torch.device("cpu")


def all_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """(len(ids), vocabulary) logits of the checkpoint's model on one rank."""
    with open_checkpoint(path) as checkpoint:
        model = Llama(checkpoint.config, init_communicator(CPU), torch.float32, CPU, checkpoint.config.max_seq_len)
        load_weights(model, checkpoint)
    n = len(ids)
    cache = KVCache(model.config, model.shard, n // 16 + 2, model.dtype, CPU)
    blocks = np.arange(1, n // 16 + 2, dtype=np.int32)[None]
    logits = model.forward(make_batch(np.array(ids), np.array([0]), np.array([n]), blocks, np.arange(n), CPU), cache)
    assert logits is not None
    return logits


def save_peer(directory: Path, heads: int, kv_heads: int, shard_size: str = "1GB", **changes: Any) -> Any:
    """A random model of transformers, saved by itself; its weights are large enough for logits near 1."""
    values: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": heads * 8,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        **changes,
    }
    torch.manual_seed(heads * 16 + kv_heads)
    peer = LlamaForCausalLM(LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, **values)).eval()
    for name, parameter in peer.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1, 0.1)
    peer.save_pretrained(directory, max_shard_size=shard_size)
    return peer


class TestAgainstTransformers:
    def check(self, directory: Path, peer: Any) -> None:
        ids = torch.randint(0, 131, (90,), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            expected = peer(ids[None]).logits[0]
        assert expected.std() > 0.3
        torch.testing.assert_close(all_logits(directory, ids.tolist()), expected, atol=1e-4, rtol=0)

    @report("B110", "ggml-org/llama.cpp#2376")
    @report("B111", "ggml-org/llama.cpp#3364")
    @report("B112", "huggingface/transformers#31554")
    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (9, 3), (12, 3), (8, 1)])
    @pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["single", "indexed"])
    def test_head_ratios(self, tmp_path: Path, heads: int, kv_heads: int, shard_size: str) -> None:
        """B110, B111, B112: heads to key/value heads 1, 2, 3, 4 and 8, as transformers saves the model."""
        peer = save_peer(tmp_path, heads, kv_heads, shard_size)
        assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
        self.check(tmp_path, peer)

    @report("B121", "vllm-project/speculators#184")
    @pytest.mark.parametrize("head_dim", [8, 32])
    def test_tied_and_head_size(self, tmp_path: Path, head_dim: int) -> None:
        """B121: one file without lm_head.weight; also heads that are larger than their part of the model."""
        peer = save_peer(tmp_path, 8, 2, tie_word_embeddings=True, head_dim=head_dim)
        with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert open_checkpoint(tmp_path).config.tied_output
        self.check(tmp_path, peer)

    @pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA3}])
    @pytest.mark.parametrize("old", [False, True], ids=["version 5", "version 4"])
    def test_scaled_rope(self, tmp_path: Path, rope: dict[str, Any], old: bool) -> None:
        """In the form that transformers 5 writes, and in that of version 4."""
        peer = save_peer(tmp_path, 6, 2, rope_parameters={**rope, "rope_theta": 5e5}, head_dim=16)
        file = tmp_path / "config.json"
        values = json.loads(file.read_text(encoding="utf-8"))
        if old:
            del values["rope_parameters"]
            values |= {"rope_theta": 5e5, "rope_scaling": rope}
            file.write_text(json.dumps(values), encoding="utf-8")
        else:
            assert values["rope_parameters"]["rope_theta"] == 5e5
        self.check(tmp_path, peer)


@pytest.fixture(scope="module", params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceCheckpoint:
    """A checkpoint in two files whose tensors don't lie at multiples of their type's size."""
    weights = {name: weight.to(request.param) for name, weight in WEIGHTS.items()}
    path = save_huggingface(tmp_path_factory.mktemp("hf"), CONFIG, weights, 2)
    for file in path.glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little") + 1
        file.write_bytes(length.to_bytes(8, "little") + data[8 : 7 + length] + b" " + data[7 + length :])
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    return checkpoint


def test_values(opened: HuggingFaceCheckpoint) -> None:
    assert opened.format == "huggingface"
    assert opened.config == CONFIG
    dtype = opened.read("norm.weight").dtype
    for name, weight in WEIGHTS.items():
        assert torch.equal(opened.read(name), weight.to(dtype)), name


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part(opened: HuggingFaceCheckpoint, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([WQ, WK, *sorted(WEIGHTS)]))
    whole = opened.read(name)
    dim = data.draw(st.integers(0, whole.dim() - 1))
    start = data.draw(st.integers(0, whole.shape[dim]))
    stop = data.draw(st.integers(start, whole.shape[dim]))
    part = opened.read(name, dim, start, stop)
    assert torch.equal(part, whole.narrow(dim, start, stop - start))
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@settings(max_examples=50, deadline=None)
@given(heads=st.integers(1, 5), pairs=st.integers(1, 6))
def test_rows_for_any_head_size(heads: int, pairs: int) -> None:
    """Meta's rows 2j and 2j + 1 of a head are rows j and j + D/2 of the file."""
    from model.checkpoint.huggingface.read import _halved_rows

    rows = torch.arange(heads * 2 * pairs).view(heads, 2, pairs).transpose(1, 2).reshape(-1)
    assert torch.equal(_halved_rows(0, len(rows), 2 * pairs), rows)
    for start in range(len(rows)):
        assert torch.equal(_halved_rows(start, len(rows), 2 * pairs), rows[start:])


def test_names_there_and_back() -> None:
    for name in parameter_shapes(CONFIG):
        assert meta_name(huggingface_name(name)) == name
    assert meta_name("model.layers.00.mlp.up_proj.weight") == "model.layers.00.mlp.up_proj.weight"


def test_what_is_read_is_our_own(tmp_path: Path) -> None:
    with open_checkpoint(save_huggingface(tmp_path, CONFIG, WEIGHTS)) as checkpoint:
        for name in (WQ, "norm.weight"):
            checkpoint.read(name).zero_()
            assert torch.equal(checkpoint.read(name), WEIGHTS[name])
    checkpoint.close()
    with pytest.raises(CheckpointError, match=f"closed, {WQ}"):
        checkpoint.read(WQ)


class TestTensors:
    def save(self, directory: Path, change: Callable[[dict[str, torch.Tensor]], object], **options: Any) -> Path:
        """A checkpoint whose one file has been changed."""
        path = save_huggingface(directory, CONFIG, WEIGHTS, **options)
        tensors = huggingface_tensors(CONFIG, WEIGHTS)
        change(tensors)
        safetensors.torch.save_file(tensors, path / "model.safetensors")
        return path

    def test_left_over_buffers_and_metadata(self, tmp_path: Path) -> None:
        extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64) for i in (0, 1)}
        for files in (1, 2):
            path = save_huggingface(tmp_path / str(files), CONFIG, WEIGHTS, files, extra=extra)
            assert torch.equal(open_checkpoint(path).read(WQ), WEIGHTS[WQ])

    @pytest.mark.parametrize("files", [1, 2])
    def test_tied_with_output(self, tmp_path: Path, files: int) -> None:
        """The output matrix of a tied model is the embedding, whatever else the file holds."""
        config = tiny_config(tied_output=True)
        extra = {"lm_head.weight": torch.ones(2)}
        path = save_huggingface(tmp_path, config, random_weights(config), files, extra=extra)
        assert open_checkpoint(path).config == config

    @report("B122", "QwenLM/Qwen3-VL-Embedding#89")
    def test_output_is_missing(self, tmp_path: Path) -> None:
        """B122: a model that isn't tied needs its output matrix."""
        path = self.save(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(CheckpointError, match=rf"{path}: lm_head.weight is missing.*tie_word_embeddings"):
            open_checkpoint(path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(Q_PROJ), f": {Q_PROJ} is missing"),
            (lambda t: t.pop("model.embed_tokens.weight"), ": model.embed_tokens.weight is missing"),
            (
                lambda t: t.update({"a.bias": torch.ones(1)}),
                r"model\.safetensors: a\.bias is not part of a Llama model",
            ),
            (lambda t: t.update({Q_PROJ: torch.ones(96, 80)}), rf"{Q_PROJ} has shape \(96, 80\), .* \(96, 96\)"),
            (lambda t: t.update({"model.norm.weight": torch.ones(1, 96)}), r"model.norm.weight has shape \(1, 96\)"),
            (
                lambda t: t.update({"model.embed_tokens.weight": torch.tensor(1.0)}),
                r"embed_tokens.weight has shape \(\)",
            ),
            (lambda t: t.update({Q_PROJ: t[Q_PROJ].double()}), f"{Q_PROJ} has type F64.*F32, F16, BF16"),
            (lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)}), f"{Q_PROJ} has type F8_E4M3"),
        ],
        ids=["missing", "no embedding", "surplus", "shape", "dimensions", "scalar", "double", "float8"],
    )
    def test_refused(self, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
        path = self.save(tmp_path, change)
        with pytest.raises(CheckpointError, match=f"{path}.*{message}"):
            open_checkpoint(path)


class TestFiles:
    INDEX = "model.safetensors.index.json"
    PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    def edit_index(self, path: Path, change: Callable[[dict[str, str]], object]) -> None:
        index = json.loads((path / self.INDEX).read_text(encoding="utf-8"))
        change(index["weight_map"])
        (path / self.INDEX).write_text(json.dumps(index), encoding="utf-8")

    def test_ways_to_name_it(self, tmp_path: Path) -> None:
        one, two = (
            save_huggingface(tmp_path / "1", CONFIG, WEIGHTS),
            save_huggingface(tmp_path / "2", CONFIG, WEIGHTS, 2),
        )
        for path in (one / "model.safetensors", two / self.INDEX, str(one)):
            assert torch.equal(open_checkpoint(path).read(WQ), WEIGHTS[WQ])
        with pytest.raises(CheckpointError, match=f"one of 2 files of a model, give its directory: {two}"):
            open_checkpoint(two / self.PARTS[0])

    def test_other_names(self, tmp_path: Path) -> None:
        """One file of any name; numbered files without their index; more files than the index lists."""
        one = save_huggingface(tmp_path / "1", CONFIG, WEIGHTS)
        (one / "model.safetensors").rename(one / "tiny.safetensors")
        (one / ".part.safetensors").write_bytes(b"")
        two = save_huggingface(tmp_path / "2", CONFIG, WEIGHTS, 2)
        (two / self.INDEX).rename(two / "tiny.safetensors.index.json")
        (two / "consolidated.safetensors").write_bytes(b"")
        three = save_huggingface(tmp_path / "3", CONFIG, WEIGHTS, 3)
        (three / self.INDEX).unlink()
        for path in (one, two, three):
            assert torch.equal(open_checkpoint(path).read(WQ), WEIGHTS[WQ])
        (three / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"3: model-00002-of-00003\.safetensors is missing \(2 files found\)"):
            open_checkpoint(three)

    def test_ambiguous(self, tmp_path: Path) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS)
        (path / "model.safetensors").rename(path / "a.safetensors")
        (path / "b.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"2 safetensors files and no index \(a\.safetensors, b\."):
            open_checkpoint(path)
        for name in "cd":
            (path / f"{name}.safetensors.index.json").write_text("{}", encoding="utf-8")
        with pytest.raises(CheckpointError, match="holds 2 indexes"):
            open_checkpoint(path)

    def test_missing_file(self, tmp_path: Path) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS, 2)
        (path / self.PARTS[1]).unlink()
        with pytest.raises(CheckpointError, match=rf"{self.PARTS[1]} is missing, where .* has 'model\.layers"):
            open_checkpoint(path)

    def test_index_of_other_files(self, tmp_path: Path) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS, 2)
        self.edit_index(path, lambda where: where.update({Q_PROJ: self.PARTS[0]}))
        with pytest.raises(
            CheckpointError,
            match=rf"{self.PARTS[0]}: .* says that '{Q_PROJ}' is in this file, but it is in {self.PARTS[1]}",
        ):
            open_checkpoint(path)
        self.edit_index(path, lambda where: where.pop(Q_PROJ))
        with pytest.raises(CheckpointError, match=rf"{self.PARTS[1]}: {Q_PROJ} isn't in {self.INDEX}"):
            open_checkpoint(path)
        self.edit_index(path, lambda where: where.update({Q_PROJ: self.PARTS[1], "x.weight": self.PARTS[1]}))
        with pytest.raises(CheckpointError, match=r"'x\.weight' is in this file, but it isn't there"):
            open_checkpoint(path)

    def test_tensor_in_two_files(self, tmp_path: Path) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS, 2)
        tensors = safetensors.torch.load_file(path / self.PARTS[1])
        extra = {"model.embed_tokens.weight": WEIGHTS["tok_embeddings.weight"]}
        safetensors.torch.save_file({**tensors, **extra}, path / self.PARTS[1])
        with pytest.raises(CheckpointError, match=rf"model.embed_tokens.weight is in {self.PARTS[0]} too"):
            open_checkpoint(path)

    @pytest.mark.parametrize(
        "value", ["../other.safetensors", "/model.safetensors", "a\\b.safetensors", "model.bin", 3]
    )
    def test_index_that_leads_elsewhere(self, tmp_path: Path, value: Any) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS, 2)
        self.edit_index(path, lambda where: where.update({Q_PROJ: value}))
        with pytest.raises(CheckpointError, match=rf"{self.INDEX}: '{Q_PROJ}' is said to be in "):
            open_checkpoint(path)

    @pytest.mark.parametrize(
        ("text", "message"), [("{}", "no weight_map"), ('{"weight_map": 1}', "no weight_map"), ("<html>", "web page")]
    )
    def test_broken_index(self, tmp_path: Path, text: str, message: str) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS, 2)
        (path / self.INDEX).write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=rf"{self.INDEX}: .*{message}"):
            open_checkpoint(path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b"abc", "it has 3 bytes"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "run `git lfs pull`"),
            (b"<!doctype html><html></html>", "it is a web page of 28 bytes"),
            (b"\xff" * 64, "truncated or no model"),
        ],
        ids=["empty", "short", "LFS pointer", "web page", "rubbish"],
    )
    def test_something_else_in_place_of_a_file(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS, 2)
        (path / self.PARTS[1]).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{self.PARTS[1]}: isn't a safetensors file: .*{message}"):
            open_checkpoint(path)

    def test_truncated_anywhere(self, tmp_path: Path) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS)
        file = path / "model.safetensors"
        data = file.read_bytes()
        for size in range(len(data) - 1, 0, -len(data) // 37):
            file.write_bytes(data[:size])
            with pytest.raises(CheckpointError, match=r"model\.safetensors: .*truncated"):
                open_checkpoint(path)
        file.write_bytes(data[:-1])
        with pytest.raises(CheckpointError, match=f"truncated: tensor '.*weight' ends at byte {len(data)}, "):
            open_checkpoint(path)

    def test_pickles(self, tmp_path: Path) -> None:
        for name in ("config.json", "pytorch_model.bin"):
            (tmp_path / name).write_text("{}", encoding="utf-8")
        for path in (tmp_path, tmp_path / "pytorch_model.bin"):
            with pytest.raises(CheckpointError, match=r"\*\.bin files \(pickles.*save_pretrained"):
                open_checkpoint(path)
        assert open_checkpoint(save_gguf(tmp_path / "ggml-model.bin", CONFIG, WEIGHTS)).format == "gguf"


class TestTokenizer:
    def test_given_by_path(self, tmp_path: Path) -> None:
        file = train_sentencepiece(tmp_path / "other.model")
        tokenizer = open_checkpoint(save_huggingface(tmp_path / "hf", CONFIG, WEIGHTS), file).tokenizer()
        assert tokenizer.decode(tokenizer.encode("Hello world!", bos=False, eos=False)) == "Hello world!"

    def test_beside_the_weights(self, tmp_path: Path) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS)
        train_sentencepiece(path / "tokenizer.model")
        for checkpoint in (open_checkpoint(path), open_checkpoint(path / "model.safetensors")):
            tokenizer = checkpoint.tokenizer()
            assert tokenizer.decode(tokenizer.encode("Hello world!", bos=False, eos=False)) == "Hello world!"
            assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)

    def test_stop_ids_reach_the_model(self, tmp_path: Path) -> None:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS)
        train_sentencepiece(path / "tokenizer.model")
        model, tokenizer = load_model(path, device="cpu", dtype="float32", comm=init_communicator(CPU))
        assert (model.config.bos_id, model.config.stop_ids) == (1, tokenizer.stop_ids)
        assert 2 in tokenizer.stop_ids
