"""What the metrics address shows after known requests."""

from __future__ import annotations

from tests.helpers.report import report
from tests.helpers.serving import Server, until
from tests.server.metrics_page import read_metrics, settled

ANSWER = {"temperature": 0, "ignore_eos": True, "max_gen_len": 7}
FINISHED = 'llama_requests_finished_total{FinishReason="length"}'
BAD = 'llama_errors_total{Status="400"}'
HISTOGRAMS = ("queue_time", "time_to_first_token", "inter_token_time", "longest_token_gap")


@report("B260", "kserve/kserve#3983")
def test_metrics_rise_as_they_should(tiny_server: Server) -> None:
    """B260: times, tokens, requests and errors; gauges are back at 0 when nothing runs."""
    before = settled(tiny_server)
    usage = [tiny_server.ask({"prompt": f"{i} Hello, how are you?", **ANSWER})["usage"] for i in range(3)]
    tiny_server.ask({"prompt": "Hello", **ANSWER, "n": 2})
    assert tiny_server.post({"prompt": "Hello", "temperature": 9}).status_code == 400
    until(lambda: read_metrics(tiny_server)[BAD] > before[BAD], timeout=10)
    after = settled(tiny_server)

    def rise(name: str) -> float:
        return float(after[name] - before.get(name, 0))

    assert rise(FINISHED) == 5
    assert rise(BAD) == 1
    assert rise("llama_generated_tokens_total") == 5 * 7
    one = tiny_server.ask({"prompt": "Hello", **ANSWER})["usage"]["prompt_tokens"]
    assert rise("llama_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage) + 2 * one
    for name in HISTOGRAMS:
        assert rise(f"llama_{name}_seconds_count") == 5
        assert 0 < rise(f"llama_{name}_seconds_sum") < 60
    gauges = ("llama_requests_running", "llama_requests_waiting", "llama_kv_cache_usage_percent")
    until(lambda: all(read_metrics(tiny_server)[name] == 0 for name in gauges), timeout=10)


def test_prefix_hits_are_counted(tiny_server: Server) -> None:
    before = settled(tiny_server)
    prompt = list(range(3, 45))  # two full blocks and a part
    for _ in range(2):
        tiny_server.ask({"prompt": prompt, **ANSWER})
    name = "llama_prefix_hit_tokens_total"
    after = settled(tiny_server)
    assert after[name] - before[name] in (32, 64)  # 64 where an earlier test sent this prompt too


def test_frontends_own_metrics_are_there(tiny_server: Server) -> None:
    """And the ones TorchServe's worker tells at each poll are not."""
    tiny_server.ask({"prompt": "Hello", **ANSWER})
    found = read_metrics(tiny_server)
    assert any(name.startswith("ts_inference_requests_total") for name in found)
    assert any(name.startswith("Requests2XX") for name in found)
    assert not any("PredictionTime" in name for name in found)
