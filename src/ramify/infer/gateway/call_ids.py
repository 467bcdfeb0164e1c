"""Unique ids for the tool calls of a rollout.

A client sends back only messages, so two equal samples whose calls have equal ids cannot be distinguished: all their
continuations would attach to the newest sample. So an id that the rollout has already used is replaced.
"""

import hashlib
from dataclasses import replace

import msgspec

from ramify.infer.gateway.conversation_trie import TrieNode
from ramify.infer.gateway.policy import SampledReply
from ramify.model.render import TokenHistory
from ramify.trace import ToolCall


class CallIdRegistry:
    """The ids of all tool calls of one rollout."""

    def __init__(self) -> None:
        self._used_ids = {""}  # some chat endpoints send no id

    def make_unique(self, sampled: SampledReply, position: TrieNode) -> SampledReply:
        """Return a reply at `position` whose tool calls have new ids where the rollout has already used theirs.

        A new id depends on the conversation and the number of its samples, so a repeated rollout has the same ids.
        """
        calls: list[ToolCall] = []
        for call in sampled.message.tool_calls:
            call_id, seed = call.id, position.digest + b"%d" % position.num_replies
            while call_id in self._used_ids:
                seed = hashlib.sha256(seed).digest()
                call_id = seed.hex()[:9]  # nine letters and digits, as the strictest template requires
            self._used_ids.add(call_id)
            calls.append(call if call_id == call.id else msgspec.structs.replace(call, id=call_id))
        if tuple(calls) == sampled.message.tool_calls:
            return sampled
        message, history = msgspec.structs.replace(sampled.message, tool_calls=tuple(calls)), sampled.history
        messages = (*history.messages[:-1], message)
        history = TokenHistory.build(
            messages, history.tools, history.token_ids, num_sampled=history.num_sampled, images=history.images
        )
        return replace(sampled, message=message, history=history)
