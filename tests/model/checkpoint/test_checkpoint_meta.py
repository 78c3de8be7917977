"""Meta checkpoints: any part of any parameter from any number of shards, and an error that helps for all else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoint import Checkpoint, open_checkpoint
from model.config import CheckpointError, parameter_shapes
from model.rope import llama3_factors
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, save_meta, tiny_config

CONFIG = tiny_config(n_heads=16, n_kv_heads=8, head_dim=4)
WEIGHTS = random_weights(CONFIG, dtype=torch.bfloat16)
LAYOUTS = [(shards, dim) for shards in (1, 2, 4, 8) for dim in (0, 1)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Checkpoint]:
    root = tmp_path_factory.mktemp("meta")
    return {
        (shards, dim): open_checkpoint(save_meta(root / f"{shards}-{dim}", CONFIG, WEIGHTS, shards, embedding_dim=dim))
        for shards, dim in LAYOUTS
    }


def edit_params(directory: Path, **changes: Any) -> None:
    file = directory / "params.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def edit_shard(file: Path, **changes: Any) -> None:
    """Put tensors into a shard, or take them out (None); dots in names are written as double underscores."""
    state = {**torch.load(file, weights_only=True), **{k.replace("__", "."): v for k, v in changes.items()}}
    torch.save({k: v for k, v in state.items() if v is not None}, file)


@report("B013", "meta-llama/llama#806")
@report("B165", "meta-llama/llama#594")
@pytest.mark.parametrize(("shards", "dim"), LAYOUTS)
def test_whole_parameters(checkpoints: dict[tuple[int, int], Checkpoint], shards: int, dim: int) -> None:
    """B009, B010, B013, B165, B166: shards are put together whatever their number."""
    checkpoint = checkpoints[shards, dim]
    assert checkpoint.format == "meta"
    assert checkpoint.config == CONFIG
    for name, weight in WEIGHTS.items():
        value = checkpoint.read(name)
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, weight), name


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_part(checkpoints: dict[tuple[int, int], Checkpoint], data: st.DataObject) -> None:
    checkpoint = checkpoints[data.draw(st.sampled_from(LAYOUTS))]
    name = data.draw(st.sampled_from(sorted(WEIGHTS)))
    weight = WEIGHTS[name]
    dim = data.draw(st.integers(0, weight.dim() - 1))
    start = data.draw(st.integers(0, weight.shape[dim]))
    stop = data.draw(st.integers(start, weight.shape[dim]))
    part = checkpoint.read(name, dim, start, stop)
    assert torch.equal(part, weight.narrow(dim, start, stop - start))
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_shards_of_unequal_size(tmp_path: Path) -> None:
    config = tiny_config(n_heads=4, n_kv_heads=2, hidden_dim=100)
    weights = random_weights(config)
    checkpoint = open_checkpoint(save_meta(tmp_path, config, weights, shards=3))
    for name, weight in weights.items():
        assert torch.equal(checkpoint.read(name), weight), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_types(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = random_weights(CONFIG, dtype=dtype)
    checkpoint = open_checkpoint(save_meta(tmp_path, CONFIG, weights))
    assert torch.equal(checkpoint.read("norm.weight"), weights["norm.weight"])


def test_what_is_read_is_our_own(tmp_path: Path) -> None:
    with open_checkpoint(save_meta(tmp_path, CONFIG, WEIGHTS)) as checkpoint:
        checkpoint.read("norm.weight").zero_()
        value = checkpoint.read("norm.weight")
    assert torch.equal(value, WEIGHTS["norm.weight"])
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("norm.weight")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("layers.9.ffn_norm.weight",), "no parameter 'layers.9.ffn_norm.weight'"),
        (("norm.weight", 1), r"shape \(64,\), so no dimension 1"),
        (("norm.weight", 0, 5, 65), "part 5..65 of norm.weight"),
        (("norm.weight", 0, 5, 4), "part 5..4"),
        (("norm.weight", 0, -1), "part -1..64"),
    ],
)
def test_parts_that_do_not_exist(
    checkpoints: dict[tuple[int, int], Checkpoint], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoints[1, 0].read(*arguments)


class TestConfiguration:
    @report("B115", "ggml-org/llama.cpp#2276")
    @report("B125", "ggml-org/llama.cpp#4258")
    def test_defaults(self, tmp_path: Path) -> None:
        """B125 (vocabulary of -1), B115 (w1's real shape), B128 and B129 (defaults): what params.json leaves open."""
        config = tiny_config(n_kv_heads=4, max_seq_len=4096, hidden_dim=104)
        params = {"n_kv_heads": None, "rope_theta": None, "max_seq_len": None, "multiple_of": 256}
        save_meta(tmp_path, config, random_weights(config), 2, params={**params, "ffn_dim_multiplier": 1.3})
        assert open_checkpoint(tmp_path).config == config

    @report("B128", "karpathy/llama2.c#356")
    @report("B129", "vllm-project/vllm#9490")
    def test_values_are_taken_over(self, tmp_path: Path) -> None:
        """B128, B129."""
        config = tiny_config(rope_theta=1e6, norm_eps=1e-6, max_seq_len=16384)
        params = {"vocab_size": config.vocab_size, "use_scaled_rope": False, "max_batch_size": 6}
        save_meta(tmp_path, config, random_weights(config), params={**params, "rope_theta": 1000000})
        assert open_checkpoint(tmp_path).config == config

    @pytest.mark.parametrize(("params", "factor"), [({}, 8), ({"rope_scaling_factor": 32}, 32)])
    def test_scaled_rope(self, tmp_path: Path, params: dict[str, Any], factor: float) -> None:
        """Llama 3.1 and 3.2: the factors, and a context that the file doesn't name."""
        config = tiny_config(rope_theta=500000.0)
        given = {"use_scaled_rope": True, "max_seq_len": None, **params}
        found = open_checkpoint(save_meta(tmp_path, config, random_weights(config), params=given)).config
        assert found.rope_factors == llama3_factors(config.head_dim, config.rope_theta, factor=factor)
        assert found.rope_factors is not None
        assert (found.rope_factors[0], found.rope_factors[-1]) == (1, factor)
        assert found.max_seq_len == 131072

    def test_tied_output(self, tmp_path: Path) -> None:
        """B123: without output.weight the embedding is the output matrix."""
        config = tiny_config(tied_output=True)
        assert "output.weight" not in parameter_shapes(config)
        assert open_checkpoint(save_meta(tmp_path, config, random_weights(config), 2)).config == config

    @report("B119", "karpathy/llama2.c#266")
    def test_buffers_may_be_left_over(self, tmp_path: Path) -> None:
        """B119."""
        extra = {"rope.freqs": torch.ones(2), "layers.0.attention.rotary_emb.inv_freq": torch.ones(2)}
        save_meta(tmp_path, CONFIG, WEIGHTS, 2, extra=extra)
        assert open_checkpoint(tmp_path).config == CONFIG

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"use_scaled_rope": "yes"}, "use_scaled_rope is 'yes', expected true or false"),
            ({"use_scaled_rope": 1}, "use_scaled_rope is 1, expected true or false"),
            ({"use_scaled_rope": True, "rope_scaling_factor": 0}, "rope scaling: factor is 0"),
            ({"rope_scaling_factor": "8"}, "rope_scaling_factor is '8', expected a number"),
            ({"quantization_args": {"bits": 8}}, "quantization_args"),
            ({"n_layers": 3}, "n_layers in params.json is 3, but the files hold 2 layers"),
            ({"n_layers": 10**12}, "n_layers"),
            ({"n_layers": "2"}, "n_layers is '2', expected an integer"),
            ({"dim": None}, "dim is missing"),
            ({"dim": 64.0}, "dim is 64.0, expected an integer"),
            ({"dim": 128}, "128"),
            ({"n_heads": 0}, "n_heads is 0"),
            ({"n_heads": 3}, "not a multiple of n_heads 3"),
            ({"n_kv_heads": 0}, "n_kv_heads is 0"),
            ({"n_kv_heads": 2}, r"wk.weight has shape \(32, 64\), but the configuration says \(8, 64\)"),
            ({"vocab_size": 1000}, r"tok_embeddings.weight has shape \(384, 64\), but .* \(1000, 64\)"),
            ({"norm_eps": True}, "norm_eps is True, expected a number"),
            ({"rope_theta": -1}, "rope_theta is -1"),
        ],
    )
    def test_refused(self, tmp_path: Path, params: dict[str, Any], message: str) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS, params=params)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[1]", "<html></html>"])
    def test_not_a_configuration(self, tmp_path: Path, text: str) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS)
        (tmp_path / "params.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"params\.json"):
            open_checkpoint(tmp_path)

    def test_missing(self, tmp_path: Path) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS)
        (tmp_path / "params.json").unlink()
        with pytest.raises(CheckpointError, match=r"params\.json: no such file"):
            open_checkpoint(tmp_path)


