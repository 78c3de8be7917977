"""What holds between TorchServe and the handler."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import requests
import yaml

from tests.helpers.report import report
from tests.helpers.serving import Server

ROOT = Path(__file__).parents[2]


@report("B256", "pytorch/serve#3198")
def test_torchserve_is_the_pinned_one() -> None:
    """Its versions differ in how they batch: exactly one is asked for, and it is the one tested here."""
    pins = re.findall(r'"(torchserve|torch-model-archiver)==([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert dict(pins).keys() == {"torchserve", "torch-model-archiver"}
    assert all(version(name) == pinned for name, pinned in pins)


@report("B133", "pytorch/serve#2061")
@report("B134", "pytorch/serve#3202")
@report("B135", "pytorch/serve#1591")
@report("B149", "pytorch/serve#2207")
def test_frontend_takes_over_the_configuration(server: Server) -> None:
    """What the frontend says of the running model is what model-config.yaml says; loading has a timeout of its own."""
    config = yaml.safe_load((ROOT / "model-config.yaml").read_text("utf-8"))
    (model,) = requests.get(f"{server.run.management_url}/models/llama2", timeout=60).json()
    for key in (
        "batchSize",
        "maxBatchDelay",
        "responseTimeout",
        "startupTimeout",
        "parallelType",
        "continuousBatching",
    ):
        assert model[key] == config[key], key
    assert model["startupTimeout"] > model["responseTimeout"]
    assert model["parallelLevel"] == len(server.ranks())
    assert [worker["status"] for worker in model["workers"]] == ["READY"]
