"""The anthropic SDK against a server: tools, structured output, streams and a prefilled reply.

Run by an interpreter that has anthropic: `python check_anthropic.py http://127.0.0.1:8000`.
"""

import sys
from typing import Literal

import anthropic
from features import (
    MAX_TOKENS,
    MODEL,
    QUESTION,
    TOOL_DESCRIPTION,
    TOOL_NAME,
    TOOL_SCHEMA,
    FeatureReport,
    check_city,
    check_weather,
)
from pydantic import BaseModel

TOOL = {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "input_schema": TOOL_SCHEMA}
MESSAGES = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    is_sunny: bool


def main(client: anthropic.Anthropic, report: FeatureReport) -> None:
    common = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": MESSAGES}
    with report.check("anthropic", "tools"):
        for choice in ({"type": "any"}, {"type": "tool", "name": TOOL_NAME}):
            reply = client.messages.create(**common, tools=[TOOL], tool_choice=choice)
            (call, *_) = [block for block in reply.content if block.type == "tool_use"]
            assert call.name == TOOL_NAME and reply.stop_reason == "tool_use"
            check_city(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        history = [*MESSAGES, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        client.messages.create(**{**common, "messages": history}, tools=[TOOL])
    with report.check("anthropic", "structured output"):
        parsed = client.messages.parse(**common, output_format=Weather)
        check_weather(parsed.parsed_output.model_dump())
    with report.check("anthropic", "streaming"):
        with client.messages.stream(**common) as stream:
            text = "".join(stream.text_stream)
            assert text == stream.get_final_message().content[0].text
        with client.messages.stream(**common, tools=[TOOL], tool_choice={"type": "any"}) as stream:
            (call, *_) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
        check_city(call.input)
    with report.check("anthropic", "prefill"):
        prefilled = [*MESSAGES, {"role": "assistant", "content": "The weather"}]
        reply = client.messages.create(**{**common, "messages": prefilled})
        assert not reply.content[0].text.startswith("The weather")


if __name__ == "__main__":
    report = FeatureReport()
    with anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60) as client:
        main(client, report)
    report.finish()