class TestShards:
    def test_a_gap(self, tmp_path: Path) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS, 4)
        (tmp_path / "consolidated.01.pth").unlink()
        with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth is missing"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("embedding_dim", [0, 1])
    def test_the_last_ones_missing(self, tmp_path: Path, embedding_dim: int) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS, 4, embedding_dim=embedding_dim)
        for number in (2, 3):
            (tmp_path / f"consolidated.{number:02d}.pth").unlink()
        with pytest.raises(CheckpointError, match=r"2 shards found, .* should be 4"):
            open_checkpoint(tmp_path)

    def test_odd_names(self, tmp_path: Path) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS)
        (tmp_path / "consolidated.last.pth").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"consolidated\.last\.pth: expected shards named"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"norm__weight": None}, r"01\.pth: norm\.weight is missing"),
            ({"norm__weight": torch.ones(65, dtype=torch.bfloat16)}, r"01\.pth: norm\.weight has shape \(65,\)"),
            (
                {"layers__0__attention__wo__weight": torch.ones(60, 32, dtype=torch.bfloat16)},
                r"01\.pth: layers\.0\.attention\.wo\.weight has shape \(60, 32\)",
            ),
            ({"norm__weight": torch.ones(64)}, r"norm\.weight has type torch\.float32, but torch\.bfloat16"),
            ({"norm__weight": torch.ones(64, dtype=torch.int8)}, r"norm\.weight has type torch\.int8"),
            ({"lora__weight": torch.ones(64)}, r"00\.pth: lora\.weight is missing"),
            ({"step": 3}, "'step' is a int"),
        ],
    )
    def test_do_not_go_together(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS, 2)
        edit_shard(tmp_path / "consolidated.01.pth", **change)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layers__1__ffn_norm__weight": None}, r"layers\.1\.ffn_norm\.weight is missing"),
            ({"tok_embeddings__weight": None}, r"tok_embeddings\.weight is missing"),
            ({"layers__0__attention__wq__bias": torch.ones(64)}, r"wq\.bias is not part of a Llama model"),
            ({"norm__weight": torch.tensor(1.0)}, r"norm\.weight has shape \(\)"),
            ({"bias": torch.ones(3, 3)}, "bias is not part"),
        ],
    )
    def test_not_a_whole_llama(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS)
        edit_shard(tmp_path / "consolidated.00.pth", **change)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)

    @report("B117", "ymcui/Chinese-LLaMA-Alpaca#97")
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "Git LFS pointer of 64 bytes"),
            (b"\n<!DOCTYPE html><html></html>", "web page"),
            (b"nonsense", "has 8 bytes and begins with b'nonsense'"),
        ],
    )
    def test_not_a_model(self, tmp_path: Path, content: bytes, message: str) -> None:
        """B117: a pointer, a web page or a broken file is called what it is."""
        save_meta(tmp_path, CONFIG, WEIGHTS)
        (tmp_path / "consolidated.00.pth").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"consolidated\.00\.pth.*{message}"):
            open_checkpoint(tmp_path)

    @report("B117", "ymcui/Chinese-LLaMA-Alpaca#97")
    @report("B118", "facebookresearch/dinov3#1")
    @pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
    def test_truncated(self, tmp_path: Path, part: float) -> None:
        """B117, B118."""
        save_meta(tmp_path, CONFIG, WEIGHTS)
        file = tmp_path / "consolidated.00.pth"
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * part)])
        with pytest.raises(
            CheckpointError, match=rf"consolidated\.00\.pth.*has {file.stat().st_size} bytes.*truncated"
        ):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("value", "message"),
        [([1, 2], "holds a list"), ({"model": {}}, "'model' is a dict"), (Path("x"), "other things")],
    )
    def test_other_pickles(self, tmp_path: Path, value: Any, message: str) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS)
        torch.save(value, tmp_path / "consolidated.00.pth")
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


