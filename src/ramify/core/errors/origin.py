"""The line of user code that raised an exception: file, line number and source text.

The traceback of a hook starts in Ramify's own modules and may end deep inside a library. The author of the hook needs
the innermost line of their own code, which is the package or the directory that the hook is in.
"""

import sysconfig
import traceback
from pathlib import Path

from ramify.core.errors import safe_message

MAX_LINE_CHARS = 160  # of a source line in a message

_RAMIFY_DIR = Path(__file__).resolve().parents[2]
_TASKSETS_DIR = _RAMIFY_DIR / "env" / "tasksets"  # counts as user code, because it holds environments
_STDLIB_DIR = Path(sysconfig.get_path("stdlib"))
_INSTALL_DIR_NAMES = ("site-packages", "dist-packages")


def describe_exception(error: BaseException) -> str:
    """Return the type and message of an exception, with its origin in user code at the end of the first line."""
    first, *others = f"{type(error).__name__}: {safe_message(error)}".removesuffix(": ").split("\n")
    origin = describe_origin(error)
    return "\n".join([f"{first} ({origin})" if origin else first, *others])


def describe_origin(error: BaseException) -> str:
    """Return `file:line in function: text` of the innermost frame of user code; empty if there is no such frame.

    If the stack has frames of Ramify, only the frames after the first of them count, because earlier ones called it.
    """
    stack = list(traceback.extract_tb(error.__traceback__))
    first_index = next((index for index, frame in enumerate(stack) if _is_ramify_code(Path(frame.filename))), 0)
    frames = [frame for frame in stack[first_index:] if _is_user_code(frame.filename)]
    if not frames:
        return ""
    root = _find_code_root(Path(frames[0].filename))
    frame = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(root))
    text = (frame.line or "").strip()
    text = text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}..."
    return f"{_shorten_path(frame.filename)}:{frame.lineno} in {frame.name}" + (f": {text}" if text else "")


def _is_user_code(filename: str) -> bool:
    file = Path(filename)
    if filename.startswith("<") or _is_ramify_code(file):  # "<": frozen modules and code without a file
        return False
    return not file.is_relative_to(_STDLIB_DIR) or any(name in file.parts for name in _INSTALL_DIR_NAMES)


def _is_ramify_code(file: Path) -> bool:
    return file.is_relative_to(_RAMIFY_DIR) and not file.is_relative_to(_TASKSETS_DIR)


def _find_code_root(file: Path) -> Path:
    """Return the top-level package of a file; its directory if it is in none; the file if it is an installed module."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        file, folder = folder, folder.parent
    return file if file.is_dir() or folder.name in _INSTALL_DIR_NAMES else folder


def _shorten_path(filename: str) -> str:
    try:
        directory = Path.cwd()
    except OSError:  # the working directory was removed
        return filename
    file = Path(filename)
    return str(file.relative_to(directory)) if file.is_relative_to(directory) else filename
