"""Names in `tokenizer.ggml.pre` that mean Llama 3's way of cutting text: ids equal to llama.cpp's.

The expected ids are llama.cpp's own: a model with the metadata below, written by `save_gguf` once for each name, was
served by xllamacpp 2026.10.11549, and each text sent to its `/tokenize` with "add_special": true.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from model.config import CheckpointError
from model.tokenizer.tokenizer import tokenizer_from_gguf

# each merge crosses a border of some way of cutting: digits, spaces, contractions, line ends, punctuation
MERGES = (
    "1 2", "12 3", "123 4", "3 4", "Ġ Ġ", "Ġ a", "a b", "ab c", "' S", "' s",
    "! Ċ", "Ċ Ċ", "č Ċ", "Ġ (", "( a", "ĉ a", "Ġ 1", "z e",
)  # fmt: skip
PIECES = (
    "<|end|>",
    "<|begin|>",
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    "Ġzebra",  # no merges lead to it
)
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
"""Names with which a word of the vocabulary is one token whatever the merges, and BOS comes first."""
MERGED = ("smaug-bpe", "dbrx")

CASES = {
    "1234 12345": [259, 21, 222, 259, 21, 22],
    "IT'S it's abc": [42, 53, 266, 222, 74, 85, 267, 263, 67, 68],
    "a!\n\nb  abc": [66, 268, 200, 67, 222, 263, 67, 68],
    "\tabc \t 1": [199, 265, 222, 199, 222, 18],
    "  \n  ab": [262, 200, 222, 263, 67],
    "a \r\n\r\n b!\n": [66, 222, 270, 270, 222, 67, 268],
    "été 漢字 '12": [129, 104, 85, 129, 104, 222, 164, 122, 97, 163, 257, 247, 222, 8, 258],
}
"""Without BOS the same for all of these names."""
ZEBRA = "x (abc) zebra  zebra"


def metadata(pre: str) -> dict[str, Any]:
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": list(PIECES),
        "token_type": [3, 3] + [1] * (len(PIECES) - 2),
        "merges": list(MERGES),
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("pre", WHOLE_WORDS)
def test_as_llama_bpe(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(metadata(pre))
    assert tokenizer.adds_bos
    for text, ids in CASES.items():
        assert tokenizer.encode(text, bos=tokenizer.adds_bos, eos=False) == [1, *ids], text
    assert tokenizer.encode(ZEBRA, bos=True, eos=False) == [1, 89, 271, 265, 10, 276, 222, 276]


@pytest.mark.parametrize("pre", MERGED)
def test_cut_as_llama_bpe_but_merged(pre: str) -> None:
    """No BOS unless the file asks for it, and a whole word is a token only if merges lead to it."""
    tokenizer = tokenizer_from_gguf(metadata(pre))
    assert not tokenizer.adds_bos
    for text, ids in CASES.items():
        assert tokenizer.encode(text, bos=tokenizer.adds_bos, eos=False) == ids, text
    split = [222, 275, 67, 83, 66]
    assert tokenizer.encode(ZEBRA, bos=False, eos=False) == [89, 271, 265, 10, *split, 222, *split]
    assert tokenizer_from_gguf(metadata(pre) | {"tokenizer.ggml.add_bos_token": True}).adds_bos


@pytest.mark.parametrize("pre", ["minicpm5", "chatglm-bpe", "qwen2", "tekken", "llama4"])
def test_others_are_refused_by_name(pre: str) -> None:
    """They cut by another pattern, or frame the text in another way."""
    with pytest.raises(CheckpointError, match=f"pre-tokenizer '{pre}' isn't known; supported are .*llama-bpe"):
        tokenizer_from_gguf(metadata(pre))
