"""Move the packages of `src/ramify` into their rooms: `python -m tools.wings`.

The script moves files that stand at an old place, in `src/ramify` and in the mirrored `tests`, and rewrites text that
names an old place: imports, strings with import paths, and paths of files. What is in its place already stays
unchanged, so a branch that was rebased over the move runs the script once more for what it has added.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {
    "core": (
        "errors config files async_calls bounded_cache display console terminal interactive durations names seeds "
        "log_filters"
    ),
    "processes": "wire",
    "run": "store fencing",
    "model": "images render",
    "infer": "client dialects gateway",
    "env": "tasksets adapters",
    "rollout": "runtime harness envserver evals",
    "launch": "monitor",
}
MODULES = {
    **{name: f"{room}.{name}" for room, names in ROOMS.items() for name in names.split()},
    **{f"model.{name}": f"model.kernels.{name}" for name in ("cpu", "cuda", "attention_plan", "decoder_ops")},
    "model.paged_attention": "model.kernels.paged_attention",
    "images.image_header": "trace.image_header",
    "images.image_labels": "run.store.image_labels",
    "images.image_store": "run.store.image_store",
}
"""Modules and packages below `ramify`: where they were, and where they are."""

CORE_TESTS = (
    "async_calls bounded_cache display durations errors files interactive log_filters names origin seeds terminal"
)
TESTS = {
    **{name: new for name, new in MODULES.items() if name not in ROOMS["core"].split() or name == "config"},
    **{f"test_{name}": f"core.test_{name}" for name in CORE_TESTS.split()},
    "model.test_attention_plan": "model.kernels.test_attention_plan",
    "model.test_cuda_kernels": "model.kernels.test_cuda_kernels",
    "model.cuda_kernels": "model.kernels.cuda_kernels",
    "images.test_image_store": "run.store.test_image_store",
}
"""The same for the modules and packages below `tests`."""

PLACES = {"ramify": MODULES, "tests": TESTS}
FOLDERS = {"src/ramify": MODULES | {"models": "model.bundled"}, "tests": TESTS}
SUFFIXES = {".py", ".pyi", ".md", ".toml", ".yml", ".ipynb", ".txt", ".js", ".c", ""}
KEPT = re.compile(r"""(?<=["'`[])ramify\.tasksets(?=["'`\]])|b"ramify\.wire\"""")
"""Names that stay: a group of entry points, and the key of a hash."""


def main() -> int:
    """Move the files, then rewrite every text file of the repository."""
    moved = move_files(_list_files())
    rewritten = [path for path in _list_files() if path != Path(__file__).relative_to(ROOT) and rewrite_file(path)]
    remove_empty_folders()
    print(f"moved {moved} files, rewrote {len(rewritten)}")
    return 0


def move_files(paths: Iterable[Path]) -> int:
    """Move every file that stands at an old place; return how many."""
    moves = [(path, new) for path in paths if (new := find_place(path)) != path]
    by_folder: dict[Path, list[Path]] = {}
    for path, new in moves:
        by_folder.setdefault(new.parent, []).append(path)
    for folder, sources in by_folder.items():
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
        tracked = _run_git("ls-files", "--", *map(str, sources)).splitlines()
        if tracked:
            _run_git("mv", *tracked, str(folder))
        for source in sources:
            if (ROOT / source).exists():  # not yet tracked
                (ROOT / source).rename(ROOT / folder / source.name)
    return len(moves)


def find_place(path: Path) -> Path:
    """Return where a file belongs."""
    for folder, places in FOLDERS.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_name(path.stem).parts
            for length in range(len(parts), 0, -1):
                if new := places.get(".".join(parts[:length])):
                    return Path(folder, *new.split("."), *parts[length:]).with_name(path.name)
    return path


def rewrite_file(path: Path) -> bool:
    """Rewrite the old names in one file; return whether it had any."""
    file = ROOT / path
    if path.suffix not in SUFFIXES or file.is_symlink() or not file.is_file():
        return False
    text = file.read_text()
    new = rewrite_text(text)
    if path.suffix == ".md":  # pages name modules by their path below `src/ramify`
        new = re.sub(rf"(?<=`){_any_of(MODULES, '/')}(?=/[\w/]+\.py`|\.py`)", _replacement(MODULES, "/"), new)
    if path == Path("src/ramify/__init__.pyi"):
        new = re.sub(rf"(?<=^from \.){_any_of(MODULES)}\b", _replacement(MODULES), new, flags=re.MULTILINE)
    if new != text:
        file.write_text(new)
    return new != text


def rewrite_text(text: str) -> str:
    """Replace the old names of modules, and the old paths of their files."""
    pieces: list[str] = []
    end = 0
    for kept in KEPT.finditer(text):
        pieces += [_rewrite_names(text[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*pieces, _rewrite_names(text[end:])])


def _rewrite_names(text: str) -> str:
    for root, places in PLACES.items():
        for separator in (".", "/"):
            pattern = rf"(?<![\w.-]){root}{re.escape(separator)}{_any_of(places, separator)}(?![\w-])"
            text = re.sub(pattern, _replacement(places, separator, root), text)
    core = _any_of(set(ROOMS["core"].split()) - {"errors"})  # `ramify.errors` stays public
    return re.sub(rf"^from ramify import (?={core}$)", "from ramify.core import ", text, flags=re.MULTILINE)


def _any_of(places: Iterable[str], separator: str = ".") -> str:
    """Return a pattern for any of the old names; of several that fit, the longest."""
    names = sorted((name.replace(".", separator) for name in places), key=len, reverse=True)
    return f"({'|'.join(map(re.escape, names))})"


def _replacement(places: dict[str, str], separator: str = ".", root: str = "") -> Callable[[re.Match[str]], str]:
    def replace(match: re.Match[str]) -> str:
        new = places[match[1].replace(separator, ".")].replace(".", separator)
        return f"{root}{separator}{new}" if root else new

    return replace


def remove_empty_folders() -> None:
    """Remove old folders in which only bytecode is left: Python would still import them, as namespaces."""
    for folder, places in FOLDERS.items():
        for old in places:
            directory = ROOT.joinpath(folder, *old.split("."))
            for path in sorted(directory.rglob("*"), reverse=True) if directory.is_dir() else ():
                if path.suffix == ".pyc":
                    path.unlink()
                elif path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()


def _list_files() -> list[Path]:
    names = _run_git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [Path(name) for name in names if name and (ROOT / name).exists()]


def _run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
