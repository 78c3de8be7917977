"""All layers of a step in one native call (native/layers.c), where weights, kernels and collectives are native."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.distributed.shared_memory import SharedMemoryCommunicator
from model.kernels.build import load_library
from model.kernels.linear import Linear, NativeWeight, QuantizedWeight
from model.kernels.operations import NATIVE_DTYPES, NativeKernels
from model.kv_cache import BLOCK_TOKENS, Batch, KVCache

if TYPE_CHECKING:
    from model.llama import Llama, TransformerBlock

_NO_MEMORY = -1
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = [("codes", _P), ("scales", _P), ("offsets", _P), ("inputs", _I), ("outputs", _I), ("bits", _I)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", _P),
        ("ffn_norm", _P),
        *((name, _Linear) for name in ("wqkv", "wo", "w13", "w2")),
        ("keys", _P),
        ("values", _P),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("layers", "rotary", "comm")),
        *((name, _I) for name in ("n_layers", "dim", "kv", "group", "head_dim", "hidden", "block_tokens")),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("positions", "slots", "counts", "lengths", "blocks")),
        *((name, _I) for name in ("tokens", "sequences", "table_width")),
    ]


class NativeLayers:
    """The layers of one rank's model, whose weights must be packed; see `native_layers`."""

    def __init__(self, model: Llama) -> None:
        config, shard = model.config, model.shard
        self._model = model  # the structures below hold addresses of its tensors
        self._comm = model.comm if isinstance(model.comm, SharedMemoryCommunicator) else None
        self._layers = (_Layer * max(len(model.layers), 1))(*(_layer(block) for block in model.layers))
        self._stack = _Stack(
            layers=ctypes.addressof(self._layers),
            rotary=model.rotary.data_ptr(),
            comm=None if self._comm is None else self._comm.handle.value,
            n_layers=len(model.layers),
            dim=config.dim,
            kv=len(shard.kv_heads),
            group=shard.group,
            head_dim=config.head_dim,
            hidden=len(shard.hidden),
            block_tokens=BLOCK_TOKENS,
            eps=config.norm_eps,
            dtype=NATIVE_DTYPES[model.dtype],
        )
        self._cache: KVCache | None = None
        self._run: Any = load_library().run_layers
        self._run.argtypes = (_P, _P, _P, _P, ctypes.c_int)
        self._run.restype = ctypes.c_int

    def __call__(self, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """h (T, dim) float32, the embedded tokens, runs through all layers, in place.

        Returns:
            (T, dim), what is still to be added to h.

        Raises:
            MemoryError: none for the buffers.
            CollectiveError: another rank is gone.
        """
        if cache is not self._cache:
            for i, layer in enumerate(self._layers[: len(self._model.layers)]):
                layer.keys, layer.values = cache.keys[i].data_ptr(), cache.values[i].data_ptr()
            self._cache = cache
        delta = torch.empty(h.shape, dtype=self._model.dtype)
        step = _Step(
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.counts.ctypes.data,
            batch.lengths.ctypes.data,
            batch.blocks.ctypes.data,
            len(h),
            len(batch.counts),
            batch.blocks.shape[1],
        )
        pointers = (ctypes.byref(self._stack), ctypes.byref(step), h.data_ptr(), delta.data_ptr())
        failed = self._run(*pointers, torch.get_num_threads())
        if failed == _NO_MEMORY:
            raise MemoryError(f"no memory for the buffers of a step with {len(h)} tokens")
        if self._comm is not None:
            self._comm.check(failed, "all_reduce")
        return delta


def native_layers(model: Llama) -> NativeLayers | None:
    """The layers of `model` in native code; None where a part of them isn't native."""
    native = (
        isinstance(model.kernels, NativeKernels)
        and (model.comm.world_size == 1 or isinstance(model.comm, SharedMemoryCommunicator))
        and all(
            isinstance(linear.packed, (NativeWeight, QuantizedWeight))
            for block in model.layers
            for linear in block.linears
        )
    )
    return NativeLayers(model) if native else None


def _layer(block: TransformerBlock) -> _Layer:
    return _Layer(
        block.attention_norm.data_ptr(),
        block.ffn_norm.data_ptr(),
        *(_linear(linear) for linear in block.linears),
    )


def _linear(linear: Linear) -> _Linear:
    packed = linear.packed
    if not isinstance(packed, (NativeWeight, QuantizedWeight)):
        raise TypeError(f"a layer's weight is {type(packed).__name__}, expected a native one")
    return _Linear(*packed.parts, packed.in_features, packed.out_features, packed.bits)
