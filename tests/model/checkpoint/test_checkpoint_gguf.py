"""GGUF files: values as the `gguf` package decodes them, any part, and an error that helps for all that is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoint import Checkpoint, open_checkpoint
from model.checkpoint.gguf.block_types import BLOCK_TYPES, CHUNK_VALUES, decode_part
from model.checkpoint.gguf.read import GGUFCheckpoint
from model.config import CheckpointError
from scripts.benchmark.peers.peer import transformers_model
from tests.helpers.ranks import make_model
from tests.helpers.report import report
from tests.helpers.tiny import (
    gguf_name,
    random_weights,
    save_gguf,
    sentencepiece_fields,
    tiny_config,
    train_sentencepiece,
)
from tests.model.test_llama import all_logits

CONFIG = tiny_config(n_heads=8, n_kv_heads=2, head_dim=16, bos_id=1)
WEIGHTS = random_weights(CONFIG)
WQ = "layers.1.attention.wq.weight"
KINDS = [name for name in BLOCK_TYPES if not name.endswith("_K")]
"""What the `gguf` package can write; the others' files are in test_gguf_types.py."""
STORED = {"F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFCheckpoint]:
    root = tmp_path_factory.mktemp("gguf")
    opened = {}
    for kind in KINDS:
        checkpoint = open_checkpoint(save_gguf(root / f"{kind}.gguf", CONFIG, WEIGHTS, kind))
        assert isinstance(checkpoint, GGUFCheckpoint)
        opened[kind] = checkpoint
    return opened


def reference(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor by GGUF's name, read and decoded by the `gguf` package, in float32."""
    tensors = gguf.GGUFReader(checkpoint.path).tensors
    return {t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))) for t in tensors}


@report("B113", "huggingface/transformers#31766")
@report("B266", "FlashML-org/FreeToken#358")
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_gguf_package(checkpoints: dict[str, GGUFCheckpoint], kind: str) -> None:
    """B113 (no row moves) and B266 (each type that is accepted can be decoded): bit for bit."""
    checkpoint = checkpoints[kind]
    assert checkpoint.format == "gguf"
    assert checkpoint.config == CONFIG
    expected = reference(checkpoint)
    for name, weight in WEIGHTS.items():
        value = checkpoint.read(name)
        assert value.dtype == (torch.float32 if weight.dim() == 1 else STORED.get(kind, torch.float32))
        assert torch.equal(value.float(), expected[gguf_name(name)]), name
        # and it really is the parameter of that name
        assert torch.allclose(value.float(), weight, atol=0.05, rtol=0.1), name


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_part(checkpoints: dict[str, GGUFCheckpoint], data: st.DataObject) -> None:
    checkpoint = checkpoints[data.draw(st.sampled_from(sorted(checkpoints)))]
    name = data.draw(st.sampled_from(sorted(WEIGHTS)))
    whole = checkpoint.read(name)
    dim = data.draw(st.integers(0, whole.dim() - 1))
    start = data.draw(st.integers(0, whole.shape[dim]))
    stop = data.draw(st.integers(start, whole.shape[dim]))
    part = checkpoint.read(name, dim, start, stop)
    assert torch.equal(part, whole.narrow(dim, start, stop - start))
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@report("B267", "huggingface/transformers#34417")
def test_decodes_in_chunks() -> None:
    """B267: what is decoded at a time is bounded, whatever the tensor's size, and the chunks fit together."""
    kind = BLOCK_TYPES["Q4_1"]
    rows = 5 * CHUNK_VALUES // (2 * kind.block) + 7
    data = torch.randint(0, 64, (rows, 2 * kind.size), dtype=torch.uint8)
    sizes = []

    def decode(blocks: torch.Tensor) -> torch.Tensor:
        sizes.append(len(blocks) * kind.block)
        return kind.decode(blocks)

    spied = type(kind)(kind.name, kind.block, kind.size, kind.dtype, decode)
    value = decode_part(data, spied, 30, 40)
    expected = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType.Q4_1)[:, 30:40]
    assert torch.equal(value, torch.from_numpy(expected))
    assert len(sizes) == 6
    assert max(sizes) <= CHUNK_VALUES


