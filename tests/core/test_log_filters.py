"""Log records of other libraries are hidden by their text, and only while a block runs."""

import logging

import pytest

from ramify.core.terminal import hide_log_records


def test_records_with_the_text_are_hidden_until_the_block_ends(caplog):
    logger = logging.getLogger("other.library")
    with pytest.raises(KeyError), hide_log_records("other.library", "no handler for 3"):
        logger.warning("there is no handler for %d", 3)
        logger.warning("there is no handler for %d", 4)
        raise KeyError
    logger.warning("there is no handler for %d", 3)
    assert caplog.messages == ["there is no handler for 4", "there is no handler for 3"]
    assert logger.filters == []
