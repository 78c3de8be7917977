"""Cache blocks by number: which are free, who shares them, and what the full ones hold.

A full block is known by the hash of its tokens and of all tokens before them, so a sequence that begins like an
earlier one finds those keys and values again. Blocks that nobody uses but that hold something keep it until they
are needed; the one unused for longest goes first. Block 0 belongs to nobody.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from model.kv_cache import BLOCK_TOKENS


def extend_hashes(hashes: list[bytes], ids: SequenceOf[int], salt: bytes = b"") -> None:
    """Append the hash of each full block of `ids` that `hashes` does not cover yet; each covers all before it."""
    for i in range(len(hashes), len(ids) // BLOCK_TOKENS):
        tokens = np.array(ids[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS], dtype="<i4").tobytes()
        hashes.append(hashlib.blake2b(tokens, digest_size=16, key=hashes[-1] if hashes else salt).digest())


class BlockPool:
    """All blocks of a cache. Every block is free, used by one or more sequences, or unused but still known."""

    def __init__(self, n_blocks: int) -> None:
        self.total = n_blocks - 1
        self._empty = list(range(n_blocks - 1, 0, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Known blocks without a user, the one unused for longest first."""
        self._users = [0] * n_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return len(self._empty) + len(self._unused)

    def take(self, n: int) -> list[int] | None:
        """`n` blocks for one user, or None where there are fewer; forgets what they held."""
        if n > self.free:
            return None
        blocks = []
        for _ in range(n):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._unused.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def find(self, hashes: SequenceOf[bytes]) -> list[int]:
        """The blocks known by the first of `hashes`, as far as they are known; nobody's use of them changes."""
        blocks = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for known blocks."""
        for block in blocks:
            self._unused.pop(block, None)
            self._users[block] += 1

    def learn(self, block: int, key: bytes) -> None:
        """`block` is full and known by `key` from now on, unless another one is."""
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key], self._hash_of[block] = block, key

    def give_back(self, blocks: SequenceOf[int]) -> None:
        """One user less. The last blocks of a sequence are forgotten before its first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._hash_of:
                self._unused[block] = None
            else:
                self._empty.append(block)
