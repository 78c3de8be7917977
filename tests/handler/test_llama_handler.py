"""The handler as TorchServe calls it: batches in, the frontend's bytes out, with a real model behind it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ts.utils.util import list_classes_from_module

from generation import load, text_completion
from generation.engine.thread import EngineThread
from handler import llama_handler, routes
from handler.errors import QueueFull
from handler.llama_handler import LlamaHandler, drain
from handler.torchserve import startup as serving
from tests.handler.frontend import MAX_SEQ_LEN, Frontend, Gate, archive, configuration
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, save_meta, tiny_config

PROMPTS = [f"{number} quick brown foxes jump over the lazy dog" for number in range(1, 17)]
GREEDY = {"temperature": 0, "max_gen_len": 12, "ignore_eos": True}
LOGGERS = ["", "handler", "generation", "model"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return save_meta(tmp_path_factory.mktemp("meta"), config, random_weights(config), tokenizer=True)


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> list[str]:
    """The library's answers to PROMPTS."""
    model, tokenizer = load(checkpoint, device="cpu", dtype="float32", max_seq_len=MAX_SEQ_LEN)
    found = text_completion(model, tokenizer, PROMPTS, max_gen_len=12, temperature=0)
    return [prediction["generation"] for prediction in found]


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    """What loading a model changes of the process, put back in the end."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "die_with_parent", lambda: None)
        patch.setattr(serving, "EngineThread", partial(EngineThread, die=lambda code: None))
        patch.setenv("TS_DECODE_INPUT_REQUEST", "true")  # so that it is put back too
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield
    torch.set_num_threads(threads)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    frontend = Frontend(archive(tmp_path_factory.mktemp("archive"), configuration(checkpoint)))
    yield frontend
    frontend.close()


@pytest.fixture
def frontend(server: Frontend) -> Iterator[Frontend]:
    """The one server, with nothing in flight before and after."""
    yield server
    server.open.clear()
    server.handler.jobs.cancel_missing(set())


# --- replies


def test_whole_reply(frontend: Frontend, answers: Sequence[str]) -> None:
    """B141: the content type is JSON's."""
    reply = frontend.ask({"prompt": PROMPTS[0], **GREEDY})
    assert (reply.status, reply.phrase) == (200, "OK")
    assert reply.content_type == "application/json; charset=utf-8"
    assert reply.json["generation"] == answers[0]
    assert reply.json["finish_reason"] == "length"
    assert reply.json["usage"]["completion_tokens"] == 12
    assert len(reply.pieces) == 1
    assert "ts_stream_next" not in reply.headers


def test_stream(frontend: Frontend, answers: Sequence[str]) -> None:
    reply = frontend.ask({"prompt": PROMPTS[1], "stream": True, **GREEDY})
    assert reply.status == 200
    assert "".join(event.get("delta", "") for event in reply.events) == answers[1]
    assert [event["finish_reason"] for event in reply.events][-1] == "length"


