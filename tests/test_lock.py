"""`requirements-dev.lock` fits pyproject.toml on every Python and machine that we test, and names no package index."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LINES = [line for line in (ROOT / "requirements-dev.lock").read_text().splitlines() if not line.startswith("#")]
PINS = [Requirement(line) for line in LINES]


def list_requirements() -> Iterator[Requirement]:
    """Yield what `make env` installs: the dependencies, the extras that the Makefile names, and the group `dev`."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    variables = dict(re.findall(r"^(\w+_EXTRAS) := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = variables["DEV_EXTRAS"].replace("$(RUN_EXTRAS)", variables["RUN_EXTRAS"]).split(",")
    project = configuration["project"]
    lists = [project["dependencies"], configuration["dependency-groups"]["dev"]]
    for requirements in [*lists, *(project["optional-dependencies"][extra] for extra in extras)]:
        yield from map(Requirement, requirements)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_requirement_has_one_locked_version_that_it_allows(python, machine):
    system = {
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    versions: dict[str, str] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(system):
            (specifier,) = pin.specifier
            assert specifier.operator == "==" and canonicalize_name(pin.name) not in versions, pin
            versions[canonicalize_name(pin.name)] = specifier.version
    for requirement in list_requirements():
        locked = versions.get(canonicalize_name(requirement.name))
        assert locked is not None and requirement.specifier.contains(locked), f"{requirement}, but {locked}: make lock"


def test_lock_names_no_address():
    assert not [line for line in LINES if "/" in line or line.startswith("-")]
