"""The openai SDK against a server: Chat Completions and Responses, each with tools, structured output and streams.

Run by an interpreter that has openai: `python check_openai.py http://127.0.0.1:8000`.
"""

import json
import sys
from typing import Literal

import openai
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

FUNCTION = {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": TOOL_SCHEMA}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", "strict": True, **FUNCTION}
MESSAGES = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    is_sunny: bool


def check_chat(client: openai.OpenAI, report: FeatureReport) -> None:
    create = client.chat.completions.create
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
    named = {"type": "function", "function": {"name": TOOL_NAME}}
    with report.check("openai chat", "tools"):
        for choice in ("required", named):
            completion = create(**common, tools=[CHAT_TOOL], tool_choice=choice)
            (call, *_) = completion.choices[0].message.tool_calls
            assert call.function.name == TOOL_NAME and completion.choices[0].finish_reason == "tool_calls"
            check_city(json.loads(call.function.arguments))
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        history = [*MESSAGES, completion.choices[0].message, result]
        create(**{**common, "messages": history}, tools=[CHAT_TOOL])
    with report.check("openai chat", "structured output"):
        parsed = client.chat.completions.parse(**common, response_format=Weather)
        check_weather(parsed.choices[0].message.parsed.model_dump())
        json_mode = create(**common, response_format={"type": "json_object"})
        if json_mode.choices[0].finish_reason == "stop":  # the model may write an object that does not end in time
            assert isinstance(json.loads(json_mode.choices[0].message.content), dict)
    with report.check("openai chat", "streaming"):
        text = create(**common).choices[0].message.content
        assert "".join(part.choices[0].delta.content or "" for part in create(**common, stream=True)) == text
        with client.chat.completions.stream(**common, tools=[CHAT_TOOL], tool_choice="required") as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        whole = create(**common, tools=[CHAT_TOOL], tool_choice="required").choices[0].message.tool_calls
        assert [call.function.arguments for call in streamed] == [call.function.arguments for call in whole]


def check_responses(client: openai.OpenAI, report: FeatureReport) -> None:
    create = client.responses.create
    common = {"model": MODEL, "max_output_tokens": MAX_TOKENS, "temperature": 0}
    with report.check("openai responses", "tools"):
        for choice in ("required", {"type": "function", "name": TOOL_NAME}):
            first = create(**common, input=QUESTION, tools=[RESPONSES_TOOL], tool_choice=choice)
            (call, *_) = [item for item in first.output if item.type == "function_call"]
            assert call.name == TOOL_NAME
            check_city(json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = create(**common, input=[result], previous_response_id=first.id, tools=[RESPONSES_TOOL])
        assert second.previous_response_id == first.id
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        third = create(**common, input=[*MESSAGES, *references, result], tools=[RESPONSES_TOOL])
        assert third.usage.input_tokens == second.usage.input_tokens
        assert client.responses.retrieve(first.id).output == first.output
    with report.check("openai responses", "structured output"):
        parsed = client.responses.parse(**common, input=QUESTION, text_format=Weather)
        check_weather(parsed.output_parsed.model_dump())
    with report.check("openai responses", "streaming"):
        text = create(**common, input=QUESTION).output_text
        events = list(create(**common, input=QUESTION, stream=True))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with client.responses.stream(
            **common, input=QUESTION, tools=[RESPONSES_TOOL], tool_choice="required"
        ) as stream:
            (call, *_) = [item for item in stream.get_final_response().output if item.type == "function_call"]
        check_city(json.loads(call.arguments))


if __name__ == "__main__":
    report = FeatureReport()
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        check_chat(client, report)
        check_responses(client, report)
    report.finish()
