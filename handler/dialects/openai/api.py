"""The OpenAI routes: requests to jobs, and what is answered at once (models, tokens)."""

from __future__ import annotations

from typing import Any

from handler.dialects.openai.reply import ChatChoice, Job, TextChoice
from handler.dialects.openai.request import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from handler.errors import InvalidRequest, NotFound
from handler.requests.body import Body
from handler.requests.encode import (
    CONFIGURABLE,
    ServingContext,
    Wanted,
    check_amount,
    check_ids,
    encode_dialog,
    encode_prompts,
    fitting,
    make_requests,
)
from handler.requests.limits import check_size
from handler.requests.structured import form_of

_SAMPLING = (*CONFIGURABLE, "logit_bias", "stop", "stop_token_ids", "ignore_eos")


def chat_job(job_id: str, body: Body, context: ServingContext) -> Job:
    """Check and tokenize a request to v1/chat/completions; nothing is generated yet.

    Raises:
        InvalidRequest: naming the field, its value and the limit.
        NotFound: another model's name.
    """
    asked = ChatRequest.read(body)
    _check_model(asked.model, context)
    check_amount(1, asked.n, context.settings, "messages")
    ids = encode_dialog(asked.messages, "messages", context, continued=asked.continue_final_message)
    prompts = [fitting(ids, "messages", context)]
    logprobs = asked.top_logprobs if asked.logprobs else None
    form = None if asked.response_format is None else form_of("response_format", asked.response_format, context)
    return _job(job_id, asked, context, ChatChoice, prompts, asked.most, logprobs, chat=True, form=form)


def completion_job(job_id: str, body: Body, context: ServingContext) -> Job:
    """Check and tokenize a request to v1/completions; nothing is generated yet.

    Raises:
        InvalidRequest: naming the field, its value and the limit.
        NotFound: another model's name.
    """
    asked = CompletionRequest.read(body)
    _check_model(asked.model, context)
    if asked.prompt is None:
        raise InvalidRequest("prompt is null, expected a text or token ids", param="prompt")
    check_amount(len(asked.prompt.items), asked.n, context.settings, "prompt")
    prompts = encode_prompts(asked.prompt, context, new=0 if asked.max_tokens == 0 else 1)
    return _job(job_id, asked, context, TextChoice, prompts, asked.max_tokens, asked.logprobs, echo=asked.echo)


def models(context: ServingContext) -> dict[str, Any]:
    """The list of models: the one there is."""
    return {"object": "list", "data": [_model(context)]}


def model(name: str, context: ServingContext) -> dict[str, Any]:
    """The model called `name`.

    Raises:
        NotFound: it is another one.
    """
    _check_model(name, context)
    return _model(context)


def tokenize(body: Body, context: ServingContext) -> dict[str, Any]:
    """The ids that a completion of `prompt` or a chat of `messages` would begin with.

    Raises:
        InvalidRequest, NotFound
    """
    asked = TokenizeRequest.read(body)
    _check_model(asked.model, context)
    if asked.messages is not None:
        ids = encode_dialog(asked.messages, "messages", context, continued=asked.continue_final_message)
    else:
        text = asked.prompt or ""
        check_size([text], "prompt", context.longest_token, context.max_seq_len)
        bos = asked.add_special_tokens and context.tokenizer.adds_bos
        ids = context.tokenizer.encode(text, bos=bos, eos=False)
    return {"tokens": ids, "count": len(ids), "max_model_len": context.max_seq_len}


def detokenize(body: Body, context: ServingContext) -> dict[str, Any]:
    """The text of token ids; control tokens have none.

    Raises:
        InvalidRequest, NotFound
    """
    asked = DetokenizeRequest.read(body)
    _check_model(asked.model, context)
    check_ids(asked.tokens, "tokens", context)
    return {"prompt": context.tokenizer.decode(asked.tokens)}


def _model(context: ServingContext) -> dict[str, Any]:
    return {"id": context.model_name, "object": "model", "created": context.created, "owned_by": "torchserve"}


def _check_model(name: str | None, context: ServingContext) -> None:
    """The address has named the model already, so a request need not."""
    if name is not None and name != context.model_name and name not in context.aliases:
        raise NotFound(
            f"the model {name[:100]!r} does not exist; this address serves {context.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _job(
    job_id: str,
    asked: GenerationFields,
    context: ServingContext,
    choice: type[ChatChoice | TextChoice],
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    **more: Any,
) -> Job:
    """`logprobs`: alternatives of each token, None without log probabilities; `more`: other fields of `Wanted`."""
    sampling = {name: getattr(asked, name) for name in _SAMPLING}
    sampling |= {"logprobs": logprobs is not None, "top_logprobs": logprobs or 0}
    seed = context.settings.seed if asked.seed is None else asked.seed
    requests = make_requests(job_id, Wanted(prompts, asked.n, max_tokens, seed, sampling, **more), context)
    choices = [choice(i, request, context.tokenizer, echo) for i, (request, echo) in enumerate(requests)]
    return Job(job_id, asked.stream, choices, model=context.model_name, n=asked.n, usage_wanted=asked.stream_options)
