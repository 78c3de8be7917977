"""Tensor parallelism as a plan: which part of each parameter one rank holds.

Column-parallel: wq, wk, wv, w1, w3 (split along the output features, dim 0). Row-parallel: wo, w2 (split
along the input features, dim 1; their outputs are summed over ranks). The embedding and the output matrix
are split along the vocabulary. Norms are whole on every rank.
Source: Shoeybi et al., "Megatron-LM" (2019), section 3, without its demand that everything divides.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config import CheckpointError, ModelConfig


@dataclass(frozen=True)
class Shard:
    """One rank's part of the model. Each key/value head here serves `len(heads) // len(kv_heads)` heads."""

    rank: int
    world_size: int
    heads: range
    kv_heads: range
    hidden: range
    vocab: range

    @property
    def group(self) -> int:
        return len(self.heads) // len(self.kv_heads)


def deal(n: int, parts: int, unit: int = 1) -> list[range]:
    """`n` things in `parts` ranges, in order, as evenly as whole `unit`s allow; the first ranges get more."""
    units, rest = divmod(n, unit)
    if units < parts:
        units, rest, unit = n, 0, 1
    size, more = divmod(units, parts)
    ends = [min((i + 1) * size + min(i + 1, more), units) * unit for i in range(parts)]
    ends[-1] += rest
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _deal_heads(config: ModelConfig, world_size: int) -> list[tuple[range, range]]:
    """(heads, key/value heads) of each rank: whole groups while there are enough, else parts of one group."""
    group = config.n_heads // config.n_kv_heads
    if world_size <= config.n_kv_heads:
        dealt = deal(config.n_kv_heads, world_size)
        return [(range(kv.start * group, kv.stop * group), kv) for kv in dealt]
    parts = []
    for kv, ranks in enumerate(deal(world_size, config.n_kv_heads)):
        for heads in deal(group, len(ranks)):
            parts.append((range(kv * group + heads.start, kv * group + heads.stop), range(kv, kv + 1)))
    return parts


def plan_shards(config: ModelConfig, world_size: int) -> list[Shard]:
    """The part of every rank.

    Raises:
        CheckpointError: more ranks than heads; names the most that fit.
    """
    limit = config.n_kv_heads * (config.n_heads // config.n_kv_heads)
    if not 1 <= world_size <= limit:
        raise CheckpointError(
            f"nproc-per-node is {world_size}, but the model has {config.n_heads} heads: use 1 to {limit} ranks"
        )
    heads = _deal_heads(config, world_size)
    # evenly, also where the heads are not: the ranks wait for each other after the attention and after this, each time
    hidden = deal(config.hidden_dim, world_size, unit=32)
    vocab = deal(config.vocab_size, world_size, unit=16)
    return [
        Shard(rank, world_size, heads[rank][0], heads[rank][1], hidden[rank], vocab[rank]) for rank in range(world_size)
    ]


def part_of(name: str, shard: Shard, head_dim: int) -> tuple[int, int, int] | None:
    """(dim, start, stop) of this rank's part of the parameter `name`; None where it is whole on every rank."""
    kind = name.split(".")[-2]
    heads, kv, hidden, vocab = shard.heads, shard.kv_heads, shard.hidden, shard.vocab
    parts = {
        "wq": (0, heads.start * head_dim, heads.stop * head_dim),
        "wk": (0, kv.start * head_dim, kv.stop * head_dim),
        "wv": (0, kv.start * head_dim, kv.stop * head_dim),
        "wo": (1, heads.start * head_dim, heads.stop * head_dim),
        "w1": (0, hidden.start, hidden.stop),
        "w3": (0, hidden.start, hidden.stop),
        "w2": (1, hidden.start, hidden.stop),
        "tok_embeddings": (0, vocab.start, vocab.stop),
        "output": (0, vocab.start, vocab.stop),
    }
    return parts.get(kind)
