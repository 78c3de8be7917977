"""The paged key/value cache of one rank, and a step's batch in terms of it.

B sequences, T tokens of the step, L cached tokens, KV key/value heads of this rank, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from model.config import ModelConfig
from model.distributed.parallel import Shard

BLOCK_TOKENS = 16
"""Tokens in one cache block. Block 0 is never written: tables are padded with it, and it stays zero."""


class KVCache:
    """Keys and values of every layer; row `block * BLOCK_TOKENS + offset` holds one token. Changed in place."""

    def __init__(
        self, config: ModelConfig, shard: Shard, n_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.n_layers, n_blocks * BLOCK_TOKENS, len(shard.kv_heads), config.head_dim)
        self.n_blocks = n_blocks
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)


def bytes_per_token(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> int:
    """Cache bytes that one token takes on this rank."""
    return 2 * config.n_layers * len(shard.kv_heads) * config.head_dim * dtype.itemsize


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each, attended together."""

    rows: torch.Tensor | slice
    """Which of the T tokens: (B,) indices, or a slice where they are neighbors."""
    lengths: torch.Tensor
    """(B,) int32, cached tokens of each sequence, the new one among them."""
    blocks: torch.Tensor
    """(B, N) int32, numbers of their cache blocks, padded with 0."""

    @cached_property
    def slots(self) -> torch.Tensor:
        """(B * L,) cache rows, each sequence padded to L = N * BLOCK_TOKENS.

        Padding is row 0, which is always zero: what others left in a block must not be read, as 0 * NaN is NaN.
        """
        offsets = torch.arange(BLOCK_TOKENS, device=self.blocks.device)
        rows = (self.blocks.long()[:, :, None] * BLOCK_TOKENS + offsets).flatten(1)
        return rows.masked_fill(~self.mask[:, 0, 0], 0).flatten()

    @cached_property
    def mask(self) -> torch.Tensor:
        """(B, 1, 1, L) True where a cached token may be seen."""
        places = torch.arange(self.blocks.shape[1] * BLOCK_TOKENS, device=self.blocks.device)
        return (places < self.lengths[:, None])[:, None, None, :]


@dataclass(frozen=True)
class PrefillChunk:
    """Several tokens of one sequence."""

    rows: slice
    start: int
    """Position of the first of them."""
    count: int
    blocks: torch.Tensor
    """(N,) int32, numbers of the sequence's cache blocks up to this chunk's end."""

    @cached_property
    def slots(self) -> torch.Tensor:
        """(L,) cache rows of the sequence up to and including this chunk."""
        offsets = torch.arange(BLOCK_TOKENS, device=self.blocks.device)
        return (self.blocks.long()[:, None] * BLOCK_TOKENS + offsets).flatten()[: self.start + self.count]

    @cached_property
    def mask(self) -> torch.Tensor:
        """(tokens, L) True where a token may see a cached one."""
        places = torch.arange(self.start + self.count, device=self.blocks.device)
        return places <= places[self.start :, None]


@dataclass(frozen=True)
class Batch:
    """What one forward pass computes: T tokens of S sequences, one sequence after the other."""

    tokens: torch.Tensor
    """(T,) ids."""
    positions: torch.Tensor
    """(T,) place of each token in its sequence."""
    slots: torch.Tensor
    """(T,) cache row each token's key and value go to."""
    logit_rows: torch.Tensor
    """(R,) tokens whose logits are wanted."""
    counts: np.ndarray
    """(S,) int32, tokens of each sequence."""
    lengths: np.ndarray
    """(S,) int32, cached tokens of each sequence, those of this step among them."""
    blocks: np.ndarray
    """(S, N) int32, numbers of the sequences' cache blocks, padded with 0."""

    @cached_property
    def decodes(self) -> list[DecodeGroup]:
        """The sequences with one new token, in groups of similar length."""
        firsts = np.cumsum(self.counts) - self.counts
        groups = []
        for members in _decode_groups(self.lengths, np.flatnonzero(self.counts == 1)):
            n_blocks = -(-int(self.lengths[members].max()) // BLOCK_TOKENS)
            rows = firsts[members]
            neighbors = bool(rows[-1] - rows[0] == len(rows) - 1)
            groups.append(
                DecodeGroup(
                    slice(int(rows[0]), int(rows[-1]) + 1) if neighbors else self._put(rows),
                    self._put(self.lengths[members], torch.int32),
                    self._put(self.blocks[members, :n_blocks], torch.int32),
                )
            )
        return groups

    @cached_property
    def prefills(self) -> list[PrefillChunk]:
        """The sequences with several new tokens."""
        firsts = np.cumsum(self.counts) - self.counts
        chunks = []
        for i in np.flatnonzero(self.counts > 1):
            end, count, first = int(self.lengths[i]), int(self.counts[i]), int(firsts[i])
            table = self._put(self.blocks[i, : -(-end // BLOCK_TOKENS)], torch.int32)
            chunks.append(PrefillChunk(slice(first, first + count), end - count, count, table))
        return chunks

    def _put(self, array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return _tensor(array, self.tokens.device, dtype)


def _tensor(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)


def make_batch(
    tokens: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    blocks: np.ndarray,
    logit_rows: np.ndarray,
    device: torch.device,
) -> Batch:
    """A batch, on `device`, from a step plan's arrays (see `generation.interface.StepPlan`)."""
    if len(tokens) == len(counts):  # one token of each sequence
        sequence, positions = np.arange(len(counts)), starts
    else:
        firsts = np.cumsum(counts) - counts
        sequence = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(tokens)) - firsts[sequence] + starts[sequence]
    slots = blocks[sequence, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    counts, lengths, blocks = (np.ascontiguousarray(a, dtype=np.int32) for a in (counts, starts + counts, blocks))
    return Batch(
        _tensor(tokens, device),
        _tensor(positions, device),
        _tensor(slots, device),
        _tensor(logit_rows, device),
        counts,
        lengths,
        blocks,
    )


def _decode_groups(lengths: np.ndarray, members: np.ndarray) -> list[np.ndarray]:
    """`members` together, or by similar length where padding to the longest would double the work."""
    if len(members) == 0:
        return []
    own = lengths[members]
    if own.max() * len(members) <= 2 * own.sum() + 64 * len(members):
        return [members]
    classes = np.ceil(np.log2(own + 64)).astype(int)
    return [members[classes == c] for c in np.unique(classes)]
