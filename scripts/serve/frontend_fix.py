"""Mends gRPC in TorchServe's frontend: `python -m scripts.serve.frontend_fix FOLDER` writes a corrected class there.

In TorchServe 0.12 the class GRPCJob answers "is the client still there?" the wrong way round. With continuous batching
the frontend therefore drops every gRPC request after its first message, so that a stream never ends, and keeps those
whose client has left. It also ignores the status of a reply, and doesn't say which call a request came by. The
corrected class lies before TorchServe's own in Java's class path; nothing that is installed is changed.

A handler can do none of this: it sees neither the client nor the call, only what the frontend makes of its replies.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from scripts.serve.run_dir import ServerError, torchserve_home

CLASS = "org/pytorch/serve/job/GRPCJob"
KNOWN = "37d38e228b6314e854c0ab05d7488eb29ade8239683289b36d027357784058ce"
"""SHA-256 of the class in torchserve 0.12.0, the only one whose code is known here."""
CALL_HEADER = "grpc_call"
"""The request header that tells the handler of the call: PREDICT, STREAMPREDICT or STREAMPREDICT2."""

_INPUT = "org/pytorch/serve/util/messages/RequestInput"
_COMMAND = "org/pytorch/serve/util/messages/WorkerCommands"
_OBSERVER = "Lio/grpc/stub/StreamObserver;"
_CONSTRUCTOR = f"({_OBSERVER}Ljava/lang/String;Ljava/lang/String;L{_COMMAND};L{_INPUT};)V"
_RESPONSE = "([BLjava/lang/CharSequence;ILjava/lang/String;Ljava/util/Map;)V"
_LENGTHS = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4}
"""Bytes behind the tag of each kind of constant, except for texts."""


@dataclass
class _Method:
    access: int
    name: str
    kind: str
    """Its arguments and result, as the class file writes them."""
    attributes: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def code(self) -> bytes:
        """The instructions."""
        data = dict(self.attributes)["Code"]
        return data[8 : 8 + struct.unpack_from(">I", data, 4)[0]]

    def set_code(self, code: bytes, *, stack: int, caught: bytes = b"", frames: bytes = b"") -> None:
        """`caught`: the exception table; `frames`: what the verifier is to know of each place that is jumped to."""
        slots = struct.unpack_from(">H", dict(self.attributes)["Code"], 2)[0]
        self.attributes = [("Code", struct.pack(">HHI", stack, slots, len(code)) + code + caught + frames)]


class _ClassFile:
    """A compiled Java class, as far as it takes to change its methods."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 10
        self._count: int = struct.unpack_from(">H", data, 8)[0]
        self._texts: dict[int, str] = {}
        self._added = b""
        index = 1
        while index < self._count:
            index += self._skip_constant(index)
        self._constants_end = self._at
        self._at += 8 + 2 * struct.unpack_from(">H", data, self._at + 6)[0]
        for _ in range(self._number(2)):
            self._member()
        self._methods_start = self._at
        self.methods = [self._member() for _ in range(self._number(2))]
        self._rest = data[self._at :]

    def _number(self, size: int) -> int:
        self._at += size
        return int.from_bytes(self._data[self._at - size : self._at], "big")

    def _skip_constant(self, index: int) -> int:
        """Returns how many indices the constant takes."""
        tag = self._number(1)
        if tag == 1:
            size = self._number(2)
            self._at += size
            self._texts[index] = self._data[self._at - size : self._at].decode("utf-8")
            return 1
        self._at += _LENGTHS[tag]
        return 2 if tag in (5, 6) else 1

    def _member(self) -> _Method:
        member = _Method(self._number(2), self._texts[self._number(2)], self._texts[self._number(2)])
        for _ in range(self._number(2)):
            name, size = self._texts[self._number(2)], self._number(4)
            self._at += size
            member.attributes.append((name, self._data[self._at - size : self._at]))
        return member

    def method(self, name: str, kind: str) -> _Method:
        return next(method for method in self.methods if (method.name, method.kind) == (name, kind))

    def constant(self, tag: int, *parts: int) -> bytes:
        """A new constant that refers to others; its index, as instructions write it."""
        return self._add(struct.pack(f">B{len(parts)}H", tag, *parts)).to_bytes(2, "big")

    def text(self, text: str) -> int:
        found = next((index for index, known in self._texts.items() if known == text), None)
        if found is not None:
            return found
        data = text.encode("utf-8")
        index = self._add(struct.pack(">BH", 1, len(data)) + data)
        self._texts[index] = text
        return index

    def _add(self, constant: bytes) -> int:
        self._added += constant
        self._count += 1
        return self._count - 1

    def type(self, name: str) -> bytes:
        return self.constant(7, self.text(name))

    def string(self, text: str) -> bytes:
        return self.constant(8, self.text(text))

    def member(self, tag: int, owner: str, name: str, kind: str) -> bytes:
        """A field (9) or a method (10) of a class."""
        named = self.constant(12, self.text(name), self.text(kind))
        return self.constant(tag, *(int.from_bytes(part, "big") for part in (self.type(owner), named)))

    def write(self) -> bytes:
        methods = b"".join(self._write(method) for method in self.methods)
        old = self._data
        head = old[:8] + struct.pack(">H", self._count) + old[10 : self._constants_end] + self._added
        between = old[self._constants_end : self._methods_start]
        return head + between + struct.pack(">H", len(self.methods)) + methods + self._rest

    def _write(self, method: _Method) -> bytes:
        name, kind = self.text(method.name), self.text(method.kind)
        data = struct.pack(">4H", method.access, name, kind, len(method.attributes))
        for attribute, content in method.attributes:
            data += struct.pack(">HI", self.text(attribute), len(content)) + content
        return data


