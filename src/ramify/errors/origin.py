"""Where user code raised an exception, in one line: file, line number and the text of that line.

The traceback of a hook begins in Ramify's own modules and may end deep inside a library. The author of the hook needs
the innermost line of their own code: the package, or the directory, that the hook is in.
"""

import sysconfig
import traceback
from pathlib import Path

from ramify.errors.failure import safe_message

MAX_LINE_CHARS = 160  # characters of a source line that are shown

_RAMIFY_DIR = Path(__file__).resolve().parent.parent
_TASKSETS_DIR = _RAMIFY_DIR / "tasksets"  # part of Ramify, but environments like any other
_STDLIB_DIR = Path(sysconfig.get_path("stdlib"))
_INSTALL_DIR_NAMES = ("site-packages", "dist-packages")


def describe_exception(error: BaseException) -> str:
    """Return the type and the message of an exception, and at the end of the first line where user code raised it."""
    first, *others = f"{type(error).__name__}: {safe_message(error)}".removesuffix(": ").split("\n")
    origin = describe_origin(error)
    return "\n".join([f"{first} ({origin})" if origin else first, *others])


def describe_origin(error: BaseException) -> str:
    """Return `file:line in function: text` of the innermost frame of user code; empty if there is no such frame.

    Code that called Ramify does not count: if the stack has frames of Ramify, only frames after the first of them do.
    """
    stack = list(traceback.extract_tb(error.__traceback__))
    entry = next((number for number, frame in enumerate(stack) if _is_ramify_code(Path(frame.filename))), 0)
    frames = [frame for frame in stack[entry:] if _is_user_code(frame.filename)]
    if not frames:
        return ""
    root = _find_code_root(Path(frames[0].filename))
    frame = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(root))
    text = (frame.line or "").strip()
    text = text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}..."
    return f"{_shorten_path(frame.filename)}:{frame.lineno} in {frame.name}" + (f": {text}" if text else "")


def _is_user_code(filename: str) -> bool:
    file = Path(filename)
    if filename.startswith("<"):  # frozen modules, and code without a file
        return False
    if _is_ramify_code(file):
        return False
    return not file.is_relative_to(_STDLIB_DIR) or any(name in file.parts for name in _INSTALL_DIR_NAMES)


def _is_ramify_code(file: Path) -> bool:
    return file.is_relative_to(_RAMIFY_DIR) and not file.is_relative_to(_TASKSETS_DIR)


def _find_code_root(file: Path) -> Path:
    """Return the package that a file is in; the directory of a file that is in none; an installed module by itself."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        file, folder = folder, folder.parent
    return file if file.is_dir() or folder.name in _INSTALL_DIR_NAMES else folder


def _shorten_path(filename: str) -> str:
    try:
        here = Path.cwd()
    except OSError:  # the working directory is gone
        return filename
    file = Path(filename)
    return str(file.relative_to(here)) if file.is_relative_to(here) else filename
