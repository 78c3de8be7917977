"""Public reports without a test, and why."""

from __future__ import annotations

LEFT_OUT = {
    "B031": "KServe's probes have no counterpart here; docs/operations.md says what to do about the authorization",
    "B151": "needs several GPUs; deviceIds is the frontend's own key",
    "B157": "Windows: not supported, WSL is Linux",
    "B292": "no quantized weights in this version; asking for them is refused by name",
}
"""Id -> reason."""
