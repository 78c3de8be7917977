"""The functions people import: signatures, results, and that a batch gives each prompt what it gets alone."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import generation
from generation import chat_completion, generate, load, text_completion
from generation.interface import Dialog
from model.checkpoint import open_checkpoint
from model.loader import load_model
from tests.helpers.ranks import on_ranks
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece

PROMPTS = ["Hello", "The quick brown fox jumps over", "", "Some words, again and again and again"]
DIALOGS: list[Dialog] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("meta")
    config = tiny_config()
    save_meta(directory, config, random_weights(config), shards=2)
    train_sentencepiece(directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Any:
    return load(checkpoint, device="cpu", dtype="float32")


def test_signatures_are_the_reference_examples() -> None:
    expected = {
        "sample_top_p": "(probs, p)",
        "generate": "(model, prompt_tokens, max_gen_len, temperature=0.6, top_p=0.9, logprobs=False, echo=False",
        "text_completion": "(model, tokenizer, prompts, max_gen_len, temperature=0.6, top_p=0.9, logprobs=False, "
        "echo=False",
        "chat_completion": "(model, tokenizer, dialogs, max_gen_len, temperature=0.6, top_p=0.9, logprobs=False",
    }
    for name, start in expected.items():
        signature = inspect.signature(getattr(generation, name))
        plain = signature.replace(
            parameters=[
                p.replace(annotation=p.empty) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD
            ],
            return_annotation=signature.empty,
        )
        assert str(plain).startswith(start)
        more = list(signature.parameters.values())[start.count(",") + 1 :]
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in more)


def test_ragged_batch_equals_each_alone(loaded: Any) -> None:
    """B040, B041, B160, B221: no padding to be seen, any number of prompts."""
    model, tokenizer = loaded
    prompts = [tokenizer.encode(p, bos=True, eos=False) for p in PROMPTS * 3]
    together, none = generate(model, prompts, 9, temperature=0)
    assert none is None
    assert together == [generate(model, [p], 9, temperature=0)[0][0] for p in prompts]
    assert all(len(t) <= 9 for t in together)


def test_echo_and_logprobs_are_aligned(loaded: Any) -> None:
    """B217, B218, B219, B273: with echo, entry i is the log probability of token i given those before it."""
    model, tokenizer = loaded
    prompt = tokenizer.encode(PROMPTS[1], bos=True, eos=False)
    tokens, logprobs = generate(model, [prompt], 6, temperature=0, logprobs=True, echo=True, ignore_eos=True)
    assert logprobs is not None
    assert tokens[0][: len(prompt)] == prompt
    assert len(tokens[0]) == len(logprobs[0]) == len(prompt) + 6
    scored = generate(model, [tokens[0]], 0, logprobs=True, echo=True)
    assert scored[0] == tokens
    assert scored[1] is not None
    assert scored[1][0] == pytest.approx(logprobs[0], abs=1e-4)
    assert all(x < 0 for x in logprobs[0][1:])


def test_text_completion(loaded: Any) -> None:
    """B281: the tokens joined are the text, with echo too."""
    model, tokenizer = loaded
    for echo in (False, True):
        found = text_completion(model, tokenizer, PROMPTS, 8, temperature=0, logprobs=True, echo=echo, ignore_eos=True)
        for prompt, prediction in zip(PROMPTS, found, strict=True):
            assert "".join(prediction["tokens"]) == prediction["generation"]
            assert len(prediction["tokens"]) == len(prediction["logprobs"])
            assert prediction["generation"].startswith(prompt if echo else "")
            assert (prediction["logprobs"][0] is None) == echo
    plain = text_completion(model, tokenizer, PROMPTS, 8, temperature=0)
    assert [set(p) for p in plain] == [{"generation"}] * 4
    ids = generate(model, [tokenizer.encode(p, bos=True, eos=False) for p in PROMPTS], 8, temperature=0)[0]
    assert [p["generation"] for p in plain] == [tokenizer.decode(t) for t in ids]


def test_stop_strings_cut_the_text(loaded: Any) -> None:
    model, tokenizer = loaded
    whole = text_completion(model, tokenizer, ["Hello"], 12, temperature=0, ignore_eos=True)[0]["generation"]
    stop = whole[3:5]
    cut = text_completion(model, tokenizer, ["Hello"], 12, temperature=0, ignore_eos=True, stop=stop, logprobs=True)[0]
    assert cut["generation"] == whole[: whole.index(stop)] == "".join(cut["tokens"])


def test_chat_completion(loaded: Any) -> None:
    model, tokenizer = loaded
    found = chat_completion(model, tokenizer, DIALOGS, 8, temperature=0, logprobs=True)
    for dialog, prediction in zip(DIALOGS, found, strict=True):
        assert prediction["generation"]["role"] == "assistant"
        assert prediction["generation"]["content"] == "".join(prediction["tokens"])
        (alone,) = chat_completion(model, tokenizer, [dialog], 8, temperature=0, logprobs=True)
        assert alone["generation"] == prediction["generation"]
        assert alone["logprobs"] == pytest.approx(prediction["logprobs"], abs=1e-4)


@pytest.mark.parametrize("dialog", [[], [{"role": "system", "content": "x"}], [{"role": "user", "content": "[/INST]"}]])
def test_bad_dialog_is_a_value_error_before_any_generation(loaded: Any, dialog: Any) -> None:
    """B049, B274, B275."""
    model, tokenizer = loaded
    steps = generation.generate.__globals__["engine_for"](model).steps
    with pytest.raises(ValueError, match="message"):
        chat_completion(model, tokenizer, [dialog], 8, logprobs=True)
    assert generation.generate.__globals__["engine_for"](model).steps == steps


def test_seed_and_torch_seed(loaded: Any) -> None:
    model, _ = loaded
    asked: dict[str, Any] = {"prompt_tokens": [[5, 6]], "max_gen_len": 10, "temperature": 1.5, "top_p": 1.0}
    assert generate(model, **asked, seed=3) == generate(model, **asked, seed=3)
    assert generate(model, **asked) != generate(model, **asked)
    torch.manual_seed(1)
    first = generate(model, **asked)
    torch.manual_seed(1)
    assert generate(model, **asked) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_gen_len": -1}, "max_gen_len is -1"),
        ({"temperature": 3}, "temperature is 3"),
        ({"prompt_tokens": [[1], [500]]}, "token id 500"),
        ({"prompt_tokens": [[]]}, "no tokens"),
        ({"prompt_tokens": [[1] * 256]}, "256 tokens, but at most 255"),
    ],
)
def test_bad_arguments(loaded: Any, change: dict[str, Any], message: str) -> None:
    model, _ = loaded
    with pytest.raises(ValueError, match=message):
        generate(model, **({"prompt_tokens": [[1, 2]], "max_gen_len": 4} | change))


def test_answer_is_cut_to_the_context(loaded: Any) -> None:
    """B241, B244."""
    model, _ = loaded
    assert len(generate(model, [[1] * 250], 100, ignore_eos=True)[0][0]) == 6


@report("B088", "NVIDIA/TensorRT-LLM#12024")
@report("B089", "huggingface/transformers#36634")
def test_every_rank_gets_the_results(checkpoint: Path) -> None:
    """B088, B089: ranks agree though tokens are drawn."""

    def on_rank(comm: Any) -> Any:
        model, tokenizer = load_model(checkpoint, device="cpu", dtype="float32", comm=comm)
        return (
            text_completion(model, tokenizer, PROMPTS, 8, temperature=0, logprobs=True),
            generate(model, [[5, 6, 7]], 8, temperature=1.0, seed=1),
        )

    (alone,) = on_ranks(1, on_rank)
    for found in on_ranks(3, on_rank):
        assert found[1] == alone[1]
        assert [p["generation"] for p in found[0]] == [p["generation"] for p in alone[0]]


def test_open_checkpoint_matches_model(checkpoint: Path, loaded: Any) -> None:
    model, tokenizer = loaded
    assert model.config.vocab_size == open_checkpoint(checkpoint).config.vocab_size
    assert model.config.stop_ids == tokenizer.stop_ids == {2}
