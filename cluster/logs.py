"""How kvorum's own log lines look, and where they go: to a replica's standard error, which Ray writes to a file.

Each line has the request and the tenant that it is about, where it is about one.
No line has text of prompts or answers.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

from kvorum.cluster.config import LogFormat


@dataclass(slots=True)
class LogContext:
    """What the lines of one request have in common; the tenant is known once its key was looked up."""

    request_id: str = ""
    tenant: str = ""


_NO_REQUEST = LogContext()
# Set where a request comes in. Each has a task of its own, so it is never set back.
CONTEXT: ContextVar[LogContext] = ContextVar("kvorum_log_context", default=_NO_REQUEST)


class TextFormatter(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Write the line, and behind it whose it is."""
        line = super().formatMessage(record)
        context = CONTEXT.get()
        fields = (("request_id", context.request_id), ("tenant", context.tenant))
        return " ".join([line, *(f"{name}={_quoted(value)}" for name, value in fields if value)])


class JsonFormatter(logging.Formatter):
    """A JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the object; request_id and tenant are absent where the line is about none."""
        context = CONTEXT.get()
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": context.request_id,
            "tenant": context.tenant,
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        required = ("time", "level", "logger", "message")
        return json.dumps({name: value for name, value in fields.items() if value or name in required})


def log_to_stderr(log_format: LogFormat) -> None:
    """Write every line of kvorum's loggers from INFO up, once per process."""
    logger = logging.getLogger("kvorum")
    if not logger.handlers:
        # Serve puts a stream of its own in place of sys.stderr, which keeps lines back until an error or 1,000 more.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _quoted(value: str) -> str:
    """Return a value that clients chose on one line, and as one word."""
    return value if value.isascii() and value.isprintable() and " " not in value else json.dumps(value)
