"""The functions people import: the interface of TorchServe's own Llama 2 example, on this project's engine.

A batch of ragged prompts gives each prompt what it would get alone. Under torchrun every rank calls them
with the same arguments and gets the same results.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from generation.chat_format import chat_format_for
from generation.detokenizer import Detokenizer
from generation.engine.engine import Engine, EngineSettings, agreed_cache_tokens
from generation.interface import ChatPrediction, CompletionPrediction, Dialog, Output, Request, SamplingParams
from model.llama import Llama
from model.tokenizer.tokenizer import Tokenizer

_ENGINE = "_library_engine"
_numbers = itertools.count()


def engine_for(model: Llama) -> Engine:
    """The engine that the functions of this module share for `model`; made at the first call."""
    engine = getattr(model, _ENGINE, None)
    if not isinstance(engine, Engine):
        engine = Engine(model, EngineSettings(kv_cache_tokens=agreed_cache_tokens(model)))
        setattr(model, _ENGINE, engine)
    return engine


def generate(
    model: Llama,
    prompt_tokens: list[list[int]],
    max_gen_len: int,
    temperature: float = 0.6,
    top_p: float = 0.9,
    logprobs: bool = False,
    echo: bool = False,
    *,
    seed: int | None = None,
    **sampling: Any,
) -> tuple[list[list[int]], list[list[float]] | None]:
    """Continue each prompt by up to `max_gen_len` tokens.

    Args:
        prompt_tokens: ids of each prompt, of any lengths.
        max_gen_len: most new tokens per prompt; what does not fit in the context is left out.
        temperature: 0 takes the likeliest token each time.
        logprobs: also return the log probability of each returned token.
        echo: return the prompt's tokens too; the first one's log probability is 0, as nothing precedes it.
        seed: makes the drawn tokens repeatable; prompt i of the batch draws with `seed`, too.
        sampling: further fields of `SamplingParams`.

    Returns:
        (ids of each answer up to its first stop id, log probabilities or None).

    Raises:
        ValueError: naming the argument, its value and the limit.
    """
    requests = [
        Request(
            _request_id(),
            list(ids),
            _params(model, len(ids), max_gen_len, temperature, top_p, logprobs, echo, seed=seed, **sampling),
        )
        for ids in prompt_tokens
    ]
    results = run(model, requests)
    tokens = [(request.prompt_ids if echo else []) + r.token_ids for request, r in zip(requests, results, strict=True)]
    if not logprobs:
        return tokens, None
    return tokens, [[x or 0.0 for x in r.all_logprobs(echo)] for r in results]


def text_completion(
    model: Llama,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_gen_len: int,
    temperature: float = 0.6,
    top_p: float = 0.9,
    logprobs: bool = False,
    echo: bool = False,
    *,
    seed: int | None = None,
    **sampling: Any,
) -> list[CompletionPrediction]:
    """Continue each text. Arguments as for `generate`; with `stop`, the text is cut before the stop string.

    Returns:
        For each prompt `{"generation"}`, with `logprobs` also `tokens` (their join is the generation) and
        `logprobs` (None for the first token of an echoed prompt).
    """
    requests = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, bos=tokenizer.adds_bos, eos=False)
        params = _params(model, len(ids), max_gen_len, temperature, top_p, logprobs, echo, seed=seed, **sampling)
        requests.append(Request(_request_id(), ids, params, Detokenizer(tokenizer, params.stop)))
    predictions: list[CompletionPrediction] = []
    for request, result in zip(requests, run(model, requests), strict=True):
        text, pieces = result.text, result.pieces
        if echo:
            text, pieces = _decode(tokenizer, request.prompt_ids + result.token_ids)
        prediction: CompletionPrediction = {"generation": text}
        if logprobs:
            prediction |= {"tokens": pieces, "logprobs": result.all_logprobs(echo)}
        predictions.append(prediction)
    return predictions


def chat_completion(
    model: Llama,
    tokenizer: Tokenizer,
    dialogs: list[Dialog],
    max_gen_len: int,
    temperature: float = 0.6,
    top_p: float = 0.9,
    logprobs: bool = False,
    *,
    seed: int | None = None,
    chat_format: str = "auto",
    **sampling: Any,
) -> list[ChatPrediction]:
    """The assistant's next message in each dialog. Arguments as for `generate`.

    Args:
        dialogs: messages `{"role", "content"}`: an optional system message, then user and assistant in turn,
            ending with the user.
        chat_format: `auto` (the checkpoint's own template, else Llama 2's), `llama2` or `template`.

    Raises:
        ValueError: a dialog that is out of order or holds the template's own markers; names the message.
    """
    template = chat_format_for(tokenizer, chat_format)
    requests = []
    for dialog in dialogs:
        ids = template.encode(dialog)
        params = _params(model, len(ids), max_gen_len, temperature, top_p, logprobs, False, seed=seed, **sampling)
        requests.append(
            Request(_request_id(), ids, params, Detokenizer(tokenizer, (*params.stop, *template.stop_strings)))
        )
    predictions: list[ChatPrediction] = []
    for result in run(model, requests):
        prediction: ChatPrediction = {"generation": {"role": "assistant", "content": result.text}}
        if logprobs:
            prediction |= {"tokens": result.pieces, "logprobs": result.all_logprobs(False)}
        predictions.append(prediction)
    return predictions


@dataclasses.dataclass
class Result:
    """All outputs of one request, joined."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    pieces: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.pieces += output.pieces
        self.logprobs += [x.logprob for x in output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [x.logprob for x in output.prompt_logprobs]
        self.finish_reason, self.error = output.finish_reason, output.error

    def all_logprobs(self, echo: bool) -> list[float | None]:
        """Of the returned tokens in order; None for the first token of an echoed prompt."""
        return [None, *self.prompt_logprobs, *self.logprobs] if echo else [*self.logprobs]


def run(model: Llama, requests: SequenceOf[Request]) -> list[Result]:
    """Run requests to their end on the shared engine; on every rank the results of all.

    Raises:
        ValueError: a request that can't be run.
        RuntimeError: the model gave logits that are not finite.
    """
    engine = engine_for(model)
    for request in requests:
        engine.check(request)
    if model.comm.rank == 0:
        results = _run_to_end(engine, requests)
        engine.heartbeat(stop=True)
        model.comm.broadcast_array(_pack([dataclasses.asdict(r) for r in results]))
    else:
        engine.follow()
        results = [Result(**fields) for fields in _unpack(model.comm.broadcast_array(None))]
    for result in results:
        if result.error is not None:
            raise RuntimeError(result.error)
    return results


def _run_to_end(engine: Engine, requests: SequenceOf[Request]) -> list[Result]:
    results = {request.request_id: Result() for request in requests}
    for request in requests:
        engine.submit(request)
    try:
        while engine.busy:
            for output in engine.step():
                results[output.request_id].add(output)
    except BaseException:  # also Ctrl-C in a notebook: the next call must find an empty engine
        for request_id in results:
            engine.cancel(request_id)
        raise
    return list(results.values())


def _params(
    model: Llama,
    n_prompt: int,
    max_gen_len: int,
    temperature: float,
    top_p: float,
    logprobs: bool,
    echo: bool,
    **sampling: Any,
) -> SamplingParams:
    if isinstance(max_gen_len, bool) or not isinstance(max_gen_len, int) or max_gen_len < 0:
        raise ValueError(f"max_gen_len is {max_gen_len!r}, expected an integer of at least 0")
    room = max(engine_for(model).max_seq_len - n_prompt, min(max_gen_len, 1))
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    elif "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    return SamplingParams(
        max_tokens=min(max_gen_len, room),
        temperature=temperature,
        top_p=top_p,
        logprobs=logprobs,
        prompt_logprobs=logprobs and echo,
        **sampling,
    )


def _decode(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, list[str]]:
    """The text of `ids` and each token's part of it."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
    return text, detokenizer.take_pieces()


def _request_id() -> str:
    return f"call-{next(_numbers)}"


def _pack(value: Any) -> np.ndarray:
    """JSON text as int32s, for the ranks' own channel: nothing is pickled."""
    data = np.frombuffer(json.dumps(value).encode("utf-8"), dtype=np.uint8)
    return data.astype(np.int32)


def _unpack(data: np.ndarray) -> Any:
    return json.loads(data.astype(np.uint8).tobytes().decode("utf-8"))
