"""Programs that others wrote read what conversion writes: transformers the folder, the gguf package the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.checkpoint import open_checkpoint
from model.config import parameter_shapes
from model.kv_cache import KVCache, make_batch
from scripts.convert_checkpoint import Options, convert
from tests.helpers.ranks import make_model
from tests.helpers.tiny import gguf_name, random_weights, save_meta, tiny_config
from tests.scripts.conversion import save_source

IDS = list(range(3, 380, 9))


def own_logits(path: Path) -> torch.Tensor:
    """(len(IDS), vocabulary), computed here."""
    with open_checkpoint(path) as checkpoint:
        weights = {name: checkpoint.read(name).float() for name in parameter_shapes(checkpoint.config)}
        model = make_model(checkpoint.config, weights)
    n = len(IDS)
    cache = KVCache(model.config, model.shard, n // 16 + 2, model.dtype, model.device)
    blocks = np.arange(1, n // 16 + 2, dtype=np.int32)[None]
    batch = make_batch(np.array(IDS), np.array([0]), np.array([n]), blocks, np.arange(n), model.device)
    logits = model.forward(batch, cache)
    assert logits is not None
    return logits


@pytest.mark.parametrize(
    "params",
    [{}, {"use_scaled_rope": True}, {"use_scaled_rope": True, "rope_scaling_factor": 32}],
    ids=["plain", "3.1", "3.2"],
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["1", "3"])
def test_transformers_computes_the_same(tmp_path: Path, heads: tuple[int, int], params: dict[str, Any]) -> None:
    """B112: for heads in any ratio; logits from a folder of several files."""
    config = tiny_config(n_heads=heads[0], n_kv_heads=heads[1], rope_theta=500000.0, norm_eps=1e-6)
    source = save_meta(tmp_path / "m", config, random_weights(config), 2, params=params, tokenizer=True)
    convert(source, tmp_path / "h", Options("huggingface", max_shard_size=200_000))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "h", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(own_logits(source), expected, rtol=1e-4, atol=1e-4)


def test_transformers_tokenizes_the_same(tmp_path: Path) -> None:
    """For BPE; to read a `tokenizer.model` it needs protobuf, which isn't installed here."""
    source = save_source(tmp_path, "bpe")
    convert(source, tmp_path / "h", Options("huggingface"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "h")
    with open_checkpoint(source) as checkpoint:
        own = checkpoint.tokenizer()
    for text in ("Hello world!", "It's 1234 o'clock,\n\tisn't it?", "eine Straße über den Fluß"):
        assert theirs(text).input_ids == own.encode(text, bos=own.adds_bos, eos=False), text
    assert theirs.eos_token_id == own.eos_id
    assert theirs.chat_template == own.chat_template


def test_gguf_package_reads_the_file(tmp_path: Path) -> None:
    config = tiny_config(rope_theta=500000.0)
    weights = random_weights(config, dtype=torch.float16)
    source = save_meta(tmp_path / "m", config, weights, params={"use_scaled_rope": True}, tokenizer=True)
    convert(source, tmp_path / "g.gguf", Options("gguf"))
    reader = gguf.GGUFReader(tmp_path / "g.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {*map(gguf_name, weights), "rope_freqs.weight"}
    for name, weight in weights.items():
        values = gguf.quants.dequantize(tensors[gguf_name(name)].data, tensors[gguf_name(name)].tensor_type)
        assert (values.reshape(weight.shape) == weight.float().numpy()).all(), name
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16
    assert reader.fields["llama.rope.freq_base"].contents() == 500000
    assert reader.fields["llama.rope.dimension_count"].contents() == 16
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == config.vocab_size
