"""The tokenizer of a Hugging Face directory: its vocabulary, and what the JSON files beside it say about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import normalizers

from model.config import CheckpointError
from model.tokenizer.added import AddedToken, SpaceRule
from model.tokenizer.base import Tokenizer
from model.tokenizer.hf_json import (
    added_tokens,
    control_flags,
    merge_added,
    space_rule,
    tokenizer_from_json,
    with_space_rule,
)
from model.tokenizer.proto import CONTROL, SPACE, USER_DEFINED, extend_model, model_pieces
from model.tokenizer.settings import Settings, read_json
from model.tokenizer.spm import SentencePieceTokenizer, TextEncoder, is_tiktoken

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn, for files whose metadata names only the end of the text."""


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """The tokenizer of the Hugging Face checkpoint in `directory`.

    Reads `tokenizer.model` (SentencePiece) where there is one, else `tokenizer.json`; tokens added beyond it, BOS,
    EOS and the chat template from `tokenizer_config.json` and the older files beside it; further ids that end a
    generation from `generation_config.json` and `config.json`.

    Raises:
        CheckpointError: naming the file and the key: no vocabulary, something else in a file, or of a kind that
            isn't supported.
    """
    directory = Path(directory)
    settings = Settings(directory)
    model, document = directory / "tokenizer.model", directory / "tokenizer.json"
    front: str | None = None
    if model.is_file() and not (document.is_file() and is_tiktoken(_head(model))):
        tokenizer: Tokenizer = _from_sentencepiece(model, settings)
    elif document.is_file():
        rule = settings.space_rule()
        try:
            content = read_json(document)
            if rule is not None and isinstance(content, dict):
                content = with_space_rule(content, rule)
            tokenizer, front = tokenizer_from_json(
                content, added=settings.added, added_first=settings.knows_all_added, framing=settings.framing()
            )
        except CheckpointError as error:
            raise CheckpointError(f"tokenizer {document}: {error}") from error
    else:
        raise CheckpointError(f"{directory} has neither tokenizer.model nor tokenizer.json; fetch one of them too")
    _apply(tokenizer, settings, front)
    return tokenizer


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise CheckpointError(f"tokenizer {path} can't be read: {error.strerror}") from error


def _from_sentencepiece(path: Path, settings: Settings) -> Tokenizer:
    """The model in `path` with the added tokens whose ids follow its own; those it has already stay what they are."""
    tokenizer = SentencePieceTokenizer.from_file(path)
    added, spaces, normalizer = _beside(path.with_name("tokenizer.json"), settings)
    base = tokenizer.proto()
    n = tokenizer.n_words
    for token_id, token in added.items():
        if token_id < n and tokenizer.pieces[token_id] != token.text.replace(" ", SPACE):
            raise CheckpointError(
                f"{path} has {tokenizer.pieces[token_id]!r} as token {token_id}, "
                f"but the files beside it add {token.text!r} there"
            )
    beyond = sorted(token_id for token_id in added if token_id >= n)
    if beyond != list(range(n, n + len(beyond))):
        gap = next(i for i, token_id in enumerate(beyond, n) if token_id != i)
        raise CheckpointError(f"{path} has {n} tokens and more are added up to {beyond[-1]}, but none with id {gap}")
    pieces = [_piece(added[token_id], settings.framing()) for token_id in beyond]
    model = extend_model(base, pieces)
    kinds = [kind for _, _, kind in model_pieces(model)]
    listed = range(len(kinds)) if settings.space_rule() else sorted(added)  # else the model finds its own itself
    in_text = [added.get(i) or AddedToken(i, _text(tokenizer.pieces[i])) for i in listed if kinds[i] == USER_DEFINED]
    try:
        tokenizer = SentencePieceTokenizer.from_proto(model, TextEncoder(base, spaces, in_text))
    except CheckpointError as error:
        raise CheckpointError(f"tokenizer {path} with the tokens added beside it: {error}") from error
    tokenizer.control_flags = control_flags(tokenizer, added.values(), normalizer)
    return tokenizer


