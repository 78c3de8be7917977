"""gRPC by a real client: whole answers, streams, statuses, clients that leave, and what must not end a worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from scripts.serve.run_dir import ServerError
from tests.helpers.readme_examples import ROOT, blocks
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece
from tests.server.conftest import Server, serving, until

PAGE = ROOT / "docs" / "grpc.md"
PLAIN = {"prompt": "Hello", "temperature": 0, "max_gen_len": 12}
LONG = {"prompt": "Hello", "temperature": 1.5, "ignore_eos": True, "max_gen_len": 8000}
SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"


@dataclass(frozen=True)
class Client:
    """The stub that the documentation's part of the service description makes."""

    server: Server
    messages: Any
    stub: Any
    channel: grpc.Channel

    def request(self, body: Any, *, key: str = "body", model: str = "llama2", version: str = "") -> Any:
        value = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.messages.PredictionsRequest(model_name=model, model_version=version, input={key: value})

    def ask(self, body: Any, **how: Any) -> Any:
        return json.loads(self.stub.Predictions(self.request(body, **how), timeout=60).prediction)

    def stream(self, body: Any) -> list[bytes]:
        return [m.prediction for m in self.stub.StreamPredictions(self.request(body), timeout=60)]

    def refusal(self, call: str, request: Any, timeout: float = 60) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            self._run(call, request, timeout)
        return caught.value.code(), caught.value.details()

    def _run(self, call: str, request: Any, timeout: float) -> None:
        reply = getattr(self.stub, call)(request, timeout=timeout)
        if call == "StreamPredictions":
            list(reply)

    def by_sequence(self, body: Any) -> list[Any]:
        """StreamPredictions2 with one request, after which this side of the call is closed."""
        kinds = self.messages.PredictionsRequest, self.messages.PredictionResponse
        call = self.channel.stream_stream(
            f"{SERVICE}/StreamPredictions2", kinds[0].SerializeToString, kinds[1].FromString
        )
        request = self.request(body).SerializeToString() + b"\x22\x01a"  # sequenceId = 4: "a"
        return list(call(iter([kinds[0].FromString(request)]), timeout=60))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, so that an answer takes many seconds."""
    directory = tmp_path_factory.mktemp("long-llama")
    config = tiny_config(n_heads=8, n_kv_heads=2, n_layers=4, max_seq_len=8192)
    save_meta(directory, config, random_weights(config), shards=1)
    train_sentencepiece(directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="module")
def proto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the documentation's inference.proto, where grpcio finds it."""
    folder = tmp_path_factory.mktemp("proto")
    (folder / "inference.proto").write_text(blocks(PAGE, "proto")[0].text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@contextlib.contextmanager
def connected(server: Server) -> Iterator[Client]:
    messages, services = grpc.protos_and_services("inference.proto")
    with grpc.insecure_channel(server.run.grpc_address) as channel:
        yield Client(server, messages, services.InferenceAPIsServiceStub(channel), channel)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with serving(checkpoint, 2) as found:
        yield found


@pytest.fixture
def client(server: Server, proto: Path) -> Iterator[Client]:
    """After each test the worker has to be the one from before, with nothing left to do."""
    ranks = server.ranks()
    with connected(server) as found:
        yield found
    until(lambda: server.health()["running"] == 0, timeout=15)
    assert server.ranks() == ranks


@pytest.fixture
def bystander(client: Client) -> Iterator[None]:
    """An HTTP stream, which has to go on while the test runs and after it."""
    reply = client.server.post({**LONG, "stream": True}, stream=True)
    lines = reply.iter_lines()
    assert next(lines).startswith(b"data: ")
    yield
    assert all(b"error" not in line for _, line in zip(range(100), lines, strict=False))
    reply.close()


def text_of(messages: list[bytes]) -> str:
    """The text of a stream of one choice; each message has whole events."""
    assert all(message.endswith(b"\n\n") for message in messages)
    events = b"".join(messages).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    found = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert found[-1]["finish_reason"] is not None
    return "".join(event.get("delta", "") for event in found)


@pytest.mark.parametrize("stream", [False, True])
def test_unary_call_has_the_whole_answer(client: Client, stream: bool) -> None:
    assert client.ask({**PLAIN, "stream": stream}) == client.server.ask(PLAIN)


@pytest.mark.parametrize("stream", [False, True])
def test_stream_call_streams(client: Client, stream: bool) -> None:
    for _ in range(3):  # the second one used to end the worker
        messages = client.stream({**PLAIN, "max_gen_len": 600, "ignore_eos": True, "stream": stream})
        assert len(messages) > 2
        expected = client.server.ask({**PLAIN, "max_gen_len": 600, "ignore_eos": True})
        assert text_of(messages) == expected["generation"]


def test_plain_text_is_a_prompt(client: Client) -> None:
    body = {"prompt": "Hello there", "temperature": 0}
    usage = client.server.ask(body)["usage"]["prompt_tokens"]
    assert client.ask(b"Hello there", key="data")["usage"]["prompt_tokens"] == usage


@pytest.mark.usefixtures("bystander")
def test_many_calls_at_once(client: Client) -> None:
    """Calls of all kinds share batches with each other and with HTTP."""
    expected = client.server.ask(PLAIN)

    def one(number: int) -> Any:
        if number % 4 == 0:
            return client.ask(PLAIN) == expected
        if number % 4 == 1:
            return text_of(client.stream(PLAIN)) == expected["generation"]
        if number % 4 == 2:
            return client.server.ask(PLAIN) == expected
        return (
            client.refusal("StreamPredictions", client.request({**PLAIN, "n": 0}))[0]
            is grpc.StatusCode.INVALID_ARGUMENT
        )

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(48))) == [True] * 48


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
@pytest.mark.parametrize(
    ("body", "key", "said"),
    [
        ({"prompt": "x", "temperature": 3}, "body", "temperature is 3, expected a number between 0 and 2"),
        ({"prompt": "x", "temperatur": 3}, "body", "temperatur"),
        ({"prompt": "x" * 100_000}, "body", "tokens"),
        (b"", "body", "the body is empty"),
        (b"\xff\xfe", "body", "must be UTF-8, its byte 0 (0xff) is not"),
        (b'{"prompt": ', "data", "not valid JSON"),
        (b"[" * 100_000, "body", "nested more than 64 levels deep"),
        (b'{"prompt": "x", "temperature": NaN}', "body", "temperature is NaN"),
        (PLAIN, "", 'unexpected form field ""'),
        (PLAIN, "prompt", 'unexpected form field "prompt"'),
        (PLAIN, "url_path", 'unexpected form field "url_path"'),
        (PLAIN, "grpc_call", 'unexpected form field "grpc_call"'),
    ],
)
def test_mistake_is_a_status(client: Client, call: str, body: Any, key: str, said: str) -> None:
    code, details = client.refusal(call, client.request(body, key=key))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in details
    assert not details.startswith("{")


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
def test_call_without_input(client: Client, call: str) -> None:
    code, details = client.refusal(call, client.messages.PredictionsRequest(model_name="llama2"))
    assert (code, details.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "no body arrived")


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
@pytest.mark.parametrize("names", [{"model": "other"}, {"model": ""}, {"version": "9.9"}])
def test_unknown_model(client: Client, call: str, names: dict[str, str]) -> None:
    """TorchServe answers that by itself."""
    code, _ = client.refusal(call, client.request(PLAIN, **names))
    assert code is grpc.StatusCode.INTERNAL


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
def test_huge_request(client: Client, call: str) -> None:
    code, _ = client.refusal(call, client.request(b"x" * (65 << 20)))
    assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.usefixtures("bystander")
