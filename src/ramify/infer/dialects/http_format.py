"""What all chat APIs share over HTTP: decoding of bodies, statuses and codes of errors, server-sent events."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ramify.core.errors import (
    BudgetExceeded,
    ContextOverflow,
    DeadlineExceeded,
    ImageMissing,
    ModelNotFound,
    PeerRefused,
    ProcessReplaced,
    QueueFull,
    QuotaExceeded,
    RamifyError,
    RequestInvalid,
    TemplateRefused,
    WeightsMissing,
    WeightsRefused,
    WeightsReplaced,
)

T = TypeVar("T")
HTTP_STATUS: dict[type[RamifyError], int] = {
    PeerRefused: 401,
    RequestInvalid: 400,
    TemplateRefused: 400,
    ModelNotFound: 404,
    ImageMissing: 409,
    WeightsRefused: 409,
    WeightsReplaced: 409,
    ProcessReplaced: 409,
    QueueFull: 503,
    WeightsMissing: 503,
    QuotaExceeded: 429,
    DeadlineExceeded: 504,
}
SSE_DONE = b"data: [DONE]\n\n"


def decode_body(data: bytes | bytearray, body_type: type[T]) -> T:
    """Decode a JSON body as `body_type`; an empty body is an empty object. Raises RequestInvalid.

    A lone surrogate, which JavaScript may send, becomes a question mark.
    """
    try:
        try:
            return msgspec.json.decode(data or b"{}", type=body_type)
        except msgspec.ValidationError:  # names the field
            raise
        except msgspec.DecodeError:
            return msgspec.json.decode(_replace_surrogates(data), type=body_type)
    except RecursionError as error:
        raise RequestInvalid("the body cannot be used: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason, _, path = str(error).partition(" - at `$.")  # `$.messages[0].role` is written as messages.0.role
        field = path.rstrip("`").replace("[", ".").replace("]", "")
        raise RequestInvalid(f"{field or 'the body cannot be used'}: {reason}") from error


def _replace_surrogates(data: bytes | bytearray) -> bytes | bytearray:
    """Return JSON without lone surrogates; what is not JSON is returned unchanged."""
    try:
        return json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8", "replace")
    except ValueError:
        return data


def get_http_status(error: RamifyError, *, retryable_status: int = 502) -> int:
    """Return the HTTP status of an error; `retryable_status` is used for retryable failures without their own.

    Exhausted limits and invalid requests are 400, which SDKs do not retry. A class without a status has
    its base class's status.
    """
    for cls in type(error).__mro__:
        if cls in HTTP_STATUS:
            return HTTP_STATUS[cls]
    if error.blame == "policy":
        return 400
    return retryable_status if error.retryable else 500


def get_error_code(error: RamifyError) -> str:
    """Return the code by which clients recognize an error, such as a history that is too long, or the error's name."""
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    if isinstance(error, ModelNotFound):
        return "model_not_found"
    return "budget_exceeded" if isinstance(error, BudgetExceeded) else error.name


def format_openai_error(message: str, error_type: str, code: str | int) -> dict[str, Any]:
    """Format an error as OpenAI does."""
    return {"error": {"message": message, "type": error_type, "param": None, "code": code}}


def format_sse(data: Mapping[str, Any], event_name: str | None = None) -> bytes:
    """Format one server-sent event."""
    head = b"" if event_name is None else b"event: %s\n" % event_name.encode()
    return head + b"data: %s\n\n" % msgspec.json.encode(data)
