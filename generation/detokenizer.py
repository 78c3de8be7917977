"""From ids to text deltas: whole characters, no part of a stop string, every token's share known in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from model.tokenizer.tokenizer import TextDecoder, Tokenizer


class Detokenizer:
    """Collects one generation's ids and gives out its text as soon as it is certain.

    The deltas joined are `tokenizer.decode(ids)`, cut before the stop string that begins first in the text, however
    the text is spread over tokens. Work and memory are linear in the text.

    Args:
        tokenizer: what the ids belong to.
        stop: non-empty strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string was found; no more text comes then."""
        self._tokenizer = tokenizer
        self._decoder = TextDecoder(tokenizer)
        self._stops = StopMatcher(stop) if stop else None
        self._finished = False
        self._pieces: deque[str] = deque()
        """The text of each pushed token that wasn't taken yet."""
        self._certain = 0
        """How many characters of `_pieces` are certain."""
        self._open = 0
        """How many of the last pieces may still grow, because they end in half a character."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now.

        After a stop or `finish` nothing is taken in; the token then has an empty piece.

        Raises:
            ValueError: the id isn't in the vocabulary; nothing changed.
        """
        if self.stopped or self._finished:
            self._pieces.append("")
            return ""
        text = self._decoder.feed(token_id)
        self._pieces.append(text)
        if not self._decoder.incomplete:
            self._open = 0
        elif self._tokenizer.token_bytes(token_id):
            self._open = 1
        else:
            self._open += 1  # the unfinished half stays with the token that brought it
        return self._release(text, final=False)

    def finish(self) -> str:
        """The rest of the text, half a character as U+FFFD. Once; an empty string afterwards."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        text = self._decoder.finish()
        if text:
            self._pieces[-self._open] += text
        self._open = 0
        return self._release(text, final=True)

    def take_pieces(self) -> list[str]:
        """The text of each token pushed since the last call, as far as it is certain, in order.

        A character belongs to the token that completes it. A piece comes once all of its text has been returned by
        `push` or `finish`, so a token that ends in half a character or in the beginning of a stop string comes
        later; after `finish` or a stop all have come. Each token has exactly one piece, those after a stop an empty
        one, and the pieces joined are the returned text.
        """
        taken: list[str] = []
        while len(self._pieces) > self._open and len(self._pieces[0]) <= self._certain:
            taken.append(self._pieces.popleft())
            self._certain -= len(taken[-1])
        return taken

    def _release(self, text: str, final: bool) -> str:
        if self._stops is not None:
            text = self._stops.feed(text)
            if final:
                text += self._stops.finish()
            self.stopped = self._stops.found
        self._certain += len(text)
        if self.stopped:
            self._cut_pieces()
        return text

    def _cut_pieces(self) -> None:
        """Drop the text from the stop string on from the pieces."""
        left = self._certain
        self._open = 0
        for i, piece in enumerate(self._pieces):
            self._pieces[i] = piece[:left]
            left -= len(self._pieces[i])


class StopMatcher:
    """Finds the stop string that begins first in a text that comes in parts (Aho and Corasick, 1975).

    A node is a prefix of some stop; the current node is the longest one that the text ends in, so its depth is the
    number of characters that may turn out to be (part of) a stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]
        """Length of the longest stop that the node's string ends in."""
        for stop in stops:
            self._add(stop)
        self._link()
        self._node = 0
        self._held = ""
        self._begin: int | None = None
        """Where in `_held` a stop was found, while one that begins before it may still follow."""

    def feed(self, text: str) -> str:
        """The text that is certain now; `found` tells whether it ends before a stop."""
        if self.found:
            return ""
        base = len(self._held)
        self._held += text
        for end, char in enumerate(text, base + 1):
            node = self._node = self._step(self._node, char)
            if self._match[node] and (self._begin is None or end - self._match[node] < self._begin):
                self._begin = end - self._match[node]
            if self._begin is not None and end - self._depth[node] >= self._begin:
                return self._stop()
        certain = len(self._held) - self._depth[self._node]
        out, self._held = self._held[:certain], self._held[certain:]
        if self._begin is not None:
            self._begin -= certain
        return out

    def finish(self) -> str:
        """What was held back, up to a stop found in it."""
        if self._begin is not None:
            return self._stop()
        out, self._held, self._node = self._held, "", 0
        return out

    def _stop(self) -> str:
        self.found = True
        out, self._held = self._held[: self._begin], ""
        self._begin = None
        return out

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def _add(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string is empty, expected at least one character")
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(0)
            node = self._next[node][char]
        self._match[node] = len(stop)

    def _link(self) -> None:
        """For each node the longest other prefix that its string ends in, shorter strings first."""
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self._match[node] = self._match[node] or self._match[self._fail[node]]
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                queue.append(child)
