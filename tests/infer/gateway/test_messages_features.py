"""Anthropic's Messages: stop sequences, prefilled replies and documents."""

from typing import Any

import anthropic
import pytest

from ramify.trace import Message
from tests.support.engine import check_tokens

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_a_reply_is_named(open_scenario, stream: bool):
    async with open_scenario(["one two END three nine"]) as scenario:
        client: Any = scenario.anthropic(max_retries=0)
        fields = {"model": "any", "max_tokens": 50, "messages": [USER], "stop_sequences": ["nine", "END"]}
        if stream:
            async with client.messages.stream(**fields) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**fields)
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
        assert reply.content[0].text == "one two "


async def test_a_prefilled_reply_is_continued(open_scenario):
    async with open_scenario([" 1}", "done"]) as scenario:
        client: Any = scenario.anthropic(max_retries=0)
        reply = await client.messages.create(
            model="any", max_tokens=50, messages=[USER, {"role": "assistant", "content": '{"x":'}]
        )
        assert reply.content[0].text == " 1}", "without what the client wrote"
        prompt, sample, _ = scenario.engine.samples[0]
        decode = scenario.engine.renderer.tokenizer.decode
        assert decode(prompt).endswith('{"x":') and decode(sample).startswith(" 1}")
        node = scenario.trace.nodes[-1]
        assert node.message == Message("assistant", '{"x": 1}') and node.sampled_span[1] - node.sampled_span[0] == len(
            sample
        )
        history = [USER, {"role": "assistant", "content": '{"x": 1}'}, {"role": "user", "content": "b"}]
        await client.messages.create(model="any", max_tokens=50, messages=history)
        assert len(scenario.trace.leaves) == 1 and not scenario.reasons
        check_tokens(scenario.trace, scenario.engine)


async def test_chat_completions_continue_the_final_message_if_asked(open_scenario):
    async with open_scenario([" upon"]) as scenario:
        messages = [USER, {"role": "assistant", "content": "Once"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        client: Any = scenario.openai(max_retries=0)
        reply = await client.chat.completions.create(model="any", messages=messages, extra_body=extra)
        assert reply.choices[0].message.content == " upon"
        assert scenario.trace.nodes[-1].message.text == "Once upon"


async def test_documents_of_text_are_read_and_others_refused(open_scenario):
    async with open_scenario(["one", "two"]) as scenario:
        client: Any = scenario.anthropic(max_retries=0)

        async def send(source: dict):
            document = {"type": "document", "title": "Notes", "source": source}
            content = [document, {"type": "text", "text": "What?"}]
            await client.messages.create(model="any", max_tokens=9, messages=[{"role": "user", "content": content}])

        await send({"type": "text", "media_type": "text/plain", "data": "It rains."})
        await send({"type": "content", "content": [{"type": "text", "text": "It rains."}]})
        assert len(scenario.trace.leaves) == 2 and scenario.reasons == ["sample"], "both are the same text"
        assert scenario.trace.nodes[0].message.text == '<document title="Notes">\nIt rains.\n</document>\nWhat?'
        with pytest.raises(anthropic.BadRequestError, match=r"document: .*base64"):
            await send({"type": "base64", "media_type": "application/pdf", "data": "AAAA"})
