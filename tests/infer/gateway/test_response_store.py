"""The Responses API with state: items by reference, conversations, responses by id, and compaction."""

import asyncio
from typing import Any

import openai
import pytest

from ramify.infer.dialects.model_call import ModelReply, ModelRequest, ParsedRequest
from ramify.infer.dialects.response_store import MAX_CONVERSATIONS, MAX_STORED_BYTES, ResponseStore
from ramify.trace import Media, Message, Usage
from tests.support.engine import check_tokens

CALL = '<think>hm</think>I look.<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}


async def test_items_by_reference_continue_the_conversation(open_scenario):
    async with open_scenario([CALL, "done"]) as scenario:
        client: Any = scenario.openai(max_retries=0)
        question = {"role": "user", "content": "a"}
        first = await client.responses.create(model="any", input=[question], tools=[TOOL])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"}
        second = await client.responses.create(model="any", input=[question, *references, result], tools=[TOOL])
        assert second.output_text == "done" and len(scenario.trace.leaves) == 1 and not scenario.reasons
        check_tokens(scenario.trace, scenario.engine)
        with pytest.raises(openai.BadRequestError, match="msg_missing"):
            await client.responses.create(
                model="any", input=[question, {"type": "item_reference", "id": "msg_missing"}]
            )


@pytest.mark.parametrize("with_items", [False, True])
async def test_a_conversation_object_holds_the_history(open_scenario, with_items: bool):
    async with open_scenario(["one", "two"]) as scenario:
        client: Any = scenario.openai(max_retries=0)
        items = [{"role": "user", "content": "earlier"}, {"role": "assistant", "content": "yes"}] if with_items else []
        conversation = await client.conversations.create(items=items)
        assert (await client.conversations.retrieve(conversation.id)).id == conversation.id
        for text in ("a", "b"):
            await client.responses.create(model="any", input=text, conversation=conversation.id, instructions="Brief.")
        texts = [message.text for message in scenario.trace.branches[0].messages]
        assert texts == ["Brief.", *(["earlier", "yes"] if with_items else []), "a", "one", "b", "two"]
        assert len(scenario.trace.leaves) == 1
        with pytest.raises(openai.BadRequestError, match="conv_missing"):
            await client.responses.create(model="any", input="a", conversation="conv_missing")


async def test_a_reply_that_is_not_stored_stays_in_its_conversation(open_scenario):
    async with open_scenario(["one", "two"]) as scenario:
        client: Any = scenario.openai(max_retries=0)
        conversation = await client.conversations.create(items=[])
        for text in ("a", "b"):
            await client.responses.create(model="any", input=text, conversation=conversation.id, store=False)
        assert [message.text for message in scenario.trace.branches[0].messages] == ["a", "one", "b", "two"]


async def test_a_reply_is_returned_if_its_conversation_was_removed_meanwhile(open_scenario):
    async with open_scenario(["one"]) as scenario:
        client: Any = scenario.openai(max_retries=0)
        conversation = await client.conversations.create(items=[])
        scenario.engine.gate.clear()
        reply = asyncio.ensure_future(client.responses.create(model="any", input="a", conversation=conversation.id))
        while not scenario.engine.requests:
            await asyncio.sleep(0.001)
        for _ in range(MAX_CONVERSATIONS):
            scenario.session.response_store.create_conversation(())
        scenario.engine.gate.set()
        assert (await reply).output_text == "one"


def test_old_replies_are_removed_if_their_requests_are_large():
    store = ResponseStore(keeps_messages=True)
    image = Media("0" * 64, "image/png", bytes(MAX_STORED_BYTES // 4))
    for index in range(8):
        request = ModelRequest((Message("user", "a"),), media={image.hash: image})
        reply = ModelReply(Message("assistant", "b"), "stop", Usage(1, 1), 0, str(index))
        store.add(ParsedRequest(request), reply)
    assert [index for index in range(8) if store.find_reply(str(index))] == [5, 6, 7]


async def test_a_response_can_be_retrieved_by_its_id(open_scenario):
    async with open_scenario([CALL]) as scenario:
        client: Any = scenario.openai(max_retries=0)
        created = await client.responses.create(model="any", input="a", tools=[TOOL])
        retrieved = await client.responses.retrieve(created.id)
        assert retrieved == created and retrieved.output_text == "I look."
        with pytest.raises(openai.NotFoundError, match="resp_missing"):
            await client.responses.retrieve("resp_missing")


async def test_a_conversation_can_be_compacted_to_a_summary_of_the_model(open_scenario):
    async with open_scenario(["work", "a summary", "done"]) as scenario:
        client: Any = scenario.openai(max_retries=0)
        first = await client.responses.create(model="any", input="the task")
        history = [{"role": "user", "content": "the task"}, *first.output]
        compacted = await client.responses.compact(model="any", input=history)
        assert [item.type for item in compacted.output] == ["message", "compaction"]
        assert compacted.usage.output_tokens > 0
        items = [item.model_dump(exclude_none=True) for item in compacted.output]
        last = await client.responses.create(model="any", input=[*items, {"role": "user", "content": "go on"}])
        assert last.output_text == "done"
        texts = [message.text for message in scenario.trace.branches[-1].messages]
        assert texts == ["the task", "a summary", "go on", "done"]
