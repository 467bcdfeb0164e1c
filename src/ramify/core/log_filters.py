"""Hides log records of other libraries that are irrelevant to users."""

import contextlib
import logging
from collections.abc import Generator


@contextlib.contextmanager
def hide_log_records(logger_name: str, text: str) -> Generator[None]:
    """Hide the records of a logger whose message contains `text`, while the block runs."""
    logger = logging.getLogger(logger_name)

    def lacks_text(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logger.addFilter(lacks_text)
    try:
        yield
    finally:
        logger.removeFilter(lacks_text)
