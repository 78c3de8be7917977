"""Hugging Face's `tokenizer.json`: byte-level BPE, and BPE over SentencePiece's pieces.

The file's own normalizer, pre-tokenizer and merges are used as they stand. Form of the file: the `tokenizers`
library, `Tokenizer.to_str`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import normalizers

from model.config import CheckpointError
from model.tokenizer.added import FLAGS, AddedToken, SpaceRule
from model.tokenizer.base import Tokenizer
from model.tokenizer.bpe import BPETokenizer, PreTokenizer
from model.tokenizer.metaspace import BYTE_PIECE, MetaspaceTokenizer
from model.tokenizer.proto import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED

_EMPTY: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


def parse_added(entry: Any, where: str, token_id: Any = None) -> AddedToken:
    """From an entry of `added_tokens`, or of `added_tokens_decoder`, where its id is the key.

    Raises:
        CheckpointError: naming `where` and the value that isn't as it should be.
    """
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is {_brief(entry)}, expected an object with an id and its content")
    token_id = entry.get("id") if token_id is None else token_id
    text = entry.get("content")
    if not is_id(token_id):
        raise CheckpointError(f"{where}: the id is {_brief(token_id)}, expected an integer of at least 0")
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{where}: content is {_brief(text)}, expected a text")
    for name in ("special", *FLAGS):
        if not isinstance(entry.get(name, False), bool):
            raise CheckpointError(f"{where}: {name} is {_brief(entry[name])}, expected true or false")
    flags = {name: entry[name] for name in FLAGS if name in entry}
    return AddedToken(token_id, text, entry.get("special", False), flags)


def is_id(value: Any) -> bool:
    """Whether a value from JSON can be a token's id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tokenizer_from_json(
    document: Any,
    *,
    added: Mapping[int, AddedToken] | None = None,
    added_first: bool = False,
    framing: Iterable[str] = (),
) -> tuple[Tokenizer, str | None]:
    """The tokenizer in a parsed `tokenizer.json`, and the text of the token it puts in front of a prompt, if any.

    Args:
        document: the file's JSON.
        added: tokens that files beside it add, by id.
        added_first: how a token that both have is found is as `added` says.
        framing: texts of tokens that frame a text or a turn: control tokens even if the file forgot it.

    Raises:
        CheckpointError: naming the key that is missing, of a wrong type or not supported.
    """
    own, beside = added_tokens(document), added or {}
    tokens = merge_added(beside, own) if added_first else merge_added(own, beside)
    model = _model(document)
    pieces = _pieces(model, tokens)
    metaspace = not _is_byte_level(document)
    if metaspace and model.get("byte_fallback") is not True:
        raise CheckpointError(
            "pre_tokenizer and model.byte_fallback: neither byte-level BPE nor BPE with byte fallback; "
            "other kinds of vocabularies aren't supported"
        )
    kinds = _kinds(pieces, tokens, set(framing), model, metaspace=metaspace)
    pre = _pre_tokenizer(document, model, tokens)
    merges = _merges(model)
    front = _front_token(document.get("post_processor"))
    try:
        if metaspace:
            unknown = model.get("unk_token")
            decoder = _component(document, "decoder")
            fuse = bool(model.get("fuse_unk"))
            tokenizer: Tokenizer = MetaspaceTokenizer(
                pieces, merges, kinds, pre, decoder, unknown=unknown, fuse_unknown=fuse
            )
        else:
            tokenizer = BPETokenizer(pieces, merges, kinds, pre)
    except CheckpointError as error:
        raise CheckpointError(f"model.vocab or model.merges: {error}") from error
    tokenizer.control_flags = control_flags(tokenizer, tokens.values(), pre.normalizer)
    return tokenizer, front


def control_flags(
    tokenizer: Tokenizer, added: Iterable[AddedToken], normalizer: normalizers.Normalizer | None
) -> dict[str, dict[str, bool]]:
    """How the control tokens among `added` are found; `normalized` only where the normalizer changes their text."""
    found: dict[str, dict[str, bool]] = {}
    for token in added:
        if token.text in tokenizer.control_tokens:
            changed = normalizer is not None and normalizer.normalize_str(token.text) != token.text
            flags = {flag: token.has(flag) and (changed or flag != "normalized") for flag in FLAGS}
            if any(flags.values()):
                found[token.text] = flags
    return found


