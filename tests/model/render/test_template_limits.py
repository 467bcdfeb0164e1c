"""Chat templates come with a model and are not trusted: one that loops or writes without end is a named error."""

import shutil
from pathlib import Path

import pytest

import ramify
from ramify.core.errors import ConfigInvalid, TemplateRefused
from ramify.model.render import load_renderer
from ramify.model.render.template import MAX_SOURCE_CHARS, ChatTemplate

TINY = Path(ramify.__file__).parent / "model" / "bundled" / "tiny"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 1 %}{{ f(n - 1) }}{{ f(n - 2) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_looping_template_ends(source):
    template = ChatTemplate({"default": source}, max_seconds=0.05)
    with pytest.raises(ConfigInvalid, match=r"chat template cannot be rendered: it takes longer than 0\.05 s"):
        template.check_limits()
    with pytest.raises(TemplateRefused, match=r"refuses \[user\]: it takes longer than 0\.05 s"):
        template.render(MESSAGES, [], True)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ 'a' * 10**12 }}", "writes more than"),
        ("{{ ([0] * 10**12) | length }}", "writes more than"),
        ("{% for i in range(9999) %}{{ 'a' * 10**6 }}{% endfor %}", "writes more than"),
        ("{{ 10 ** 1000000000 }}", "has an exponent of 1000000000"),
        ("a" * (MAX_SOURCE_CHARS + 1), "has 1048577 characters"),
    ],
)
def test_a_huge_template_is_refused_when_the_model_is_loaded(tmp_path, source, problem):
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "model" / "chat_template.jinja").write_text(source)
    with pytest.raises(ConfigInvalid, match=f"chat template.*{problem}"):
        load_renderer(tmp_path / "model")


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in [1] %}" * 110 + "{% endfor %}" * 110,
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_is_nested_too_deeply_is_refused(source):
    with pytest.raises(TemplateRefused):
        ChatTemplate({"default": source}).render(MESSAGES, [], True)