def corrected(original: bytes) -> bytes:
    """The corrected class file.

    Raises:
        ServerError: it isn't the class that is known here.
    """
    if hashlib.sha256(original).hexdigest() != KNOWN:
        raise ServerError("this TorchServe's class GRPCJob isn't that of torchserve 0.12.0, which can be corrected")
    job = _ClassFile(original)
    _negate_is_open(job)
    _tell_the_call(job)
    _guard_response(job)
    return job.write()


def _negate_is_open(job: _ClassFile) -> None:
    """`return observer.isCancelled()` becomes `return !observer.isCancelled()`."""
    is_open = job.method("isOpen", "()Z")
    is_open.set_code(is_open.code[:-1] + bytes.fromhex("04 82 ac"), stack=2, caught=bytes(2), frames=bytes(2))


def _tell_the_call(job: _ClassFile) -> None:
    """The constructor ends with `input.updateHeaders("grpc_call", command.name())`."""
    constructor = job.method("<init>", _CONSTRUCTOR)
    name = job.member(10, _COMMAND, "name", "()Ljava/lang/String;")
    update = job.member(10, _INPUT, "updateHeaders", "(Ljava/lang/String;Ljava/lang/String;)V")
    added = b"\x19\x05\x13" + job.string(CALL_HEADER) + b"\x19\x04\xb6" + name + b"\xb6" + update
    constructor.set_code(constructor.code[:-1] + added + b"\xb1", stack=6, caught=bytes(2), frames=bytes(2))


def _guard_response(job: _ClassFile) -> None:
    """A method around `response`. In Java:

    try {
        if (body.length == 0) return;  // asks only whether the client is there
        if (status >= 400) { sendError(status, new String(body, UTF_8)); return; }
        respond(body, contentType, status, phrase, headers);  // the original
    } catch (IllegalStateException e) {}  // the call has ended meanwhile; thrown further it would end the worker
    """
    original = job.method("response", _RESPONSE)
    guard = _Method(original.access, "response", _RESPONSE, original.attributes)
    original.name, original.access = "respond", 2
    text = job.type("java/lang/String")
    utf8 = job.member(9, "java/nio/charset/StandardCharsets", "UTF_8", "Ljava/nio/charset/Charset;")
    new_text = job.member(10, "java/lang/String", "<init>", "([BLjava/nio/charset/Charset;)V")
    send_error = job.member(10, CLASS, "sendError", "(ILjava/lang/String;)V")
    respond = job.member(10, CLASS, "respond", _RESPONSE)
    error = job.type("java/lang/IllegalStateException")
    code = bytes.fromhex("2b be 9a0004 b1")  # if body.length != 0 goto 6; return
    code += bytes.fromhex("1d 110190 a10014")  # 6: if status < 400 goto 30
    code += b"\x2a\x1d\xbb" + text + b"\x59\x2b\xb2" + utf8 + b"\xb7" + new_text + b"\xb6" + send_error + b"\xb1"
    code += bytes.fromhex("2a 2b 2c 1d 1904 1905 b7") + respond + b"\xb1"  # 30: the original with the same arguments
    code += bytes.fromhex("57 b1")  # 42: the exception is dropped
    frames = struct.pack(">HBBB", 3, 6, 30 - 6 - 1, 64 + 42 - 30 - 1) + b"\x07" + error
    frames = struct.pack(">HHI", 1, job.text("StackMapTable"), len(frames)) + frames
    guard.set_code(code, stack=6, caught=struct.pack(">4H", 1, 0, 42, 42) + error, frames=frames)
    job.methods.append(guard)


def write_fix(folder: Path) -> None:
    """Write the corrected class below `folder`, which then goes before TorchServe's jars in the class path.

    Raises:
        ServerError: no TorchServe, or one that isn't known here.
    """
    with zipfile.ZipFile(torchserve_home() / "ts" / "frontend" / "model-server.jar") as jar:
        data = corrected(jar.read(f"{CLASS}.class"))
    path = folder / f"{CLASS}.class"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="TorchServe's launcher looks for classes in the folder it starts in")
    try:
        write_fix(parser.parse_args().folder)
    except ServerError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
