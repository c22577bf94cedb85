"""Logs as JSON, one object a line, each with the id of the request it belongs to.

Owns their form. What is logged never holds a token, a signature, a query string or a body: who logs sees to it.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

__all__ = ["configure", "request_id"]

#: The id of the request that this task works for.
request_id: ContextVar[str] = ContextVar("fanout-request-id", default="")


class _Json(logging.Formatter):
    """Time, level, logger, message, request, then whatever was passed as `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request"] = request_id.get()
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send this process's logs to `stream` (stderr by default)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fanout").setLevel(level)
