"""docs/rendering.md says for every template whether the next turn reuses its tokens; the tests measure it."""

import re
import tomllib
from pathlib import Path

import numpy as np

from ramify.model.render import Renderer
from ramify.trace import Message, ToolCall
from tests.model.render.test_family_renderer import FAMILIES, SHOWS_NO_THINKING
from tests.model.render.test_family_renderer import renderer as family
from tests.model.render.test_family_renderer import sampled as family_reply
from tests.support.reference_renderer import get_oracle
from tests.support.renderers import MODELS, TOOLS, renderer

PAGE = (Path(__file__).parents[3] / "docs" / "rendering.md").read_text("utf-8")
ROW = re.compile(r"^\| `([^`]+)` \| (\S+) \| (\S+) \|$", re.MULTILINE)
USER = Message("user", "What is 2+2?")


def outcome(render: Renderer, sampled, tools, *, results: bool) -> str:
    """Return whether a reply's tokens are reused before a question or tool results: `kept`, or the break reason."""
    prompt = render.render([USER], tools)
    parsed = render.parse(sampled, prompt)
    new = [Message("tool", "4", tool_call_id=call.id) for call in parsed.message.tool_calls]
    following = render.bridge(prompt.with_reply(sampled, parsed), new if results else [Message("user", "Sure?")])
    assert bool(new) == results
    return "kept" if following.prefix_break is None else following.prefix_break.reason.value


def measure_outcomes() -> dict[str, tuple[str, str]]:
    rows: dict[str, tuple[str, str]] = {}
    call = (ToolCall("call00000", "run", '{"code": "2+2"}'),)
    for model in MODELS:
        render, oracle, tools = renderer(model.name), get_oracle(model.name), TOOLS if model.tools else []
        thought = "Two and two." if model.reasoning else None
        replies = [Message("assistant", "4", thought), Message("assistant", "", thought, call)]
        ids = [oracle.reply([USER], reply, tools) for reply in replies[: 2 if tools else 1]]
        asked = outcome(render, ids[0], tools, results=False)
        rows[model.name] = (asked, outcome(render, ids[1], tools, results=True) if tools else "–")
    for name in FAMILIES:
        thought = None if name in SHOWS_NO_THINKING else "Two and two."
        replies = [Message("assistant", "4", thought), Message("assistant", "", thought, call)]
        first, second = (np.asarray(family_reply(name, [USER], reply)) for reply in replies)
        asked = outcome(family(name), first, TOOLS, results=False)
        rows[f"{name} (family)"] = (asked, outcome(family(name), second, TOOLS, results=True))
    return rows


def test_the_docs_list_what_every_template_preserves():
    measured = measure_outcomes()
    for name, (question, results) in measured.items():
        print(f"{name:24} next question: {question:28} tool results: {results}")
    assert len(measured) >= 12
    documented = {name: (question, results) for name, question, results in ROW.findall(PAGE)}
    assert documented == measured


def test_multi_turn_examples_keep_what_was_sampled():
    """`render/breaks` is 0 with the template of every model that a multi-turn example names."""
    templates = {"Qwen/Qwen3-4B-Instruct-2507": "qwen3-2507", "Qwen/Qwen3-0.6B": "qwen3-no-thinking", "tiny": "ramify"}
    measured, names = measure_outcomes(), set[str]()
    for file in sorted((Path(__file__).parents[3] / "examples").glob("*/*.toml")):
        example = tomllib.loads(file.read_text("utf-8"))
        if any(source.get("max_turns") != 1 for source in example.get("train", [])):
            names.add(example["model"]["name"])
    names -= {"Qwen/Qwen3-VL-4B-Instruct", "tiny-vision", "HuggingFaceTB/SmolLM2-135M-Instruct"}  # of other families
    assert "Qwen/Qwen3-4B-Instruct-2507" in names
    assert {name: measured[templates[name]] for name in names} == dict.fromkeys(names, ("kept", "kept"))