def test_call_by_sequence_is_refused(client: Client) -> None:
    for _ in range(50):
        with pytest.raises(grpc.RpcError) as caught:
            client.by_sequence(PLAIN)
        assert caught.value.code() is grpc.StatusCode.UNKNOWN


@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
def test_client_that_leaves_frees_its_slot(client: Client, call: str) -> None:
    before = client.server.health()["finished"].get("cancelled", 0)
    request = client.request({**LONG, "n": 4})
    stub = client.stub.Predictions.future if call == "Predictions" else client.stub.StreamPredictions
    pending = stub(request)
    until(lambda: client.server.health()["running"] == 4)
    pending.cancel()
    until(lambda: client.server.health()["running"] == 0, timeout=15)
    after = client.server.health()
    assert after["finished"]["cancelled"] == before + 4
    assert after["kv_blocks_free"] == after["kv_blocks_total"]


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
def test_deadline_frees_the_slot(client: Client, call: str) -> None:
    code, _ = client.refusal(call, client.request({**LONG, "n": 4}), timeout=1)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: client.server.health()["running"] == 1, timeout=15)


def test_slow_unary_call_gets_one_message(client: Client) -> None:
    """Longer than the time after which the frontend is asked for the client."""
    replies = client.ask({**LONG, "max_gen_len": 1000, "n": 8})
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [1000] * 8


def test_example(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's program prints a whole reply, and the events of a stream."""
    (block,) = blocks(PAGE, "py")
    assert "127.0.0.1:8083" in block.text
    program = block.text.replace("127.0.0.1:8083", client.server.run.grpc_address)
    exec(compile(program, PAGE.name, "exec"), {})
    whole, _, events = capsys.readouterr().out.partition("\n")
    assert "'generation': {'role': 'assistant'" in whole
    assert events.startswith('data: {"index":0,')
    assert events.endswith("data: [DONE]\n\n")


@pytest.fixture(scope="module")
def unmended(checkpoint: Path, proto: Path) -> Iterator[Server]:
    """A server whose frontend is TorchServe's as it comes."""

    def refuse(folder: Path) -> None:
        raise ServerError("left as it is")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.server.write_fix", refuse)
        with serving(checkpoint, 2) as server:
            yield server


def test_frontend_as_it_comes_is_safe(unmended: Server) -> None:
    """Each call, a stream too, has one message with the whole answer or the error."""
    ranks = unmended.ranks()
    with connected(unmended) as client:
        expected = unmended.ask(PLAIN)
        for stream in (False, True):
            assert client.ask({**PLAIN, "stream": stream}) == expected
            assert [json.loads(m) for m in client.stream({**PLAIN, "stream": stream})] == [expected]
        for body in ({**PLAIN, "n": 0}, b"\xff", b""):
            assert client.ask(body)["error"]["type"] == "invalid_request_error"
            assert [json.loads(m)["error"]["type"] for m in client.stream(body)] == ["invalid_request_error"]
        slow = client.stream({**LONG, "max_gen_len": 3000, "n": 8})
        assert len(json.loads(slow[0])) == 8
        client.stub.StreamPredictions(client.request({**LONG, "max_gen_len": 2000})).cancel()
        for _ in range(5):
            with pytest.raises(grpc.RpcError):
                client.by_sequence(PLAIN)
        until(lambda: unmended.health()["running"] == 0)
        assert client.ask(PLAIN) == expected
    assert unmended.ranks() == ranks