def test_what_is_read_is_our_own(tmp_path: Path) -> None:
    with open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS)) as checkpoint:
        checkpoint.read(WQ).zero_()
        value = checkpoint.read(WQ)
    assert torch.equal(value, WEIGHTS[WQ])
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read(WQ)


@report("B265", "huggingface/transformers#31847")
def test_mixed_types(tmp_path: Path) -> None:
    """B265: the type is each tensor's own, whatever the file is called."""
    types = {name: KINDS[i % len(KINDS)] for i, name in enumerate(WEIGHTS)}
    checkpoint = open_checkpoint(save_gguf(tmp_path / "model-Q4_0.gguf", CONFIG, WEIGHTS, types))
    expected = reference(checkpoint)
    for name in WEIGHTS:
        assert torch.equal(checkpoint.read(name).float(), expected[gguf_name(name)]), name


@report("B265", "huggingface/transformers#31847")
def test_unsupported_type(tmp_path: Path) -> None:
    """B265: refused by name when the file is opened."""
    path = save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, {WQ: "MXFP4"})
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.weight has type MXFP4.*F32, F16, BF16, Q8_0.*Q6_K"):
        open_checkpoint(path)


class TestConfiguration:
    @report("B123", "ggml-org/llama.cpp#12567")
    def test_tied_output(self, tmp_path: Path) -> None:
        """B123: without output.weight the embedding is the output matrix."""
        config = tiny_config(tied_output=True)
        assert open_checkpoint(save_gguf(tmp_path / "m.gguf", config, random_weights(config))).config == config

    def test_values_are_taken_over(self, tmp_path: Path) -> None:
        """B128, B129; a head size that isn't dim / n_heads is read too."""
        config = tiny_config(dim=96, head_dim=16, rope_theta=5e5, norm_eps=1e-6, max_seq_len=8192)
        assert open_checkpoint(save_gguf(tmp_path / "m.gguf", config, random_weights(config))).config == config

    def test_defaults(self, tmp_path: Path) -> None:
        config = tiny_config(n_kv_heads=4)
        keys = ["attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "vocab_size"]
        fields = {**{f"llama.{key}": None for key in keys}, "tokenizer.ggml.bos_token_id": 0xFFFFFFFF}
        path = save_gguf(tmp_path / "m.gguf", config, random_weights(config), fields=fields)
        assert open_checkpoint(path).config == config

    def test_sizes_by_layer(self, tmp_path: Path) -> None:
        """A list with the same value for each layer is that value."""
        fields = {
            "llama.attention.head_count": [CONFIG.n_heads] * CONFIG.n_layers,
            "llama.attention.head_count_kv": [CONFIG.n_kv_heads] * CONFIG.n_layers,
            "llama.feed_forward_length": [CONFIG.hidden_dim] * CONFIG.n_layers,
        }
        checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields=fields))
        assert checkpoint.config == CONFIG
        for name, weight in WEIGHTS.items():
            assert torch.equal(checkpoint.read(name), weight), name

    def test_metadata_equals_the_gguf_package(self, tmp_path: Path) -> None:
        fields = sentencepiece_fields(train_sentencepiece(tmp_path / "tokenizer.model"))
        fields |= {"a.bool": True, "a.flags": [True, False], "a.text": "ä漢", "an.empty": "", "a.number": 2.5}
        checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields=fields))
        assert isinstance(checkpoint, GGUFCheckpoint)
        expected = {key: field.contents() for key, field in gguf.GGUFReader(checkpoint.path).fields.items()}
        assert checkpoint.metadata == {key: value for key, value in expected.items() if not key.startswith("GGUF.")}

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2', expected 'llama'"),
            ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn', expected 'none' or 'linear'"),
            ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
            ({"llama.rope.scaling.type": 3}, "rope.scaling.type is 3"),
            ({"llama.rope.scaling.factor": -4.0}, "rope.scaling.factor is -4.0, expected a number above 0"),
            ({"llama.rope.scaling.factor": float("nan")}, "rope.scaling.factor is nan"),
            ({"llama.rope.scale_linear": -2.0}, "rope.scale_linear is -2.0"),
            ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0, expected 1"),
            ({"llama.attention.key_length": 2**31}, "dimension_count is 16, expected 2147483648"),
            (
                {
                    "llama.attention.key_length": 2**31,
                    "llama.rope.dimension_count": None,
                    "llama.rope.scale_linear": 2.0,
                },
                "configuration says",
            ),
            ({"llama.expert_count": 8}, "expert_count is 8"),
            ({"split.count": 3}, "split.count is 3, .*--merge"),
            ({"llama.block_count": 3}, "block_count is 3, but the files hold 2 layers"),
            ({"llama.block_count": 4_000_000_000}, "block_count"),
            ({"llama.block_count": None}, "block_count is missing, expected an integer"),
            ({"llama.embedding_length": 64}, "dimension_count is 16, expected 8"),
            ({"llama.embedding_length": 130}, r"\(384, 128\), but the configuration says \(384, 130\)"),
            ({"llama.attention.head_count": 0}, "head_count is 0, expected at least 1"),
            ({"llama.attention.head_count": "8"}, "head_count is '8', expected an integer"),
            (
                {"llama.attention.head_count_kv": [2, 1]},
                r"head_count_kv is 1 to 2 depending on the layer, expected the",
            ),
            ({"llama.feed_forward_length": [96, 0]}, r"feed_forward_length is 0 to 96 depending on the layer"),
            (
                {"llama.attention.head_count": [8]},
                r"head_count is a list of 1 values, expected .* of the 2 layers",
            ),
            ({"llama.attention.head_count": [8] * 3}, r"head_count is a list of 3 values"),
            ({"llama.attention.head_count": [8.0, 8.0]}, r"head_count is a list of 2 values"),
            ({"llama.attention.head_count": [0, 0]}, r"head_count is a list of 2 values, expected at least 1"),
            ({"llama.attention.key_length": [16, 16]}, r"key_length is a list of 2 values, expected an integer"),
            ({"llama.attention.head_count_kv": 4}, r"wk.weight has shape \(32, 128\), .* \(64, 128\)"),
            ({"llama.rope.dimension_count": 8}, "dimension_count is 8, expected 16"),
            ({"llama.attention.value_length": 32}, "value_length is 32, expected 16"),
            ({"llama.feed_forward_length": 128}, r"\(128, 128\)"),
            ({"llama.context_length": None}, "context_length is missing"),
            ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is missing, expected a finite number"),
            ({"llama.rope.freq_base": float("inf")}, "freq_base is inf"),
            ({"tokenizer.ggml.tokens": ["a"] * 385}, "expected a list of at most 384 tokens"),
            ({"tokenizer.ggml.bos_token_id": 384}, "bos_token_id is 384, expected an id below 384"),
        ],
    )
    def test_refused(self, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields=fields))


