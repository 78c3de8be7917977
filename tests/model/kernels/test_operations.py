"""Native kernels against the reference in torch, on shapes and numbers that models and failing requests bring."""

from __future__ import annotations

import ctypes
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.kernels import build as native_build
from model.kernels import operations as kernels_module
from model.kernels.build import NativeBuildError
from model.kernels.operations import NativeKernels, TorchKernels, choose_kernels
from model.kv_cache import BLOCK_TOKENS, DecodeGroup
from model.rope import rotary_table
from tests.helpers.report import report
from tests.helpers.tiny import tiny_config

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]
LENGTHS = [17, 1, 1000, 15, 16, 100]
REFERENCE = TorchKernels()
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
_BUILDS = {
    "shipped": None,
    "no shuffles": ("-O1", "-march=native", "-fopenmp", "-DNO_SHUFFLES", *_WARNINGS),
    "any CPU, no OpenMP": ("-O1", *_WARNINGS),
}
"""Compiler flags in place of the usual ones; what the usual ones give is the first."""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module", params=_BUILDS)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    flags = _BUILDS[request.param]
    return NativeKernels() if flags is None else build(tmp_path_factory.mktemp("native"), *flags)


def build(folder: Path, *flags: str) -> NativeKernels:
    command = ["cc", "-x", "c", "-std=c11", "-ffp-contract=fast", "-fPIC", "-shared", *flags]
    library = ctypes.CDLL(str(native_build._compile(folder, command)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels_module, "load_library", lambda: library)
        return NativeKernels()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, exact: Tensor) -> None:
    """`exact` is the result of the same numbers in float32 or better."""
    rtol = 2**-7 if found.dtype == BF16 else 1e-5  # one unit in bfloat16's last place
    torch.testing.assert_close(found.to(exact.dtype), exact, rtol=rtol, atol=1e-5, equal_nan=True)


