"""What an answer must look like: the fields that ask for it, in either dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from generation.structured.grammar import Compiled, ConstraintError
from handler.errors import InvalidRequest

if TYPE_CHECKING:
    from handler.requests.encode import ServingContext

FIELDS = ("response_format", "regex", "grammar")
"""Of which a request has one at most."""


def form_of(field: str, value: Any, context: ServingContext) -> Compiled | None:
    """What `value`, sent as one of FIELDS, asks for; None where that is plain text.

    Raises:
        InvalidRequest: naming the place in the field and what is wrong or unsupported there.
    """
    if context.constraints is None:
        raise InvalidRequest(f"{field} is not available on this server", param=field)
    make = {
        "response_format": context.constraints.from_response_format,
        "regex": context.constraints.regex,
        "grammar": context.constraints.grammar,
    }[field]
    try:
        return make(value)
    except ConstraintError as error:
        place = f"{field}.{error.path}" if error.path else field
        raise InvalidRequest(f"{place} {error.reason}", param=place) from None
