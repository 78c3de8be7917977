"""Tokenizers written in the forms of checkpoint formats: Hugging Face's files, GGUF's metadata, a `tokenizer.model`.

What is written reads back as a tokenizer with the same ids, stop ids and template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, processors

from model.config import CheckpointError
from model.tokenizer.added import FLAGS, SpaceRule
from model.tokenizer.base import Tokenizer
from model.tokenizer.bpe import PRE_TOKENIZERS, BPETokenizer
from model.tokenizer.metaspace import MetaspaceTokenizer
from model.tokenizer.proto import CONTROL, SPACE, UNKNOWN, USER_DEFINED, model_pieces, model_traits
from model.tokenizer.spm import SentencePieceTokenizer

_PREFIX = "tokenizer.ggml."
_EOM = "<|eom_id|>"
NO_ID = 0xFFFFFFFF
"""What GGUF writes for the id of a token that the vocabulary doesn't have."""


def export_sentencepiece(tokenizer: Tokenizer) -> bytes | None:
    """The bytes of a `tokenizer.model`; None where the tokenizer isn't SentencePiece's."""
    return tokenizer.proto() if isinstance(tokenizer, SentencePieceTokenizer) else None


def export_huggingface(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer.model` or `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` (stop ids).

    Raises:
        CheckpointError: a tokenizer of a kind that isn't known.
    """
    pieces, kinds, config = tokenizer.pieces, _kinds(tokenizer), _tokenizer_config(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        (directory / "tokenizer.model").write_bytes(tokenizer.proto())
        config |= _space_settings(tokenizer)
        flags = tokenizer.flags()
    else:
        document = _document(tokenizer, kinds)
        document.save(str(directory / "tokenizer.json"))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        flags = {
            token.content: {flag: getattr(token, flag) for flag in FLAGS}
            for token in document.get_added_tokens_decoder().values()
        }
    config["added_tokens_decoder"] = {
        str(i): _added_token(pieces[i], kind, flags)
        for i, kind in enumerate(kinds)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    _write_json(directory / "tokenizer_config.json", config)
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.stop_ids) or None}
    known = {key: value for key, value in generation.items() if value is not None}
    _write_json(directory / "generation_config.json", known)


def export_gguf(tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys of a GGUF file that describe the tokenizer, as plain Python values; 32-bit floats for scores.

    Raises:
        CheckpointError: GGUF has no way to say it: a pre-tokenizer without a name there, a SentencePiece model
            that isn't BPE or that normalizes, more stop ids than keys.
    """
    _refuse_flags(tokenizer.control_flags)
    if isinstance(tokenizer, SentencePieceTokenizer):
        _refuse_flags(tokenizer.flags())
        values = _gguf_sentencepiece(tokenizer)
    elif isinstance(tokenizer, BPETokenizer):
        values = _gguf_bpe(tokenizer)
    else:
        raise CheckpointError(
            "this tokenizer.json has SentencePiece's pieces without their scores, which GGUF needs; "
            "put the model's tokenizer.model beside it"
        )
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, **_turn_ends(tokenizer)}
    if tokenizer.pad_id >= 0:
        ids["padding"] = tokenizer.pad_id
    for name, token_id in ids.items():
        if token_id is not None:
            values[f"{name}_token_id"] = token_id
        elif values["model"] == "llama":  # where 1 and 2 are what a missing key means
            values[f"{name}_token_id"] = NO_ID
    values["add_bos_token"] = tokenizer.adds_bos
    metadata = {_PREFIX + key: value for key, value in values.items()}
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _kinds(tokenizer: Tokenizer) -> list[int]:
    if isinstance(tokenizer, SentencePieceTokenizer):
        return [kind for _, _, kind in model_pieces(tokenizer.proto())]
    if isinstance(tokenizer, (BPETokenizer, MetaspaceTokenizer)):
        return list(tokenizer.kinds)
    raise CheckpointError(f"a {type(tokenizer).__name__} can't be written to a file")


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    pieces = tokenizer.pieces
    return {
        "add_bos_token": tokenizer.adds_bos,
        "add_eos_token": False,
        "bos_token": None if tokenizer.bos_id is None else pieces[tokenizer.bos_id],
        "eos_token": None if tokenizer.eos_id is None else pieces[tokenizer.eos_id],
        "pad_token": None if tokenizer.pad_id < 0 else pieces[tokenizer.pad_id],
        "unk_token": next((pieces[i] for i in sorted(tokenizer.special_ids) if not _is_control(tokenizer, i)), None),
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_control(tokenizer: Tokenizer, token_id: int) -> bool:
    return tokenizer.control_tokens.get(tokenizer.pieces[token_id]) == token_id


def _added_token(text: str, kind: int, known: Mapping[str, Mapping[str, bool]]) -> dict[str, Any]:
    text = text.replace(SPACE, " ") if kind == USER_DEFINED else text
    return {"content": text, "special": kind != USER_DEFINED, **dict.fromkeys(FLAGS, False), **known.get(text, {})}


def _space_settings(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """What of `tokenizer_config.json` says where spaces are put beside `tokenizer.model`."""
    if tokenizer.spaces is SpaceRule.PREPEND:
        raise CheckpointError(
            "the checkpoint's tokenizer.json looks for added tokens in normalized text, which a tokenizer.model "
            "can't do; set normalized to false for them"
        )
    if tokenizer.spaces is SpaceRule.MODEL:
        return {"legacy": True}
    legacy = tokenizer.spaces is SpaceRule.ALWAYS
    prefix = {"add_prefix_space": False} if tokenizer.spaces is SpaceRule.NEVER else {}
    return {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, **prefix}


def _document(tokenizer: Tokenizer, kinds: list[int]) -> tokenizers.Tokenizer:
    """A `tokenizer.json`, as the library's object."""
    if not isinstance(tokenizer, (BPETokenizer, MetaspaceTokenizer)):
        raise CheckpointError(f"a {type(tokenizer).__name__} can't be written as tokenizer.json")
    document = tokenizer.rules()
    document["model"]["vocab"] = {piece: i for i, piece in enumerate(tokenizer.pieces)}
    known = {entry["id"]: entry for entry in document["added_tokens"]}
    document["added_tokens"] = [
        known.get(i) or {"id": i, **_added_token(tokenizer.pieces[i], kind, tokenizer.control_flags)}
        for i, kind in enumerate(kinds)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    if isinstance(tokenizer, BPETokenizer):
        document["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        bos = tokenizer.pieces[tokenizer.bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.bos_id)]
        )
    return backend


def _gguf_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    proto = tokenizer.proto()
    traits = model_traits(proto)
    if not traits.is_bpe or traits.changes_text:
        what = "normalizes its text" if traits.is_bpe else "isn't of type BPE"
        raise CheckpointError(f"the SentencePiece model {what}, which GGUF's pieces and scores can't say")
    rows = model_pieces(proto)
    unknown = next((i for i, (_, _, kind) in enumerate(rows) if kind == UNKNOWN), None)
    values: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": [text for text, _, _ in rows],
        "scores": [score for _, score, _ in rows],
        "token_type": [kind for _, _, kind in rows],
        "add_space_prefix": traits.add_dummy_prefix,
    }
    return values if unknown is None else {**values, "unknown_token_id": unknown}


def _gguf_bpe(tokenizer: BPETokenizer) -> dict[str, Any]:
    rules = tokenizer.rules()
    return {
        "model": "gpt2",
        "pre": _pre_name(rules),
        "tokens": list(tokenizer.pieces),
        "token_type": list(tokenizer.kinds),
        "merges": [" ".join(pair) for pair in rules["model"]["merges"]],
    }


def _pre_name(rules: dict[str, Any]) -> str:
    """GGUF's name of the way text is cut."""
    if rules["normalizer"] is not None:
        raise CheckpointError(
            f"the tokenizer normalizes text ({_short(rules['normalizer'])}); GGUF has no name for that"
        )
    _refuse_flags({token["content"]: token for token in rules["added_tokens"]})
    wanted = _canonical(rules["pre_tokenizer"])
    for name, known in PRE_TOKENIZERS.items():
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = known.build()
        own = json.loads(backend.to_str())["pre_tokenizer"]
        if _canonical(own) == wanted and known.whole_words == rules["model"]["ignore_merges"]:
            return name
    raise CheckpointError(
        f"the pre-tokenizer {_short(rules['pre_tokenizer'])} (ignore_merges {rules['model']['ignore_merges']}) has no "
        f"name in GGUF that is known here; those are {', '.join(PRE_TOKENIZERS)}"
    )


def _refuse_flags(known: Mapping[str, Mapping[str, bool]]) -> None:
    for text, flags in known.items():
        if any(flags.get(flag) for flag in ("single_word", "lstrip", "rstrip")):
            raise CheckpointError(f"added token {text!r} takes spaces or whole words; GGUF can't say that")


def _canonical(component: Any) -> Any:
    """A component without what doesn't change ids; a sequence of one as that one."""
    if isinstance(component, dict):
        if component.get("type") == "Sequence" and len(component.get("pretokenizers", [])) == 1:
            return _canonical(component["pretokenizers"][0])
        return {key: _canonical(value) for key, value in component.items() if key != "trim_offsets"}
    return [_canonical(part) for part in component] if isinstance(component, list) else component


def _short(component: Any) -> str:
    text = json.dumps(component)
    return text if len(text) <= 200 else text[:197] + "..."


def _turn_ends(tokenizer: Tokenizer) -> dict[str, int]:
    """Stop ids other than EOS, under GGUF's two further names."""
    left = sorted(tokenizer.stop_ids - {tokenizer.eos_id})
    found: dict[str, int] = {}
    for token_id in sorted(left, key=lambda token_id: tokenizer.pieces[token_id] != _EOM):
        name = "eom" if tokenizer.pieces[token_id] == _EOM or "eot" in found else "eot"
        if name in found:
            raise CheckpointError(
                f"stop ids {left} beside EOS; GGUF has keys for one end of a turn and one of a message"
            )
        found[name] = token_id
    return found
