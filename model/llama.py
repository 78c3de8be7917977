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

from model.config import ModelConfig
from model.distributed.collectives import Communicator
from model.distributed.parallel import Shard, plan_shards
from model.kernels.layers import NativeLayers, native_layers
from model.kernels.linear import Linear, Packed, packed_kind
from model.kernels.operations import TorchKernels, choose_kernels
from model.kv_cache import Batch, KVCache
from model.rope import rotary_table


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
        kind: str,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = len(shard.heads), len(shard.kv_heads), config.head_dim
        q, kv = self.heads * config.head_dim, self.kv_heads * config.head_dim
        self.wqkv = Linear(q + 2 * kv, config.dim, dtype, device, kind)
        self.wo = Linear(config.dim, q, dtype, device, kind)
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
        kind: str,
    ) -> None:
        hidden = len(shard.hidden)
        self.w13 = Linear(2 * hidden, config.dim, dtype, device, kind)
        self.w2 = Linear(config.dim, hidden, dtype, device, kind)
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
        kind: str,
    ) -> None:
        self.attention = Attention(config, shard, comm, kernels, dtype, device, kind)
        self.feed_forward = FeedForward(config, shard, comm, kernels, dtype, device, kind)
        self.attention_norm = torch.empty(config.dim, dtype=torch.float32, device=device)
        self.ffn_norm = torch.empty(config.dim, dtype=torch.float32, device=device)

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """Its matrices, in the order in which they are used."""
        return self.attention.wqkv, self.attention.wo, self.feed_forward.w13, self.feed_forward.w2


class Llama:
    """One rank's part of the model, ready for its weights (`loader.py` fills them in, then calls `loaded`).

    Args:
        quantization: "int8" or "int4" for the layers' matrices (the output matrix is int8 then), None or "none".
    """

    def __init__(
        self,
        config: ModelConfig,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        max_seq_len: int,
        quantization: str | None = None,
    ) -> None:
        self.config, self.comm, self.dtype, self.device = config, comm, dtype, device
        self.max_seq_len = max_seq_len
        self.shards = plan_shards(config, comm.world_size)
        self.shard = self.shards[comm.rank]
        self.kernels = choose_kernels(device, dtype, config.head_dim)
        self.kind = packed_kind(dtype, device, quantization)
        """How the weights lie in memory, see `packed_kind`."""
        self.layers = [
            TransformerBlock(config, self.shard, comm, self.kernels, dtype, device, self.kind)
            for _ in range(config.n_layers)
        ]
        self.norm = torch.empty(config.dim, dtype=torch.float32, device=device)
        vocab, output_kind = len(self.shard.vocab), "int8" if self.kind == "int4" else self.kind
        self._rounds_logits = dtype == torch.bfloat16 and device.type == "cpu" and self.kind in ("plain", "onednn")
        out_dtype = None if self._rounds_logits else torch.float32
        self.output = Linear(vocab, config.dim, dtype, device, output_kind, out_dtype)
        self.tok_embeddings: Tensor | None = self.output.weight
        """None where the embedding is the packed output matrix."""
        if not config.tied_output:
            self.tok_embeddings = torch.empty(vocab, config.dim, dtype=dtype, device=device)
        self._packed_embedding: Packed | None = None
        self._exact_output: Tensor | None = None
        self.rotary = rotary_table(config, max_seq_len, device)
        self.native: NativeLayers | None = None

    def loaded(self) -> None:
        """All weights are in their place and the layers' are packed: pack the output matrix, connect native code."""
        if self._rounds_logits:
            self._exact_output = self.output.weight
        self.output.pack()
        if self.config.tied_output and self.output.packed is not None and self.output.packed.has_rows:
            self.tok_embeddings, self._packed_embedding = None, self.output.packed
        self.native = native_layers(self)

    def _embed(self, tokens: Tensor) -> Tensor:
        """(T,) -> (T, dim); each rank looks up the ids it holds, the others' rows are zero."""
        vocab = self.shard.vocab
        if len(vocab) == self.config.vocab_size:
            return self._rows(tokens)
        local = tokens - vocab.start
        elsewhere = (local < 0) | (local >= len(vocab))
        rows = self._rows(local.masked_fill(elsewhere, 0))
        return self.comm.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def _rows(self, ids: Tensor) -> Tensor:
        if self.tok_embeddings is not None:
            return F.embedding(ids, self.tok_embeddings)
        if self._packed_embedding is None:
            raise RuntimeError("the model has no weights yet")
        return self._packed_embedding.rows(ids)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor | None:
        """One step. The cache gains the batch's tokens.

        Returns:
            (R, vocabulary) float32 logits of `batch.logit_rows` on rank 0, None on other ranks or for R = 0.
        """
        h = self._embed(batch.tokens).float()
        delta = self.native(h, batch, cache) if self.native is not None else self._run_layers(h, batch, cache)
        rows = batch.logit_rows
        if len(rows) == 0:
            return None
        if len(rows) < len(h):
            h, delta = h.index_select(0, rows), None if delta is None else delta.index_select(0, rows)
        h = self.kernels.add_norm(h, delta, self.norm, self.config.norm_eps, self.dtype)
        logits = self.output(h)
        if self._exact_output is not None:
            logits = self.kernels.sharpen(logits, h, self._exact_output)
        return self.comm.gather(logits, [len(s.vocab) for s in self.shards])

    def _run_layers(self, h: Tensor, batch: Batch, cache: KVCache) -> Tensor | None:
        """h (T, dim) float32 runs through all layers, in place. Returns (T, dim), what is still to be added to it."""
        eps, norm = self.config.norm_eps, self.kernels.add_norm
        delta = None
        for i, layer in enumerate(self.layers):
            x = norm(h, delta, layer.attention_norm, eps, self.dtype)
            delta = layer.attention(x, self.rotary, batch, cache.keys[i], cache.values[i])
            x = norm(h, delta, layer.ffn_norm, eps, self.dtype)
            delta = layer.feed_forward(x)
        return delta
