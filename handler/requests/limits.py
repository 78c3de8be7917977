"""What is refused before it costs anything: more requests than may wait, texts that can't fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handler.errors import InvalidRequest, QueueFull
from handler.settings import HandlerSettings

if TYPE_CHECKING:
    from model.tokenizer.tokenizer import Tokenizer


def check_queue(waiting: int, settings: HandlerSettings) -> None:
    """Raise QueueFull where `waiting` prompts and choices are as many as may wait in the engine."""
    if settings.max_waiting is not None and waiting >= settings.max_waiting:
        raise QueueFull(
            f"{waiting} prompts wait in the engine, expected fewer than {settings.max_waiting} (max_waiting): "
            f"try again in {QueueFull.retry_after} s",
            code="queue_full",
        )


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Most bytes of text one token stands for, in UTF-8; None where a single token stands for any unknown text."""
    unknown = tokenizer.special_ids - set(tokenizer.control_tokens.values())
    if unknown and not tokenizer.byte_ids:
        return None
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_words))


def check_size(texts: list[str], path: str, longest: int | None, max_seq_len: int) -> None:
    """Raise InvalidRequest where `texts` together can't fit in the context, however they are tokenized.

    Tokenizing takes about a second per megabyte, in which no other request is looked at. Blanks don't count, as a
    chat format may strip them.

    Args:
        path: of the texts in the request, for the message.
        longest: what `longest_token` says.
        max_seq_len: of the model, in tokens.
    """
    if longest is None or 4 * sum(map(len, texts)) <= longest * max_seq_len:
        return
    size = sum(len("".join(text.split()).encode("utf-8", "replace")) for text in texts)
    least = -(-size // longest)
    if least > max_seq_len - 1:
        raise InvalidRequest(
            f"{path} has {size} bytes without blanks, which is at least {least} tokens (the longest token has "
            f"{longest} bytes), expected at most {max_seq_len - 1}: the context of {max_seq_len} tokens must hold the "
            "prompt and at least one new token",
            param=path,
            code="context_length_exceeded",
        )