def _beside(path: Path, settings: Settings) -> tuple[dict[int, AddedToken], SpaceRule, normalizers.Normalizer | None]:
    """What the files beside a model say: added tokens by id, where spaces are put, the normalizer.

    Args:
        path: where a `tokenizer.json` may be.
    """
    added, spaces, normalizer = dict(settings.added), settings.space_rule(), None
    if path.is_file() and (spaces is None or not settings.knows_all_added):
        try:
            document = read_json(path)
            if not settings.knows_all_added:
                added = merge_added(added_tokens(document), added)
            if spaces is None:
                spaces, normalizer = space_rule(document)
        except CheckpointError as error:
            raise CheckpointError(f"tokenizer {path}: {error}") from error
    if spaces is None:
        spaces = SpaceRule.FIRST if settings.legacy is False else SpaceRule.MODEL
    return added, spaces, normalizer


def _text(piece: str) -> str:
    return piece.replace(SPACE, " ")


def _piece(token: AddedToken, framing: set[str]) -> tuple[str, int]:
    if token.special or token.text in framing:
        return token.text, CONTROL
    return token.text.replace(" ", SPACE), USER_DEFINED


def _apply(tokenizer: Tokenizer, settings: Settings, front: str | None) -> None:
    """Set what isn't in the vocabulary: BOS, EOS, padding, ids that stop, the template."""
    ids = {piece: i for i, piece in reversed(list(enumerate(tokenizer.pieces)))}
    tokenizer.bos_id = _named(tokenizer, settings, ids, "bos", front)
    tokenizer.eos_id = _named(tokenizer, settings, ids, "eos", None)
    pad = settings.text("pad_token")
    tokenizer.pad_id = ids.get(pad, tokenizer.pad_id) if pad else tokenizer.pad_id
    adds_bos = settings.adds_bos()
    if adds_bos is None:
        adds_bos = tokenizer.adds_bos or (front is not None and ids.get(front) == tokenizer.bos_id)
    tokenizer.adds_bos = adds_bos and tokenizer.bos_id is not None
    tokenizer.chat_template = settings.chat_template()
    tokenizer.stop_ids = frozenset(_stop_ids(tokenizer, settings))


def _named(
    tokenizer: Tokenizer, settings: Settings, ids: Mapping[str, int], name: str, front: str | None
) -> int | None:
    """The id of BOS or EOS: by its text, else the vocabulary's own, else `front`'s, else by `config.json`'s id."""
    text = settings.text(f"{name}_token")
    if text is not None:
        if text not in ids:
            raise CheckpointError(
                f"{settings.directory / 'tokenizer_config.json'}: {name}_token is {text!r}, which no token has"
            )
        return ids[text]
    own: int | None = getattr(tokenizer, f"{name}_id")
    if own is not None:
        return own
    if front is not None and front in ids:
        return ids[front]
    return next(iter(_checked(tokenizer, settings, "config.json", f"{name}_token_id")), None)


def _stop_ids(tokenizer: Tokenizer, settings: Settings) -> Iterable[int]:
    """EOS, all that the configurations name, and the ends of turns that the chat template writes."""
    if tokenizer.eos_id is not None:
        yield tokenizer.eos_id
    for name in ("generation_config.json", "config.json"):
        yield from _checked(tokenizer, settings, name, "eos_token_id")
    for text in TURN_ENDS:
        token_id = tokenizer.control_token(text)
        if token_id is not None and text in (tokenizer.chat_template or ""):
            yield token_id


def _checked(tokenizer: Tokenizer, settings: Settings, name: str, key: str) -> list[int]:
    found = settings.ids(name, key)
    for token_id in found:
        if token_id >= tokenizer.n_words:
            raise CheckpointError(
                f"{settings.directory / name}: {key} is {token_id}, "
                f"but the vocabulary has {tokenizer.n_words} tokens (0..{tokenizer.n_words - 1})"
            )
    return found
