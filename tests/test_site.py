"""The site: its navigation has every page, its start page answers common questions, its reference has every key.

`make docs` builds the site and checks its links; these tests need neither MkDocs nor a network.
"""

import re
from pathlib import Path

import pytest

from ramify.core.config.schema import iter_keys
from ramify.env.plugin import PLUGIN_KINDS
from tests.test_docs_keys import COMMANDS, list_plugin_configs
from tools.reference import FOLDER, list_pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAV = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
QUESTIONS = {
    "one GPU": "memory.md",
    "eight GPUs": "scaling.md#one-machine",
    "memory": "memory.md",
    "LoRA": "lora.md",
    "your own agent": "agents.md",
    "judge": "judges.md",
    "Slurm": "cluster.md#slurm",
    "resume": "training.md#resume-ramify-rl",
    "serve": "inference.md#serve-a-model",
    "SFT data": "sft.md#the-data",
    "models are supported": "models.md#supported-models",
    "migrate": "from-prime-rl.md",
}


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return list_pages()


def test_every_page_is_in_the_navigation(reference: dict[str, str]) -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages |= {f"{FOLDER}/{name}.md" for name in reference}
    assert pages - set(NAV) == set(), "add these pages to `nav` in mkdocs.yml, where a user would look for them"
    assert len(NAV) == len(set(NAV))
    assert [page for page in set(NAV) - pages if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_start_page_links_to_the_answer(question: str) -> None:
    row = re.search(rf"^\| .*\*\*{question}\*\*.*$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert row is not None and f"({QUESTIONS[question]})" in row[0]


@pytest.mark.parametrize("config", COMMANDS, ids=lambda config: config.__name__)
def test_the_reference_has_every_key_of_a_command_and_no_other(config: type, reference: dict[str, str]) -> None:
    keys = {".".join(map(str, key)) for key in iter_keys(config)}
    pages = [set(re.findall(r"^(?:\| |## )`([\w.]+)`", text, re.MULTILINE)) for text in reference.values()]
    listed = [{path for path in page if ".NAME." not in path} for page in pages]
    assert keys in listed


def test_the_reference_has_every_option_of_every_plugin(reference: dict[str, str]) -> None:
    sections = re.split(r"^### ", reference["plugins"], flags=re.MULTILINE)[1:]
    listed = [set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) for section in sections]
    configs = [config for kind in PLUGIN_KINDS for config in list_plugin_configs(kind)]
    assert listed == [set(config.model_fields) - {"id"} for config in configs]


def test_the_reference_describes_the_options_of_harnesses_runtimes_and_judges(reference: dict[str, str]) -> None:
    """Their text is in the docstring of a class or below its fields."""
    sections = re.split(r"^## ", reference["plugins"], flags=re.MULTILINE)
    described = [section for section in sections if section.startswith(("harness\n", "runtime\n", "judge\n"))]
    assert len(described) == 3
    assert [line for section in described for line in section.splitlines() if line.endswith("|  |")] == []


def test_the_index_of_examples_lists_every_example() -> None:
    listed = set(re.findall(r"^\| \[[\w.]+\]\(([\w.]+)\)", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE))
    names = {path.name for path in (ROOT / "examples").iterdir() if not path.name.startswith(("__", "README"))}
    assert listed == names


def test_the_readme_is_short_and_leads_to_the_docs() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90 and "(docs/index.md)" in text
