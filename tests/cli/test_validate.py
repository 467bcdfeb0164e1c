"""`ramify validate`: every task without a model, and an exit code that says whether all are sound."""

from ramify.cli import main
from tests.cli.command import ramify_command

TASKSET = """
import ramify as rf


class Mixed(rf.Taskset):
    def load(self):
        yield rf.Task(key="fine", prompt="one?", answer="1")
        yield rf.Task(key="talks", prompt="two?", answer="2", gold=["1", "2"])
        yield rf.Task(key="unpaid", prompt="three?", answer="3", gold=["4"])
        yield rf.Task(key="raises", prompt="four?", answer="4", broken=True)
        yield rf.Task(key="refused", prompt="five?", answer="5", odd=True)
        yield rf.Task(key="silent", prompt="six?", answer=None)

    def setup(self, task):
        if getattr(task, "broken", False):
            raise KeyError("corpus")

    def validate(self, task):
        return "five is odd" if getattr(task, "odd", False) else None

    def gold(self, task):
        return getattr(task, "gold", task.answer)

    @rf.reward
    def right(self, task, trace):
        return float(trace.last_reply == task.answer)
"""


def test_a_built_in_taskset_is_sound():
    done = ramify_command("validate", "reverse-text", "--taskset.max_chars", "6", "-n", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 tasks, 20 sound, 0 failed; 20 with gold replies" in done.stdout


def test_each_task_is_reported_and_one_that_fails_decides(tmp_path):
    (tmp_path / "mixed.py").write_text(TASKSET)
    done = ramify_command("validate", str(tmp_path / "mixed.py"))
    assert done.returncode == 1
    lines = {words[1]: line for line in done.stdout.splitlines() if len(words := line.split()) > 3}
    assert lines["fine"].startswith("ok")
    assert "gold 1" in lines["fine"]
    assert "1 of 2 gold replies" in lines["talks"]
    assert "earn 0" in lines["unpaid"]
    assert "EnvironmentFault: setup: KeyError: 'corpus'" in lines["raises"]
    assert "five is odd" in lines["refused"]
    assert lines["silent"].startswith("ok")
    assert "no gold" in lines["silent"]
    assert "6 tasks, 2 sound, 4 failed" in done.stdout


def test_what_cannot_be_loaded_is_a_problem_of_the_command_line(tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("import ramify as rf\nclass B(rf.Taskset):\n  def load(self):\n    1 / 0\n")
    refused = {
        "reverse-text": ["revers-text"],
        "max_chars": ["reverse-text", "--taskset.max_char", "6"],
        "ZeroDivisionError": [str(broken)],
    }
    for told, args in refused.items():
        assert main(["validate", *args]) == 2
        assert told in capsys.readouterr().err
