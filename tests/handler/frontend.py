"""TorchServe's frontend as the handler sees it: polls with the open requests, and reads the bytes of the replies."""

from __future__ import annotations

import json
import struct
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.model_loader import TsModelLoader
from ts.service import Service

from generation.engine.engine import Engine
from handler import llama_handler
from handler.llama_handler import LlamaHandler
from scripts.serve.run_dir import ROOT

MAX_SEQ_LEN = 128


@dataclass
class Reply:
    """What the frontend has got for one request."""

    status: int = 0
    phrase: str = ""
    content_type: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    done: bool = False

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        assert self.content_type == "text/event-stream; charset=utf-8"
        blocks = self.data.decode("utf-8").split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(b.removeprefix("data: ")) for b in blocks[:-2] if not b.startswith(":")]


class Wire:
    """Reads the frontend's protocol: numbers of four bytes, and fields with their length before them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self) -> int:
        self.at += 4
        return int(struct.unpack("!i", self.data[self.at - 4 : self.at])[0])

    def bytes(self) -> bytes:
        size = self.number()
        self.at += size
        return self.data[self.at - size : self.at]

    def text(self) -> str:
        return self.bytes().decode("utf-8")


class Frontend:
    """The part of TorchServe's frontend that polls one worker with the requests that are open."""

    def __init__(self, model_dir: Path, rows: str = "body") -> None:
        handle, initialize = TsModelLoader()._get_class_entry_point(llama_handler)
        manifest = {"model": {"configFile": "model-config.yaml"}}
        self.service = Service("llama2", str(model_dir), manifest, handle, None, 16, metrics_cache=metrics_cache())
        self.service.set_cl_socket(None)
        self.handler: LlamaHandler = handle.__self__
        self.open: dict[str, dict[str, Any]] = {}
        self.replies: dict[str, Reply] = {}
        initialize(self.service.context)

    def send(
        self, request_id: str, value: Any, *, name: str = "body", content_type: str = "application/json", path: str = ""
    ) -> Reply:
        """Put a request to `path` below the model into the next poll; dicts are sent as JSON in bytes."""
        headers = {"host": "localhost", "url_path": path}
        return self._open(request_id, headers, name, content_type, value)

    def call(self, request_id: str, value: Any, headers: dict[str, str], name: str = "body") -> Reply:
        """A gRPC request as TorchServe passes it."""
        return self._open(request_id, headers, name, "", value)

    def _open(self, request_id: str, headers: dict[str, str], name: str, content_type: str, value: Any) -> Reply:
        if isinstance(value, dict):
            value = bytearray(json.dumps(value).encode("utf-8"))
        self.open[request_id] = {
            "requestId": request_id.encode(),
            "headers": [{"name": key.encode(), "value": text.encode()} for key, text in headers.items()],
            "parameters": [{"name": name, "contentType": content_type, "value": value}],
        }
        self.replies[request_id] = Reply()
        return self.replies[request_id]

    def poll(self) -> None:
        wire = Wire(bytes(self.service.predict(list(self.open.values()))))
        assert (wire.number(), wire.text()) == (200, "Prediction success")
        while wire.data[wire.at : wire.at + 4] != b"\xff\xff\xff\xff":
            self._take(wire)
        assert wire.at + 4 == len(wire.data)

    def _take(self, wire: Wire) -> None:
        request_id = wire.text()
        reply = self.replies[request_id]
        reply.content_type, reply.status, reply.phrase = wire.text(), wire.number(), wire.text()
        reply.headers = {wire.text(): wire.text() for _ in range(wire.number())}
        first = not reply.pieces
        reply.pieces.append(wire.bytes())
        more = reply.headers.get("ts_stream_next")
        if any(header["name"] == b"host" for header in self.open[request_id]["headers"]):
            # Without the header it is a whole reply, which a head that was sent before rules out; and only a reply
            # that has a head can be ended by "false".
            assert first or more is not None
            assert more != "false" or not first
        else:
            assert more in ("true", "false"), "gRPC: the frontend's thread fails without it"
        if more != "true":
            reply.done = True
            del self.open[request_id]

    def finish(self) -> None:
        """Poll until every request is answered."""
        end = time.monotonic() + 60
        while self.open:
            assert time.monotonic() < end, f"no answer to {list(self.open)}"
            assert self.handler.serving is not None
            assert self.handler.serving.thread._thread.is_alive()
            self.poll()

    def ask(self, value: Any, **how: Any) -> Reply:
        reply = self.send(f"request {len(self.replies)}", value, **how)
        self.finish()
        return reply

    @property
    def engine(self) -> Engine:
        assert self.handler.serving is not None
        return self.handler.serving.engine

    def close(self) -> None:
        if self.handler.serving is not None:
            self.handler.serving.thread.stop()
        if self.handler.metrics is not None:
            self.handler.metrics.stop()


def metrics_cache(path: Path = ROOT / "metrics.yaml") -> MetricsCacheYamlImpl:
    """A worker's `context.metrics`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # TorchServe leaves the file open
        cache = MetricsCacheYamlImpl(path)
        cache.initialize_cache()
    cache.model_name = "llama2"
    return cache


def configuration(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    values = {"checkpoint": str(checkpoint), "device": "cpu", "dtype": "float32", "max_seq_len": MAX_SEQ_LEN}
    values |= {"kv_cache_tokens": 4096, "stream_interval": 0}
    return {"batchSize": 16, "maxBatchDelay": 1, "continuousBatching": True, "handler": values | changes}


def archive(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "model-config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


class Gate:
    """Lets the engine do so many steps, and the others once it is opened."""

    def __init__(self, step: Callable[[], Any], steps: int) -> None:
        self.step, self.left = step, steps
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> Any:
        if self.left == 0:
            self.reached.set()
            assert self.opened.wait(30)
        self.left -= 1
        return self.step()
