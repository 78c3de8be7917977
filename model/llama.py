"""The Llama 2 transformer in Meta's terms, written as if there were one rank.

T tokens of a step, H heads, KV key/value heads, G = H / KV heads per group, D head dim. With several ranks,
H, KV, the hidden size and the vocabulary are this rank's parts (see parallel.py), and the three places
where ranks meet are `comm.all_reduce` after wo, w2 and the embedding, and `comm.gather` of the logits.
The residual stream and the norms are float32 in every dtype: nearly free, and much closer to full precision.
Source: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), section 2.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import Communicator
from .config import ModelConfig
from .kernels import TorchKernels, choose_kernels
from .kv_cache import Batch, KVCache
from .parallel import Shard, plan_shards
from .rope import rotary_table


def padded_rows(rows: int) -> int:
    """The next of few row counts: oneDNN builds a kernel, and keeps it, for each that it meets."""
    step = 1 if rows <= 8 else 8 if rows <= 64 else 32 if rows <= 256 else 64
    return -(-rows // step) * step


class Linear:
    """y = x W^T. On a CPU in bfloat16 the weight is kept in oneDNN's own order, which nearly halves the time."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight: Tensor | None = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self._packed: Tensor | None = None

    def prepack(self, keep: bool = False) -> None:
        """Reorder the weight for the kernel; `keep` leaves the plain one for other users."""
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return
        if not torch.backends.mkldnn.is_available():
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        if not keep:
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            rows = len(x)
            more = padded_rows(rows) - rows
            if more:
                x = F.pad(x, (0, 0, 0, more))
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], None)
            return y[:rows]
        if self.weight is None:
            raise RuntimeError("this layer's weight was dropped")
        return F.linear(x, self.weight)


class Attention:
    """Grouped-query attention over the paged cache. Source: Ainslie et al., "GQA" (2023)."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        comm: Communicator,
        kernels: TorchKernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = len(shard.heads), len(shard.kv_heads), config.head_dim
        q, kv = self.heads * config.head_dim, self.kv_heads * config.head_dim
        self.wqkv = Linear(q + 2 * kv, config.dim, dtype, device)
        self.wo = Linear(config.dim, q, dtype, device)
        self.comm, self.kernels = comm, kernels

    def __call__(self, x: Tensor, rotary: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """x (T, dim) -> (T, dim). `keys` and `values` (rows, KV, D) are this layer's cache, written in place."""
        qkv = self.wqkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        q = self.kernels.rotate_and_store(qkv, self.heads, rotary, batch.positions, batch.slots, keys, values)
        seen = self._attend(q, batch, keys, values)
        return self.comm.all_reduce(self.wo(seen.view(len(x), -1)))

    def _attend(self, q: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """q (T, H, D) -> (T, H, D)."""
        if not batch.prefills and len(batch.decodes) == 1:
            return self.kernels.decode(q, batch.decodes[0], keys, values)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in batch.decodes:
            out[part.rows] = self.kernels.decode(q[part.rows], part, keys, values)
        for chunk in batch.prefills:
            self.kernels.prefill(q[chunk.rows], chunk, keys, values, out[chunk.rows])
        return out


class FeedForward:
    """w2(silu(w1 x) * w3 x). Source: Shazeer, "GLU Variants Improve Transformer" (2020)."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        comm: Communicator,
        kernels: TorchKernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden = len(shard.hidden)
        self.w13 = Linear(2 * hidden, config.dim, dtype, device)
        self.w2 = Linear(config.dim, hidden, dtype, device)
        self.comm, self.kernels = comm, kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(self.w2(self.kernels.silu_multiply(self.w13(x))))


class TransformerBlock:
    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        comm: Communicator,
        kernels: TorchKernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.attention = Attention(config, shard, comm, kernels, dtype, device)
        self.feed_forward = FeedForward(config, shard, comm, kernels, dtype, device)
        self.attention_norm = torch.empty(config.dim, dtype=torch.float32, device=device)
        self.ffn_norm = torch.empty(config.dim, dtype=torch.float32, device=device)


class Llama:
    """One rank's part of the model, ready for its weights (`loader.py` fills them in)."""

    def __init__(
        self, config: ModelConfig, comm: Communicator, dtype: torch.dtype, device: torch.device, max_seq_len: int
    ) -> None:
        self.config, self.comm, self.dtype, self.device = config, comm, dtype, device
        self.max_seq_len = max_seq_len
        self.shards = plan_shards(config, comm.world_size)
        self.shard = self.shards[comm.rank]
        self.kernels = choose_kernels(device, dtype, config.head_dim)
        vocab = len(self.shard.vocab)
        self.tok_embeddings = torch.empty(vocab, config.dim, dtype=dtype, device=device)
        self.layers = [
            TransformerBlock(config, self.shard, comm, self.kernels, dtype, device) for _ in range(config.n_layers)
        ]
        self.norm = torch.empty(config.dim, dtype=torch.float32, device=device)
        self.output = Linear(0 if config.tied_output else vocab, config.dim, dtype, device)
        if config.tied_output:
            self.output.weight = self.tok_embeddings
        self.rotary = rotary_table(config, max_seq_len, device)

    def _embed(self, tokens: Tensor) -> Tensor:
        """(T,) -> (T, dim); each rank looks up the ids it holds, the others' rows are zero."""
        vocab = self.shard.vocab
        if len(vocab) == self.config.vocab_size:
            return F.embedding(tokens, self.tok_embeddings)
        local = tokens - vocab.start
        elsewhere = (local < 0) | (local >= len(vocab))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.tok_embeddings)
        return self.comm.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor | None:
        """One step. The cache gains the batch's tokens.

        Returns:
            (R, vocabulary) float32 logits of `batch.logit_rows` on rank 0, None on other ranks or for R = 0.
        """
        eps, norm = self.config.norm_eps, self.kernels.add_norm
        h = self._embed(batch.tokens).float()
        delta = None
        for i, layer in enumerate(self.layers):
            x = norm(h, delta, layer.attention_norm, eps, self.dtype)
            delta = layer.attention(x, self.rotary, batch, cache.keys[i], cache.values[i])
            x = norm(h, delta, layer.ffn_norm, eps, self.dtype)
            delta = layer.feed_forward(x)
        if len(batch.logit_rows) == 0:
            return None
        rows = batch.logit_rows
        h = norm(
            h.index_select(0, rows), None if delta is None else delta.index_select(0, rows), self.norm, eps, self.dtype
        )
        logits = self.output(h)
        if self.dtype == torch.bfloat16 and self.device.type == "cpu" and self.output.weight is not None:
            logits = self.kernels.sharpen(logits, h, self.output.weight)
        gathered = self.comm.gather(logits, [len(s.vocab) for s in self.shards])
        return None if gathered is None else gathered.float()
