"""SentencePiece models as bytes: made from pieces and scores, given further pieces, looked into.

Message and field numbers: sentencepiece's `sentencepiece_model.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.config import CheckpointError

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces; GGUF numbers them alike."""
_BPE = 2
_WIRE_SIZES = {1: 8, 5: 4}
_DAMAGED = "the SentencePiece model is cut short or damaged"


def build_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    bos_id: int | None,
    eos_id: int | None,
    add_dummy_prefix: bool = True,
) -> bytes:
    """A serialized ModelProto of type BPE that merges by score, without normalization.

    Args:
        pieces: text of each token, a space as "▁".
        scores: one per piece; higher is merged first.
        kinds: NORMAL ... BYTE, one per piece; one piece must be UNKNOWN.
        add_dummy_prefix: put a space in front of the text.
    """
    model = b"".join(_piece(*row) for row in zip(pieces, scores, kinds, strict=True))
    trainer = _integer(3, _BPE) + _integer(4, len(pieces)) + _integer(35, BYTE in kinds)
    for field, token_id in ((46, bos_id), (47, eos_id)):
        if token_id is not None:
            trainer += _message(field, pieces[token_id].encode())
    if UNKNOWN in kinds:
        unknown = list(kinds).index(UNKNOWN)
        trainer += _integer(40, unknown) + _message(45, pieces[unknown].encode())
    normalizer = _message(1, b"identity") + _integer(3, add_dummy_prefix) + _integer(4, False) + _integer(5, True)
    return model + _message(2, trainer) + _message(3, normalizer)


def extend_model(model: bytes, pieces: Sequence[tuple[str, int]]) -> bytes:
    """`model` with further pieces (text and kind) at the end of its vocabulary.

    Serialized messages that are joined are one message with the repeated fields of both.
    """
    return model + b"".join(_piece(text, 0.0, kind) for text, kind in pieces)


def without_dummy_prefix(model: bytes) -> bytes:
    """`model` without a space put in front of text. Of a field that is there twice the last one counts."""
    return model + _message(3, _integer(3, False))


def model_pieces(model: bytes) -> list[tuple[str, float, int]]:
    """Text, score and kind of every piece of a serialized ModelProto.

    Raises:
        CheckpointError: the bytes aren't a serialized message.
    """
    rows = []
    for number, value in _fields(model):
        if number == 1 and isinstance(value, bytes):
            row = dict(_fields(value))
            text, score, kind = row.get(1, b""), row.get(2, bytes(4)), row.get(3, NORMAL)
            if not (isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)):
                raise CheckpointError(_DAMAGED)
            rows.append((text.decode(), struct.unpack("<f", score)[0], kind))
    return rows


@dataclass(frozen=True)
class ModelTraits:
    """What of a model's settings its pieces and scores alone don't tell."""

    is_bpe: bool
    changes_text: bool
    """Whether the text is normalized, by a table of characters or by dropping spaces."""
    add_dummy_prefix: bool


def model_traits(model: bytes) -> ModelTraits:
    """The traits of a serialized ModelProto.

    Raises:
        CheckpointError: the bytes aren't a serialized message.
    """
    parts = {2: b"", 3: b""}
    for number, value in _fields(model):
        if number in parts and isinstance(value, bytes):
            parts[number] += value
    trainer, normalizer = (dict(_fields(parts[number])) for number in (2, 3))
    return ModelTraits(
        is_bpe=trainer.get(3, 1) == _BPE,
        changes_text=bool(normalizer.get(2)) or bool(normalizer.get(4, 1)),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
    )


def _piece(text: str, score: float, kind: int) -> bytes:
    return _message(1, _message(1, text.encode()) + _float(2, score) + _integer(3, kind))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message; fixed-size values as their bytes."""
    at = 0
    try:
        while at < len(data):
            key, at = _read_varint(data, at)
            wire = key & 7
            if wire == 0:
                value, at = _read_varint(data, at)
                yield key >> 3, value
                continue
            size = _WIRE_SIZES.get(wire)
            if wire == 2:
                size, at = _read_varint(data, at)
            if size is None or at + size > len(data):
                raise IndexError
            yield key >> 3, data[at : at + size]
            at += size
    except IndexError as error:
        raise CheckpointError(_DAMAGED) from error


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
