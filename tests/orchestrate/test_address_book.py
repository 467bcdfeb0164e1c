"""The address book: subscribers get the addresses of their key, and a run without the file notices nothing."""

import asyncio

import pytest

from ramify.core.errors import ConfigInvalid, StorageFailed
from ramify.orchestrate.address_book import (
    ADDRESS_BOOK_FILE,
    AddressBook,
    get_env_key,
    get_model_key,
    write_addresses,
)


async def test_subscribers_get_the_addresses_of_their_key_when_they_change(tmp_path):
    calls: list[tuple[str, list[str]]] = []
    async with asyncio.timeout(10), AddressBook(tmp_path, poll_interval=0.01) as book:
        for key in ("inference", get_model_key("judge"), get_env_key("train", "reverse")):
            book.subscribe(key, lambda addresses, key=key: calls.append((key, addresses)))
        await asyncio.sleep(0.05)
        assert calls == [] and book.addresses is None
        write_addresses(tmp_path, {"inference": ["http://a:1"], "env/train/reverse": ["tcp://a:2"]})
        while len(calls) < 2:
            await asyncio.sleep(0.01)
        write_addresses(tmp_path, {"inference": ["http://b:1"], "models/judge": []})
        while len(calls) < 4:
            await asyncio.sleep(0.01)
        assert book.addresses == {
            "inference": ["http://b:1"],
            "env/train/reverse": ["tcp://a:2"],  # a key that is gone keeps its addresses
            "models/judge": [],
        }
        book.subscribe("inference", lambda addresses: calls.append(("late", addresses)))
    assert calls == [
        ("inference", ["http://a:1"]),
        ("env/train/reverse", ["tcp://a:2"]),
        ("inference", ["http://b:1"]),
        ("models/judge", []),
        ("late", ["http://b:1"]),
    ]


async def test_malformed_book_fails_with_the_path_and_the_expected_form(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"addresses.json is not an address book: .*expected lists of addresses"):
        async with asyncio.timeout(10), AddressBook(tmp_path, poll_interval=0.01) as book:
            (tmp_path / ADDRESS_BOOK_FILE).write_text('{"inference": "http://a:1"}')
            await book.wait_failed()


async def test_book_that_cannot_be_read_for_a_moment_keeps_its_addresses(tmp_path):
    calls: list[list[str]] = []
    async with asyncio.timeout(60), AddressBook(tmp_path, poll_interval=0.01) as book:
        book.subscribe("inference", calls.append)
        (tmp_path / ADDRESS_BOOK_FILE).mkdir()
        await asyncio.sleep(0.05)
        (tmp_path / ADDRESS_BOOK_FILE).rmdir()
        write_addresses(tmp_path, {"inference": ["http://a:1"]})
        while not calls:
            await asyncio.sleep(0.01)
    assert calls == [["http://a:1"]]


async def test_book_that_stays_unreadable_ends_the_run(tmp_path):
    with pytest.raises(StorageFailed):
        async with asyncio.timeout(60), AddressBook(tmp_path, poll_interval=0.01, retry_time=0.05) as book:
            (tmp_path / ADDRESS_BOOK_FILE).mkdir()
            await book.wait_failed()
