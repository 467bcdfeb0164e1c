"""instructor against a server: a response model by a tool call, by a schema, and streamed.

Run by an interpreter that has instructor: `python check_instructor.py http://127.0.0.1:8000`.
"""

import sys
from typing import Literal

import instructor
import openai
from features import MAX_TOKENS, MODEL, QUESTION, FeatureReport, check_weather
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # else the schema allows the model any further property
    city: Literal["Paris", "Rome"]
    is_sunny: bool


def main(openai_client: openai.OpenAI, report: FeatureReport) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    common = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "max_retries": 0}
    with report.check("instructor", "tools"):
        client = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
        check_weather(client.create(response_model=Weather, **common).model_dump())
    with report.check("instructor", "structured output"):
        client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
        check_weather(client.create(response_model=Weather, **common).model_dump())
    with report.check("instructor", "streaming"):
        client = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
        parts = list(client.create_partial(response_model=Weather, **common))
        check_weather(parts[-1].model_dump())


if __name__ == "__main__":
    report = FeatureReport()
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        main(client, report)
    report.finish()