def with_space_rule(document: dict[str, Any], rule: SpaceRule) -> dict[str, Any]:
    """`document`, a SentencePiece vocabulary, with its spaces put by `rule` (ALWAYS, FIRST or NEVER)."""
    if _is_byte_level(document):
        return document
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if rule is not SpaceRule.NEVER:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": rule.value, "split": False}
    decoder = {"type": "Sequence", "decoders": steps}
    return {**document, "normalizer": None, "pre_tokenizer": metaspace, "decoder": decoder}


def space_rule(document: Any) -> tuple[SpaceRule | None, normalizers.Normalizer | None]:
    """How a SentencePiece vocabulary's document puts spaces in front of text, and its normalizer; None: not at all."""
    if not isinstance(document, dict) or _is_byte_level(document):
        return None, None
    normalizer = _component(document, "normalizer")
    if any(part.get("type") == "Prepend" for part in _parts(document.get("normalizer"))):
        return SpaceRule.PREPEND, normalizer
    metaspace = next((p for p in _parts(document.get("pre_tokenizer")) if p.get("type") == "Metaspace"), None)
    if metaspace is None:
        return None, normalizer
    rule = SpaceRule(_component({"pre_tokenizer": metaspace}, "pre_tokenizer").prepend_scheme)
    doubles = normalizer is not None and normalizer.normalize_str(SPACE) == SPACE + SPACE
    return (SpaceRule.MODEL if rule is SpaceRule.ALWAYS and doubles else rule), normalizer


def merge_added(first: Mapping[int, AddedToken], second: Mapping[int, AddedToken]) -> dict[int, AddedToken]:
    """Both together; how a token is found is as `first` says.

    Raises:
        CheckpointError: an id has one text here and another there.
    """
    for token_id in first.keys() & second.keys():
        texts = first[token_id].text, second[token_id].text
        if texts[0] != texts[1]:
            raise CheckpointError(f"added token {token_id} is {texts[0]!r} here, but {texts[1]!r} in a file beside it")
    return {**second, **first}


def added_tokens(document: Any) -> dict[int, AddedToken]:
    """The document's `added_tokens` by id.

    Raises:
        CheckpointError: naming the entry that isn't as it should be.
    """
    if not isinstance(document, dict):
        raise CheckpointError(f"the file holds {_brief(document)}, expected an object with model and added_tokens")
    entries = document.get("added_tokens")
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise CheckpointError(f"added_tokens is {_brief(entries)}, expected a list")
    found: dict[int, AddedToken] = {}
    for i, entry in enumerate(entries):
        token = parse_added(entry, f"added_tokens[{i}]")
        known = found.setdefault(token.token_id, token)
        if known.text != token.text:
            raise CheckpointError(f"added_tokens: id {token.token_id} is both {known.text!r} and {token.text!r}")
    return found


def _model(document: Mapping[str, Any]) -> Mapping[str, Any]:
    model = document.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"model is {_brief(model)}, expected an object; the file is no tokenizer.json")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise CheckpointError(f"model.type is {_brief(kind)}, only BPE is supported")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise CheckpointError(f"model.{key} is {_brief(model[key])}, which isn't supported")
    if model.get("unk_token") is not None and not isinstance(model["unk_token"], str):
        raise CheckpointError(f"model.unk_token is {_brief(model['unk_token'])}, expected a text or null")
    return model


def _pieces(model: Mapping[str, Any], added: Mapping[int, AddedToken]) -> list[str]:
    """The text of each id, from the vocabulary and the added tokens together."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise CheckpointError(f"model.vocab is {_brief(vocab)}, expected an object of pieces and their ids")
    by_id: dict[int, str] = {}
    for piece, token_id in vocab.items():
        if not is_id(token_id):
            raise CheckpointError(f"model.vocab: {piece!r} has id {_brief(token_id)}, expected an integer from 0 up")
        if token_id in by_id:
            raise CheckpointError(f"model.vocab: id {token_id} is both {by_id[token_id]!r} and {piece!r}")
        by_id[token_id] = piece
    for token_id, token in added.items():
        if by_id.setdefault(token_id, token.text) != token.text:
            raise CheckpointError(f"added token {token_id} is {token.text!r}, but model.vocab has {by_id[token_id]!r}")
        if vocab.get(token.text, token_id) != token_id:
            raise CheckpointError(f"added token {token.text!r} has id {token_id}, in model.vocab {vocab[token.text]}")
    missing = next((i for i in range(len(by_id)) if i not in by_id), None)
    if missing is not None:
        raise CheckpointError(
            f"model.vocab and added_tokens: no token has id {missing}, but there are ids up to {max(by_id)}"
        )
    pieces = [by_id[i] for i in range(len(by_id))]
    check_unicode(pieces, "model.vocab or added_tokens")
    return pieces


def check_unicode(pieces: Iterable[str], where: str) -> None:
    """Refuse text with lone surrogates, which JSON can spell but UTF-8 can't hold."""
    for piece in pieces:
        try:
            piece.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{where}: {piece!r} is no valid Unicode text") from error


