"""Which calls of a rollout are the agent's work at its task, and which are housekeeping.

Agent programs make calls that have nothing to do with the task: a title for the conversation, a "say hello" that tries
the connection. Hooks and tools may call the policy too. Training such calls on the task's reward teaches nonsense. So
`harness.train = "main"` trains the main conversations alone; a conversation is a call and all calls that continue it:

1. Calls made outside the agent's time (by `setup`, `finalize` or a reward) are never main.
2. If the harness itself asks in this process, as the chat loop does, its conversations are main, and no others.
3. Otherwise, if some calls offer tools, the conversations in which tools are offered are main. A sub-agent has tools,
   and so has an agent that goes on with a compacted history; a title or a probe has none.
4. Otherwise, if the task's prompt stands in a conversation as one message, or as one part of it, such conversations are
   main, and those that begin with the same system prompt.
5. Otherwise all are main: there is nothing to tell them apart by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ramify.trace import Message, TextPart

SYSTEM = ("system", "developer")
HOOK = "made by a hook of the environment, not by the agent"
ENDPOINT = "made over the endpoint, beside the harness's own conversation"
NO_TOOLS = "offers no tools, unlike other conversations of the agent"
NO_PROMPT = "holds neither the task's prompt nor the system prompt that stands before it"


@dataclass(frozen=True, slots=True)
class SelectedCall:
    """What decides about one recorded call."""

    node: int
    opening: tuple[Message, ...]
    """The messages before the first reply of its conversation; empty for a call that continues one."""
    continues: int | None
    """The reply that it continues, as a node; None for the first call of a conversation."""
    tools: bool
    remote: bool
    """Whether it came over the endpoint."""
    by_agent: bool
    """Whether it was made in the agent's time."""


def left_out(calls: Sequence[SelectedCall], prompt: Sequence[str]) -> dict[int, str]:
    """Return the calls that are not main, by node, with the reason; `prompt` has the texts of the task's prompt."""
    conversation: dict[int, int] = {}
    for call in calls:
        first = call.node if call.continues is None else conversation.get(call.continues, call.node)
        conversation[call.node] = first
    agents = [call for call in calls if call.by_agent]
    main, reason = _main(agents, conversation, prompt)
    found = {call.node: HOOK for call in calls if not call.by_agent}
    return found | {call.node: reason for call in agents if conversation[call.node] not in main}


def _main(
    calls: Sequence[SelectedCall], conversation: Mapping[int, int], prompt: Sequence[str]
) -> tuple[set[int], str]:
    """The main conversations, by their first reply, and the reason why others are not."""
    own = {conversation[call.node] for call in calls if not call.remote}
    if own:
        return own, ENDPOINT
    offering = {conversation[call.node] for call in calls if call.tools}
    if offering:
        return offering, NO_TOOLS
    openings = {call.node: call.opening for call in calls if call.continues is None}
    holding = {first for first, opening in openings.items() if _holds(opening, prompt)}
    if holding:
        systems = {_system(openings[first]) for first in holding} - {""}
        return holding | {first for first, opening in openings.items() if _system(opening) in systems}, NO_PROMPT
    return set(conversation.values()), ""


def _holds(opening: Sequence[Message], prompt: Sequence[str]) -> bool:
    wanted = {text.strip() for text in prompt}
    for message in opening:
        parts = () if isinstance(message.content, str) else message.content
        texts = [message.text, *(part.text for part in parts if isinstance(part, TextPart))]
        if any(text.strip() in wanted for text in texts):
            return True
    return False


def _system(opening: Sequence[Message]) -> str:
    return "\n".join(message.text for message in opening if message.role in SYSTEM)
