"""Find phrases that no engineer says aloud: `python -m tools.words` prints each with a better one and exits with 1.

It reads Python, Markdown and TOML files and the Makefile, and finds a phrase also where a line break divides it.
`python -m tools.words DIRECTORY` checks another copy of the repository.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "docs", "examples", "tests", "tools", "benchmarks")
SUFFIXES = (".py", ".pyi", ".md", ".toml")
OWN_FILES = ("tools/words.py", "tests/test_words.py")  # which name the phrases
PHRASES = {  # a pattern, in which a space may be a line break, and what to write instead
    r"(?:that|those) of": "the possessive (the task's prompt), or the noun once more",
    r"there (?:is|are|was|were) no|"  # fine, as are "is no longer" and "is no more than"
    r"(?P<phrase>(?:is|are|was|were) no (?!(?:longer|more|less|fewer|later|other|such|one)\b)\w+)": '"is not a ..."',
    r"box(?!=)": '"sandbox"',
    r"given up|giving up|gave up|gives up(?! to)": '"timed out", "cancelled" or "dropped"',
    r"head epochs?": '"term"',
    r"abandon\w*": '"left behind", "cancelled" or "detached"',
}


def main(root: Path = ROOT) -> int:
    """Print every phrase that was found; return 1 if there is one."""
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in SUFFIXES]
    problems = [
        f"{name}:{line}: {phrase!r}: write {advice}"
        for path in sorted([*root.glob("*.md"), root / "Makefile", *paths])
        if (name := path.relative_to(root).as_posix()) not in OWN_FILES
        for line, phrase, advice in find_phrases(path.read_text())
    ]
    for problem in problems:
        print(problem)
    print(f"words: {len(problems)} phrases to reword")
    return 1 if problems else 0


def find_phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the phrase and the advice for each phrase in a text.

    Patterns that begin with a boundary of words, or ignore case, take ten times longer: they cannot skip to a letter.
    """
    text = text.lower()
    for pattern, advice in PHRASES.items():
        regex = re.compile(rf"(?:{pattern})\b".replace(" ", r"[\s#]+"))
        for match in regex.finditer(text):
            is_word = not re.match(r"\w", text[match.start() - 1 : match.start()])
            if is_word and ("phrase" not in regex.groupindex or match["phrase"]):
                yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].replace("#", "").split()), advice


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
