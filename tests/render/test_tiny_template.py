"""The template of the packaged model is append-only, and its replies are parsed back."""

import json
from pathlib import Path

import pytest

import ramify
from ramify.render import load_renderer
from ramify.trace import Message, ToolCall
from tests.support.renderers import TOOLS

TINY = Path(ramify.__file__).parent / "models" / "tiny"
pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the packaged model is not built")


def test_tiny_reuses_all_tokens_and_parses_its_own_replies():
    renderer = load_renderer(TINY)
    prompt = renderer.render([Message("system", "Be brief."), Message("user", "Reverse abc. é日")], TOOLS)
    for number in range(4):
        call = (ToolCall("call00000", "run", '{"code": "x\\"y", "fast": true}'),) if number % 2 == 0 else ()
        reply = Message("assistant", "" if call else f"cba {number}", None, call)
        full_ids = renderer.render([*prompt.messages, reply], TOOLS, add_generation_prompt=False).token_ids
        assert full_ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
        sampled = full_ids[len(prompt.token_ids) :].tolist()
        sampled = sampled[: 1 + min(sampled.index(id) for id in renderer.stop_ids if id in sampled)]
        parsed = renderer.parse(sampled, prompt)
        assert parsed.problems == ()
        assert parsed.message.content == reply.content
        arguments = [json.loads(call.arguments) for call in parsed.message.tool_calls]
        assert arguments == [json.loads(call.arguments) for call in reply.tool_calls]
        results = [Message("tool", "done", tool_call_id=call.id) for call in parsed.message.tool_calls]
        prompt = renderer.bridge(prompt.with_reply(sampled, parsed), results or [Message("user", "And now?")])
        assert prompt.prefix_break is None
        assert prompt.token_ids.tolist() == renderer.render(prompt.messages, TOOLS).token_ids.tolist()
