"""The packaged model: an ordinary directory, which writes the formats of the tasksets and has little skill."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.model.render import load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.trace import Message, ToolCall

TINY = resolve_model_path("tiny")
RENDERER = load_renderer(TINY)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "click_link",
            "description": "Follow a link.",
            "parameters": {"type": "object", "properties": {"article": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "go_back"}},
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, local_files_only=True).eval()


def test_transformers_loads_model_and_tokenizer(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    assert 1_000_000 <= sum(weight.numel() for weight in model.parameters()) <= 2_500_000
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    rendered = RENDERER.render([Message("system", "Be brief."), Message("user", "hi")])
    assert list(ids) == rendered.token_ids.tolist()


def test_directory_is_small_and_records_its_training():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 6_000_000
    record = json.loads((TINY / "ramify.json").read_text())
    figures = record["figures"]
    assert record["seed"] == 0
    assert figures["well_formed"] >= 0.95
    assert 0.40 <= figures["similarity"] <= 0.60
    assert figures["exact"] <= 0.10
    assert figures["tool_calls"] >= 0.80


def test_initial_skill_suffices_for_every_taskset():
    """A policy that never scores learns nothing: it knows the format of each taskset, and rewards vary."""
    figures = json.loads((TINY / "ramify.json").read_text())["figures"]
    assert figures["walk_calls"] >= 0.8
    assert figures["walk_links"] >= 0.5
    assert 0.1 <= figures["walk_reached"] <= 0.5
    assert figures["sort_tagged"] >= 0.9
    assert 0.1 <= figures["sort_reward"] <= 0.5
    assert figures["guess_valid"] >= 0.5
    assert 0.1 <= figures["guess_reward"] <= 0.4
    assert figures["guess_spread"] >= 0.03


def test_initial_heads_look_back():
    """Before training the first layer attends one, two and three characters back."""
    import torch
    from transformers import LlamaForCausalLM

    from tools.tiny.induction_heads import LOOKBACK, init_induction_heads
    from tools.tiny.tokenizer import build_model_config

    config = build_model_config()
    config._attn_implementation = "eager"  # the only one that shows what it attends to
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    init_induction_heads(model, seed=0)
    with torch.no_grad():
        attention = model(torch.randint(0, 256, (1, 64)), output_attentions=True, use_cache=False).attentions[0][0]
    for head in range(LOOKBACK):
        assert torch.diagonal(attention[head], -(head + 1)).mean() > 0.4  # about 0.05 with random weights


@given(TEXTS)
def test_text_round_trips_through_tokens(text):
    from ramify.model.render import Tokenizer

    tokenizer = Tokenizer(TINY)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), st.booleans())
def test_conversation_keeps_earlier_tokens(turns, use_tools):
    """Every turn keeps all earlier tokens, and the result equals one render of all messages."""
    tools = TOOLS if use_tools else []
    prompt = RENDERER.render([Message("system", "Play."), Message("user", "start")], tools)
    messages = [Message("system", "Play."), Message("user", "start")]
    for reply_text, answer_text in turns:
        call = ToolCall("1", "click_link", json.dumps({"article": reply_text}, ensure_ascii=False))
        reply = Message("assistant", "", tool_calls=(call,)) if use_tools else Message("assistant", f"[{reply_text}]")
        answer = Message("tool", answer_text, tool_call_id="1") if use_tools else Message("user", answer_text)
        rendered = RENDERER.render([*messages, reply], tools, add_generation_prompt=False)
        start, stop = rendered.spans[-1].content_span
        sampled = rendered.token_ids[start : stop + 1]
        parsed = RENDERER.parse(sampled, prompt)
        assert not parsed.problems
        prompt = RENDERER.bridge(prompt.with_reply(sampled, parsed), [answer])
        assert prompt.prefix_break is None
        messages += [reply, answer]
        assert prompt.token_ids.tolist() == RENDERER.render(messages, tools).token_ids.tolist()


async def test_sampled_replies_are_well_formed():
    from ramify.env.tasksets.reversal import ReversalTextsConfig, generate_texts, is_well_formed
    from ramify.infer.client import ClientSampling
    from tools.tiny.corpus import build_reversal_prompt
    from tools.tiny.local_model import open_local_model

    config = ReversalTextsConfig(split="eval", num_tasks=16, seed=1)
    prompts = [RENDERER.render(build_reversal_prompt(text).messages) for text in generate_texts(config)]
    with open_local_model(TINY) as model:
        parsed = await model.sample_replies(prompts, ClientSampling(max_tokens=32))
    replies = [reply.message.text for reply in parsed]
    assert sum(map(is_well_formed, replies)) >= 0.9 * len(replies)
    assert len(set(replies)) > len(replies) / 2


async def test_rollout_calls_tools_over_several_turns():
    from tools.tiny.local_model import open_local_model
    from tools.tiny.metrics import WIKISPEEDIA

    with open_local_model(TINY) as model:
        groups = await model.run_rollouts(WIKISPEEDIA, 2, 2, seed=0)
    assert [len(group) for group in groups] == [2] * 2
    traces = [trace for group in groups for trace in group]
    assert all(trace.reward is not None for trace in traces)
    assert max(len(trace.nodes) for trace in traces) > 4
