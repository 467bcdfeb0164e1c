"""litellm against a server: chat, streams, tools, text, and the failures that it distinguishes by code and wording.

Run by an interpreter that has litellm: `python check_litellm.py http://127.0.0.1:8000`.
"""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it asks the network for prices

import litellm

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": "Reverse: abc"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


def main(url: str) -> None:
    common = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": 60}
    chat = {"model": "openai/tiny", "max_tokens": 16, **common}

    answer = litellm.completion(messages=MESSAGES, temperature=0, **chat)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens > 0, answer
    print(f"chat: {text!r}, {answer.usage.total_tokens} tokens")

    parts = litellm.completion(messages=MESSAGES, temperature=0, stream=True, **chat)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert streamed == text, (streamed, text)
    print("streamed chat: the same text")

    scored = litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=2, tools=[TOOL], **chat)
    assert len(scored.choices[0].logprobs.content) == scored.usage.completion_tokens
    print("chat with tools and logprobs: one logprob for each token")

    completion = litellm.text_completion(
        model="text-completion-openai/tiny", prompt="Reverse: abc", max_tokens=1, echo=True, logprobs=1, **common
    )
    assert completion.choices[0].text.startswith("Reverse: abc")
    print(f"text with echo: {len(completion.choices[0].logprobs.token_logprobs)} logprobs")

    expect(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "abc " * 20_000}], **chat)
    expect(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "abc " * 1_000_000}], **chat)
    expect(litellm.BadRequestError, messages=MESSAGES, frequency_penalty=0.5, **chat)
    expect(litellm.BadRequestError, messages=[{"role": "wizard", "content": "x"}], **chat)


def expect(kind: type[Exception], **request: object) -> None:
    """Assert that the request fails with exactly this exception."""
    try:
        litellm.completion(**request)
    except kind as error:
        assert type(error) is kind, error
        print(f"{kind.__name__}: {str(error)[:110]}...")
    else:
        raise AssertionError(f"expected {kind.__name__}")


if __name__ == "__main__":
    main(sys.argv[1])
