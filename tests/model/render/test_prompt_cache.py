"""The prompt that all attempts at a task share is rendered once."""

from ramify.model.render import load_renderer
from ramify.model.render.base import MAX_CACHED_PROMPTS
from ramify.model.resolve import resolve_model_path
from ramify.trace import Message

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def prompt(text: str) -> list[Message]:
    return [Message("system", "be brief"), Message("user", text)]


def test_equal_prompts_are_cached():
    renderer = load_renderer(resolve_model_path("tiny"))
    first = renderer.render(prompt("hi"))
    assert renderer.render(prompt("hi")) is first
    assert renderer.render(prompt("ho")) is not first
    assert renderer.render(prompt("hi"), [TOOL]).token_ids.tolist() != first.token_ids.tolist()
    assert renderer.render(prompt("hi")).token_ids.tolist() == first.token_ids.tolist()
    assert renderer.render(prompt("hi"), add_generation_prompt=False).token_ids.tolist() != first.token_ids.tolist()


def test_the_cache_of_prompts_is_bounded():
    renderer = load_renderer(resolve_model_path("tiny"))
    first = renderer.render(prompt("0"))
    for number in range(1, MAX_CACHED_PROMPTS + 1):
        renderer.render(prompt(str(number)))
    again = renderer.render(prompt("0"))
    assert again is not first
    assert again.token_ids.tolist() == first.token_ids.tolist()