class TestDetection:
    @report("B008", "meta-llama/llama#40")
    @report("B124", "tjake/Jlama#2")
    def test_nothing_there(self, tmp_path: Path) -> None:
        """B008, B124: says which directory, what was looked for, and what is there."""
        with pytest.raises(CheckpointError, match=r"consolidated\.\*\.pth .*\*\.gguf .*\*\.safetensors .*it is empty"):
            open_checkpoint(tmp_path)
        (tmp_path / "params.json").write_text("{}", encoding="utf-8")
        (tmp_path / ".hidden.gguf").write_bytes(b"")
        with pytest.raises(CheckpointError, match=rf"{tmp_path}.*it holds params\.json$"):
            open_checkpoint(str(tmp_path))

    def test_no_such_path(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere: no such file or directory"):
            open_checkpoint(tmp_path / "nowhere")

    def test_a_shard_in_place_of_its_directory(self, tmp_path: Path) -> None:
        save_meta(tmp_path, CONFIG, WEIGHTS)
        with pytest.raises(CheckpointError, match=f"give its directory instead: {tmp_path}"):
            open_checkpoint(tmp_path / "consolidated.00.pth")


class TestTokenizer:
    def test_beside_the_shards(self, tmp_path: Path) -> None:
        tokenizer = open_checkpoint(save_meta(tmp_path, CONFIG, WEIGHTS, tokenizer=True)).tokenizer()
        assert tokenizer.decode(tokenizer.encode("Hello world!", bos=False, eos=False)) == "Hello world!"

    def test_given_by_path(self, tmp_path: Path) -> None:
        save_meta(tmp_path / "a", CONFIG, WEIGHTS, tokenizer=True)
        save_meta(tmp_path / "b", CONFIG, WEIGHTS)
        file = (tmp_path / "a" / "tokenizer.model").rename(tmp_path / "other.model")
        assert open_checkpoint(tmp_path / "b", file).tokenizer().encode("Hello", bos=False, eos=False)
        with pytest.raises(CheckpointError, match=r"nothing\.model: no such file"):
            open_checkpoint(tmp_path / "b", tmp_path / "nothing.model").tokenizer()

    def test_missing(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(save_meta(tmp_path, CONFIG, WEIGHTS))
        with pytest.raises(CheckpointError, match=r"tokenizer\.model: no such file"):
            checkpoint.tokenizer()
