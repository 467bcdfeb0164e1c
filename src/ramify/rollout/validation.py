"""Validate a task without a model: set it up, run its `validate` hook, and play its gold replies through the harness.

It is a normal attempt with a scripted policy. So it detects everything that would fail in a perfect rollout: a setup
that raises, a tool that does not answer, a reward that cannot be computed or that a perfect agent does not get. For a
task without gold replies, the script is one empty reply: its rewards run, but it is not checked whether a correct
answer earns a reward.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ramify.core.errors import BudgetExceeded, ConfigInvalid, EnvironmentFault, RamifyError
from ramify.core.names import suggest
from ramify.env import Task, ToolSet, User
from ramify.infer.gateway.policy import MessagePolicy, PolicyRequest, SampledReply
from ramify.model.images import decode_image
from ramify.rollout.attempt import AttemptRunner
from ramify.rollout.environment import Environment
from ramify.trace import Media, Message, ToolCall, Trace, Usage

if TYPE_CHECKING:
    from ramify.infer.gateway import Gateway

REPLY_KEYS = ("role", "content", "reasoning_content", "tool_calls")


class ScriptedPolicy(MessagePolicy):
    """Answers with the given replies, one after another. After the last one, a call raises `exhausted_error`."""

    name = "scripted"

    def __init__(
        self, replies: Sequence[str | Message] = (), exhausted_error: type[RamifyError] = EnvironmentFault
    ) -> None:
        self.replies: list[str | Message] = list(replies)
        self.exhausted_error = exhausted_error
        self.num_played = 0

    async def process_images(self, images: Iterable[Media]) -> None:
        """Decode images as a policy with a vision model does. Raises ImageInvalid."""
        for image in images:
            await asyncio.to_thread(decode_image, image.data)

    async def sample(self, request: PolicyRequest) -> SampledReply:
        """Return the next reply."""
        if self.num_played == len(self.replies):
            count = "1 reply" if self.num_played == 1 else f"{self.num_played} replies"
            raise self.exhausted_error(f"the script has {count}, but the conversation is not over")
        reply = self.replies[self.num_played]
        self.num_played += 1
        message = Message("assistant", reply) if isinstance(reply, str) else reply
        return self._build_reply(request.prompt, message, "stop", Usage())


def parse_gold_replies(gold: Any) -> list[str | Message]:
    """Return the replies in order. Raises EnvironmentFault, which names the invalid reply.

    `gold` is one reply, or a list with one for each model call, including those with tool calls. A reply is a text, a
    dict in the form of a chat message, or a Message.
    """
    replies: list[Any] = [gold] if isinstance(gold, (str, Message, Mapping)) else list(gold)
    return [_parse_reply(reply, f"gold[{index}]") for index, reply in enumerate(replies)]


def _parse_reply(reply: Any, location: str) -> str | Message:
    if isinstance(reply, str | Message):
        return reply
    if not isinstance(reply, Mapping):
        raise EnvironmentFault(f"{location}: expected a text, a dict or a Message, found a {type(reply).__qualname__}")
    fields = cast(Mapping[str, Any], reply)
    for key in fields:
        if key not in REPLY_KEYS:
            hint = suggest(str(key), REPLY_KEYS, f"a reply has {', '.join(REPLY_KEYS)}")
            raise EnvironmentFault(f"{location}: unknown key {key!r}; {hint}")
    role, content = fields.get("role", "assistant"), fields.get("content")
    if role != "assistant":
        raise EnvironmentFault(f"{location}: role {role!r}, expected 'assistant': only the agent's replies are given")
    if not (content is None or isinstance(content, str)):
        raise EnvironmentFault(f"{location}.content: expected a text, found a {type(content).__qualname__}")
    calls = enumerate(fields.get("tool_calls") or ())
    tool_calls = tuple(_parse_tool_call(call, f"{location}.tool_calls[{index}]") for index, call in calls)
    return Message("assistant", content or "", fields.get("reasoning_content"), tool_calls)


def _parse_tool_call(call: Any, location: str) -> ToolCall:
    """Return a tool call. Its arguments are a dict or JSON text; in OpenAI's format, name and arguments are in a dict
    `function`."""
    fields: Mapping[str, Any] = cast(Mapping[str, Any], call) if isinstance(call, Mapping) else {}
    function: Any = fields.get("function", fields)
    called: Mapping[str, Any] = cast(Mapping[str, Any], function) if isinstance(function, Mapping) else {}
    if not isinstance(called.get("name"), str):
        raise EnvironmentFault(f"{location} needs a name: {{'name': TOOL, 'arguments': {{...}}}}")
    arguments: Any = called.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(fields.get("id") or location), called["name"], text)


@dataclass(frozen=True, slots=True)
class TaskValidation:
    """The result of validating one task."""

    task: str  # the identity of the task
    problem: str | None  # what is wrong with the task; None if it is valid
    reward: float | None  # the reward of the replies; None if the rewards did not run
    has_gold: bool  # whether the task has gold replies; otherwise one empty reply was played
    seconds: float  # the duration of all phases
    trace: Trace


async def validate_task(
    env: Environment, task: Task, *, gateway: "Gateway | None" = None, seed: int = 0
) -> TaskValidation:
    """Validate one task."""
    identity = task.identity
    attempt = _ValidationAttempt(env, task, ScriptedPolicy(), gateway, f"validate-{identity}", "", 0, seed, False, None)
    try:
        env.check_task(task)
    except ConfigInvalid as error:
        return TaskValidation(identity, error.message, None, False, 0.0, attempt.trace)
    await attempt.run()
    timing = attempt.trace.timing
    seconds = timing.boot + timing.setup + timing.harness + timing.finalize + timing.scoring
    return TaskValidation(
        identity, attempt.find_problem(), attempt.gold_reward(), attempt.has_gold, seconds, attempt.trace
    )


class _ValidationAttempt(AttemptRunner):
    """An attempt that plays the task's gold replies, or one empty reply if it has none."""

    has_gold = False

    async def run_harness(self, tools: ToolSet, user: User | None) -> str:
        hooks = self.env.hooks
        if hooks.validate is not None:
            _check_validate_result(await hooks.validate(self.context))
        gold = None if hooks.gold is None else await hooks.gold(self.context)
        policy = self.session.policy
        assert isinstance(policy, ScriptedPolicy)
        if gold is None:
            policy.replies = [""]
            policy.exhausted_error = BudgetExceeded
            return await super().run_harness(tools, user)
        self.has_gold = True
        policy.replies = parse_gold_replies(gold)
        stop = await super().run_harness(tools, user)
        if policy.num_played < len(policy.replies):
            played = f"{policy.num_played} of {len(policy.replies)}"
            raise EnvironmentFault(f"{played} gold replies were played before the rollout ended ({stop})")
        return stop

    def gold_reward(self) -> float | None:
        """Return the reward of the replies without group rewards, or None if a reward is missing."""
        rewards = [self.trace.rewards[hook.name] for hook in self.env.hooks.rewards]
        if not rewards or any(reward is None for reward in rewards):
            return None
        return sum(reward[0] * reward[1] for reward in rewards if reward is not None)

    def find_problem(self) -> str | None:
        """Return what is wrong with the task, or None."""
        errors = [error for error in self.trace.errors if self.has_gold or error.blame == "system"]
        if errors:
            return "; ".join(f"{error.name}: {error.message}" for error in errors)
        reward = self.gold_reward()
        if self.has_gold and reward is not None and reward <= 0:
            return f"the reward of the gold replies is {reward:g}; expected more than 0"
        return None


def _check_validate_result(result: Any) -> None:
    """Raise EnvironmentFault if the `validate` hook returned False or a text; None and True mean valid."""
    if isinstance(result, str) and result:
        raise EnvironmentFault(f"validate: {result}")
    if result is False:
        raise EnvironmentFault("validate returned False")
