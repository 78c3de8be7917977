"""The TorchServe frontend that started this worker, as the worker itself can reach it."""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

MAIN_CLASS = "org.pytorch.serve.ModelServer"
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Frontend:
    """An inference address on this machine, and where the frontend keeps the keys of its token authorization."""

    host: str
    port: int
    tls: bool
    key_file: Path

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET.

        Raises:
            OSError, http.client.HTTPException: no answer, or not HTTP.
        """
        connection = self._connect()
        try:
            connection.request("GET", path, headers=self._headers())
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def post_and_leave(self, path: str) -> None:
        """Send an empty POST and close the connection without waiting for the answer.

        Raises:
            OSError, http.client.HTTPException: it could not be sent.
        """
        connection = self._connect()
        try:
            headers = {**self._headers(), "Content-Type": "application/json"}
            connection.request("POST", path, body=b"{}", headers=headers)
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        # The other end is this process's own parent: there is no name to verify.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=context)

    def _headers(self) -> dict[str, str]:
        try:
            key = json.loads(self.key_file.read_text(encoding="utf-8"))["inference"]["key"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # token authorization is off
        return {"Authorization": f"Bearer {key}"}


def find_frontend() -> Frontend | None:
    """The frontend among this process's ancestors; None where there is none, or its inference address isn't TCP."""
    try:
        for parent in psutil.Process(os.getpid()).parents():
            if MAIN_CLASS in parent.cmdline():
                return _inference_address(parent)
    except psutil.Error as error:
        logger.info("the frontend's process can't be looked at: %s", error)
    return None


def _inference_address(process: psutil.Process) -> Frontend | None:
    """The one of the process's listening ports that answers as the inference API does."""
    key_file = Path(process.cwd()) / "key_file.json"
    for connection in process.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN:
            continue
        host = connection.laddr.ip.removeprefix("::ffff:")
        host = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)
        for tls in (False, True):
            candidate = Frontend(host, connection.laddr.port, tls, key_file)
            try:
                status, body = candidate.get("/ping")
                if status == 200 and "status" in json.loads(body):
                    return candidate
            except (OSError, http.client.HTTPException, ValueError):
                continue
    return None
