"""Hooks of MkDocs, which builds the site of `docs/`: the reference of the keys, the files that pages link to, formulas.

A page may link to any file of the repository. A file outside `docs/` becomes a page of its own, at its path in the
repository, so links work the same on the site and in the repository, and the search covers these files too.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert as convert_to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tools.reference import FOLDER, list_pages

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+")
MATH = re.compile(r"`[^`\n]+`|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$", re.DOTALL)
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".ipynb": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference, and a page for each file outside `docs/` that the navigation or a page names."""
    for name, text in list_pages().items():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=text))
    in_nav = {path for path in iter_nav(config.nav) if (ROOT / path).is_file()}
    waiting = [*in_nav, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if file.src_dir)]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text()
        links = list_links(path, text) if path.endswith(".md") else []
        new = {link for link in links if not link.startswith("docs/") and (ROOT / link).is_file()} - seen
        waiting += new  # MkDocs reports links to missing files
        seen |= new
        if not path.startswith("docs/"):
            inclusion = InclusionLevel.INCLUDED if path in in_nav else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, get_uri(path), content=make_page(path, text), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point the links of a page in `docs/` at the pages of their files, and convert its formulas."""
    if not page.file.src_dir:
        return markdown
    parts = CODE.split(convert_links(f"docs/{page.file.src_uri}", markdown))
    return "".join(part if index % 2 else MATH.sub(_convert_formula, part) for index, part in enumerate(parts))


def make_page(path: str, text: str) -> str:
    """Return the page of a file outside `docs/`: its text, or a block of code."""
    if path.endswith(".md"):
        return convert_links(path, text)
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"


def get_uri(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".md") else f"{path}.md"


def list_links(path: str, text: str) -> list[str]:
    """Return the files of the repository to which a page links."""
    return [_resolve(path, link) for part in CODE.split(text)[::2] for link in LINK.findall(part)]


def convert_links(path: str, text: str) -> str:
    """Return the text of a page with links to pages of the site instead of files of the repository."""
    folder = posixpath.dirname(get_uri(path))

    def convert(match: re.Match[str]) -> str:
        return posixpath.relpath(get_uri(_resolve(path, match[0])), folder)

    return "".join(part if index % 2 else LINK.sub(convert, part) for index, part in enumerate(CODE.split(text)))


def iter_nav(nav: Any) -> Iterator[str]:
    """Yield the paths that the navigation names."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from iter_nav(entry)


def _convert_formula(match: re.Match[str]) -> str:
    """Return MathML, which browsers show without a script; inline code stays as it is."""
    if block := match["block"]:
        return convert_to_mathml(" ".join(block.split()), display="block")
    return f"<span>{convert_to_mathml(match['inline'])}</span>" if match["inline"] else match[0]


def _resolve(path: str, link: str) -> str:
    """Return the path in the repository of the file that a link names; a directory stands for its README."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return f"{target}/README.md" if (ROOT / target).is_dir() else target
