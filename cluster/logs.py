"""Where kvorum's own log lines go in a replica: its standard error, which Ray writes to a file."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Write every line of kvorum's loggers from INFO up, once per process."""
    logger = logging.getLogger("kvorum")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
