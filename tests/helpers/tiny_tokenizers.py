"""Small tokenizers as `tokenizer.json` documents, of the kinds that Llama checkpoints bring."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.helpers.tiny import CORPUS

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")

Document = dict[str, Any]


def _byte_level(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _train(pre: pre_tokenizers.PreTokenizer, special: tuple[str, ...] = (), size: int = 560) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS.splitlines(), trainer)
    return backend


def smollm() -> Document:
    """SmolLM2's kind: single digits, control tokens at the start of the vocabulary."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return _parsed(_train(pre_tokenizers.Sequence([digits, _byte_level()]), CHATML_TOKENS))


def gpt2() -> Document:
    """GPT-2's kind, merges as the old form of the file writes them."""
    document = _parsed(_train(_byte_level(), CHATML_TOKENS[:1]))
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    return document


def llama3() -> Document:
    """Llama 3's kind: control tokens behind the vocabulary, whole words first, BOS put in front."""
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
    pre = pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])
    document = _parsed(_train(pre))
    model = document["model"]
    model["ignore_merges"] = True
    # a word that no merges lead to, as tiktoken's ranks may have
    model["vocab"]["\u0120zebra"] = len(model["vocab"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    backend.add_special_tokens(list(LLAMA3_TOKENS))
    bos = LLAMA3_TOKENS[0]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return _parsed(backend)


def llama2(model: Path, *, metaspace: bool = False) -> Document:
    """Llama 2's kind, from a SentencePiece model: its pieces, and for merges all pairs of them that make a piece.

    Args:
        model: the `tokenizer.model`.
        metaspace: put the spaces by a pre-tokenizer, as newer files do, instead of by the normalizer.
    """
    sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    plain = {piece for piece, i in vocab.items() if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i))}
    merges = []
    for piece in sorted(plain, key=lambda piece: (-sp.get_score(vocab[piece]), vocab[piece])):
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [pair for pair in halves if plain.issuperset(pair)]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _parsed(backend)


def chatml_directory(
    directory: Path,
    model: Path,
    *,
    files: str,
    special: bool,
    config: dict[str, Any],
    spaces: str = "normalizer",
    flags: dict[str, bool] | None = None,
) -> Path:
    """A fine-tune of a SentencePiece model with two ChatML tokens behind its vocabulary.

    Args:
        files: "model" (`tokenizer.model`), "json" (`tokenizer.json`) or "both".
        special: whether the added tokens are control tokens.
        config: put over `tokenizer_config.json`; None takes a key out.
        spaces: what puts spaces in `tokenizer.json`: "normalizer", or Metaspace's scheme.
        flags: put over those of the added tokens.
    """
    n = sentencepiece.SentencePieceProcessor(model_file=str(model)).vocab_size()
    added = {i: _entry(text, True) for i, text in enumerate(("<unk>", "<s>", "</s>"))}
    added |= {i: _entry(text, special, flags) for i, text in enumerate(("<|im_start|>", "<|im_end|>"), n)}
    values = {
        "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": {str(i): entry for i, entry in added.items()},
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    document = None
    if files != "model":
        document = llama2(model, metaspace=spaces != "normalizer")
        if spaces != "normalizer":
            document["pre_tokenizer"]["prepend_scheme"] = spaces
        document["added_tokens"] = [{"id": i, **entry} for i, entry in added.items()]
    save(
        directory,
        document,
        tokenizer_config={key: value for key, value in values.items() if value is not None},
        config={"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    )
    if files != "json":
        shutil.copy(model, directory / "tokenizer.model")
    return directory


def _entry(text: str, special: bool, flags: dict[str, bool] | None = None) -> dict[str, Any]:
    own = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    return {"content": text, "special": special, **own, **(flags or {})}


@functools.cache
def _cached(kind: str) -> str:
    return json.dumps({"smollm": smollm, "gpt2": gpt2, "llama3": llama3}[kind]())


def byte_level_document(kind: str) -> Document:
    """A fresh copy of the document of a kind: smollm, gpt2 or llama3."""
    document: Document = json.loads(_cached(kind))
    return document


def save(directory: Path, document: Any, **files: Any) -> Path:
    """Write a `tokenizer.json` and, by their names without `.json`, files beside it; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in {"tokenizer": document, **files}.items():
        if value is not None:
            (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


def _parsed(backend: tokenizers.Tokenizer) -> Document:
    document: Document = json.loads(backend.to_str())
    return document
