"""The marker of tests that stand for a public report (tests/conformance/reports.txt)."""

from __future__ import annotations

import pytest


def report(report_id: str, origin: str) -> pytest.MarkDecorator:
    """Marks a test of report `report_id`, which was made at `origin` (owner/repository#number)."""
    return pytest.mark.report(report_id, origin)
