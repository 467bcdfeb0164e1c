"""Paths with slashes, as text. Nothing looks at real files."""


def normalize(path: str) -> str:
    """Return the path without empty parts, "." and "..": "/a/./b/../c" -> "/a/c".

    ".." at the root stays at the root. In a relative path, leading ".." are kept; an empty result is ".".
    """
    is_absolute = path.startswith("/")
    parts: list[str] = []
    for part in path.split("/"):
        if part == "" or part == ".":
            continue
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part != ".." or not is_absolute:
            parts.append(part)
    if is_absolute:
        return "/" + "/".join(parts)
    return "/".join(parts) or "."


def get_extension(path: str) -> str:
    """Return the text after the last dot of the file name; "" if there is no dot, or only one at its start."""
    name = path.split("/")[-1]
    position = name.rfind(".")
    return name[position + 1 :] if position > 0 else ""


def is_inside(path: str, directory: str) -> bool:
    """Return whether an absolute path is the absolute directory itself or lies below it, after `normalize`."""
    inner, outer = normalize(path), normalize(directory)
    return inner == outer or outer == "/" or inner.startswith(outer + "/")
