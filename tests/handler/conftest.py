"""TorchServe's package leaves a file open when it is imported; as an error that would fail whichever test runs then."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ResourceWarning)
    import ts  # noqa: F401
