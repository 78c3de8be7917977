"""The tiny server (on one rank, then on two) and its tokenizer, under short names."""

from __future__ import annotations

from typing import Any

import pytest

from model.tokenizer.tokenizer import Tokenizer
from tests.helpers.serving import Server


@pytest.fixture
def server(tiny_server: Server) -> Server:
    return tiny_server


@pytest.fixture(scope="session")
def tokenizer(tiny_library: Any) -> Tokenizer:
    found: Tokenizer = tiny_library[1]
    return found
