"""Ask a running server one request of each kind: `python -m scripts.smoke --url http://127.0.0.1:8080`.

Ends with status 1 if any answer is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import requests

TIMEOUT = 300
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Unexpected(Exception):
    """An answer that is not as it should be."""


def post(url: str, body: dict[str, Any], *, status: int = 200) -> Any:
    """The JSON of the answer to `body`; raises Unexpected for another status or a body that isn't JSON."""
    reply = requests.post(url, json=body, timeout=TIMEOUT)
    if reply.status_code != status:
        raise Unexpected(f"status {reply.status_code} instead of {status}: {reply.text[:500]}")
    try:
        return reply.json()
    except ValueError:
        raise Unexpected(f"not JSON: {reply.text[:500]}") from None


def expect(condition: object, what: str, got: Any) -> None:
    """Raises Unexpected unless `condition` is true."""
    if not condition:
        raise Unexpected(f"expected {what}, got {json.dumps(got, ensure_ascii=False)[:500]}")


def text(url: str) -> str:
    reply = post(url, {"prompt": "The capital of France is", "max_gen_len": 16, "temperature": 0})
    expect(isinstance(reply.get("generation"), str), "a text in `generation`", reply)
    expect(reply["usage"]["completion_tokens"] >= 1, "at least one token", reply)
    return repr(reply["generation"])


def chat(url: str) -> str:
    reply = post(url, {"dialog": QUESTION, "max_gen_len": 32, "temperature": 0})
    generation = reply.get("generation")
    expect(isinstance(generation, dict) and generation.get("role") == "assistant", "an assistant's message", reply)
    return repr(generation["content"])


def batch(url: str) -> str:
    prompts = ["One, two, three,", "The sky is", "Once upon a time"]
    replies = post(url, {"prompt": prompts, "max_gen_len": 8, "temperature": 0})
    expect(isinstance(replies, list) and len(replies) == len(prompts), f"a list of {len(prompts)} answers", replies)
    return ", ".join(repr(reply["generation"]) for reply in replies)


def events(lines: Iterator[bytes]) -> Iterator[str]:
    """The data of each server-sent event in a reply's lines."""
    for line in lines:
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].decode("utf-8")


def stream(url: str) -> str:
    body = {"dialog": QUESTION, "max_gen_len": 32, "temperature": 0, "stream": True}
    deltas, last, seen = [], None, ""
    with requests.post(url, json=body, stream=True, timeout=TIMEOUT) as reply:
        kind = reply.headers.get("content-type", "")
        expect(reply.ok and kind.startswith("text/event-stream"), "an event stream", [reply.status_code, kind])
        for seen in events(reply.iter_lines()):
            if seen != "[DONE]":
                last = json.loads(seen)
                deltas.append(last.get("delta") or "")
    expect(seen == "[DONE]", "[DONE] at the end", seen)
    expect(last and last.get("finish_reason"), "a finish_reason in the last event", last)
    whole = post(url, {**body, "stream": False})["generation"]["content"]
    expect("".join(deltas) == whole, f"the deltas to join to {whole!r}", deltas)
    return " | ".join(repr(delta) for delta in deltas if delta)


def mistake(url: str) -> str:
    reply = post(url, {"prompt": "Hi", "temperature": -1}, status=400)
    message = str(reply.get("error", {}).get("message", ""))
    expect("temperature" in message, "an error that names temperature", reply)
    return f"400 {message}"


CHECKS: tuple[Callable[[str], str], ...] = (text, chat, batch, stream, mistake)


def smoke(url: str) -> bool:
    """Run every check against the model's route `url`, printing one line each; returns whether all went well."""
    good = True
    for check in CHECKS:
        try:
            print(f"ok    {check.__name__}: {check(url)}", flush=True)
        except (Unexpected, requests.RequestException, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"FAIL  {check.__name__}: {error}", flush=True)
            good = False
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="llama2")
    args = parser.parse_args()
    sys.exit(0 if smoke(f"{args.url.rstrip('/')}/predictions/{args.model}") else 1)


if __name__ == "__main__":
    main()
