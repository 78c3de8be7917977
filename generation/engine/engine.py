"""The engine: requests in, outputs out, one step at a time.

Rank 0 schedules, samples and decides everything; the other ranks follow its plans (`Engine.follow`).
`submit` and `cancel` may be called from any thread, `step` from one only.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from generation.engine.scheduler import Scheduled, Scheduler, blocks_for
from generation.engine.speculation import PromptLookup
from generation.engine.timings import Meter
from generation.interface import FinishReason, Output, Request, Sequence, StepPlan, TokenLogprob
from generation.sampling import Sampled, sample, token_logprobs
from model.kv_cache import BLOCK_TOKENS, KVCache, bytes_per_token, make_batch
from model.llama import Llama
from model.memory import available_bytes


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of the engine; the same on every rank."""

    kv_cache_tokens: int
    """Tokens whose keys and values fit in the cache, over all sequences."""
    max_seqs: int = 256
    """Most sequences in one step."""
    prefill_chunk: int = 512
    """Most prompt tokens in one step."""
    prefix_cache: bool = True
    """Whether sequences that begin alike share their cache."""
    speculation: Literal["none", "prompt_lookup"] = "none"
    """Whether a step may compute several tokens of an answer that repeats itself or its prompt."""


@dataclass
class EngineStats:
    """Counters since the start, and what is in flight now."""

    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    steps: int
    last_step_age_s: float | None
    preemptions: int
    finished: dict[str, int]
    """Ended requests by finish reason."""
    prompt_tokens: int
    """Of all requests that have begun to run."""
    prefix_hit_tokens: int
    """Prompt tokens that were found in the cache."""
    generated_tokens: int
    draft_tokens: int
    """Proposed by speculation."""
    accepted_draft_tokens: int
    """Draft tokens that were right."""


