"""The configuration files at the top of the repository are complete and agree with each other."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from handler.settings import load_settings
from scripts.serve.run_dir import ROOT, read_properties
from scripts.server import STARTUP_TIMEOUT
from tests.helpers.report import report


@pytest.fixture
def config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "model-config.yaml").read_text(encoding="utf-8"))
    return config


@pytest.fixture
def properties() -> dict[str, str]:
    return read_properties((ROOT / "config.properties").read_text(encoding="utf-8"))


@report("B133", "pytorch/serve#2061")
@report("B134", "pytorch/serve#3202")
@report("B135", "pytorch/serve#1591")
@report("B149", "pytorch/serve#2207")
def test_model_config_is_usable_as_it_is(config: dict[str, Any], tmp_path: Path) -> None:
    """B133, B134, B149: parallel type, ranks and generous timeouts are set, each under its own key."""
    (tmp_path / "weights").mkdir()
    load_settings(config, tmp_path)
    assert config["parallelType"] == "tp"
    assert config["torchrun"]["nproc-per-node"] == 2
    assert config["continuousBatching"] is True
    assert config["maxBatchDelay"] == 1, "0 means 100 ms"
    assert config["startupTimeout"] == STARTUP_TIMEOUT
    assert config["startupTimeout"] > config["responseTimeout"]


@report("B130", "meta-llama/llama-cookbook#186")
def test_ranks_meet_at_a_free_port(config: dict[str, Any]) -> None:
    """B130: with a fixed port a second server on the machine would join, or be refused by, the first."""
    assert config["torchrun"]["rdzv-backend"] == "c10d"
    assert config["torchrun"]["rdzv-endpoint"] == "localhost:0"


@report("B032", "pytorch/serve#2754")
def test_properties_are_safe_to_deploy(properties: dict[str, str]) -> None:
    assert properties["disable_token_authorization"] == "false"
    assert properties["management_address"].startswith("http://127.0.0.1:")
    assert properties["metrics_address"].startswith("http://127.0.0.1:")
    assert properties["grpc_inference_address"] == properties["grpc_management_address"] == "127.0.0.1"
    assert int(properties["grpc_inference_port"]) == 7070
    assert int(properties["grpc_management_port"]) == 7071
    assert properties["allowed_urls"] == "file://none"


@report("B257", "pytorch/serve#430")
def test_large_bodies_are_let_through(properties: dict[str, str]) -> None:
    """B257: the default of 6.5 MB is too little for long prompts and log probabilities."""
    assert int(properties["max_request_size"]) >= 64 * 2**20
    assert int(properties["max_response_size"]) >= 64 * 2**20


@report("B260", "kserve/kserve#3983")
def test_metrics_are_in_prometheus_form(properties: dict[str, str]) -> None:
    """B260: in the default mode the metrics port stays empty."""
    assert properties["metrics_mode"] == "prometheus"
    assert (ROOT / properties["metrics_config"]).is_file()


def test_frontend_logs_warnings_only_and_the_model_everything() -> None:
    """B015: load errors are told at the level INFO, by the model's own logger."""
    root = ElementTree.parse(ROOT / "log4j2.xml").getroot()
    levels = {logger.get("name"): logger.get("level") for logger in root.iter("Logger")}
    assert levels["org.pytorch.serve"] == "warn"
    assert levels["MODEL_LOG"] == "info"
    defined = {appender.get("name") for kind in ("Console", "RollingFile") for appender in root.iter(kind)}
    assert {reference.get("ref") for reference in root.iter("AppenderRef")} <= defined


def test_make_without_a_target_lists_them() -> None:
    """Needs no environment: it is what someone types first."""
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = ("demo", "test", "start", "stop", "serve", "smoke", "archive", "benchmark", "lint", "clean", "help")
    for target in targets:
        assert f"make {target} " in done.stdout


@pytest.mark.parametrize(("given", "expected"), [([], False), (["PORT=9000"], True)])
def test_demo_takes_free_ports_unless_told(given: list[str], expected: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PORT", "MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--dry-run", "demo", *given]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert ('--port "9000"' in done.stdout) == expected
    assert ("--port" in done.stdout) == expected


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
