"""What prompt lookup brings, on one copy-heavy and one free answer; a part of `scripts.benchmark.worker`."""

from __future__ import annotations

import dataclasses
from typing import Any

from generation.chat_format import chat_format_for
from generation.engine.engine import Engine, EngineSettings
from generation.interface import Dialog
from model.llama import Llama
from model.tokenizer.tokenizer import Tokenizer
from scripts.benchmark.engine import run_engine
from scripts.benchmark.measure import summarize

PASSAGE = """\
The harbor office opens at seven on weekdays and at nine on Sundays. Boats longer than twelve meters need a berth at the
outer wall, shorter ones may lie at the wooden piers. A night costs two coins for each meter, water and light included.
Whoever leaves before noon pays for the night only; whoever stays pays for the day as well. Nets are mended in the shed
behind the crane, never on the quay. In a storm the red lamp is lit and no boat may leave until it is dark again."""
REQUESTS = {
    "copy": f"Repeat the following text word for word, and nothing else:\n\n{PASSAGE}",
    "free": "Write a story about a lighthouse keeper, his daughter and a storm that lasts for three days.",
}


def lookup_rows(model: Llama, tokenizer: Tokenizer, new_tokens: int) -> list[dict[str, Any]]:
    """Each answer without and with prompt lookup, one stream; rank 0 gets the rows, the others only help.

    Raises:
        RuntimeError: the answers differ, which prompt lookup must not change.
    """
    rows = []
    for name, text in REQUESTS.items():
        dialog: Dialog = [{"role": "user", "content": text}]
        prompt = chat_format_for(tokenizer).encode(dialog)
        answers = []
        for lookup in (False, True):
            settings = EngineSettings(2 * (len(prompt) + new_tokens + 32), prefix_cache=False)
            if lookup:
                settings = dataclasses.replace(settings, speculation="prompt_lookup")
            engine = Engine(model, settings)
            if model.comm.rank != 0:
                engine.follow()
                continue
            run_engine(engine, [prompt], 8)
            ids: list[int] = []
            row = summarize(run_engine(engine, [prompt], new_tokens, ids), len(prompt))
            engine.heartbeat(stop=True)
            answers.append(ids)
            rows.append({"prompt": name, "lookup": lookup, **row})
        if answers and answers[0] != answers[1]:
            raise RuntimeError(f"prompt lookup changes the answer to {name!r}: {answers[0]} and {answers[1]}")
    return rows
