"""The `ramify` command: help, version and exit codes."""

import ast
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramify import __version__
from ramify.cli import app
from ramify.cli.commands import COMMANDS, CliCommand, ConfigCommand, pause_garbage_collection, switch

COMMAND = str(Path(sys.executable).parent / "ramify")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Define a command whose body is the given lines of Python."""

    def define(*body: str) -> None:
        name = f"scratch_command_{tmp_path.name.replace('-', '_')}"
        lines = "\n    ".join(body)
        (tmp_path / f"{name}.py").write_text(f"def run(args):\n    {lines}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        options = (switch("--max_step", "an option"),)
        monkeypatch.setitem(COMMANDS, "scratch", CliCommand("a command of this test", f"{name}:run", options))

    return define


@pytest.mark.process
@pytest.mark.parametrize("command", [[COMMAND], [sys.executable, "-m", "ramify"]], ids=["installed", "module"])
def test_version(command):
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, f"ramify {__version__}\n")


@pytest.mark.parametrize("args", [["--help"], ["-h"], []])
def test_help_lists_every_command(args, ramify):
    result = ramify(*args)
    assert result.returncode == 0
    for name, command in COMMANDS.items():
        assert f"  {name}" in result.stdout
        assert command.help in result.stdout


@pytest.mark.process
def test_help_imports_no_heavy_library():
    script = "import sys; before = set(sys.modules); from ramify.cli import main; main(['--help']); " + (
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.split(".")[0] for name in result.stderr.split()}
    assert "ramify" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "pydantic", "rich", "psutil"}


def test_unknown_command_or_option_is_refused(ramify):
    result = ramify("docter")
    assert result.returncode == 2
    assert "unknown command 'docter'" in result.stderr
    assert "ramify doctor" in result.stderr
    assert "Traceback" not in result.stderr
    result = ramify("--nonsense")
    assert result.returncode == 2
    assert "--nonsense" in result.stderr


@pytest.mark.parametrize(
    ("body", "exit_code", "message"),
    [
        (
            ["from ramify.core.errors import ConfigInvalid", "raise ConfigInvalid('x: unknown key')"],
            2,
            "x: unknown key\n",
        ),
        (["from ramify.core.errors import ProcessDied", "raise ProcessDied('code -9')"], 1, "ProcessDied: code -9\n"),
        # of another version
        (
            ["from ramify.core.errors import Failure", "raise Failure('A', 'b', 'system', False).to_exception()"],
            1,
            "A: b\n",
        ),
        (["raise KeyboardInterrupt"], 130, ""),
    ],
    ids=["configuration", "failure", "unknown failure", "interrupt"],
)
def test_named_failures_are_exit_codes_with_their_message(command, capsys, body, exit_code, message):
    command(*body)
    assert app.main(["scratch", "--max_step"]) == exit_code
    error = capsys.readouterr().err
    assert error == message if message else "Traceback" not in error


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("return 1 // 0", ZeroDivisionError),
        ("import ramify.nowhere", ModuleNotFoundError),
        ("raise BrokenPipeError", BrokenPipeError),  # of another file than standard output
    ],
)
def test_unexpected_exceptions_keep_their_traceback(command, line, error):
    command(line)
    with pytest.raises(error):
        app.main(["scratch"])


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_missing_torch_or_transformers_is_exit_2_with_the_extra(command, capsys, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    command(f"import {library}")
    assert app.main(["scratch"]) == 2
    assert capsys.readouterr().err == f"{library} is not installed; pip install 'ramify[local]'\n"


@pytest.mark.process
@pytest.mark.parametrize(("buffered", "args"), [("", ["--help"]), ("1", ["--help"]), ("", ["model", "list"])])
def test_closed_output_pipe_prints_no_traceback(buffered, args):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
        result = subprocess.run([COMMAND, *args], stdout=gone, stderr=subprocess.PIPE, env=environment, timeout=100)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("words", ["rl reverse-text", "eval reverse-text", "trainer", "sft"])
def test_run_name_must_stay_below_output(words, capsys):
    for name in ("..", ".", "/elsewhere", "a/../../b"):
        assert app.main([*words.split(), "--name", name, "--dry-run"]) == 2
        assert "below `output`" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_import_paths_of_a_command_exist(name):
    command = COMMANDS[name]
    paths = [command.run]
    if isinstance(command, ConfigCommand):
        paths += [command.config, command.expand, command.extract]
    for module, _, attribute in (path.partition(":") for path in paths if path):
        file = Path(app.__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
        definitions = {getattr(node, "name", None) for node in ast.parse(file.read_text()).body}
        assert attribute in definitions, f"{module} does not define {attribute}"


def test_garbage_collection_continues_also_after_a_failed_import():
    with pytest.raises(ImportError), pause_garbage_collection():
        assert not gc.isenabled()
        raise ImportError("no module")
    assert gc.isenabled()
