"""openai-agents against a server, over Chat Completions and over Responses: a tool, an output type, and streams.

Run by an interpreter that has openai-agents: `python check_openai_agents.py http://127.0.0.1:8000`.
"""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from features import MAX_TOKENS, MODEL, QUESTION, FeatureReport, check_weather
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    is_sunny: bool


async def main(url: str, report: FeatureReport) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    for name, model_type in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        await check_model(f"openai-agents {name}", model_type(model=MODEL, openai_client=client), report)


async def check_model(client: str, model: OpenAIChatCompletionsModel | OpenAIResponsesModel, report: FeatureReport):
    settings = ModelSettings(max_tokens=MAX_TOKENS, temperature=0)
    cities: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "sunny"

    requires_call = settings.resolve(ModelSettings(tool_choice="required"))
    agent = Agent("weather", model=model, tools=[get_weather], model_settings=requires_call)
    with report.check(client, "tools"):
        result = await Runner.run(agent, QUESTION, max_turns=4)
        assert cities and any(item.type == "tool_call_output_item" for item in result.new_items)
    with report.check(client, "structured output"):
        shaped = Agent("shape", model=model, output_type=Weather, model_settings=settings)
        check_weather((await Runner.run(shaped, QUESTION, max_turns=1)).final_output.model_dump())
    with report.check(client, "streaming"):
        streamed = Runner.run_streamed(agent, QUESTION, max_turns=4)
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
        assert "".join(deltas).endswith(streamed.final_output)


if __name__ == "__main__":
    report = FeatureReport()
    asyncio.run(main(sys.argv[1], report))
    report.finish()
