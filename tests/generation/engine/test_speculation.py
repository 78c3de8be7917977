"""Drafts looked up in the prompt and the answer: they change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.chat_format import chat_format_for
from generation.detokenizer import Detokenizer
from generation.engine import speculation
from generation.engine.engine import Engine, EngineSettings, EngineStats
from generation.engine.scheduler import Scheduler
from generation.engine.speculation import MOST_DRAFT, MOST_ROWS, Drafter, PromptLookup, best_length, row_cost
from generation.interface import Request, SamplingParams, Sequence, StepPlan
from generation.structured.grammar import Constraints
from model.distributed.collectives import Communicator, init_communicator
from model.kernels.linear import QuantizedWeight
from model.kv_cache import BLOCK_TOKENS
from model.llama import Llama
from model.loader import load_model, load_weights
from model.tokenizer.tokenizer import SentencePieceTokenizer
from tests.generation.engine.test_scheduler import check_blocks, make
from tests.helpers.ranks import Weights, make_model, on_ranks
from tests.helpers.tiny import random_weights, tiny_config, train_sentencepiece

GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 0.5, "top_p": 1.0}
STORY = (
    "The lighthouse keeper woke before dawn and climbed the narrow stairs to trim the lamp. Outside, the sea was grey "
    "and restless, and a fishing boat was making slowly for the harbor."
)
CODE = "def total(prices, tax):\n    result = 0\n    for price in prices:\n        result += price * tax\n    return 0"


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as if they cost nothing: long ones, most of which are wrong."""
    monkeypatch.setattr(speculation, "ROW_COST", 1e-9)


@pytest.fixture(scope="module")
def model() -> Llama:
    """Few ids, so that the last ones nearly always occurred before."""
    config = tiny_config(vocab_size=24, stop_ids=frozenset({2}))
    return make_model(config, random_weights(config))


class Joined:
    """The outputs of one request, joined."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"text": "", "ids": [], "pieces": []}
        self.logprobs: list[float] = []

    def add(self, output: Any) -> None:
        assert "finish_reason" not in self.told or self.told["finish_reason"] is None
        self.told["text"] += output.text
        self.told["ids"] += output.token_ids
        self.told["pieces"] += output.pieces
        self.logprobs += [x.logprob for x in output.logprobs] + [v for x in output.logprobs for _, v in x.top]
        self.logprobs += [] if output.end is None else [output.end.logprob]
        self.told |= {
            "finish_reason": output.finish_reason,
            "completion_tokens": output.completion_tokens,
            "end": None if output.end is None else output.end.token_id,
        }


Then = Callable[[Engine, int], None]


def run(model: Llama, requests: list[Request], then: Then | None = None, **changes: Any) -> tuple[Any, EngineStats]:
    """Every request's joined outputs, and what the engine counted; `then` is called before each step."""
    engine = Engine(model, EngineSettings(**({"kv_cache_tokens": 4096} | changes)))
    for request in requests:
        engine.submit(request)
    joined: dict[str, Joined] = {r.request_id: Joined() for r in requests}
    while engine.busy:
        if then is not None:
            then(engine, engine.steps)
        for output in engine.step():
            joined[output.request_id].add(output)
    engine.heartbeat(stop=True)
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    return joined, stats


def same(model: Llama, requests: Callable[[], list[Request]], then: Then | None = None, **changes: Any) -> EngineStats:
    """Answers with and without drafts must agree; returns what the engine with drafts counted."""
    expected, without = run(model, requests(), then, speculation="none", **changes)
    found, stats = run(model, requests(), then, speculation="prompt_lookup", **changes)
    for name, joined in expected.items():
        assert found[name].told == joined.told
        assert found[name].logprobs == pytest.approx(joined.logprobs, abs=1e-4)
    assert without.draft_tokens == 0
    assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens
    assert stats.steps <= without.steps
    return stats


