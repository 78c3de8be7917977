"""The demo model in int8 through a real TorchServe on two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.serving import serving

QUESTION = [{"role": "user", "content": "Which city is the capital of France? Answer in English."}]
"""Without its second sentence the demo model is in doubt whether to answer in French: logits 0.08 apart in float32."""


def test_int8_answers_and_says_so(demo_checkpoint: Path) -> None:
    """Greedy answers, alone and 8 at a time; the log's line tells the quantization."""
    with serving(demo_checkpoint, 2, dtype="auto", quantization="int8") as server:
        body = {"dialog": QUESTION, "temperature": 0, "max_gen_len": 32}
        alone = server.ask(body)
        assert alone["generation"]["content"] == "The capital of France is Paris."
        assert [reply.json()["generation"] for reply in server.ask_all([body] * 8)] == [alone["generation"]] * 8
        log = (server.run.logs / "model_log.log").read_text(encoding="utf-8")
        assert "quantization int8" in log