class Paged:
    """A cache that holds sequences of given lengths in blocks in random order; NaN wherever no token lies."""

    def __init__(
        self, lengths: list[int], kv: int, group: int, dim: int, dtype: torch.dtype = F32, seed: int = 0
    ) -> None:
        counts = [-(-n // BLOCK_TOKENS) for n in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1
        self.blocks = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, ids in zip(self.blocks, order.split(counts), strict=True):
            row[: len(ids)] = ids
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        used = [self.rows(i) for i in range(len(lengths))]
        size = (sum(counts) + 1) * BLOCK_TOKENS
        self.keys, self.values = torch.full((2, size, kv, dim), torch.nan).to(dtype)
        for i, cache in enumerate((self.keys, self.values)):
            cache[torch.cat(used)] = randn(sum(lengths), kv, dim, seed=seed + i, dtype=dtype)
        heads = kv * group
        self.q = randn(len(lengths), heads + 2 * kv, dim, seed=seed + 2, dtype=dtype)[:, :heads]

    def rows(self, sequence: int) -> Tensor:
        """The cache rows of a sequence's tokens."""
        rows = self.blocks[sequence].long()[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        return rows.flatten()[: self.lengths[sequence]]

    def decode(self, native: NativeKernels) -> Tensor:
        return native.decode(self.q, DecodeGroup(slice(0, 0), self.lengths, self.blocks), self.keys, self.values)

    def decode_alone(self, native: NativeKernels, sequence: int) -> Tensor:
        """One sequence, in a table just as wide as it needs."""
        lengths = self.lengths[sequence : sequence + 1]
        blocks = self.blocks[sequence : sequence + 1, : -(-int(lengths) // BLOCK_TOKENS)].contiguous()
        q = self.q[sequence : sequence + 1].contiguous()
        return native.decode(q, DecodeGroup(slice(0, 0), lengths, blocks), self.keys, self.values)

    def check(self, found: Tensor) -> None:
        """In bfloat16 the softmax's weights are rounded too: an output is as exact as the sum of its absolute terms."""
        exact = self.expected()
        if self.q.dtype == F32:
            assert_near(found, exact)
            return
        magnitude = self.expected(self.values.abs())
        assert (exact.isnan() == found.isnan()).all()
        assert ((found.double() - exact).abs() <= 2**-7 * magnitude + 1e-5)[~exact.isnan()].all()

    def expected(self, values: Tensor | None = None) -> Tensor:
        """The reference in float64, on a cache whose free rows are zero: 0 * NaN is NaN there."""
        keys, values = self.keys.double(), (self.values if values is None else values).double()
        free = torch.ones(len(keys), dtype=torch.bool)
        free[torch.cat([self.rows(i) for i in range(len(self.lengths))])] = False
        keys[free], values[free] = 0, 0
        part = DecodeGroup(slice(0, 0), self.lengths, self.blocks)
        return REFERENCE.decode(self.q.double(), part, keys, values)


# --- attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
def test_decode(native: NativeKernels, dim: int, group: int, dtype: torch.dtype) -> None:
    """Ragged lengths, blocks in random order, q as a slice of qkv, and free rows that hold NaN; B007, B111, B159."""
    paged = Paged(LENGTHS, 1 + (dim // 16 + group) % 3, group, dim, dtype)
    paged.check(paged.decode(native))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", range(1, 9))
def test_decode_with_any_number_of_key_heads(native: NativeKernels, kv: int, dtype: torch.dtype) -> None:
    paged = Paged([33, 1, 16], kv, 3, 64, dtype, seed=kv)
    paged.check(paged.decode(native))


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    kv=st.integers(1, 4),
    group=st.integers(1, 20),
    chunks=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_decode_of_any_shape(lengths: list[int], kv: int, group: int, chunks: int, dtype: torch.dtype) -> None:
    paged = Paged(lengths, kv, group, 16 * chunks, dtype)
    paged.check(paged.decode(NativeKernels()))


@report("B087", "vllm-project/vllm#11204")
@report("B158", "huggingface/transformers#22861")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (1, 128), (5, 80)])
@pytest.mark.usefixtures("threads")
def test_decode_of_a_row_depends_on_that_row_alone(
    native: NativeKernels, group: int, dim: int, dtype: torch.dtype
) -> None:
    """Bit for bit, whatever else is in the batch and however many threads there are; B087, B158."""
    paged = Paged(LENGTHS, 3, group, dim, dtype)
    torch.set_num_threads(1)
    together = paged.decode(native)
    assert torch.equal(together, torch.cat([paged.decode_alone(native, i) for i in range(len(LENGTHS))]))
    for count in (2, 3):
        torch.set_num_threads(count)
        assert torch.equal(together, paged.decode(native))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_large_scores(native: NativeKernels, dtype: torch.dtype) -> None:
    """Scores of 10000 and -10000: e to that power isn't a float."""
    paged = Paged([40, 40, 40, 1], 1, 2, 64, dtype)
    paged.q[:] = 100
    for sequence, factors in enumerate([(12.5, -12.5), (-12.5, -12.5), (12.5, 12.0), (-12.5, -12.5)]):
        rows = paged.rows(sequence)
        paged.keys[rows] = factors[1]
        paged.keys[rows[::7]] = factors[0]
    found = paged.decode(native)
    assert torch.isfinite(found).all()
    paged.check(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["q", "keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_decode_keeps_what_is_not_finite_to_its_row(
    native: NativeKernels, where: str, bad: float, dtype: torch.dtype
) -> None:
    """B005: only the request that has failed sees it, and it does see it."""
    paged = Paged([50, 50, 50], 2, 3, 64, dtype)
    paged.q[1, 3:] = -paged.q[1, 3:].abs()  # times a key of -inf a score of +inf
    clean = paged.decode(native)
    if where == "q":
        paged.q[1, 3:, 20] = bad
    else:
        getattr(paged, where)[paged.rows(1)[-1], 1, 20] = bad
    found = paged.decode(native)
    affected = torch.zeros(found.shape, dtype=torch.bool)
    affected[1, 3:, 20 if where == "values" else slice(None)] = True
    assert not torch.isfinite(found[affected]).any()
    assert torch.equal(found[~affected], clean[~affected])


# --- rotary embedding and cache write


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (9, 3), (8, 8), (7, 1)])
def test_rotate_and_store(native: NativeKernels, heads: int, kv: int, dim: int, dtype: torch.dtype) -> None:
    rows = 5
    qkv = randn(rows, heads + 2 * kv, dim, dtype=dtype)
    rotary = rotary_table(tiny_config(head_dim=dim), 64, CPU)
    positions, slots = torch.tensor([0, 63, 7, 7, 1]), torch.tensor([18, 2, 30, 5, 16])
    found, exact = (torch.full((2, 32, kv, dim), 7.0).to(t) for t in (dtype, F32))
    q = native.rotate_and_store(qkv.clone(), heads, rotary, positions, slots, *found)
    expected = REFERENCE.rotate_and_store(qkv.float(), heads, rotary, positions, slots, *exact)
    assert q.shape == expected.shape
    assert_near(q, expected)
    assert_near(found[0], exact[0])
    assert torch.equal(found[1], exact[1].to(dtype))  # copied, and no other row touched
    for i in range(rows):
        alone = torch.full((2, 32, kv, dim), 7.0).to(dtype)
        part = slice(i, i + 1)
        one = native.rotate_and_store(qkv[part].clone(), heads, rotary, positions[part], slots[part], *alone)
        assert torch.equal(one, q[part])
        assert torch.equal(alone[:, slots[i]], found[:, slots[i]])


# --- norm and gated unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("dim", [1, 5, 16, 37, 64, 100, 576])
def test_add_norm(native: NativeKernels, dim: int, with_delta: bool, dtype: torch.dtype) -> None:
    """Also where `dim` is no multiple of the vector's 16."""
    for rows in (0, 1, 7):
        h, weight = 3 * randn(rows, dim), 1 + randn(dim, seed=1)
        delta = randn(rows, dim, seed=2, dtype=dtype) if with_delta else None
        exact = h.double()
        expected = REFERENCE.add_norm(
            exact, None if delta is None else delta.double(), weight.double(), 1e-5, torch.float64
        )
        alone = [
            native.add_norm(h[i : i + 1].clone(), None if delta is None else delta[i : i + 1], weight, 1e-5, dtype)
            for i in range(rows)
        ]
        found = native.add_norm(h, delta, weight, 1e-5, dtype)
        assert found.dtype == dtype
        assert_near(found, expected)
        assert_near(h, exact)
        assert torch.equal(found, torch.cat([found[:0], *alone]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_of_extremes(native: NativeKernels, dtype: torch.dtype) -> None:
    """B005: zeros stay zeros, tiny and large numbers are scaled, NaN and infinity stay in their row."""
    h, ones = randn(6, 50), torch.ones(50)
    h[0], h[1], h[2] = 0, h[1] * 1e-18, h[2] * 1e15
    clean = native.add_norm(h, None, ones, 1e-5, dtype)
    assert_near(clean, REFERENCE.add_norm(h, None, ones, 1e-5, F32))
    h[4, 3] = torch.inf
    h.view(torch.int32)[3, ::7] = 0x7FFFFFFF  # the NaN that would become -0 if it were rounded like a number
    found = native.add_norm(h, None, ones, 1e-5, dtype)
    assert found[3].isnan().all()
    assert found[4, 3].isnan()
    for row in (0, 1, 2, 5):
        assert torch.equal(found[row], clean[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 5, 16, 37, 100, 1536])
def test_silu_multiply(native: NativeKernels, hidden: int, dtype: torch.dtype) -> None:
    for rows in (0, 1, 7):
        gate_up = randn(rows, 2 * hidden, dtype=dtype) * 5
        found = native.silu_multiply(gate_up)
        assert_near(found, REFERENCE.silu_multiply(gate_up.double()))
        alone = [native.silu_multiply(gate_up[i : i + 1]) for i in range(rows)]
        assert torch.equal(found, torch.cat([found[:0], *alone]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_multiply_of_extremes(native: NativeKernels, dtype: torch.dtype) -> None:
    gates = [0.0, -0.0, 1e-30, -1e-30, 80, -80, 88, -88, 100, -100, 1e4, -1e4, 3e38, -3e38, torch.inf, -torch.inf]
    gates += [torch.nan, 1.0, -1.0]  # beyond a vector: by the loop for the rest
    for shift in range(len(gates)):
        gate = torch.tensor(gates).roll(shift).to(dtype)
        gate_up = torch.cat([gate, torch.full_like(gate, 0.5)])[None]
        assert_near(native.silu_multiply(gate_up), REFERENCE.silu_multiply(gate_up.double()))


def test_silu_is_exact_to_a_few_units(native: NativeKernels) -> None:
    """What the vector code's own exponential function is good for."""
    gate = torch.linspace(-87, 87, 16 * 5001)
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    exact = REFERENCE.silu_multiply(gate_up.double())
    torch.testing.assert_close(native.silu_multiply(gate_up).double(), exact, rtol=6e-7, atol=0)


def test_bfloat16_is_rounded_as_torch_does(native: NativeKernels) -> None:
    """From 32 on, silu(x) is x in float32, so the product of two bfloat16 numbers is exact before it is rounded."""
    gate = 32 + randn(1, 16 * 1000).abs() * 100
    up = randn(1, 16 * 1000, seed=1)
    gate_up = torch.cat([gate, up], 1).to(BF16)
    expected = (gate_up[:, : 16 * 1000].float() * gate_up[:, 16 * 1000 :].float()).to(BF16)
    assert torch.equal(native.silu_multiply(gate_up), expected)


# --- the choice


def test_without_a_compiler_the_reference_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> ctypes.CDLL:
        raise NativeBuildError("no C compiler found")

    monkeypatch.setattr(kernels_module, "load_library", fail)
    with caplog.at_level(logging.WARNING):
        assert type(choose_kernels(CPU, F32, 64)) is TorchKernels
    assert [record.getMessage() for record in caplog.records] == [
        "without native kernels a step takes longer: no C compiler found"
    ]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [("cpu", F32, 24), ("cpu", BF16, 8), ("cpu", torch.float16, 64), ("cuda", F32, 64), ("cuda", BF16, 128)],
)
def test_what_native_code_does_not_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, dtype: torch.dtype, head_dim: int
) -> None:
    """The reference is used without trying to compile anything, and without a warning."""

    def fail() -> ctypes.CDLL:
        pytest.fail("native code was asked for")

    monkeypatch.setattr(kernels_module, "load_library", fail)
    assert type(choose_kernels(torch.device(device), dtype, head_dim)) is TorchKernels
    assert not caplog.records


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_code_is_chosen(dtype: torch.dtype) -> None:
    assert type(choose_kernels(CPU, dtype, 16)) is NativeKernels


def test_no_memory_is_an_error(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_decode", lambda *_: 1)
    with pytest.raises(MemoryError):
        Paged([3], 1, 1, 16).decode(native)


@pytest.mark.parametrize("which", ["native", "torch"])
def test_ties_of_bfloat16_logits_are_resolved(native: NativeKernels, which: str) -> None:
    """The likeliest token is the one that float32 would find, though bfloat16 can't tell it from the next."""
    h = torch.full((2, 32), 1.0, dtype=torch.bfloat16)
    weight = torch.full((5, 32), 0.5, dtype=torch.bfloat16)
    weight[3, 0] += 2**-7
    weight[4] = 0.25
    rough = h @ weight.T
    assert rough[0, 3] == rough[0, 0]
    kernels = native if which == "native" else REFERENCE
    exact = kernels.sharpen(rough, h, weight)
    assert exact.dtype == torch.float32
    assert exact.argmax(-1).tolist() == [3, 3]
    assert exact[0].tolist() == [16, 16, 16, 16 + 2**-7, 8]


@pytest.mark.parametrize(("rows", "vocabulary", "dim"), [(1, 5, 16), (3, 64, 40), (8, 1000, 576)])
def test_sharpen(native: NativeKernels, rows: int, vocabulary: int, dim: int) -> None:
    h, weight = randn(rows, dim, dtype=BF16), randn(vocabulary, dim, seed=1, dtype=BF16)
    logits = h @ weight.T
    if rows > 1:
        logits[1, 3] = torch.nan
    found, expected = native.sharpen(logits, h, weight), REFERENCE.sharpen(logits, h, weight)
    torch.testing.assert_close(found[:1], expected[:1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2:], expected[2:], rtol=1e-5, atol=1e-5)
    assert found[1:2].isnan().sum() == (rows > 1)
