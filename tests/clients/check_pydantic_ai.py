"""pydantic-ai against a server: a tool, an output type by a tool call and by a schema, and streams.

Run by an interpreter that has pydantic-ai-slim[openai]: `python check_pydantic_ai.py http://127.0.0.1:8000`.
"""

import asyncio
import sys
from typing import Literal

from features import MAX_TOKENS, MODEL, QUESTION, FeatureReport, check_city, check_weather
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool


async def main(url: str, report: FeatureReport) -> None:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = ModelSettings(max_tokens=MAX_TOKENS, temperature=0)
    with report.check("pydantic-ai", "tools"):
        asked: list[str] = []
        output_tool = ToolOutput(Weather, name="final_weather")
        agent = Agent(model, output_type=output_tool, model_settings=settings, retries=0)

        @agent.tool_plain
        def get_weather(city: Literal["Paris", "Rome"]) -> str:
            """Return the weather of a city."""
            asked.append(city)
            if len(asked) > 3:
                raise StopAsyncIteration
            return "sunny"

        try:
            result = await agent.run(QUESTION)
            check_weather(result.output.model_dump())
        except StopAsyncIteration:  # the model only calls the other tool
            check_city({"city": asked[0]})
    with report.check("pydantic-ai", "structured output"):
        for output_type in (ToolOutput(Weather), NativeOutput(Weather)):
            result = await Agent(model, output_type=output_type, model_settings=settings, retries=0).run(QUESTION)
            check_weather(result.output.model_dump())
    with report.check("pydantic-ai", "streaming"):
        agent = Agent(model, model_settings=settings)
        async with agent.run_stream(QUESTION) as stream:
            text = "".join([part async for part in stream.stream_text(delta=True, debounce_by=None)])
        assert text and text.strip() == (await agent.run(QUESTION)).output.strip()
        async with Agent(model, output_type=NativeOutput(Weather), model_settings=settings).run_stream(
            QUESTION
        ) as stream:
            check_weather((await stream.get_output()).model_dump())


if __name__ == "__main__":
    report = FeatureReport()
    asyncio.run(main(sys.argv[1], report))
    report.finish()
