"""Packed and quantized linear layers, against products in float32."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from model.config import CheckpointError
from model.kernels import build as native_build
from model.kernels.linear import GROUP, Linear, NativeWeight, Packed, QuantizedWeight, packed_kind, padded_rows

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

CPU = torch.device("cpu")
SHAPES = [(64, 64), (640, 576), (70, 50), (1, 2), (33, 96), (16, 31)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def unpacked(packed: Packed) -> torch.Tensor:
    return packed.rows(torch.arange(packed.out_features)).float()


@pytest.mark.parametrize(("outputs", "inputs"), [s for s in SHAPES if s[1] % 2 == 0])
def test_bfloat16(outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs).bfloat16()
    packed = NativeWeight(weight)
    assert torch.equal(packed.rows(torch.arange(outputs)), weight)
    for rows in (1, 5, 6, 7, 13):
        x = random(rows, inputs, seed=rows).bfloat16()
        expected = x.float() @ weight.float().T
        torch.testing.assert_close(packed(x, torch.float32), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(packed(x, torch.bfloat16), packed(x, torch.float32).bfloat16())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_quantized(outputs: int, inputs: int, bits: int) -> None:
    """The product is that of the rounded weight, but for the rounding of the inputs to 8 bits."""
    weight = random(outputs, inputs)
    packed = QuantizedWeight(weight, bits)
    rounded = unpacked(packed)
    assert relative_error(rounded, weight) < (0.01 if bits == 8 else 0.1)
    for rows in (1, 7, 8, 9):
        for dtype in (torch.float32, torch.bfloat16):
            x = random(rows, inputs, seed=rows).to(dtype)
            scale = torch.nn.functional.pad(x.float(), (0, -inputs % GROUP)).view(rows, -1, GROUP)
            bound = (scale.abs().amax(-1).repeat_interleave(GROUP, 1)[:, :inputs] / 254) @ rounded.abs().T
            difference = (packed(x, torch.float32) - x.float() @ rounded.T).abs()
            assert (difference <= bound * 1.01 + 1e-5).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_group_that_fits_is_exact(bits: int) -> None:
    """Numbers that are multiples of a scale come back as they were, as after a quantized file."""
    rng = torch.Generator().manual_seed(1)
    codes = torch.randint(bits // 8, 2**bits, (48, 64), generator=rng).float()
    codes[:, ::GROUP], codes[:, 1::GROUP] = 0 if bits == 4 else 1, 2**bits - 1
    weight = (codes - (128 if bits == 8 else 5)) * 0.0625
    assert torch.equal(unpacked(QuantizedWeight(weight, bits)), weight)


@pytest.mark.parametrize("span", range(9, 16))
def test_four_bits_that_are_not_all_used_stay_exact(span: int) -> None:
    """A group of 4-bit numbers, as in a file, may lack the largest or the smallest of them."""
    codes = torch.randint(0, span + 1, (48, 64), generator=torch.Generator().manual_seed(span)).float()
    codes[:, ::GROUP], codes[:, 1::GROUP] = 0, span
    weight = (codes - 8) * 0.0625
    assert torch.equal(unpacked(QuantizedWeight(weight, 4)), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_extreme_weights(bits: int) -> None:
    weight = torch.zeros(16, 64)
    weight[1, :32], weight[2, 0], weight[3] = 5.0, 1e-7, -2.0
    rounded = unpacked(QuantizedWeight(weight, bits))
    torch.testing.assert_close(rounded, weight, rtol=2e-3, atol=1e-6)
    weight[5, 40] = torch.inf
    assert not unpacked(QuantizedWeight(weight, bits))[5, 32:].isfinite().any()
    assert unpacked(QuantizedWeight(weight, bits))[[0, 4, 6]].eq(0).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_input_that_is_not_finite_is_seen(bits: int) -> None:
    packed = QuantizedWeight(random(32, 64), bits)
    x = random(3, 64)
    x[1, 5] = torch.nan
    y = packed(x, torch.float32)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", ["native", "int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbors(kind: str) -> None:
    linear = Linear(200, 96, torch.bfloat16, CPU, kind)
    assert linear.weight is not None
    linear.weight.copy_(random(200, 96))
    linear.pack()
    x = random(40, 96, seed=2).bfloat16()
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 6, 8, 11, 40):
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_kinds() -> None:
    assert packed_kind(torch.float32, CPU) == "plain"
    assert packed_kind(torch.bfloat16, CPU) in ("native", "onednn")
    assert packed_kind(torch.bfloat16, CPU, "int8") == "int8"
    assert packed_kind(torch.bfloat16, torch.device("cuda")) == "plain"
    with pytest.raises(CheckpointError, match="quantization is 'int3', expected none, int8, int4"):
        packed_kind(torch.bfloat16, CPU, "int3")
    with pytest.raises(CheckpointError, match="runs on a CPU only"):
        packed_kind(torch.bfloat16, torch.device("cuda"), "int8")


@pytest.mark.parametrize("kind", ["plain", "onednn", "native"])
def test_layer(kind: str) -> None:
    linear = Linear(24, 32, torch.bfloat16, CPU, kind, torch.float32)
    weight = random(24, 32).bfloat16()
    assert linear.weight is not None
    linear.weight.copy_(weight)
    linear.pack()
    x = random(3, 32).bfloat16()
    y = linear(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x.float() @ weight.float().T, rtol=1e-2, atol=1e-2)


def test_rows_are_rounded_to_few_counts() -> None:
    assert [padded_rows(n) for n in (1, 8, 9, 64, 65, 256, 257)] == [1, 8, 16, 64, 96, 256, 320]
    assert len({padded_rows(n) for n in range(1, 513)}) < 32


def test_without_special_instructions_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler makes of the plain code, for CPUs without the instructions used here."""
    weight, x = random(70, 96), random(5, 96, seed=3).bfloat16()
    fast = [QuantizedWeight(weight, bits)(x, torch.float32) for bits in (8, 4)]
    fast.append(NativeWeight(weight.bfloat16())(x, torch.float32))
    monkeypatch.setattr(native_build, "_FLAG_SETS", (native_build._FLAGS,))
    library = native_build.load_library(tmp_path)
    monkeypatch.setattr("model.kernels.linear.load_library", lambda: library)
    from model.kernels import linear

    linear._native.cache_clear()
    try:
        plain = [QuantizedWeight(weight, bits)(x, torch.float32) for bits in (8, 4)]
        plain.append(NativeWeight(weight.bfloat16())(x, torch.float32))
    except subprocess.CalledProcessError as error:
        pytest.fail(str(error))
    finally:
        linear._native.cache_clear()
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