class TestTensors:
    def test_missing(self, tmp_path: Path) -> None:
        weights = {name: weight for name, weight in WEIGHTS.items() if name not in (WQ, "norm.weight")}
        with pytest.raises(CheckpointError, match=rf"{WQ}, norm\.weight are missing"):
            open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, weights))

    def test_surplus(self, tmp_path: Path) -> None:
        extra = {"blk.0.attn_q.bias": torch.ones(128)}
        with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias is not part of a Llama model"):
            open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=extra))

    @pytest.mark.parametrize("factors", [torch.ones(8), 10000.0 ** (-torch.arange(8) / 8)])
    def test_buffers_may_be_left_over(self, tmp_path: Path, factors: torch.Tensor) -> None:
        extra = {"rope_freqs.weight": factors, "blk.0.attn_rot_embd.weight": torch.ones(8)}
        assert open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=extra)).config == CONFIG

    @pytest.mark.parametrize(
        ("factors", "message"),
        [
            (torch.ones(7), r"rope_freqs\.weight has type F32 and shape \(7,\), expected F32 and \(8,\)"),
            (torch.ones(1, 8), r"rope_freqs\.weight has type F32 and shape \(1, 8\)"),
            (torch.tensor([1.0] * 7 + [0.0]), r"rope_freqs\.weight holds 0\.0\.\.1\.0, expected finite"),
            (torch.tensor([1.0] * 7 + [torch.nan]), r"rope_freqs\.weight holds nan"),
        ],
    )
    def test_factors_that_can_not_be(self, tmp_path: Path, factors: torch.Tensor, message: str) -> None:
        with pytest.raises(CheckpointError, match=rf"m\.gguf: {message}"):
            open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra={"rope_freqs.weight": factors}))

    def test_a_parameter_under_two_names(self, tmp_path: Path) -> None:
        extra = {"norm.weight": torch.ones(128)}
        with pytest.raises(CheckpointError, match=r"'output_norm\.weight' and 'norm\.weight' are the same parameter"):
            open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=extra))


