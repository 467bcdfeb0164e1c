"""A renderer is loaded from a model directory alone: offline, from files of any version, and without torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.core.config import Config, parse
from ramify.core.errors import ConfigInvalid, ImageInvalid, TemplateRefused
from ramify.model.render import FamilyRendererConfig, RendererConfig, TemplateRendererConfig, load_renderer
from ramify.model.render.model_files import ModelFiles
from ramify.trace import MediaPart, Message, TextPart
from tests.support.renderers import directory, tokenizer

USER = [Message("user", "Well?")]
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(directory("chatml"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.process
def test_rendering_does_not_import_torch(tmp_path: Path):
    qwen = tokenizer((*TOKENS, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>"))
    qwen.save(str(tmp_path / "tokenizer.json"))
    script = f"""
import sys
import ramify.model.render as r
from ramify.trace import Message
def loaded(*names): print(*(set(names) & set(sys.modules)))
r.RendererConfig
loaded("tokenizers", "jinja2")
renderer = r.load_renderer({str(directory("qwen3"))!r})
prompt = renderer.render([Message("user", "Well?")])
sampled = [*prompt.token_ids[:3], renderer.stop_ids[0]]
history = prompt.with_reply(sampled, renderer.parse(sampled, prompt))
renderer.bridge(history, [Message("user", "And?")])
loaded("torch", "transformers", "renderers", "huggingface_hub")
r.load_renderer({str(tmp_path)!r}, r.FamilyRendererConfig(name="qwen3")).render([Message("user", "Well?")])
loaded("torch", "transformers")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n\n\n"


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_template_may_be_in_the_tokenizer_config(model: Path):
    source = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    for form in (source, [{"name": "default", "template": source}, {"name": "tool_use", "template": "{{ tools }}"}]):
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": form}))
        expected = load_renderer(directory("chatml")).render(USER).token_ids.tolist()
        assert load_renderer(model).render(USER).token_ids.tolist() == expected


def test_a_tool_use_template_renders_conversations_with_tools(model: Path):
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.description }}")
    render = load_renderer(model)
    tool = {"type": "function", "function": {"name": "run", "description": "Run it.", "parameters": {}}}
    decode = tokenizer(TOKENS).decode
    assert decode(render.render(USER, [tool]).token_ids.tolist()) == "Run it."
    assert "Well?" in decode(render.render(USER).token_ids.tolist())


def test_eos_ids_are_read_from_all_files(model: Path):
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    (model / "generation_config.json").unlink()
    ids = {token: tokenizer(TOKENS).token_to_id(token) for token in TOKENS}
    (model / "config.json").write_text(json.dumps({"eos_token_id": ids["<|im_start|>"]}))
    assert load_renderer(model).stop_ids == (ids["<|im_start|>"], ids["<|endoftext|>"], ids["<|im_end|>"])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<|im_end|>"]]}))
    assert load_renderer(model).stop_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])


def test_special_tokens_may_be_in_special_tokens_map(model: Path):
    (model / "tokenizer_config.json").unlink()
    (model / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))
    assert ModelFiles.read(model).special_tokens == {"bos_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("chat_template.jinja", None, "no chat template"),
        (".", None, "is not a directory"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json.*is not JSON"),
        (
            "tokenizer_config.json",
            '{"chat_template": [1]}',
            "expected a text, or a list of tables",
        ),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json.*expected token ids"),
        ("generation_config.json", '{"eos_token_id": -1}', "generation_config.json.*expected token ids"),
    ],
)
def test_missing_and_damaged_model_files_are_named(model, file, content, problem):
    if content is not None:
        (model / file).write_text(content)
    elif file == ".":
        shutil.rmtree(model)
    else:
        (model / file).unlink()
    with pytest.raises(ConfigInvalid, match=problem):
        load_renderer(model).render(USER)


# -- templates --------------------------------------------------------------------------------------------------------


def text_of(model: Path, source: str, messages=USER, **args) -> str:
    (model / "chat_template.jinja").write_text(source)
    render = load_renderer(model, TemplateRendererConfig(template_args=args))
    return tokenizer(TOKENS).decode(render.render(messages).token_ids.tolist(), skip_special_tokens=False)


def test_tojson_does_not_escape_html(model: Path):
    assert text_of(model, "{{ {'b': '<é>', 'a': \"it's\"} | tojson }}") == '{"b": "<é>", "a": "it\'s"}'
    assert text_of(model, "{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert text_of(model, "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}") == '{"a": 2, "b": 1}'


def test_templates_have_loop_controls_and_the_generation_tag(model: Path):
    body = "{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
    assert text_of(model, f"{{% for i in [1, 2, 3, 4] %}}{body}{{% endfor %}}") == "13"
    assert text_of(model, "a{% generation %}b{% endgeneration %}c") == "abc"


def test_templates_get_special_tokens_and_arguments(model: Path):
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}))
    assert text_of(model, "{{ bos_token }}{{ depth }}{{ eos_token }}", depth=3) == "<|im_start|>3<|im_end|>"
    assert text_of(model, "{{ tools is none }} {{ documents is defined }}") == "True False"


def test_a_template_that_requires_content_parts_gets_them(model: Path):
    source = """
{%- for message in messages %}{{ '<|im_start|>' + message.role }}
    {%- for part in message.content %}{{ part.text }}{% endfor %}{{ '<|im_end|>' }}
{%- endfor %}"""
    conversation = [*USER, Message("assistant", "Yes.", "hm"), *USER]
    asked = "<|im_start|>userWell?<|im_end|>"
    assert text_of(model, source, conversation) == (
        f"{asked}<|im_start|>assistant<think>\nhm\n</think>\n\nYes.<|im_end|>{asked}"
    )


def test_images_for_a_text_model_are_refused(model: Path):
    with pytest.raises(ImageInvalid, match="text model"):
        load_renderer(model).render([Message("user", (TextPart("Look:"), MediaPart("hash")))])
    assert load_renderer(model).render([Message("user", (TextPart("a"), TextPart("b")))]).spans[0].message.text == "ab"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('No such role!') }}", "No such role!"),
        ("{% if %}", "not valid Jinja, line 1"),
        ("{{ messages[0].content.nothing.here }}", "refuses"),
        ("{{ messages[0].__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
    ],
)
def test_errors_inside_a_template_are_raised(model: Path, source: str, words: str):
    with pytest.raises(TemplateRefused, match=words):
        text_of(model, source)


# -- config -----------------------------------------------------------------------------------------------------------


class Run(Config):
    renderer: RendererConfig = TemplateRendererConfig()


def test_the_default_renderer_is_the_template_of_the_model():
    assert parse(Run, []).renderer == TemplateRendererConfig(type="auto")
    assert parse(Run, ["--renderer.template-args.enable_thinking", "false"]).renderer.template_args == {
        "enable_thinking": False
    }
    family = parse(Run, ["--renderer.type", "family", "--renderer.name", "qwen3"]).renderer
    assert family == FamilyRendererConfig(name="qwen3")


def test_keys_of_the_other_renderer_type_are_refused():
    family = ["--renderer.type", "family", "--renderer.name", "qwen3"]
    with pytest.raises(ConfigInvalid, match="tool_format"):
        parse(Run, [*family, "--renderer.tool_format", "hermes"])
    with pytest.raises(ConfigInvalid, match=r"renderer\.name"):
        parse(Run, family[:2])
    with pytest.raises(ConfigInvalid, match="mistal"):
        parse(Run, ["--renderer.tool_format", "mistal"])
