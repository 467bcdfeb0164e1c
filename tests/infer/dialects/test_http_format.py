"""Bodies, errors and events, as all chat APIs share them."""

from typing import Any

import msgspec
import pytest

from ramify.core.errors import (
    BudgetExceeded,
    ConfigInvalid,
    ContextOverflow,
    DeadlineExceeded,
    PeerRefused,
    ProviderError,
    QueueFull,
    RequestInvalid,
    WeightsRefused,
)
from ramify.infer.dialects.http_format import (
    decode_body,
    format_openai_error,
    format_sse,
    get_error_code,
    get_http_status,
)


class Item(msgspec.Struct):
    name: str


class Body(msgspec.Struct):
    items: list[Item] = []


def test_a_body_is_decoded_as_its_type():
    assert decode_body(b'{"items": [{"name": "a"}]}', Body).items[0].name == "a"
    assert decode_body(b"", Body).items == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"items": [{"name": 5}]}', r"^items\.0\.name: Expected `str`, got `int`$"),
        (b'{"items": 5}', r"^items: Expected `array`, got `int`$"),
        (b"[]", "^the body cannot be used: Expected `object`, got `array`$"),
        (b"{not json", "^the body cannot be used: JSON is malformed"),
        (b'{"items": NaN}', "^the body cannot be used: JSON is malformed"),
        (b'{"more": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_an_invalid_body_is_refused_by_its_field(data, message):
    with pytest.raises(RequestInvalid, match=message):
        decode_body(data, Body)


def test_a_lone_surrogate_becomes_a_question_mark():
    data = b'{"items": [{"name": "\\ud83d and \\ud83d\\ude00"}]}'
    assert decode_body(data, Body).items[0].name == "? and \U0001f600"
    assert decode_body(data, dict[str, Any])["items"] == [{"name": "? and \U0001f600"}]


@pytest.mark.parametrize(
    ("error_class", "status", "code"),
    [
        (RequestInvalid, 400, "RequestInvalid"),
        (ContextOverflow, 400, "context_length_exceeded"),
        (BudgetExceeded, 400, "budget_exceeded"),
        (PeerRefused, 401, "PeerRefused"),
        (WeightsRefused, 409, "WeightsRefused"),
        (ConfigInvalid, 500, "ConfigInvalid"),
        (ProviderError, 502, "ProviderError"),
        (QueueFull, 503, "QueueFull"),
        (DeadlineExceeded, 504, "DeadlineExceeded"),
    ],
)
def test_every_error_has_a_status_and_a_code(error_class, status, code):
    error = error_class("why")
    assert (get_http_status(error), get_error_code(error)) == (status, code)
    assert get_http_status(error, retryable_status=500) == (500 if status == 502 else status)


def test_errors_and_events_have_the_form_that_clients_parse():
    body = format_openai_error("why", "RequestInvalid", 400)
    assert format_sse(body) == (
        b'data: {"error":{"message":"why","type":"RequestInvalid","param":null,"code":400}}\n\n'
    )
    assert format_sse({"type": "ping"}, "ping") == b'event: ping\ndata: {"type":"ping"}\n\n'
