"""`ramify init NAME`: create a taskset package from a working template.

The package is small: one module with an example of what most environments need, an entry point that makes the name an
id, and a test that plays the gold replies. `tiny` learns the example task within minutes, so `ramify rl` shows a rising
reward before anything is changed.
"""

import importlib.util
import keyword
import re
from argparse import Namespace
from pathlib import Path
from string import Template

from ramify.core.errors import ConfigInvalid, StorageFailed
from ramify.env import plugin

TEMPLATES = Path(__file__).parent / "taskset_template"


def run(options: Namespace) -> int:
    """Write the package and print the next steps."""
    directory = Path(options.directory or options.name)
    paths = write_package(options.name, directory)
    print("\n".join(f"wrote {path}" for path in paths))
    module = paths[1].name
    steps = [
        f"cd {directory}",
        f"ramify validate {module}",
        f"ramify eval {module} -m tiny -n 20",
        f"ramify rl {module} -m tiny --max-steps 40",
    ]
    print("\n  ".join(["next:", *steps]))
    print(f"to use it as `{options.name}` anywhere: pip install -e .")
    return 0


def write_package(name: str, directory: Path) -> list[Path]:
    """Write the package and return its files.

    Raises ConfigInvalid, before anything is written, if the name is not allowed or the directory is not empty.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ConfigInvalid(
            f"{name!r} is not a valid taskset name: use lowercase letters, digits, dashes and underscores, starting "
            "with a letter"
        )
    if name in plugin.PLUGIN_KINDS["taskset"].builtin_paths:
        raise ConfigInvalid(f"{name!r} is the name of a built-in taskset; choose another name")
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:  # the new file would shadow it, or be shadowed
        raise ConfigInvalid(f"{name!r} is the name of an existing module, {spec.origin}; choose another name")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigInvalid(f"{directory} exists and is not empty; nothing was written")
    cls = "".join(word.capitalize() for word in module.split("_"))
    files = {
        "pyproject.toml": "pyproject.toml.txt",
        f"{module}.py": "module.py.txt",
        "README.md": "README.md.txt",
        f"tests/test_{module}.py": "test_module.py.txt",
    }
    try:
        for path, template in files.items():
            target = directory / path
            text = Template((TEMPLATES / template).read_text("utf-8")).substitute(name=name, module=module, cls=cls)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be written: {error.strerror}") from error
    return [directory / path for path in files]