def test_stream_that_is_one_piece(frontend: Frontend, answers: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before its first poll; TorchServe writes a head only if it is sent as a whole reply."""
    monkeypatch.setattr(llama_handler, "POLL_S", 0.0)
    reply = frontend.send("one piece", {"prompt": PROMPTS[2], "stream": True, **GREEDY})
    jobs = frontend.handler.jobs
    monkeypatch.setattr(jobs, "take", lambda job_id: None)
    frontend.poll()
    entry = jobs._entries["one piece"]
    with jobs._changed:
        assert jobs._changed.wait_for(lambda: entry.job.done, 30)
    monkeypatch.undo()
    frontend.poll()
    assert len(reply.pieces) == 1
    assert "".join(event.get("delta", "") for event in reply.events) == answers[2]


@report("B139", "pytorch/serve#730")
@report("B140", "pytorch/serve#3284")
def test_list_of_prompts_is_one_reply(frontend: Frontend, answers: Sequence[str]) -> None:
    """B139: several prompts in one request."""
    reply = frontend.ask({"prompt": PROMPTS[:8], **GREEDY})
    assert [item["generation"] for item in reply.json] == answers[:8]


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_request_among_good_ones(frontend: Frontend, answers: Sequence[str], stream: bool) -> None:
    """B019, B137, B153: it alone gets a 400, also where it asked for a stream."""
    replies = [frontend.send(f"good {i}", {"prompt": p, "stream": stream, **GREEDY}) for i, p in enumerate(PROMPTS[:9])]
    bad = frontend.send("bad", {"prompt": "x", "stream": stream, "temperature": -1})
    replies += [frontend.send(f"good {i}", {"prompt": p, **GREEDY}) for i, p in enumerate(PROMPTS[9:], 9)]
    frontend.finish()
    assert (bad.status, bad.phrase, bad.content_type) == (400, "Bad Request", "application/json")
    assert bad.json["error"]["param"] == "temperature"
    assert [reply.status for reply in replies] == [200] * 16
    for i, reply in enumerate(replies):
        text = "".join(e.get("delta", "") for e in reply.events) if stream and i < 9 else reply.json["generation"]
        assert text == answers[i]
    assert len(frontend.handler.jobs) == 0


@report("B140", "pytorch/serve#3284")
@report("B026", "pytorch/serve#3160")
def test_request_may_join_others_under_way(frontend: Frontend, answers: Sequence[str]) -> None:
    """B026, B185: rows come and go between polls; each reply goes to its own request."""
    replies = []
    for i, prompt in enumerate(PROMPTS):
        replies.append(frontend.send(f"r{i}", {"prompt": prompt, "stream": i % 2 == 0, **GREEDY}))
        frontend.poll()
    frontend.finish()
    texts = [
        r.json["generation"] if i % 2 else "".join(e.get("delta", "") for e in r.events) for i, r in enumerate(replies)
    ]
    assert texts == answers


@report("B255", "pytorch/serve#2628")
@pytest.mark.parametrize("stream", [False, True])
def test_request_that_vanishes_is_canceled(
    frontend: Frontend, answers: Sequence[str], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """B027, B154, B255: its engine requests end, the running and the waiting one, and the others don't notice."""
    engine = frontend.engine
    before = engine.finished.get("cancelled", 0)
    monkeypatch.setattr(llama_handler, "POLL_S", 0.0)
    monkeypatch.setattr(engine.scheduler, "max_seqs", 1)
    gate = Gate(engine.step, 5)
    monkeypatch.setattr(engine, "step", gate)
    frontend.send("gone", {"prompt": ["x", "y"], "max_gen_len": 100, "ignore_eos": True, "stream": stream})
    stays = frontend.send("stays", {"prompt": PROMPTS[3], **GREEDY})
    frontend.poll()
    assert gate.reached.wait(30)
    del frontend.open["gone"]
    frontend.poll()
    assert len(frontend.handler.jobs) == 1
    gate.opened.set()
    frontend.finish()
    assert stays.json["generation"] == answers[3]
    assert engine.finished.get("cancelled", 0) == before + 2
    assert len(frontend.handler.jobs) == 0


def test_time_runs_out_for_what_runs_and_what_waits(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that runs ends with its text so far, the one that still waits with none."""
    engine = frontend.engine
    monkeypatch.setattr(engine.scheduler, "max_seqs", 1)
    gate = Gate(engine.step, 5)
    monkeypatch.setattr(engine, "step", gate)
    body = {"prompt": "x", "temperature": 0, "max_gen_len": 100, "ignore_eos": True}
    runs, waits = frontend.send("runs", body), frontend.send("waits", body)
    frontend.poll()
    assert gate.reached.wait(30)
    for entry in frontend.handler.jobs._entries.values():
        assert entry.job.requests[0].deadline is not None
        entry.job.requests[0].deadline = 0.0
    gate.opened.set()
    frontend.finish()
    assert [reply.json["finish_reason"] for reply in (runs, waits)] == ["timeout"] * 2
    assert [reply.json["usage"]["completion_tokens"] for reply in (runs, waits)] == [5, 0]
    assert (bool(runs.json["generation"]), waits.json["generation"]) == (True, "")


def test_full_engine_is_429(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """B189: with the time to try again; counted as an error."""
    stats = frontend.engine.stats()
    monkeypatch.setattr(frontend.engine, "stats", lambda: dataclasses.replace(stats, waiting=1024))
    reply = frontend.ask({"prompt": "x"})
    assert (reply.status, reply.phrase, reply.headers["Retry-After"]) == (429, "Too Many Requests", "1")
    assert "1024 prompts wait in the engine, expected fewer than 1024 (max_waiting)" in reply.json["error"]["message"]
    assert frontend.handler.metrics is not None
    assert frontend.handler.metrics._errors[429] == 1


@pytest.mark.parametrize("name", ["body", "data"])
def test_row_forms(frontend: Frontend, answers: Sequence[str], name: str) -> None:
    """B142, B143, B277: JSON as bytes, as text or parsed, as the body or a form field."""
    body = {"prompt": PROMPTS[4], **GREEDY}
    text = json.dumps(body)
    for i, value in enumerate((text.encode(), bytearray(text.encode()), text)):
        for content_type in ("application/json", "", "application/octet-stream"):
            reply = frontend.send(f"{i} {content_type}", value, name=name, content_type=content_type)
            frontend.finish()
            assert reply.json["generation"] == answers[4]
    frontend.send("parsed", text, name=name)
    frontend.open["parsed"]["parameters"][0]["value"] = body
    frontend.finish()
    assert frontend.replies["parsed"].json["generation"] == answers[4]


def test_plain_text_is_a_prompt(frontend: Frontend) -> None:
    """B023: with the configuration's sampling."""
    reply = frontend.ask(PROMPTS[5].encode(), content_type="text/plain")
    assert reply.status == 200
    assert reply.json["usage"]["prompt_tokens"] > 5


@pytest.mark.parametrize("value", [b"", b"\xff\xfe{}", b'{"prompt": NaN}', b'{"prompt":', b"[1, 2", b"{}", 5, None])
def test_bad_bodies(frontend: Frontend, value: Any) -> None:
    """B179, B197, B277."""
    reply = frontend.ask(value)
    assert reply.status == 400
    assert reply.json["error"]["type"] == "invalid_request_error"


# --- errors that are nobody's mistake


def test_retry_after_is_passed_on(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise QueueFull("the queue is full")

    monkeypatch.setattr(routes, "build_job", full)
    reply = frontend.ask({"prompt": "x"})
    assert (reply.status, reply.phrase) == (429, "Too Many Requests")
    assert reply.headers["Retry-After"] == "1"


@pytest.mark.parametrize("broken", ["parse_body", "build_job"])
def test_bug_while_reading_is_a_500_of_that_request(
    frontend: Frontend, answers: Sequence[str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    good = frontend.send("good", {"prompt": PROMPTS[6], "stream": True, **GREEDY})
    frontend.poll()

    def fail(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(routes, broken, fail)
    bad = frontend.send("bad", {"prompt": "x"})
    frontend.finish()
    assert (bad.status, bad.json["error"]["type"]) == (500, "internal_error")
    assert "a bug" not in bad.data.decode()
    assert "".join(event.get("delta", "") for event in good.events) == answers[6]


def test_bug_while_writing_is_a_500_of_that_request(
    frontend: Frontend, answers: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (frontend.send(name, {"prompt": PROMPTS[7], **GREEDY}) for name in ("bad", "good"))
    jobs = frontend.handler.jobs
    add = jobs.add

    def sabotage(job: Any) -> None:
        if job.job_id == "bad":
            job.body = None  # can't be called
        add(job)

    monkeypatch.setattr(jobs, "add", sabotage)
    frontend.finish()
    assert bad.status == 500
    assert good.json["generation"] == answers[7]


def test_non_finite_logits_fail_that_request_alone(
    frontend: Frontend, answers: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B005."""
    engine = frontend.engine
    forward = engine.model.forward

    def poisoned(batch: Any, cache: Any) -> Any:
        logits = forward(batch, cache)
        if logits is not None:
            logits[batch.tokens[batch.logit_rows] == 77] = torch.nan
        return logits

    monkeypatch.setattr(engine.model, "forward", torch.inference_mode()(poisoned))
    bad = frontend.send("bad", {"prompt": [77], **GREEDY})
    good = frontend.send("good", {"prompt": PROMPTS[8], **GREEDY})
    frontend.finish()
    assert bad.status == 500
    assert good.json["generation"] == answers[8]


def test_before_a_model_is_loaded_nothing_is_raised() -> None:
    handler = LlamaHandler()
    context = SimpleNamespace(request_ids={0: "a"}, get_request_id=lambda i: "a")
    context.get_all_request_header = lambda i: {"url_path": ""}
    statuses: list[int] = []
    context.set_response_status = lambda code, phrase, i: statuses.append(code)
    context.set_response_content_type = lambda i, value: None
    (reply,) = handler.handle([{"body": b"{}"}], context)
    assert statuses == [500]
    assert b"not loaded" in bytes(reply)  # type: ignore[arg-type]


# --- loading


def load_error(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        Frontend(archive(folder, config))
    message = str(caught.value)
    assert message.startswith("llama2 can't be served: ")
    return message.removeprefix("llama2 can't be served: ")


@report("B008", "meta-llama/llama#40")
@report("B016", "pytorch/serve#806")
def test_missing_checkpoint(tmp_path: Path) -> None:
    """B008, B015, B016: one line that names the directory."""
    message = load_error(tmp_path, configuration(tmp_path / "nowhere"))
    assert len(message.splitlines()) == 1
    assert str(tmp_path / "nowhere") in message
    (tmp_path / "empty").mkdir()
    message = load_error(tmp_path, configuration(tmp_path / "empty"))
    assert len(message.splitlines()) == 1
    assert "no model in this directory" in message


@report("B017", "pytorch/serve#498")
def test_unknown_key(tmp_path: Path, checkpoint: Path) -> None:
    """B017."""
    message = load_error(tmp_path, configuration(checkpoint, temprature=0.5))
    assert len(message.splitlines()) == 1
    assert "temprature" in message


def test_every_mistake_is_told_at_once(tmp_path: Path, checkpoint: Path) -> None:
    config = configuration(checkpoint, temperature=7, dtype="int3") | {"continuousBatching": False}
    lines = load_error(tmp_path, config).splitlines()
    assert len(lines) == 3
    for key in ("temperature", "dtype", "continuousBatching"):
        assert sum(key in line for line in lines) == 1


@report("B145", "pytorch/serve#2405")
def test_checkpoint_inside_the_archive(tmp_path: Path, checkpoint: Path) -> None:
    """B145: a relative path is one inside the archive."""
    (tmp_path / "weights").symlink_to(checkpoint)
    frontend = Frontend(archive(tmp_path, configuration(Path("weights"))))
    try:
        assert frontend.ask({"prompt": "x", **GREEDY}).status == 200
    finally:
        frontend.close()


# --- what TorchServe and torchrun need


def test_module_holds_one_class() -> None:
    """TorchServe takes the only class it finds."""
    assert list_classes_from_module(llama_handler) == [LlamaHandler]


def test_bodies_are_left_to_the_handler(server: Frontend) -> None:
    assert os.environ["TS_DECODE_INPUT_REQUEST"] == "false"


@report("B280", "pytorch/serve tp_llama llama-handler.py")
def test_nothing_of_a_request_is_logged(
    frontend: Frontend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B280: neither prompts nor answers, also of requests that fail."""
    for name in LOGGERS:
        caplog.set_level(logging.DEBUG, name)
    texts = [frontend.ask({"prompt": "xylophone zebra", "stream": s, **GREEDY}) for s in (False, True)]
    answer = texts[0].json["generation"]
    assert len(answer) > 8
    frontend.ask({"prompt": "xylophone zebra", "temperature": 9})
    frontend.ask(b'{"prompt": "xylophone zebra"')
    frontend.ask({"dialog": [{"role": "user", "content": "xylophone zebra [INST]"}]})
    monkeypatch.setattr(routes, "build_job", lambda *_: 1 / 0)
    frontend.ask({"prompt": "xylophone zebra"})
    logged = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert any("failed while it was read" in record.getMessage() for record in logged)
    formatter = logging.Formatter()
    for record in logged:
        line = formatter.format(record)
        assert "xylophone" not in line
        assert answer not in line


def test_other_ranks_read_until_the_frontend_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"I" * 100_000)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(SystemExit) as caught:
            drain(ours)
        assert caught.value.code == 0
        ours.setblocking(False)
        assert ours.recv(1) == b""


@report("B022", "pytorch/serve#2522")
def test_other_ranks_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B022: rank 0 alone replies."""
    handler = LlamaHandler()
    handler.rank = 1
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(SystemExit):
            handler.handle([{"body": b"{}"}], SimpleNamespace(cl_socket=ours))


# --- paths


def test_openai_paths(frontend: Frontend, answers: Sequence[str]) -> None:
    """B152: the rest of the path chooses; a slash at its end changes nothing."""
    body = {"model": "llama2", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    for path in ("v1/completions", "v1/completions/"):
        reply = frontend.ask(body, path=path)
        assert (reply.status, reply.json["object"]) == (200, "text_completion")
        assert reply.json["choices"][0]["text"] == answers[0]
    chat = frontend.ask({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}, path="v1/chat/completions")
    assert chat.json["object"] == "chat.completion"
    assert frontend.ask(b"", path="v1/models").json["data"][0]["id"] == "llama2"
    assert frontend.ask(b"", path="v1/models/llama2").json["id"] == "llama2"
    count = frontend.ask({"prompt": "x"}, path="v1/tokenize").json["count"]
    assert count == len(frontend.ask({"prompt": "x"}, path="v1/tokenize").json["tokens"])
    assert frontend.ask({"tokens": []}, path="v1/detokenize").json == {"prompt": ""}
    assert frontend.ask(b"", path="v1/health").json["status"] == "ok"


@pytest.mark.parametrize("path", ["v1", "v1/embeddings", "v1/chat", "v1/models/gpt-4", "x" * 500])
def test_unknown_paths(frontend: Frontend, path: str) -> None:
    reply = frontend.ask(b"", path=path)
    assert (reply.status, reply.phrase) == (404, "Not Found")
    assert reply.json["error"]["type"] == "not_found_error"
    assert len(reply.json["error"]["message"]) < 400


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/completions", "v1/tokenize", "v1/detokenize"])
@pytest.mark.parametrize("value", [b"", b"{", b'"text"', b"[]", b'{"model": 5}'])
def test_bad_openai_bodies(frontend: Frontend, path: str, value: bytes) -> None:
    reply = frontend.ask(value, path=path)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
