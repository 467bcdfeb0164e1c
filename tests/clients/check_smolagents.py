"""smolagents against a server: an agent that calls tools, an answer with a schema, and streams.

Run by an interpreter that has smolagents[openai]: `python check_smolagents.py http://127.0.0.1:8000`.
"""

import json
import sys

from features import CITIES, MAX_TOKENS, MODEL, QUESTION, SCHEMA, FeatureReport, check_weather
from smolagents import ActionStep, ChatMessage, OpenAIModel, Tool, ToolCallingAgent


class GetWeather(Tool):
    name = "get_weather"
    description = "Return the weather of a city."
    inputs = {"city": {"type": "string", "description": "The city.", "enum": CITIES}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"sunny in {city}"


class FinalAnswer(Tool):
    name = "final_answer"
    description = "Give the final answer."
    inputs = {"answer": {"type": "string", "description": "The answer.", "enum": ["sunny"]}}
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


def main(url: str, report: FeatureReport) -> None:
    model = OpenAIModel(MODEL, api_base=f"{url}/v1", api_key="none", max_tokens=MAX_TOKENS, temperature=0)
    with report.check("smolagents", "tools"):
        run_agent(model, stream=False)
    with report.check("smolagents", "structured output"):
        response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
        question = ChatMessage(role="user", content=QUESTION)
        check_weather(json.loads(model.generate([question], response_format=response_format).content))
    with report.check("smolagents", "streaming"):
        run_agent(model, stream=True)
        parts = model.generate_stream([ChatMessage(role="user", content=QUESTION)])
        text = "".join(part.content or "" for part in parts)
        assert text == model.generate([ChatMessage(role="user", content=QUESTION)]).content


def run_agent(model: OpenAIModel, *, stream: bool) -> None:
    """Run an agent for at most two steps, which require a call; its first call must be parsed and run."""
    templates = {"system_prompt": "Answer with tools.", "planning": {}, "managed_agent": {}, "final_answer": {}}
    templates["final_answer"] = {"pre_messages": "Answer.", "post_messages": "Answer now."}
    templates["planning"] = dict.fromkeys(
        ("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"), "Plan."
    )
    templates["managed_agent"] = {"task": "{{task}}", "report": "{{final_answer}}"}
    agent = ToolCallingAgent(
        [GetWeather(), FinalAnswer()],
        model,
        max_steps=2,
        prompt_templates=templates,
        stream_outputs=stream,
        verbosity_level=0,
    )
    agent.run(QUESTION)
    (step, *_) = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert step.error is None and step.tool_calls, step.error
    assert step.observations or step.is_final_answer


if __name__ == "__main__":
    report = FeatureReport()
    main(sys.argv[1], report)
    report.finish()
