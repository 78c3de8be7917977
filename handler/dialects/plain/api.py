"""The native route's dialect: a checked body becomes engine requests, their outputs become the reply.

build_job   body -> Job, with one engine request per prompt and choice
Job         outputs -> one JSON reply, or server-sent events (native_reply.py)
"""

from __future__ import annotations

from generation.structured.grammar import Compiled
from handler.dialects.plain.reply import Choice, Job
from handler.dialects.plain.request import Body, NativeRequest
from handler.requests.encode import (
    CONFIGURABLE,
    ServingContext,
    Wanted,
    check_amount,
    encode_dialog,
    encode_prompts,
    fitting,
    make_requests,
)
from handler.requests.structured import FIELDS, form_of

__all__ = ["Job", "ServingContext", "build_job"]


def build_job(job_id: str, body: Body, context: ServingContext) -> Job:
    """Check and tokenize one HTTP request; nothing is generated yet.

    Raises:
        InvalidRequest: naming the field, its value and the limit.
    """
    asked = NativeRequest.read(body, context.settings.mode)
    inputs = asked.prompt.items if asked.prompt is not None else asked.dialogs
    check_amount(1 if inputs is None else len(inputs), asked.n, context.settings, "dialogs" if asked.chat else "prompt")
    wanted = _wanted(asked, context)
    choices = [
        Choice(i, request, context.tokenizer, echo)
        for i, (request, echo) in enumerate(make_requests(job_id, wanted, context))
    ]
    many = asked.n > 1 or asked.dialogs is not None or (asked.prompt is not None and asked.prompt.many)
    return Job(job_id, asked.stream, asked.chat, many, choices)


def _wanted(asked: NativeRequest, context: ServingContext) -> Wanted:
    """What a request says nothing of is as the settings have it."""
    settings, given = context.settings, asked.model_fields_set
    sampling = {name: getattr(asked if name in given else settings, name) for name in CONFIGURABLE}
    sampling |= {
        "logit_bias": asked.logit_bias,
        "stop": asked.stop,
        "ignore_eos": asked.ignore_eos,
        "logprobs": asked.logprobs or asked.top_logprobs > 0,
        "top_logprobs": asked.top_logprobs,
    }
    return Wanted(
        prompts=_encode_dialogs(asked, context) if asked.prompt is None else encode_prompts(asked.prompt, context),
        n=asked.n,
        max_tokens=asked.max_gen_len if "max_gen_len" in given else settings.max_gen_len,
        seed=asked.seed if "seed" in given else settings.seed,
        echo=asked.echo,
        sampling=sampling,
        chat=asked.chat,
        form=_form(asked, context),
    )


def _form(asked: NativeRequest, context: ServingContext) -> Compiled | None:
    sent = [(name, getattr(asked, name)) for name in FIELDS]
    return next((form_of(name, value, context) for name, value in sent if value is not None), None)


def _encode_dialogs(asked: NativeRequest, context: ServingContext) -> list[list[int]]:
    if asked.dialog is not None:
        dialogs = {asked.sent_name("dialog"): asked.dialog}
    else:
        dialogs = {f"dialogs[{i}]": dialog for i, dialog in enumerate(asked.dialogs or [])}
    continued = asked.continue_final_message
    return [
        fitting(encode_dialog(dialog, path, context, continued=continued), path, context)
        for path, dialog in dialogs.items()
    ]
