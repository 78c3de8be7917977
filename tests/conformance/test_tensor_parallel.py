"""Several ranks: how many fit, and how a model is dealt."""

from __future__ import annotations

import pytest

from model.config import CheckpointError, ModelConfig, parameter_shapes
from model.distributed.parallel import part_of, plan_shards
from tests.helpers.report import report

LLAMA_2 = {
    "7B": ModelConfig(4096, 32, 32, 32, 128, 11008, 32000),
    "13B": ModelConfig(5120, 40, 40, 40, 128, 13824, 32000),
    "70B": ModelConfig(8192, 80, 64, 8, 128, 28672, 32000),
}


@report("B020", "pytorch/serve#2604")
@pytest.mark.parametrize("size", list(LLAMA_2))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_llama_2_fits_on_any_number_of_ranks(size: str, ranks: int) -> None:
    """No rank holds much more than its share of the weights."""
    config = LLAMA_2[size]
    shapes = parameter_shapes(config)
    held = []
    for shard in plan_shards(config, ranks):
        parts = {name: part_of(name, shard, config.head_dim) for name in shapes}
        cut = {name: (stop - start) / shapes[name][dim] for name, (dim, start, stop) in _known(parts).items()}
        held.append(sum(_numel(shape) * cut.get(name, 1.0) for name, shape in shapes.items()))
    total = sum(map(_numel, shapes.values()))
    assert total <= sum(held) < 1.01 * total
    assert max(held) < 1.4 * total / ranks


@report("B020", "pytorch/serve#2604")
def test_too_many_ranks_are_refused_with_what_fits() -> None:
    with pytest.raises(CheckpointError, match="nproc-per-node is 65, but the model has 64 heads: use 1 to 64 ranks"):
        plan_shards(LLAMA_2["70B"], 65)


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _known(parts: dict[str, tuple[int, int, int] | None]) -> dict[str, tuple[int, int, int]]:
    return {name: part for name, part in parts.items() if part is not None}