def _kinds(
    pieces: list[str], added: Mapping[int, AddedToken], framing: set[str], model: Mapping[str, Any], *, metaspace: bool
) -> list[int]:
    kinds = [NORMAL] * len(pieces)
    for token_id, token in added.items():
        kinds[token_id] = CONTROL if token.special else USER_DEFINED
        # Code Llama's "▁<PRE>" and its like are ordinary pieces of its SentencePiece model
        if metaspace and token.special and token.text.startswith(SPACE):
            kinds[token_id] = NORMAL
    for i, piece in enumerate(pieces):
        if piece in framing:
            kinds[i] = CONTROL
        elif metaspace and piece == model.get("unk_token"):
            kinds[i] = UNKNOWN
        elif metaspace and kinds[i] == NORMAL and BYTE_PIECE.fullmatch(piece):
            kinds[i] = BYTE
    return kinds


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs; in the file each is a list of two or, as older versions wrote it, one text with a space between."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"model.merges is {_brief(merges)}, expected a list of pairs of pieces")
    pairs = []
    for i, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise CheckpointError(f"model.merges[{i}] is {_brief(merge)}, expected two pieces")
        pairs.append((pair[0], pair[1]))
    check_unicode((part for pair in pairs for part in pair), "model.merges")
    return pairs


def _pre_tokenizer(
    document: Mapping[str, Any], model: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> PreTokenizer:
    component = _component(document, "pre_tokenizer")
    later_value = _not_at_start(document.get("pre_tokenizer"))
    later = _component({"pre_tokenizer": later_value}, "pre_tokenizer")
    return PreTokenizer(
        build=lambda: component,
        build_later=None if document.get("pre_tokenizer") == later_value else lambda: later,
        whole_words=bool(model.get("ignore_merges")),
        normalizer=_component(document, "normalizer"),
        added={
            token.text: tokenizers.AddedToken(token.text, special=False, **({"normalized": True} | dict(token.flags)))
            for token in added.values()
            if not token.special
        },
    )


def _not_at_start(pre_tokenizer: Any) -> Any:
    """The same for text that something stands before: what is put only at the start isn't put."""
    if isinstance(pre_tokenizer, dict):
        changed = {key: _not_at_start(value) for key, value in pre_tokenizer.items()}
        return changed | ({"prepend_scheme": "never"} if changed.get("prepend_scheme") == "first" else {})
    return [_not_at_start(part) for part in pre_tokenizer] if isinstance(pre_tokenizer, list) else pre_tokenizer


def _component(document: Mapping[str, Any], key: str) -> Any:
    """The library's object for one part of the document; None where the file has none."""
    value = document.get(key)
    if value is None:
        return None
    try:
        return getattr(tokenizers.Tokenizer.from_str(json.dumps({**_EMPTY, key: value})), key)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{key} isn't understood: {error}") from error


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    return any(
        part.get("type") == "ByteLevel" for key in ("pre_tokenizer", "decoder") for part in _parts(document.get(key))
    )


def _parts(component: Any) -> Iterable[Mapping[str, Any]]:
    """A component and, where it is a sequence, what it consists of."""
    if not isinstance(component, dict):
        return
    yield component
    for key in ("pretokenizers", "processors", "decoders", "normalizers"):
        inner = component.get(key)
        for part in inner if isinstance(inner, list) else ():
            yield from _parts(part)


def _front_token(post_processor: Any) -> str | None:
    """The token that the template for a single text begins with."""
    for part in _parts(post_processor):
        single = part.get("single")
        if part.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            first = single[0].get("SpecialToken") if isinstance(single[0], dict) else None
            text = first.get("id") if isinstance(first, dict) else None
            return text if isinstance(text, str) else None
    return None


def _brief(value: Any) -> str:
    """A value of unknown size, for a message."""
    text = repr(value) if not isinstance(value, (dict, list)) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else text[:57] + "..."
