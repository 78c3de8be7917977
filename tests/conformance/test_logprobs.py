"""Log probabilities: of the tokens that were chosen, aligned, finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from generation import generate
from model.kv_cache import BLOCK_TOKENS, KVCache, make_batch
from model.llama import Llama
from model.tokenizer.tokenizer import Tokenizer
from tests.conformance.asking import GREEDY, LOUD, all_negative, strict_json
from tests.helpers.report import report
from tests.helpers.serving import Server


def reference(model: Llama, ids: list[int]) -> torch.Tensor:
    """(len(ids) - 1, vocabulary) log probabilities after each of `ids` but the last, in one pass of the model."""
    n = len(ids) - 1
    blocks = np.arange(1, 1 + -(-n // BLOCK_TOKENS))[None]
    cache = KVCache(model.config, model.shard, blocks.size + 1, model.dtype, model.device)
    batch = make_batch(np.array(ids[:-1]), np.array([0]), np.array([n]), blocks, np.arange(n), model.device)
    with torch.inference_mode():
        logits = model.forward(batch, cache)
    assert logits is not None
    return logits.log_softmax(-1)


@report("B217", "meta-llama/llama#583")
@report("B218", "meta-llama/llama#869")
@report("B219", "facebookresearch/metaseq#224")
@report("B273", "pytorch/serve examples/large_models/tp_llama/generate.py")
def test_echoed_logprobs_are_the_models(server: Server, tokenizer: Tokenizer, tiny_library: Any) -> None:
    """Entry i is log p(token i given those before it); the first has none. Also where the context is then full."""
    prompt = tokenizer.encode("The quick brown fox jumps", bos=True, eos=False)
    for ids, new in ((prompt, 6), ((prompt * 40)[:255], 1)):
        (answer,), _ = generate(tiny_library[0], [ids], new, temperature=0, ignore_eos=True)
        whole = ids + answer
        body = {"prompt": ids, "echo": True, "logprobs": True, "temperature": 0, "max_gen_len": new, "ignore_eos": True}
        reply = server.ask(body)
        table = reference(tiny_library[0], whole)
        assert reply["logprobs"][0] is None
        expected = [float(table[i, token]) for i, token in enumerate(whole[1:])]
        assert reply["logprobs"][1:] == pytest.approx(expected, abs=1e-3)
        assert len(reply["tokens"]) == len(whole)
        assert all_negative(reply["logprobs"][1:])


@report("B217", "meta-llama/llama#583")
@report("B093", "sgl-project/sglang#5984")
def test_low_temperature_leaves_logprobs_alone(server: Server) -> None:
    """Of the sampled token, from the distribution before temperature: never all zero, never infinite."""
    body = {"prompt": "Hello", "temperature": 0.01, "top_p": 0.3, "top_logprobs": 5, "max_gen_len": 200, "seed": 1}
    reply = strict_json(server.post(body | {"ignore_eos": True}).content)
    assert all_negative(reply["logprobs"])
    assert min(reply["logprobs"]) < -0.5
    assert all(len(top) <= 5 and all_negative(list(top.values())) for top in reply["top_logprobs"])


@report("B092", "dphnAI/sonar#183")
@report("B094", "madroidmaq/mlx-omni-server#56")
@report("B095", "vllm-project/vllm#10234")
def test_filtered_tokens_have_finite_logprobs(server: Server) -> None:
    body = {"prompt": "Hello", "temperature": 1, "top_k": 1, "top_p": 0.2, "top_logprobs": 10, "echo": 1, **LOUD}
    bias = {str(i): -100 for i in range(3, 200)}
    for fields in (body, body | {"logit_bias": bias}, body | {"min_p": 1.0}):
        reply = server.post(fields | {"max_gen_len": 10})
        assert reply.status_code == 200, reply.text
        value = strict_json(reply.content)
        assert value["generation"].startswith("Hello")
        assert all_negative(value["logprobs"][1:])


@report("B183", "ggml-org/llama.cpp#10783")
def test_logprobs_do_not_depend_on_the_sampling(server: Server) -> None:
    """The distribution before sampling, also at temperature 0."""
    body = {"prompt": "Hello", "max_gen_len": 1, "top_logprobs": 10, "ignore_eos": True}
    tops = [server.ask(body | more)["top_logprobs"][0] for more in ({"temperature": 0}, {"temperature": 2, "top_k": 3})]
    assert tops[0] == pytest.approx(tops[1], abs=1e-4)
    assert list(tops[0].values()) == sorted(tops[0].values(), reverse=True)


@report("B037", "abetlen/llama-cpp-python#151")
def test_logprobs_is_true_or_false(server: Server) -> None:
    """True works, with echo too; a number is a 400 that says so, never a 500."""
    reply = server.ask({"prompt": "Hello", "echo": True, "logprobs": True, **GREEDY})
    assert len(reply["logprobs"]) == len(reply["tokens"])
    wrong = server.post({"prompt": "Hello", "logprobs": 1, **GREEDY})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "logprobs"
