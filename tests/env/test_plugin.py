"""Plugin ids are resolved in four places; unknown ids and keys are refused with the closest match."""

import sys
import textwrap

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env import Taskset
from ramify.env.plugin import build_plugin, find_plugin_class

ENVIRONMENT = """
    from __future__ import annotations
    import ramify as rf

    class GameConfig(rf.TasksetConfig):
        max_chars: int = 8
        seeds: list[int] = [1, 2]

    class Game(rf.Taskset):
        config: GameConfig
        def load(self):
            yield rf.Task(prompt="x" * self.config.max_chars)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_env.py"
    path.write_text(textwrap.dedent(ENVIRONMENT))
    return path


def build_error(*args, **kwargs) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        build_plugin(*args, **kwargs)
    return caught.value.message


@pytest.mark.parametrize("form", ["{}", "{}:Game"])
def test_file(file, form):
    taskset = build_plugin("taskset", {"id": form.format(file), "max_chars": 3})
    assert [task.prompt for task in taskset.load()] == ["xxx"]
    assert taskset.config.id == form.format(file)
    assert find_plugin_class("taskset", str(file)) is find_plugin_class("taskset", f"{file}:Game")


@pytest.fixture
def package(file, monkeypatch):
    """An importable package with the module `games`."""
    folder = file.parent / "game_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    file.rename(folder / "games.py")
    monkeypatch.syspath_prepend(file.parent)
    yield folder
    for name in [name for name in sys.modules if name.startswith("game_package")]:
        del sys.modules[name]


@pytest.mark.parametrize("form", ["game_package.games:Game", "game_package.games.Game"])
def test_import_path(package, form):
    assert find_plugin_class("taskset", form).__name__ == "Game"


@pytest.mark.parametrize("imports", ["", "from game_package.games import Game"])
def test_module_path(package, imports):
    (package / "__init__.py").write_text(imports)
    taskset = build_plugin("taskset", {"id": "game_package.games", "max_chars": 3})
    assert [task.prompt for task in taskset.load()] == ["xxx"]


def test_module_path_of_a_package_that_exports_its_only_plugin(package):
    (package / "__init__.py").write_text("import ramify as rf\nfrom game_package.games import Game\n")
    assert find_plugin_class("taskset", "game_package").__name__ == "Game"


def test_module_path_without_exactly_one_plugin_is_refused(package):
    (package / "two.py").write_text("import ramify as rf\nclass A(rf.Taskset): ...\nclass B(rf.Taskset): ...\n")
    assert build_error("taskset", {"id": "game_package"}).endswith(
        "game_package should have one taskset class, it has none; define one in it, or select another module"
    )
    assert "game_package.games should have one harness class, it has none; define one" in build_error(
        "harness", {"id": "game_package.games"}
    )
    assert build_error("taskset", {"id": "game_package.two"}).endswith(
        "game_package.two should have one taskset class, it has A, B; select one as game_package.two:Class"
    )


def test_module_path_that_does_not_exist_is_refused(package):
    (package / "broken.py").write_text("1 / 0\n")
    assert "there is no module 'game_pakage'" in build_error("taskset", {"id": "game_pakage.games"})
    assert "game_package has no game" in build_error("taskset", {"id": "game_package.game"})
    assert "game_package.broken cannot be imported: ZeroDivisionError" in build_error(
        "taskset", {"id": "game_package.broken"}
    )


def test_metadata_of_installed_packages_is_read_only_for_other_names(monkeypatch):
    """Reading the metadata of all packages takes longer than everything else of a built-in plugin."""

    def refuse(**_):
        raise AssertionError("the metadata was read")

    monkeypatch.setattr("importlib.metadata.entry_points", refuse)
    path = "ramify.env.tasksets.reverse_text:ReverseText"
    assert find_plugin_class("taskset", "reverse-text") is find_plugin_class("taskset", path)
    with pytest.raises(AssertionError, match="the metadata was read"):
        find_plugin_class("taskset", "guessing")


def test_entry_point_of_an_installed_package(file, monkeypatch):
    file.rename(file.with_name("installed_games.py"))
    info = file.with_name("games-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: games\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ramify.tasksets]\nguessing = installed_games:Game\n")
    monkeypatch.syspath_prepend(file.parent)
    assert find_plugin_class("taskset", "guessing").__name__ == "Game"
    assert "did you mean 'guessing'?" in build_error("taskset", {"id": "guesing"})
    monkeypatch.delitem(sys.modules, "installed_games")


def test_unknown_id_is_refused_with_the_closest_known_id():
    assert build_error("taskset", {"id": "revers-text"}) == (
        "taskset.id: unknown taskset 'revers-text'; did you mean 'reverse-text'?"
    )
    assert "expected one of container" in build_error("runtime", {"id": "qqq"})
    assert "taskset.id: required" in build_error("taskset", {})


def test_unknown_keys_and_invalid_values_are_reported_together(file):
    message = build_error("taskset", {"id": str(file), "max_char": 3, "seeds": [1, "x"]}, table_key="train.0.taskset")
    assert message.startswith("2 problems in the configuration:")
    assert "train.0.taskset.max_char: unknown key; did you mean train.0.taskset.max_chars?" in message
    assert "train.0.taskset.seeds.1: expected a valid integer, got 'x'" in message


def test_missing_modules_and_other_classes_are_refused(file):
    other = file.with_name("other.py")
    assert "there is no such file" in build_error("taskset", {"id": str(other)})
    assert "there is no module 'no_such_package'" in build_error("taskset", {"id": "no_such_package.games:Game"})
    assert "did you mean Game?" in build_error("taskset", {"id": f"{file}:Gam"})
    assert "does not derive from Taskset" in build_error("taskset", {"id": f"{file}:GameConfig"})
    other.write_text("import ramify as rf\nclass A(rf.Taskset): ...\nclass B(rf.Taskset): ...\n")
    assert "it has A, B; select one" in build_error("taskset", {"id": str(other)})


def test_import_path_that_matches_a_file_suggests_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_the_user.py").write_text("import ramify as rf\nclass A(rf.Taskset): ...\n")
    assert "write beside_the_user.py:Class" in build_error("taskset", {"id": "beside_the_user:A"})
    assert "write beside_the_user.py:Class" in build_error("taskset", {"id": "beside_the_user.A"})
    assert "is its package installed" in build_error("taskset", {"id": "beside_nobody:A"})


def test_file_that_raises_is_refused_with_the_error(file):
    broken = file.with_name("broken.py")
    broken.write_text("1 / 0\n")
    message = build_error("taskset", {"id": str(broken)})
    assert "cannot be imported: ZeroDivisionError: division by zero" in message
    broken.write_text("import ramify as rf\nclass Fixed(rf.Taskset): ...\n")
    assert issubclass(find_plugin_class("taskset", str(broken)), Taskset)


def test_config_annotation_must_be_a_config_class(file):
    file.with_name("odd.py").write_text("import ramify as rf\nclass Odd(rf.Taskset):\n    config: int\n")
    assert "config must be annotated" in build_error("taskset", {"id": str(file.with_name("odd.py"))})
