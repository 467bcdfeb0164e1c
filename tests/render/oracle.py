"""What a template itself says, by the shortest way: Jinja on all messages, the tokenizer on all the text."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.sandbox

from ramify.trace import Message
from tests.render.models import BY_NAME, tokenizer


def plain(message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    return told


class Oracle:
    """One model's template and tokenizer, used without any cleverness."""

    def __init__(self, name: str) -> None:
        self.model = BY_NAME[name]
        self.tokenizer = tokenizer(tuple(self.model.tokens), self.model.spaces)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = datetime.now().strftime
        source = self.model.source.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
        self.template = environment.from_string(source)
        self.field = "reasoning_content" if "reasoning_content" in source else None

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generate: bool) -> str:
        told = []
        for message in messages:
            one = plain(message)
            if message.reasoning is not None and self.field:
                one[self.field] = message.reasoning
            elif message.reasoning is not None and self.model.name != "deepseek-r1":  # which would cut it off again
                one["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
            told.append(one)
        return self.template.render(
            messages=told,
            tools=list(tools) or None,
            add_generation_prompt=generate,
            bos_token=self.model.bos or "",
            eos_token=self.model.stops[0],
            **self.model.args,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Any) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def reply(self, before: Sequence[Message], reply: Message, tools: Sequence[Any] = ()) -> list[int]:
        """What a model that follows the template would sample, its stop token included where the template has one."""
        said = self.reply_text(before, reply, tools)
        prompt = self.text(before, tools, generate=True)
        return self.behind(prompt, prompt + said)

    def reply_text(self, before: Sequence[Message], reply: Message, tools: Sequence[Any] = ()) -> str:
        for context in (before, [Message("user", "x")]):
            prompt = self.text(context, tools, generate=True)
            whole = self.text([*context, reply], tools, generate=False)
            if whole.startswith(prompt):
                said = whole[len(prompt) :]
                stops = [at + len(stop) for stop in self.model.stops if (at := said.find(stop)) >= 0]
                return said[: min(stops)] if stops else said
        # The prompt has opened reasoning, which the template does not show again.
        return f"{reply.reasoning or ''}\n</think>\n\n{reply.text}{self.model.stops[0]}"

    def behind(self, prompt: str, whole: str) -> list[int]:
        """The ids of the whole text behind those of the prompt, or its own where the two would merge."""
        first, ids = self.ids(prompt), self.ids(whole)
        return ids[len(first) :] if ids[: len(first)] == first else self.ids(whole[len(prompt) :])


@cache
def oracle_of(name: str) -> Oracle:
    return Oracle(name)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