class Engine:
    """One per model and process."""

    def __init__(self, model: Llama, settings: EngineSettings) -> None:
        self.model = model
        self.settings = settings
        n_blocks = blocks_for(settings.kv_cache_tokens) + 1
        self.cache = KVCache(model.config, model.shard, n_blocks, model.dtype, model.device)
        self.max_seq_len = min(model.max_seq_len, (n_blocks - 1) * BLOCK_TOKENS)
        self.scheduler = Scheduler(
            n_blocks,
            max_seqs=settings.max_seqs,
            prefill_chunk=settings.prefill_chunk,
            prefix_cache=settings.prefix_cache,
            speculation=PromptLookup(self.max_seq_len) if settings.speculation == "prompt_lookup" else None,
        )
        self.steps = 0
        self.last_step: float | None = None
        self.finished: dict[str, int] = {}
        self.meter = Meter()
        self._sequences: dict[str, Sequence] = {}
        self._inbox: deque[tuple[Request, float] | str] = deque()
        self._arrivals = 0
        self.work = threading.Event()
        """Set when a request or a cancellation came in."""

    # --- any thread ---

    def submit(self, request: Request) -> None:
        """Hand in a request; its outputs come from `step`.

        Raises:
            ValueError: no prompt, an id out of range, or a prompt that leaves no room for an answer.
        """
        self.check(request)
        self._inbox.append((request, time.monotonic()))
        self.work.set()

    def check(self, request: Request) -> None:
        """Raise ValueError where `request` can't be run."""
        ids, vocabulary = request.prompt_ids, self.model.config.vocab_size
        if not ids:
            raise ValueError("the prompt has no tokens, expected at least 1")
        for token in ids:
            if not 0 <= token < vocabulary:
                raise ValueError(f"token id {token} is out of range, expected 0 to {vocabulary - 1}")
        for token, _ in request.params.logit_bias:
            if not 0 <= token < vocabulary:
                raise ValueError(f"logit_bias has token id {token}, expected 0 to {vocabulary - 1}")
        room = self.max_seq_len - (request.params.max_tokens > 0)
        if len(ids) > room:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but at most {room} fit in the context of {self.max_seq_len} tokens"
            )

    def cancel(self, request_id: str) -> None:
        """Drop a request, wherever it is; an unknown or ended one is ignored. It yields no further output."""
        self._inbox.append(request_id)
        self.work.set()

    def stats(self) -> EngineStats:
        scheduler, last = self.scheduler, self.last_step
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            kv_blocks_free=scheduler.pool.free,
            kv_blocks_total=scheduler.pool.total,
            steps=self.steps,
            last_step_age_s=None if last is None else time.monotonic() - last,
            preemptions=scheduler.preemptions,
            finished=dict(self.finished),
            prompt_tokens=self.meter.prompt_tokens,
            prefix_hit_tokens=self.meter.prefix_hit_tokens,
            generated_tokens=self.meter.generated_tokens,
            draft_tokens=self.meter.draft_tokens,
            accepted_draft_tokens=self.meter.accepted_draft_tokens,
        )

    @property
    def busy(self) -> bool:
        """Whether a step would have something to do."""
        return bool(self._inbox) or self.scheduler.busy

    # --- the engine's thread, rank 0 ---

    def step(self) -> list[Output]:
        """Compute the next token of every running sequence, and the next part of the prompts."""
        outputs = self._receive()
        scheduled = self.scheduler.plan()
        self.meter.scheduled(scheduled.sequences, time.monotonic())
        logits = self._forward(scheduled.plan)
        outputs += self._commit(scheduled, logits)
        self.steps += 1
        self.last_step = time.monotonic()
        return outputs

    def heartbeat(self, *, stop: bool = False) -> None:
        """Tell the other ranks that rank 0 lives; `stop` ends their `follow`."""
        if self.model.comm.world_size > 1:
            self.model.comm.broadcast_array(StepPlan.empty(stop=stop).encode())

    # --- the engine's thread, other ranks ---

    def follow(self) -> None:
        """Obey rank 0's plans until it says stop."""
        while True:
            plan = StepPlan.decode(self.model.comm.broadcast_array(None))
            if plan.stop:
                return
            self._compute(plan)

    # --- inside ---

    def _receive(self) -> list[Output]:
        """Take in what was submitted and cancelled, and end what is past its deadline."""
        self.work.clear()
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, tuple):
                self._admit(*message)
            elif message in self._sequences:
                self._drop(self._sequences[message], "cancelled")
        now = time.monotonic()
        late = [s for s in self._sequences.values() if s.request.deadline is not None and s.request.deadline <= now]
        return [self._finish(sequence, "timeout") for sequence in late]

    def _admit(self, request: Request, arrived: float) -> None:
        seed = request.params.seed
        if seed is None:  # from torch's generator, so that torch.manual_seed makes a whole run repeatable
            seed = int(torch.randint(2**62, (1,)).item())
        sequence = Sequence(request, self._arrivals, list(request.prompt_ids), random.Random(seed))
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self.meter.arrived(sequence, arrived)
        self.scheduler.add(sequence)

    def _forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Run the plan on every rank. Returns rank 0's logits (R, V), None where the plan wants none."""
        if self.model.comm.world_size > 1:
            self.model.comm.broadcast_array(plan.encode())
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> torch.Tensor | None:
        if len(plan.tokens) == 0:
            return None
        arrays = (plan.tokens, plan.starts, plan.counts, plan.blocks, plan.logit_rows)
        return self.model.forward(make_batch(*arrays, self.model.device), self.cache)

    @torch.inference_mode()
    def _commit(self, scheduled: Scheduled, logits: torch.Tensor | None) -> list[Output]:
        """Record what the step computed, and the chosen tokens."""
        for sequence, count in zip(scheduled.sequences, scheduled.counts, strict=True):
            self.scheduler.computed(sequence, count)
        if logits is None:
            return []
        self._score_prompts(scheduled, logits)
        self.meter.draft_tokens += scheduled.drafted
        outputs = []
        last = [(row, s) for row, (s, position) in enumerate(scheduled.rows) if position == len(s.ids) - 1]
        while last:
            rows, sequences = zip(*last, strict=True)
            sampled = sample(logits if len(rows) == len(logits) else logits[list(rows)], sequences)
            outputs += self._advance(sequences, sampled)
            last = self._accepted(scheduled, last) if scheduled.drafted else []
        return outputs

    def _accepted(self, scheduled: Scheduled, last: list[tuple[int, Sequence]]) -> list[tuple[int, Sequence]]:
        """The rows after `last` whose draft token is the one that was just chosen, so that their logits count."""
        plan, rows = scheduled.plan, []
        for row, sequence in last:
            after = row + 1
            drafted = after < len(scheduled.rows) and scheduled.rows[after][0] is sequence
            if (
                drafted
                and sequence.request.request_id in self._sequences
                and plan.tokens[plan.logit_rows[after]] == sequence.ids[-1]
            ):
                self.scheduler.computed(sequence, 1)
                rows.append((after, sequence))
        self.meter.accepted_draft_tokens += len(rows)
        return rows

    def _score_prompts(self, scheduled: Scheduled, logits: torch.Tensor) -> None:
        """Log probabilities of prompt tokens, where they are asked for."""
        rows = [(row, s, p) for row, (s, p) in enumerate(scheduled.rows) if p < s.n_prompt - 1]
        if not rows:
            return
        ids = [s.request.prompt_ids[p + 1] for _, s, p in rows]
        scored = token_logprobs(
            logits[[row for row, _, _ in rows]], ids, [s.request.params.top_logprobs for _, s, _ in rows]
        )
        for (_, sequence, _), logprob in zip(rows, scored, strict=True):
            sequence.prompt_logprobs.append(logprob)

    def _advance(self, sequences: tuple[Sequence, ...], sampled: Sampled) -> list[Output]:
        """Append each sequence's token, and end those that are done."""
        outputs = []
        now = time.monotonic()
        for i, (sequence, token) in enumerate(zip(sequences, sampled.token_ids, strict=True)):
            self.meter.token(sequence, now)
            if token is None:
                outputs.append(self._fail(sequence, sampled.errors[i]))
            else:
                outputs.append(self._append(sequence, token, sampled.logprobs[i]))
        return outputs

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Output:
        params, constraint = sequence.request.params, sequence.request.constraint
        if params.max_tokens == 0:
            return self._finish(sequence, "length")
        # A constraint has allowed the stop id because the text is complete, maybe with nothing else to say.
        own_end = token in self.model.config.stop_ids and (not params.ignore_eos or constraint is not None)
        if own_end or token in params.stop_token_ids:
            output = self._finish(sequence, "stop")
            output.end = logprob
            return output
        sequence.ids.append(token)
        self.meter.generated_tokens += 1
        sequence.unsent.append((token, logprob))
        detokenizer = sequence.request.detokenizer
        text = "" if detokenizer is None else detokenizer.push(token)
        reason: FinishReason | None = None
        if constraint is not None:
            try:
                constraint.accept(token)
            except Exception as error:  # whatever a library does with one request's grammar, the others go on
                return self._fail(sequence, str(error), text)
        if (detokenizer is not None and detokenizer.stopped) or (constraint is not None and constraint.finished):
            reason = "stop"
        elif sequence.n_generated >= params.max_tokens or len(sequence.ids) >= self.max_seq_len:
            reason = "length"
        if reason is not None:
            return self._finish(sequence, reason, text)
        return self._output(sequence, text)

    def _output(self, sequence: Sequence, text: str) -> Output:
        """What may be told of a sequence now: text, and the tokens whose text is certain."""
        detokenizer = sequence.request.detokenizer
        pieces = [""] * len(sequence.unsent) if detokenizer is None else detokenizer.take_pieces()
        sent, sequence.unsent = sequence.unsent[: len(pieces)], sequence.unsent[len(pieces) :]
        first = sequence.sent == 0 and sequence.request.params.prompt_logprobs and sequence.scored
        output = Output(
            sequence.request.request_id,
            token_ids=[token for token, _ in sent],
            text=text,
            pieces=pieces,
            logprobs=[logprob for _, logprob in sent if logprob is not None],
            prompt_logprobs=sequence.prompt_logprobs if first else None,
            prompt_tokens=sequence.n_prompt,
            cached_tokens=sequence.cached,
            completion_tokens=sequence.n_generated,
        )
        sequence.sent += 1
        return output

    def _fail(self, sequence: Sequence, error: str, text: str = "") -> Output:
        output = self._finish(sequence, "error", text)
        output.error = error
        return output

    def _finish(self, sequence: Sequence, reason: FinishReason, text: str = "") -> Output:
        """The last output of a sequence, which leaves the engine."""
        detokenizer = sequence.request.detokenizer
        if detokenizer is not None:
            text += detokenizer.finish()
        output = self._output(sequence, text)
        if detokenizer is not None and detokenizer.stopped:
            _cut_stopped(output)
            reason = "stop" if reason == "length" else reason
        output.finish_reason = reason
        self._drop(sequence, reason)
        return output

    def _drop(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.remove(sequence)
        self.meter.ended(sequence)
        del self._sequences[sequence.request.request_id]
        self.finished[reason] = self.finished.get(reason, 0) + 1


def _cut_stopped(output: Output) -> None:
    """Drop the last tokens that lie wholly inside a stop string."""
    while output.pieces and not output.pieces[-1]:
        output.pieces.pop()
        output.token_ids.pop()
        if output.logprobs:
            output.logprobs.pop()


def agreed_cache_tokens(model: Llama, tokens: int | None = None, memory: int | None = None) -> int:
    """How many tokens of cache to keep; every rank calls this and gets rank 0's answer.

    Args:
        tokens: the number itself.
        memory: bytes per rank to fill instead. Without either: four full contexts (at least 32768 tokens), within
            85 % of a GPU's free memory or 40 % of the host's, divided by the ranks on it.
    """
    if model.comm.rank != 0:
        return int(model.comm.broadcast_array(None)[0])
    tokens = tokens or _fitting_tokens(model, memory)
    return int(model.comm.broadcast_array(np.array([tokens], dtype=np.int32))[0])


def _fitting_tokens(model: Llama, memory: int | None) -> int:
    largest = max(bytes_per_token(model.config, shard, model.dtype) for shard in model.shards)
    if memory is not None:
        return max(memory // largest, BLOCK_TOKENS)
    free = available_bytes(model.device)
    free = int(free * 0.85) if model.device.type == "cuda" else int(free * 0.4) // model.comm.world_size
    wanted = max(4 * model.max_seq_len, 32768)
    return max(min(wanted, free // largest), BLOCK_TOKENS)
