"""Find the main calls of a rollout: those with which the agent works on its task.

Agent programs make calls that have nothing to do with the task: a title for the conversation, a "say hello" that tests
the connection. Hooks and tools may call the policy too. Training such calls on the task's reward would reinforce calls
unrelated to the task. So `harness.train = "main"` trains only the main conversations. A conversation is a call and all
calls that continue it:

1. Calls made outside the agent's time (by `setup`, `finalize`, a reward, or the simulated user of a program) are never
   main.
2. If the harness makes calls in this process, as the chat loop does, its conversations are main, and no others.
3. Otherwise, if some calls offer tools, the conversations in which tools are offered are main. A sub-agent has tools,
   and so has an agent that goes on with a compacted history; a title or a probe has none.
4. Otherwise, if a message before the first reply, or one part of it, is the task's prompt, such conversations are main,
   and those with the same system prompt.
5. Otherwise all are main: nothing distinguishes them.
"""

from collections.abc import Callable, Mapping, Sequence, Set

from msgspec import Struct

from ramify.model.render.outline import SYSTEM_ROLES
from ramify.trace import Message, TextPart

HOOK_REASON = "made by a hook of the environment, not by the agent"
ENDPOINT_REASON = "made over the endpoint, beside the harness's own conversation"
NO_TOOLS_REASON = "offers no tools, unlike other conversations of the agent"
NO_PROMPT_REASON = "holds neither the task's prompt nor the system prompt that stands before it"


class RecordedCall(Struct, frozen=True):
    """The properties of a recorded call that decide whether it is main."""

    node: int
    initial_messages: tuple[Message, ...]
    """The messages before the first reply of the conversation; empty for a call that continues one."""
    previous_node: int | None
    """The node of the reply that the call continues; None for the first call of a conversation."""
    has_tools: bool
    """Whether the call offered tools."""
    is_remote: bool
    """Whether the call came over the endpoint."""
    by_agent: bool
    """Whether the call was made while the agent ran, not by `setup`, `finalize`, a reward or a program's user."""


def find_side_calls(calls: Sequence[RecordedCall], get_prompt_texts: Callable[[], Sequence[str]]) -> dict[int, str]:
    """Return why each side call is not main, by its node.

    `get_prompt_texts` returns the texts of the task's prompt; it is called only if nothing else decides.
    """
    first_nodes: dict[int, int] = {}  # by the node of a call, the node of the first call of its conversation
    for call in calls:
        first_node = call.node if call.previous_node is None else first_nodes.get(call.previous_node, call.node)
        first_nodes[call.node] = first_node
    agent_calls = [call for call in calls if call.by_agent]
    main, reason = _find_main(agent_calls, first_nodes, get_prompt_texts)
    by_hooks = {call.node: HOOK_REASON for call in calls if not call.by_agent}
    return by_hooks | {call.node: reason for call in agent_calls if first_nodes[call.node] not in main}


def _find_main(
    calls: Sequence[RecordedCall], first_nodes: Mapping[int, int], get_prompt_texts: Callable[[], Sequence[str]]
) -> tuple[set[int], str]:
    """Return the main conversations, by the node of their first call, and the reason why others are not main."""
    in_process = {first_nodes[call.node] for call in calls if not call.is_remote}
    if in_process:
        return in_process, ENDPOINT_REASON
    with_tools = {first_nodes[call.node] for call in calls if call.has_tools}
    if with_tools:
        return with_tools, NO_TOOLS_REASON
    openings = {call.node: call.initial_messages for call in calls if call.previous_node is None}
    prompts = {text.strip() for text in get_prompt_texts()}
    with_prompt = {first_node for first_node, opening in openings.items() if _contains_any(opening, prompts)}
    if with_prompt:
        systems = {_get_system_prompt(openings[first_node]) for first_node in with_prompt} - {""}
        same_system = {first_node for first_node, opening in openings.items() if _get_system_prompt(opening) in systems}
        return with_prompt | same_system, NO_PROMPT_REASON
    return set(first_nodes.values()), ""


def _contains_any(messages: Sequence[Message], prompts: Set[str]) -> bool:
    for message in messages:
        parts = () if isinstance(message.content, str) else message.content
        texts = [message.text, *(part.text for part in parts if isinstance(part, TextPart))]
        if any(text.strip() in prompts for text in texts):
            return True
    return False


def _get_system_prompt(messages: Sequence[Message]) -> str:
    return "\n".join(message.text for message in messages if message.role in SYSTEM_ROLES)
