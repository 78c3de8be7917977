"""Attention of a prompt's chunk in native code, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.kernels.operations import NativeKernels, TorchKernels
from model.kv_cache import PrefillChunk
from tests.model.kernels.test_operations import DTYPES, Paged, assert_near, native, randn, threads

__all__ = ["native", "threads"]


def prefill(kernels: TorchKernels, paged: Paged, q: Tensor, start: int, keys: Tensor, values: Tensor) -> Tensor:
    """`q` (tokens, H, D) at positions from `start` on, as a slice of a wider result."""
    n = len(q)
    chunk = PrefillChunk(slice(0, n), start, n, paged.blocks[0, : -(-(start + n) // 16)].contiguous())
    out = torch.zeros(n + 2, *q.shape[1:], dtype=q.dtype)
    kernels.prefill(q, chunk, keys, values, out[1:-1])
    assert not out[0].any()
    assert not out[-1].any()
    return out[1:-1]


def case(
    start: int, n: int, kv: int, group: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Paged, Tensor, Tensor]:
    """(cache with NaN in its free rows, q as a slice of qkv, what the reference gives)."""
    paged = Paged([start + n], kv, group, dim, dtype)
    q = randn(n, kv * (group + 2), dim, seed=7, dtype=dtype)[:, : kv * group]
    keys, values = paged.keys.double(), paged.values.double()
    expected = prefill(TorchKernels(), paged, q.double().contiguous(), start, keys, values)
    return paged, q, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "n"), [(0, 2), (0, 16), (0, 17), (5, 40), (100, 31), (16, 160), (1000, 3)])
@pytest.mark.parametrize(("kv", "group", "dim"), [(1, 3, 64), (2, 1, 16), (2, 4, 80), (1, 8, 128), (3, 2, 96)])
def test_prefill(native: NativeKernels, kv: int, group: int, dim: int, start: int, n: int, dtype: torch.dtype) -> None:
    """Also the free rows of the last block hold NaN, and q is a slice of qkv."""
    paged, q, expected = case(start, n, kv, group, dim, dtype)
    assert_near(prefill(native, paged, q, start, paged.keys, paged.values), expected)


def test_chunks_and_threads_do_not_matter(native: NativeKernels, threads: None) -> None:
    """A row's result depends on that row alone, bit for bit."""
    paged, q, _ = case(20, 90, 2, 3, 64)
    torch.set_num_threads(1)
    whole = prefill(native, paged, q, 20, paged.keys, paged.values)
    torch.set_num_threads(2)
    assert prefill(native, paged, q, 20, paged.keys, paged.values).equal(whole)
    first = prefill(native, paged, q[:37], 20, paged.keys, paged.values)
    rest = prefill(native, paged, q[37:], 57, paged.keys, paged.values)
    assert torch.cat((first, rest)).equal(whole)


def test_large_scores_and_what_is_not_finite(native: NativeKernels) -> None:
    """Scores of 1e4 don't overflow; a NaN reaches the rows that see it (and perhaps a few before, of its sequence)."""
    paged, q, _ = case(0, 40, 1, 2, 32)
    keys = paged.keys.double()
    expected = prefill(TorchKernels(), paged, q.double() * 3000, 0, keys, paged.values.double())
    found = prefill(native, paged, q * 3000, 0, paged.keys, paged.values)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=0)
    paged.values[paged.rows(0)[25], 0, 3] = torch.nan
    found = prefill(native, paged, q, 0, paged.keys, paged.values)
    assert not found[:20].isnan().any()
    assert found[25:, :, 3].isnan().all()
