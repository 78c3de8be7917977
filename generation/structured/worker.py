"""Compiling grammars with llguidance, and a process that tries each one first.

A small schema can keep the compiler busy for minutes (sixty patterns that all must match, say), and nothing in the
same process can stop it. So a grammar is compiled in a child process with limits on time and memory; what
passes there is compiled again where it is used. The child runs this file alone: no import from the project.

Child's input: a line of JSON [tokens as latin-1 strings, end ids, lead], then a line of JSON per grammar.
Child's output: the line "ready", then a line of JSON per grammar, the error or "". It dies where a limit is passed.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import llguidance

CPU_SECONDS, WALL_SECONDS = 0.3, 0.9
"""For one grammar and its first mask."""
MEMORY_BYTES = 2**31
"""Address space of the child."""

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A step's fuel bounds the time of one mask."""


class Vocabulary:
    """What llguidance asks of a tokenizer.

    Args:
        tokens: bytes of each id; empty for those that are no text.
        end_ids: ids that end an answer.
        lead: the id every grammar begins with, if there is one.
        encode: text to ids whose bytes joined are the text, for parts of an answer that leave no choice.
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokens: Sequence[bytes],
        end_ids: Sequence[int],
        lead: int | None = None,
        encode: Callable[[str], list[int] | None] | None = None,
    ) -> None:
        # The library takes a leading 0xff, which no UTF-8 text has, as the mark of a control token.
        self.tokens = [b"" if token[:1] == b"\xff" else token for token in tokens]
        for i in end_ids:
            self.tokens[i] = b"\xff<end %d>" % i
        self.eos_token_id = end_ids[0]
        self.special_token_ids = list(end_ids)
        self.lead = lead
        self._encode = encode
        self._ids = {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if self._encode is not None:
            ids = self._encode(data.decode("utf-8", "replace"))
            if ids is not None and b"".join([self.tokens[i] for i in ids]) == data:
                return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again; stops at a byte that no token begins with."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def make_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """The library's tables for a vocabulary: about 0.1 s for 50,000 tokens."""
    return llguidance.LLTokenizer(
        cast(Any, vocabulary),  # looks like the library's own wrapper
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.special_token_ids,
    )


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: str, lead: int | None) -> llguidance.LLMatcher:
    """A matcher at its beginning, with its first mask (behind the lead) known to exist.

    Raises:
        ValueError: what is wrong with the grammar, in the library's words.
    """
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    begun = matcher.deep_copy()
    if lead is not None:
        begun.consume_token(lead)
    begun.compute_bitmask()
    if begun.is_error():
        raise ValueError("no answer can satisfy it, or it needs more work than is allowed")
    return matcher


def main() -> None:
    """The child's loop; ends with its input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    tokens, end_ids, lead = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(Vocabulary([token.encode("latin-1") for token in tokens], end_ids))
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        try:
            compile_grammar(tokenizer, json.loads(line), lead)
            error = ""
        except ValueError as problem:
            error = str(problem)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
