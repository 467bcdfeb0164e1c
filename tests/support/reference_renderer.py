"""A reference renderer: Jinja on all messages, then the tokenizer on the whole text."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.sandbox

from ramify.trace import Message
from tests.support.renderers import BY_NAME, tokenizer


def to_dict(message: Message) -> dict[str, Any]:
    message_dict: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        message_dict["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        message_dict["tool_call_id"] = message.tool_call_id
    return message_dict


class Oracle:
    """The template and tokenizer of one model, applied to whole conversations."""

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
        message_dicts = []
        for message in messages:
            message_dict = to_dict(message)
            if message.reasoning is not None and self.field:
                message_dict[self.field] = message.reasoning
            elif message.reasoning is not None and self.model.name != "deepseek-r1":  # whose template would remove it
                message_dict["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
            message_dicts.append(message_dict)
        return self.template.render(
            messages=message_dicts,
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
        """Return what a model that follows the template would sample, with the stop token if the template has one."""
        reply_text = self.reply_text(before, reply, tools)
        prompt = self.text(before, tools, generate=True)
        return self.ids_after(prompt, prompt + reply_text)

    def reply_text(self, before: Sequence[Message], reply: Message, tools: Sequence[Any] = ()) -> str:
        for context in (before, [Message("user", "x")]):
            prompt = self.text(context, tools, generate=True)
            full_text = self.text([*context, reply], tools, generate=False)
            if full_text.startswith(prompt):
                reply_text = full_text[len(prompt) :]
                stops = [at + len(stop) for stop in self.model.stops if (at := reply_text.find(stop)) >= 0]
                return reply_text[: min(stops)] if stops else reply_text
        # The prompt has opened reasoning, which the template does not show again.
        return f"{reply.reasoning or ''}\n</think>\n\n{reply.text}{self.model.stops[0]}"

    def ids_after(self, prompt: str, full_text: str) -> list[int]:
        """Return the ids after the prompt; encode the text after the prompt alone if tokens would merge."""
        prompt_ids, ids = self.ids(prompt), self.ids(full_text)
        return ids[len(prompt_ids) :] if ids[: len(prompt_ids)] == prompt_ids else self.ids(full_text[len(prompt) :])


@cache
def get_oracle(name: str) -> Oracle:
    return Oracle(name)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
