"""The Python blocks of the docs run, and print what the block after them says.

They run in an empty directory, beside the TOML blocks that begin with a name (`# run.toml`).
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.core.config import parse
from ramify.orchestrate.run_config import RunConfig, TrainSourceConfig
from ramify.rollout.evals.config import EvalSourceConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAMED_TOML = re.compile(r"^```toml\n# (\S+\.toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"\d(?:[\d,.]*\d)?")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[tuple[str, str | None]]:
    """(code, expected output) of each Python block; the output is None where no text block follows."""
    blocks = BLOCK.findall(page.read_text())
    following = [*blocks[1:], ("", "")][: len(blocks)]
    return [
        (code, after if kind == "text" else None)
        for (language, code), (kind, after) in zip(blocks, following, strict=True)
        if language == "python"
    ]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_python_blocks_print_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in NAMED_TOML.findall(page.read_text()):
        Path(name).write_text(text)
    names: dict[str, object] = {}
    for code, expected in python_blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        if expected is not None:
            assert printed.getvalue() == expected


@pytest.mark.parametrize("page", ["advantages.md", "cluster.md", "from-trl.md", "training.md", "vision.md"])
def test_run_files_of_the_docs_are_valid(page: str, tmp_path: Path) -> None:
    files = [text for _, text in NAMED_TOML.findall((DOCS / page).read_text()) if "[[train]]" in text]
    assert files
    for text in files:
        (tmp_path / "run.toml").write_text(text)
        parse(RunConfig, ["@", str(tmp_path / "run.toml")])


def test_the_taskset_of_the_vision_page_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("squares.py").write_text(python_blocks(DOCS / "vision.md")[0][0])
    assert main(["validate", "squares.py", "-n", "4"]) == 0


def test_the_architecture_page_shows_trace_and_forest_with_their_output() -> None:
    blocks = python_blocks(DOCS / "architecture.md")
    assert sum(expected is not None for _, expected in blocks) >= 4


PAGES = [ROOT / "README.md", *DOCS.rglob("*.md"), *ROOT.glob("examples/**/README.md")]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", page.read_text())):
        if link.startswith("http"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
        assert not heading or heading in anchors, link


def test_the_configuration_page_names_every_key_of_a_source() -> None:
    page = (DOCS / "configuration.md").read_text()
    for source in (TrainSourceConfig, EvalSourceConfig):
        assert [key for key in source.model_fields if f"`{key}`" not in page] == []


def test_the_reading_list_has_existing_files_of_about_9000_lines() -> None:
    files = re.findall(r"^\| `([^`]+)` \|", (DOCS / "reading.md").read_text(), re.MULTILINE)
    assert sum(len((ROOT / "src/ramify" / file).read_text().splitlines()) for file in files) <= 9200


@pytest.mark.parametrize(
    ("page", "sentence", "row"),
    [
        (
            "docs/cluster.md",
            r"(\d+) to (\d+) such rollouts a second",
            r"4 env servers, rollouts/s.*? \| (\d+).*?(\d+) \|",
        ),
        ("README.md", r"backwards: (\d+) s on two cores", r"on two cores \(x86-64\) it took (\d+) s"),
        ("docs/agents.md", r"`program` in a sandbox \| ([\d.]+)", r"`program`, started from nothing \| ([\d.]+)"),
        (
            "docs/agents.md",
            r"with `preload` \| ([\d.]+)",
            r"`program` with `preload` of [^|]* \| ([\d.]+) \| .* \| ≥",
        ),
        ("docs/agents.md", r"subclass of .* \| ([\d.]+)", r"the same code as `run_agent`.* \| ([\d.]+) \| 3"),
        (
            "docs/agents.md",
            r"mean reward rose from ([\d.]+) in the first three steps to ([\d.]+)",
            r"agent of the example, which needs only the standard library, from ([\d.]+) to ([\d.]+)\.",
        ),
        ("docs/agents.md", r"the chat harness does, with (\d+) rollouts", r"the chat harness \| (\d+)"),
    ],
)
def test_figures_are_those_of_the_benchmarks_page(page: str, sentence: str, row: str) -> None:
    quoted = re.search(sentence, (ROOT / page).read_text())
    measured = re.search(row, (DOCS / "benchmarks.md").read_text())
    assert quoted is not None and measured is not None
    assert quoted.groups() == measured.groups()


def test_every_row_that_links_to_a_result_quotes_it() -> None:
    """The numbers of a row of the README with a link to a section of the benchmarks page are in one line there."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (DOCS / "benchmarks.md").read_text().splitlines():
        if heading := re.fullmatch(r"#+ (.*)", line):
            lines = sections.setdefault(re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-"), [])
        lines.append(line)
    rows = re.findall(r"^\| .* \| (.*) \| (.*) \| \[.*\]\(docs/benchmarks.md#(.*)\) \|$", README, re.MULTILINE)
    assert len(rows) == README.count("docs/benchmarks.md#") >= 4
    for ours, theirs, section in rows:
        numbers = set(re.findall(NUMBER, f"{ours} {theirs}"))
        assert numbers and any(numbers <= set(re.findall(NUMBER, line)) for line in sections[section]), (ours, theirs)
    assert "faster" in README, "also name what the others do better"
