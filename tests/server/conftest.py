"""The servers themselves are fixtures of the whole session, in tests/conftest.py."""

from tests.helpers.serving import Server, serving, until

__all__ = ["Server", "serving", "until"]
