"""Rendering turn by turn gives the tokens of a full rendering, if the template is append-only.

The oracle renders everything with Jinja and encodes all of the text. Its texts also decide whether the template is
append-only at a turn: what it writes for the longer conversation begins with the prompt and the reply, or it does not.
"""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ramify.model.render import RenderedPrompt
from tests.support.conversations import Conversation, conversations, wild
from tests.support.reference_renderer import get_oracle
from tests.support.renderers import MODELS, Model, renderer

EXAMPLES = min(400, max(3, settings.default.max_examples // 6)) if settings.default else 3


def converse(model: Model, conversation: Conversation) -> list[RenderedPrompt]:
    """Return the prompts of a rollout, after checking their text and their breaks against the oracle."""
    render, oracle = renderer(model.name), get_oracle(model.name)
    tools, prompts, messages = conversation.tools, [], []
    history, expected = None, ""
    for new_messages, reply in [
        *((turn.messages, turn.reply) for turn in conversation.turns),
        (conversation.last, None),
    ]:
        prompt = render.render(new_messages, tools) if history is None else render.bridge(history, new_messages)
        prompts.append(prompt)
        messages += new_messages
        text = oracle.text(messages, tools, generate=True)
        assert oracle.decode(prompt.token_ids) == oracle.decode(oracle.ids(text))
        assert (prompt.prefix_break is None) == text.startswith(expected), prompt.prefix_break
        if reply is not None:
            sampled = oracle.reply(messages, reply, tools)
            parsed = render.parse(sampled, prompt)
            if reply.reasoning is None and parsed.message.reasoning == "":  # the template writes empty reasoning
                reply = msgspec.structs.replace(reply, reasoning="")
            expected = text + oracle.reply_text(messages, reply, tools)
            history = prompt.with_reply(sampled, replace(parsed, message=reply))
            messages.append(reply)
    return prompts


@pytest.mark.parametrize("model", MODELS, ids=str)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_every_turn_equals_the_full_rendering_of_the_template(model: Model, data: st.DataObject):
    conversation = data.draw(conversations(model))
    oracle = get_oracle(model.name)
    for prompt in converse(model, conversation):
        text = oracle.text(prompt.messages, conversation.tools, generate=True)
        assert prompt.token_ids.tolist() == oracle.ids(text)
        assert prompt.token_ids.dtype == np.int32
        assert model.rewrites or prompt.prefix_break is None


@pytest.mark.parametrize("model", MODELS, ids=str)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_texts_with_any_whitespace_or_script_equal_the_text_of_the_template(model: Model, data: st.DataObject):
    converse(model, data.draw(conversations(model, wild)))