def asked(n: int, seed: int = 0, longest: int = 40, **params: Any) -> list[Request]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 24) for _ in range(rng.randint(1, longest))] for _ in range(n)]
    values = {"max_tokens": 60, "ignore_eos": True} | params
    return [Request(str(i), p, SamplingParams(**({"seed": i} | values))) for i, p in enumerate(prompts)]


# --- whole engines ---


@pytest.mark.parametrize("params", [GREEDY, DRAWN, DRAWN | {"top_p": 0.7}, DRAWN | {"top_k": 5, "min_p": 0.05}])
@pytest.mark.parametrize("together", [1, 3, 8, 12])
@pytest.mark.usefixtures("eager")
def test_answers_stay_the_same(model: Llama, params: dict[str, Any], together: int) -> None:
    """Alone and with others; where too many run for drafts, those that are left at the end have some again."""

    def requests() -> list[Request]:
        several = asked(together, **params)
        for i, request in enumerate(several):
            several[i] = Request(request.request_id, request.prompt_ids, lengthened(request.params, 70 + 10 * i))
        return several

    same(model, requests)


def lengthened(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(**({k: getattr(params, k) for k in params.__dataclass_fields__} | {"max_tokens": max_tokens}))


@pytest.mark.usefixtures("eager")
def test_penalties_biases_and_logprobs_follow_each_token(model: Llama) -> None:
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    more: dict[str, Any] = {"logit_bias": ((7, 2.0), (8, -3.0)), "logprobs": True, "top_logprobs": 3}
    same(model, lambda: asked(3, **GREEDY, **penalties, **more))
    same(model, lambda: asked(3, **DRAWN, **penalties, **more, prompt_logprobs=True))


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
@pytest.mark.usefixtures("eager")
def test_ends_in_the_middle_of_a_draft(model: Llama, params: dict[str, Any]) -> None:
    """Stop ids, the model's own and a request's, and every possible number of tokens."""
    free, _ = run(model, asked(1, **params))
    ids = free["0"].told["ids"]
    for last in range(1, 40):
        found, _ = run(model, asked(1, **params, max_tokens=last), speculation="prompt_lookup")
        assert found["0"].told["ids"] == ids[:last]
        assert found["0"].told["finish_reason"] == "length"
    for stop in set(ids):
        params_ = params | {"stop_token_ids": frozenset({stop}), "logprobs": True}
        expected, _ = run(model, asked(1, **params_))
        found, _ = run(model, asked(1, **params_), speculation="prompt_lookup")
        assert found["0"].told == expected["0"].told
        assert len(found["0"].logprobs) == len(expected["0"].logprobs)


@pytest.mark.usefixtures("eager")
def test_the_context_ends_in_the_middle_of_a_draft(model: Llama) -> None:
    limit = model.max_seq_len
    stats = same(model, lambda: [Request("r", [5, 6] * (limit // 2 - 20), SamplingParams(max_tokens=999, **GREEDY))])
    assert stats.finished == {"length": 1}
    same(model, lambda: [Request("r", [5, 6] * 20, SamplingParams(max_tokens=999, **GREEDY))], kv_cache_tokens=64)


@pytest.mark.usefixtures("eager")
def test_stop_strings(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer.from_file(train_sentencepiece(tmp_path / "tokenizer.model"))
    config = tiny_config(vocab_size=tokenizer.n_words, stop_ids=tokenizer.stop_ids)
    speaking = make_model(config, random_weights(config))
    params: dict[str, Any] = {"temperature": 0.3, "max_tokens": 80, "ignore_eos": True, "logprobs": True, "seed": 4}

    def requests(*stop: str) -> list[Request]:
        values = SamplingParams(**params, stop=stop)
        return [Request("r", [5, 6, 7] * 5, values, Detokenizer(tokenizer, stop))]

    free, _ = run(speaking, requests())
    text = free["r"].told["text"]
    for start in range(20, len(text) - 3, 17):
        stop = text[start : start + 3]
        expected, _ = run(speaking, requests(stop))
        found, _ = run(speaking, requests(stop), speculation="prompt_lookup")
        assert found["r"].told == expected["r"].told
        assert found["r"].told["finish_reason"] == "stop"
    same(speaking, requests)


@pytest.mark.usefixtures("eager")
def test_a_cache_too_small_for_all(model: Llama) -> None:
    """Nobody loses blocks to a draft, and drafts of what was preempted leave no trace."""
    for prefix_cache in (True, False):
        stats = same(model, lambda: asked(5, longest=30, **DRAWN), kv_cache_tokens=16 * 12, prefix_cache=prefix_cache)
        assert stats.preemptions > 0


@pytest.mark.usefixtures("eager")
def test_only_what_was_said_can_be_found_in_the_cache(model: Llama) -> None:
    """A second turn that begins with the first answer finds its blocks, with the keys and values of its tokens."""
    (request,) = asked(1, longest=60, **DRAWN, max_tokens=100)
    engine = Engine(model, EngineSettings(4096, speculation="prompt_lookup"))

    def answer(prompt: list[int], engine: Engine) -> tuple[list[int], int]:
        engine.submit(Request("r", prompt, SamplingParams(max_tokens=20, seed=3, ignore_eos=True, **DRAWN)))
        outputs = []
        while engine.busy:
            outputs += engine.step()
        return [token for o in outputs for token in o.token_ids], outputs[0].cached_tokens

    said = list(request.prompt_ids)
    for turn in range(8):
        found, cached = answer(said, engine)
        fresh, _ = answer(said, Engine(model, EngineSettings(4096, speculation="none")))
        assert found == fresh
        assert turn == 0 or cached >= (len(said) - 10) // BLOCK_TOKENS * BLOCK_TOKENS
        said += found
    assert engine.stats().draft_tokens > engine.stats().accepted_draft_tokens > 0


@pytest.mark.usefixtures("eager")
def test_cancelled_and_late_ones_leave_while_others_go_on(model: Llama) -> None:
    def leave(engine: Engine, step: int) -> None:
        if step == 6:
            engine.cancel("1")
            engine._sequences["2"].request.deadline = 0.0

    expected, _ = run(model, asked(4, **DRAWN))
    found, stats = run(model, asked(4, **DRAWN), leave, speculation="prompt_lookup")
    assert stats.finished == {"cancelled": 1, "timeout": 1, "length": 2}
    for name, joined in found.items():
        assert joined.told["ids"] == expected[name].told["ids"][: len(joined.told["ids"])]
        assert len(joined.told["ids"]) >= 6
    assert len(found["0"].told["ids"]) == 60


@pytest.mark.usefixtures("eager")
def test_what_follows_a_grammar_has_no_drafts(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer.from_file(train_sentencepiece(tmp_path / "tokenizer.model"))
    config = tiny_config(vocab_size=tokenizer.n_words, stop_ids=tokenizer.stop_ids)
    speaking = make_model(config, random_weights(config))
    form = Constraints(tokenizer, config.vocab_size, tokenizer.stop_ids).regex("(ab)*c")
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1)
    request = Request("r", [5, 6] * 9, params, Detokenizer(tokenizer), constraint=form())
    _, stats = run(speaking, [request], speculation="prompt_lookup")
    assert stats.draft_tokens == 0


@pytest.mark.parametrize("kind", ["none", "int8"])
@pytest.mark.usefixtures("eager")
def test_native_bfloat16_is_the_same_bit_by_bit(kind: str) -> None:
    """A draft's rows are computed as they would have been in steps of their own, so not even a near tie turns."""
    config = tiny_config(n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=128, vocab_size=64)
    weights = random_weights(config, dtype=torch.bfloat16)
    model = bfloat16_model(config, weights, kind)
    if model.native is None:
        pytest.skip("the model doesn't run in native code here")
    params: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "logprobs": True}

    def answers(how: Any) -> Any:
        requests = [Request("g", [5, 6, 7] * 4, SamplingParams(temperature=0, **params))]
        requests += [Request(str(i), [5, i] * 4, SamplingParams(temperature=0.9, seed=i, **params)) for i in range(2)]
        joined, stats = run(model, requests, speculation=how)
        return {name: (j.told, j.logprobs) for name, j in joined.items()}, stats.accepted_draft_tokens

    (expected, _), (found, accepted) = answers("none"), answers("prompt_lookup")
    assert found == expected
    assert accepted > 0


def bfloat16_model(config: Any, weights: dict[str, torch.Tensor], kind: str) -> Llama:
    if kind == "none":
        return make_model(config, weights, dtype=torch.bfloat16)
    device = torch.device("cpu")
    model = Llama(config, init_communicator(device), torch.bfloat16, device, config.max_seq_len, kind)
    load_weights(model, Weights(weights))  # type: ignore[arg-type]
    assert model.native is None or isinstance(model.output.packed, QuantizedWeight)
    return model


@pytest.mark.parametrize("head_dim", [16, 8])
@pytest.mark.usefixtures("eager")
def test_two_ranks(head_dim: int) -> None:
    """A head of 8 numbers is attended by torch's kernels, one of 16 by the native ones where they can be had."""
    config = tiny_config(vocab_size=24, head_dim=head_dim)
    weights = random_weights(config)

    def on_rank(comm: Communicator) -> Any:
        model = make_model(config, weights, comm)
        if comm.rank != 0:
            for how in ("none", "prompt_lookup"):
                Engine(model, EngineSettings(4096, speculation=how)).follow()  # type: ignore[arg-type]
            return None
        return same(model, lambda: asked(3, **DRAWN))

    assert on_ranks(2, on_rank)[0].accepted_draft_tokens > 0


def test_demo_model(demo_checkpoint: Path) -> None:
    """Real weights in float32, with the real price of a draft: what copies is drafted, what doesn't hardly ever is."""
    model, tokenizer = load_model(demo_checkpoint, device="cpu", dtype="float32")
    template = chat_format_for(tokenizer)

    def request(text: str, **params: Any) -> Request:
        ids = template.encode([{"role": "user", "content": text}])
        return Request(text, ids, SamplingParams(max_tokens=30, **params), Detokenizer(tokenizer))

    def requests() -> list[Request]:
        story = request(f"Repeat the following text word for word:\n{STORY}", temperature=0)
        code = request(f"Print this code again:\n```python\n{CODE}\n```", temperature=0.7, seed=3)
        return [story, code, request("Why is the sky blue?", temperature=0.7, seed=3)]

    stats = same(model, requests)
    assert stats.accepted_draft_tokens > 25
    assert stats.draft_tokens < 1.5 * stats.accepted_draft_tokens + 10


# --- the parts ---


def test_random_text_is_hardly_ever_drafted() -> None:
    """What does not repeat itself costs nothing: fewer than one wasted row in twenty steps."""
    rng = random.Random(1)
    drafter, ids, rows = Drafter(), [rng.randrange(200)], 0
    for _ in range(2000):
        rows += len(drafter.draft(ids, MOST_DRAFT))
        ids.append(rng.randrange(200))
    assert rows < 100


def test_a_copy_is_drafted_to_its_full_length_soon() -> None:
    text = list(range(100, 160))
    drafter = Drafter()
    assert drafter.draft([*text, 7], MOST_DRAFT) == []
    lengths = [len(drafter.draft([*text, 7, *text[:n]], MOST_DRAFT)) for n in range(1, 40)]
    assert min(lengths[1:]) >= 1
    assert min(lengths[12:]) == MOST_DRAFT
    assert drafter.draft([*text, 7, *text[:39]], 3) == text[39:42]


def test_what_never_comes_true_is_given_up() -> None:
    """Pairs that recur but are always followed by something else."""
    drafter, ids, rows = Drafter(), [], []
    for i in range(300):
        ids += [5, 6]
        rows.append(len(drafter.draft(ids, MOST_DRAFT)))
        ids.append(10 + i)
    assert sum(rows[20:]) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3) | st.sampled_from([255, 65536, 2**24]), min_size=1, max_size=9), min_size=1))
def test_a_draft_stands_behind_the_same_tokens(parts: list[list[int]]) -> None:
    """Whatever came before: where the last two tokens occurred, the draft is what followed, repeated if need be."""
    drafter = Drafter()
    ids: list[int] = []
    for part in parts:
        ids += part
        drafter._read(ids)
        places = [i for i in range(2, len(ids)) if ids[i - 2 : i] == ids[-2:]]
        assert (drafter._source >= 0) == bool(places)
        if places:
            assert drafter._source in places
            follows = ids[drafter._source :]
            assert drafter._copy(20) == (follows * 20)[:20]
            match = drafter._match
            assert ids[drafter._source - match : drafter._source] == ids[-match:]


@given(st.floats(0, 1), st.floats(0.01, 1), st.integers(0, 10))
def test_the_best_length_gives_most_tokens_per_time(trust: float, cost: float, most: int) -> None:
    rates = [sum(trust**i for i in range(n + 1)) / (1 + cost * n) for n in range(most + 1)]
    assert rates[best_length(trust, cost, most)] == pytest.approx(max(rates))


def test_a_row_costs_more_in_a_long_context_and_with_others() -> None:
    assert row_cost(100, 1) < row_cost(3000, 1)
    costs = [row_cost(500, n) for n in range(1, 20)]
    assert costs == sorted(costs)
    assert costs[-1] < 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40)), min_size=1, max_size=10),
    st.integers(7, 20),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_blocks_and_rows_of_drafts(jobs: list[tuple[int, int]], n_blocks: int, chunk: int, rng: random.Random) -> None:
    """No block is lost or given twice, every draft token has a place, its own row and the tokens before it."""
    limit = (n_blocks - 1) * BLOCK_TOKENS
    scheduler = Scheduler(n_blocks + 1, max_seqs=6, prefill_chunk=chunk, speculation=PromptLookup(limit))
    for i, (n_prompt, n_new) in enumerate(jobs):
        scheduler.add(make(i, min(n_prompt, limit - 45), n_new))
    for _ in range(5000):
        if not scheduler.busy:
            break
        scheduled = scheduler.plan()
        check_blocks(scheduler, n_blocks)
        plan = scheduled.plan
        assert StepPlan.decode(plan.encode()).encode().tolist() == plan.encode().tolist()
        assert scheduled.drafted == 0 or scheduled.drafted + len(scheduled.sequences) <= MOST_ROWS
        assert plan.counts.sum() == len(plan.tokens) == sum(scheduled.counts) + scheduled.drafted
        for row, (sequence, position) in zip(plan.logit_rows.tolist(), scheduled.rows, strict=True):
            assert position < len(sequence.blocks) * BLOCK_TOKENS
            assert position < limit - 1 or position == len(sequence.ids) - 1
            place = int((plan.counts.cumsum() <= row).sum())
            ends = int(plan.starts[place] + plan.counts[place])
            assert ends == position + 1
            assert plan.blocks[place, : len(sequence.blocks)].tolist() == sequence.blocks
            if position < len(sequence.ids):
                assert plan.tokens[row] == sequence.ids[position]
        for sequence, count in zip(scheduled.sequences, scheduled.counts, strict=True):
            scheduler.computed(sequence, count)
            drafted = _draft_of(scheduled, sequence)
            for token in [*drafted, None]:
                if sequence.computed < len(sequence.ids):
                    break
                right = token is not None and rng.random() < 0.7
                sequence.ids.append(token if right and token is not None else rng.randrange(2))
                if sequence.n_generated >= sequence.request.params.max_tokens:
                    scheduler.remove(sequence)
                    break
                if sequence.ids[-1] == token:
                    scheduler.computed(sequence, 1)
    assert not scheduler.busy
    assert scheduler.pool.free == n_blocks


def _draft_of(scheduled: Any, sequence: Sequence) -> list[int]:
    rows = [row for row, (s, p) in enumerate(scheduled.rows) if s is sequence and p >= len(sequence.ids)]
    return [int(scheduled.plan.tokens[scheduled.plan.logit_rows[row]]) for row in rows]