class TestRope:
    """Where the context was stretched."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"llama.rope.scaling.factor": 4.0},
            {"llama.rope.scale_linear": 4.0},
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
        ],
    )
    def test_linear(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        """By the key of today or of old, which counts only without the other."""
        path = save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields=fields)
        assert open_checkpoint(path).config.rope_factors == (4.0,) * 8

    @pytest.mark.parametrize(
        "fields",
        [
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0},
            {"llama.rope.scaling.type": "linear"},
            {"llama.rope.scale_linear": 0.0, "llama.rope.scaling.attn_factor": 1.0},
        ],
    )
    def test_none(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        assert open_checkpoint(save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields=fields)).config == CONFIG

    def test_both(self, tmp_path: Path) -> None:
        """llama.cpp applies one after the other."""
        extra = {"rope_freqs.weight": torch.tensor([1.0] * 4 + [8.0] * 4)}
        fields = {"llama.rope.scaling.factor": 2.0}
        path = save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields=fields, extra=extra)
        assert open_checkpoint(path).config.rope_factors == (2.0,) * 4 + (16.0,) * 4

    @pytest.mark.parametrize(
        "rope",
        [
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            {"rope_type": "linear", "factor": 2.5},
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_logits_equal_transformers(self, tmp_path: Path, rope: dict[str, Any]) -> None:
        """Llama 3.1's factors stand in a tensor of the file, linear scaling in its metadata."""
        reference_model = transformers_model(CONFIG, WEIGHTS, rope)
        ids = list(range(1, 141, 2))
        with torch.inference_mode():
            expected = reference_model(torch.tensor([ids])).logits[0]
        if rope["rope_type"] == "linear":
            path = save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields={"llama.rope.scaling.factor": rope["factor"]})
        else:
            # as llama.cpp's converter does: how much slower each pair turns than without scaling
            plain = CONFIG.rope_theta ** -(torch.arange(0, CONFIG.head_dim, 2).double() / CONFIG.head_dim)
            factors = (plain / reference_model.model.rotary_emb.inv_freq.double()).float()
            assert len(set(factors.tolist())) > 2
            path = save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra={"rope_freqs.weight": factors})
        with open_checkpoint(path) as checkpoint:
            weights = {name: checkpoint.read(name) for name in WEIGHTS}
            logits = all_logits(make_model(checkpoint.config, weights), ids)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        unscaled = all_logits(make_model(CONFIG, WEIGHTS), ids)
        assert unscaled is not None
        assert (unscaled - expected).abs().max() > 0.01


class TestDetection:
    def test_in_a_directory(self, tmp_path: Path) -> None:
        path = save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS)
        (tmp_path / "config.json").write_text("{}", encoding="utf-8")
        assert open_checkpoint(tmp_path).path == path

    def test_several_in_a_directory(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"holds 2 GGUF files, give one of them: a\.gguf, b\.gguf"):
            open_checkpoint(tmp_path)


class TestTokenizer:
    def test_from_the_metadata(self, tmp_path: Path) -> None:
        fields = sentencepiece_fields(train_sentencepiece(tmp_path / "tokenizer.model"))
        path = save_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, fields=fields)
        tokenizers = [
            open_checkpoint(path).tokenizer(),
            open_checkpoint(path, tmp_path / "tokenizer.model").tokenizer(),
        ]
        first, second = (tokenizer.encode("Hello, Straße!", bos=True, eos=False) for tokenizer in tokenizers)
        assert first == second
        assert first[0] == 1
