"""The size of a request, checked before it is parsed and rendered.

Rendering and tokenizing a text takes time in proportion to its length, and parsing needs memory for every value. Both
are bounded by what can fit the model's context, with a wide margin; the exact length is checked after rendering.
"""

from collections.abc import Iterable

from ramify.core.errors import ContextOverflow
from ramify.infer.dialects.model_call import ModelRequest
from ramify.infer.gateway.canonical import encode_canonical
from ramify.model.render.offload import OFFLOAD_MIN_CHARS

MAX_CHARS_PER_TOKEN = 16  # of a whole conversation, on average; English has four
MAX_UNKNOWN_CHARS = 4 * 2**20  # of a conversation with a model whose length is not known


def count_chars(request: ModelRequest) -> int:
    """Return the number of characters of a request that are rendered; tools and schemas count as they are encoded."""
    num_chars = len(request.prefill) + (len(encode_canonical(request.tools)) if request.tools else 0)
    if request.constraint is not None and request.constraint.json_schema is not None:
        num_chars += len(encode_canonical(request.constraint.json_schema))
    for message in request.messages:
        num_chars += len(message.text) + len(message.reasoning or "")
        num_chars += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return num_chars


def check_num_chars(num_chars: int, context_lengths: Iterable[int | None]) -> None:
    """Raise ContextOverflow if a text fits none of these context lengths in tokens; None is an unknown length."""
    lengths = list(context_lengths)
    max_chars = max(
        MAX_UNKNOWN_CHARS if length is None else max(OFFLOAD_MIN_CHARS, MAX_CHARS_PER_TOKEN * length)
        for length in lengths
    )
    if num_chars > max_chars:
        expected = "unknown" if None in lengths else f"{max(filter(None, lengths))} tokens"
        raise ContextOverflow(
            f"This model's maximum context length is {expected}; the prompt has {num_chars} characters, and at most "
            f"{max_chars} are rendered"
        )
