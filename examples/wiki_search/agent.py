"""An agent that makes plain chat calls to the rollout's endpoint: it works with the taskset's tools, and lets the model
summarize long results before they enter the conversation.

The calls for summaries offer no tools, so they are recorded but, by default, not trained on.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

import ramify as rf

SUMMARIZE = "Summarize what this text says about the question."


class SummaryAgentConfig(rf.HarnessConfig):
    """The options of the agent."""

    summary_chars: int = Field(default=1000, ge=1)
    """The model summarizes results of tools that are longer."""


class SummaryAgent(rf.Harness):
    """Calls the model and its tools in turn until a reply has no tool call."""

    config: SummaryAgentConfig
    requires_endpoint = True

    async def run(
        self, context: rf.RolloutContext, session: Any, tools: Any, user: rf.User | None, stop_hooks: Sequence[Any]
    ) -> str:
        """Answer the question of the task."""
        endpoint = context.endpoint
        client = rf.ChatClient(
            rf.ChatClientConfig(base_url=endpoint.base_url, model=endpoint.model), api_key=endpoint.api_key
        )
        messages = self.format_prompt(context.task)
        while session.exhausted_limit is None:
            reply = (await client.complete(messages, tools.schemas)).message
            if not reply.tool_calls:
                return "done"
            messages.append(
                {"role": "assistant", "content": reply.text, "tool_calls": list(map(format_call, reply.tool_calls))}
            )
            for call in reply.tool_calls:
                result = (await tools.call(call, context)).text
                if len(result) > self.config.summary_chars and session.exhausted_limit is None:
                    request = f"{SUMMARIZE}\nQuestion: {context.task.prompt}\nText: {result}"
                    result = (await client.complete([{"role": "user", "content": request}])).text
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return session.exhausted_limit


def format_call(call: rf.ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's format."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
