"""The vocabulary of the engine: what travels between its parts, and in which direction.

Request   a submitter (library call or handler) -> engine, on rank 0
Sequence  the engine's own record of a request while it lives, on rank 0
StepPlan  rank 0 -> every rank: what the model computes in one step
Output    engine -> submitter: what one step added to a request
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict

import numpy as np

if TYPE_CHECKING:
    from generation.detokenizer import Detokenizer
    from generation.engine.speculation import Drafter

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


class Message(TypedDict):
    """One turn of a dialog."""

    role: Role
    content: str


Dialog = list[Message]


class CompletionPrediction(TypedDict, total=False):
    """Result of a text completion; `tokens` and `logprobs` only where log probabilities were asked for."""

    generation: str
    tokens: list[str]
    logprobs: list[float | None]


class ChatPrediction(TypedDict, total=False):
    """Result of a chat completion; `tokens` and `logprobs` only where log probabilities were asked for."""

    generation: Message
    tokens: list[str]
    logprobs: list[float | None]


def _check(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    if not low <= value <= high:
        limit = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
        raise ValueError(f"{name} is {value!r}, expected {limit}")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Raises:
        ValueError: naming the field, its value and the limit.
    """

    max_tokens: int = 128
    """Most new tokens; 0 only scores the prompt."""
    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, value added to its logit)."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the answer beside the model's own; like those they are not part of it."""
    ignore_eos: bool = False
    """Whether the model's own stop ids are taken for any other token."""
    logprobs: bool = False
    """Log probability of each new token, from the distribution before temperature and filters."""
    top_logprobs: int = 0
    """How many of the likeliest alternatives come with each log probability."""
    prompt_logprobs: bool = False
    """Log probability of each prompt token given those before it (the first has none)."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "top_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}, expected an integer")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ValueError(f"seed is {self.seed!r}, expected an integer")
        _check("max_tokens", self.max_tokens, 0, math.inf)
        _check("temperature", self.temperature, 0, 2)
        _check("top_p", self.top_p, 0, 1)
        _check("top_k", self.top_k, 0, math.inf)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0, 2)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty is 0, expected a number above 0")
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        _check("presence_penalty", self.presence_penalty, -2, 2)
        _check("top_logprobs", self.top_logprobs, 0, 20)
        for token, bias in self.logit_bias:
            _check(f"logit_bias[{token}]", bias, -100, 100)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}, expected non-empty strings")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (temperature 0, or a nucleus of one)."""
        return self.temperature < 1e-5 or self.top_p == 0 or self.top_k == 1

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


class Constraint(Protocol):
    """What an answer may say next; the state of one sequence, of which `structured.py` has the maker.

    A method that raises ends its request with an error.
    """

    def mask(self) -> np.ndarray:
        """The ids allowed next, stop ids where the text may end: (ceil(V / 8),) uint8, a bit each, lowest first."""

    def accept(self, token_id: int) -> None:
        """Go on behind an allowed token that is no stop id."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and can't go on."""


@dataclass
class Request:
    """One prompt to be continued once; the submitter's own name for it is `request_id`."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    detokenizer: Detokenizer | None = None
    """Turns ids into text and finds stop strings; without one only ids are returned."""
    deadline: float | None = None
    """Time of `time.monotonic()` at which the request ends with what it has."""
    constraint: Constraint | None = None
    """What the answer must look like; its own object, not another request's. The model's stop ids then end the answer
    even with `ignore_eos`."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token, with the likeliest alternatives at its place (id, log probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Output:
    """What one step added to a request. `finish_reason` is set in the last one."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """Text that became certain in this step; joined over all outputs it is the generated text."""
    pieces: list[str] = field(default_factory=list)
    """The text of each token in `token_ids`; joined over all outputs it is the generated text too."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    """For prompt tokens 1, 2, ...; complete, in the output that ends the prompt."""
    finish_reason: FinishReason | None = None
    end: TokenLogprob | None = None
    """The stop id that ended the request, which is not among `token_ids`; where log probabilities are asked for."""
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed."""
    completion_tokens: int = 0
    """Tokens generated so far, over all outputs."""


@dataclass
class Sequence:
    """A request on its way through the engine. Only the scheduler and the engine's commit change it."""

    request: Request
    order: int
    """Arrival number: first come, first served."""
    ids: list[int]
    """Prompt and generated ids."""
    rng: random.Random
    computed: int = 0
    """How many of `ids` have their keys and values in the cache."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of each full block of `ids`, see `block_pool.extend_hashes`."""
    cached: int = 0
    """Prompt tokens that were found in the cache."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    unsent: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    """Generated tokens whose text is not certain yet."""
    sent: int = 0
    """Outputs so far."""
    drafter: Drafter | None = None
    """Proposes tokens, see `speculation.py`; made when it is first asked."""

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def scored(self) -> bool:
        """Whether the log probabilities of the whole prompt are known."""
        return len(self.prompt_logprobs) == self.n_prompt - 1

    @property
    def n_generated(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)


@dataclass(frozen=True)
class StepPlan:
    """One step of the model: for each of S sequences, the tokens to compute and where their cache lies.

    The tokens of a draft stand there as sequences of one token each, which share their cache, in rising order: so the
    model computes them just as it would in steps of their own.

    All arrays are int32. A plan with S = 0 is a heartbeat; `stop` ends the followers' loop.
    """

    tokens: np.ndarray
    """(T,) ids, the sequences one after another."""
    starts: np.ndarray
    """(S,) position of each sequence's first token of this step."""
    counts: np.ndarray
    """(S,) tokens of each sequence in this step; sums to T."""
    blocks: np.ndarray
    """(S, B) cache blocks of each sequence from its first token on, padded with 0."""
    logit_rows: np.ndarray
    """(R,) which of the T tokens need logits, rising within a sequence."""
    stop: bool = False

    def encode(self) -> np.ndarray:
        """The plan as one int32 vector: five numbers, then the arrays."""
        s, b = self.blocks.shape
        head = [len(self.tokens), s, b, len(self.logit_rows), self.stop]
        arrays = (self.tokens, self.starts, self.counts, self.blocks.ravel(), self.logit_rows)
        return np.concatenate((np.array(head, dtype=np.int32), *arrays))

    @classmethod
    def decode(cls, data: np.ndarray) -> StepPlan:
        """The inverse of `encode`; anything after the plan's own numbers is ignored."""
        t, s, b, r, stop = (int(x) for x in data[:5])
        ends = np.cumsum([5, t, s, s, s * b, r])
        tokens, starts, counts, blocks, rows = (data[i:j] for i, j in itertools.pairwise(ends))
        return cls(tokens, starts, counts, blocks.reshape(s, b), rows, bool(stop))

    @classmethod
    def empty(cls, *, stop: bool = False) -> StepPlan:
        none = np.zeros(0, dtype=np.int32)
        return cls(none, none, none, np.zeros((0, 0), dtype=np.int32), none, stop)
