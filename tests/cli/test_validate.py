"""`ramify validate`: every task without a model, and an exit code that says whether all are valid."""

from ramify.cli import main

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

UNGOLDEN = """
import ramify as rf


class Endless(rf.User):
    def respond(self):
        return "go on"


class Ungolden(rf.Taskset):
    def load(self):
        yield rf.Task(key="raises", prompt="one?", strict=True)
        yield rf.Task(key="goes-on", prompt="two?", strict=False)

    def user(self, task):
        return None if task.strict else Endless()

    @rf.reward
    def right(self, task, trace):
        return float(trace.last_reply.split()[0] == "1") if task.strict else 1.0

    @rf.group_reward
    def best(self, traces):
        return [0.0 for _ in traces]
"""

IMAGES = """
import base64
import struct

import ramify as rf
from ramify.env.tasksets.color_codeword import make_square

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
PNG = make_square((255, 0, 0))


def encode(data, mime="image/png"):
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


URLS = {
    "fine": encode(PNG),
    "address": "https://example.com/cat.png",
    "path": "ok.png",
    "empty": "",
    "svg": encode(SVG, "image/svg+xml"),
    "svg-as-png": encode(SVG),
    "gif": encode(b"GIF89a" + bytes(20), "image/gif"),
    "huge": encode(PNG[:16] + struct.pack(">II", 6000, 6000) + PNG[24:]),
    "truncated": encode(PNG[:60]),
}


def show(url):
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]


class Shows(rf.User):
    def respond(self, task):
        return show(task.shown)


class Pictures(rf.Taskset):
    def load(self):
        for key, url in URLS.items():
            yield rf.Task(key=key, prompt=[{"role": "user", "content": show(url)}], answer="A")
        yield rf.Task(key="user", answer="A", shown=URLS["svg"])
        yield rf.Task(key="many", prompt=[{"role": "user", "content": show(URLS["fine"]) * 33}], answer="A")

    def user(self, task):
        return Shows() if task.key == "user" else None

    def gold(self, task):
        return task.answer

    @rf.reward
    def right(self, task, trace):
        return float(trace.last_reply == task.answer)
"""


def test_built_in_taskset_is_valid(ramify):
    result = ramify("validate", "reverse-text", "--taskset.max_chars", "6", "-n", "20")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "20 tasks, 20 valid, 0 checked in part, 0 failed" in result.stdout


def test_one_failing_task_fails_the_command(ramify, tmp_path):
    (tmp_path / "mixed.py").write_text(TASKSET)
    result = ramify("validate", str(tmp_path / "mixed.py"))
    assert result.returncode == 1
    lines = {words[1]: line for line in result.stdout.splitlines() if len(words := line.split()) > 3}
    assert "fine" not in lines and "silent" not in lines
    assert "1 of 2 gold replies" in lines["talks"]
    assert "the reward of the gold replies is 0" in lines["unpaid"]
    assert "EnvironmentFault: setup: KeyError: 'corpus'" in lines["raises"]
    assert "five is odd" in lines["refused"]
    assert "Whether a right reply has a reward was not checked" in " ".join(result.stdout.split())
    assert "6 tasks, 1 valid, 1 checked in part, 4 failed" in result.stdout


def test_tasks_without_gold_are_checked_in_part(tmp_path, capsys):
    (tmp_path / "ungolden.py").write_text(UNGOLDEN)
    assert main(["validate", str(tmp_path / "ungolden.py")]) == 1
    output = capsys.readouterr().out
    lines = {words[1]: line for line in output.splitlines() if len(words := line.split()) > 3}
    assert lines["raises"].startswith("failed")
    assert "EnvironmentFault: right: IndexError: list index out of range" in lines["raises"]
    assert "ungolden.py:20 in right: return float(trace.last_reply.split()[0] ==" in lines["raises"]
    assert "goes-on" not in output
    assert "not checked: best, which compare the rollouts of a group" in output
    assert "2 tasks, 0 valid, 1 checked in part, 1 failed" in output


def test_taskset_without_rewards_is_invalid(tmp_path, capsys):
    (tmp_path / "silent.py").write_text(UNGOLDEN.replace("@rf.reward", "").replace("@rf.group_reward", ""))
    assert main(["validate", str(tmp_path / "silent.py")]) == 1
    output = capsys.readouterr().out
    assert "has no reward: no rollout can be scored, and rl refuses it; mark a method" in output
    assert "valid" not in output


def test_unloadable_taskset_is_exit_2(tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("import ramify as rf\nclass B(rf.Taskset):\n  def load(self):\n    1 / 0\n")
    refused = {
        "reverse-text": ["revers-text"],
        "max_chars": ["reverse-text", "--taskset.max_char", "6"],
        "ZeroDivisionError": [str(broken)],
    }
    for message, args in refused.items():
        assert main(["validate", *args]) == 2
        assert message in capsys.readouterr().err


SHOP = """
import ramify as rf


class Shop(rf.Taskset):
    def load(self):
        for name, gold in GOLD.items():
            yield rf.Task(key=name, prompt="Sell two apples, then a pear.", gold=gold)

    def setup(self, state):
        state.sold = {}

    @rf.tool
    def sell(self, item: str, count: int = 1, *, state) -> str:
        state.sold[item] = state.sold.get(item, 0) + count
        return f"sold {count}"

    def user(self):
        return Customer()

    def gold(self, task):
        return task.gold

    @rf.reward
    def sold(self, state, trace):
        return float(state.sold == {"apple": 2, "pear": 1} and trace.last_reply == "You are welcome.")


class Customer(rf.User):
    def respond(self, turn):
        return {1: "Now the pear.", 2: "Thanks."}.get(turn)


def call(item, count):
    return {"name": "sell", "arguments": {"item": item, "count": count}}


APPLES = '{"item": "apple", "count": 2}'
WELCOME = "You are welcome."
GOLD = {
    "plain": [{"tool_calls": [call("apple", 2)]}, "Sold.", {"tool_calls": [call("pear", 1)]}, "Sold.", WELCOME],
    "together": [{"content": "At once.", "tool_calls": [call("apple", 2), call("pear", 1)]}, "Sold.", "Too.", WELCOME],
    "openai": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "sell", "arguments": APPLES}},
                {"id": "b", "type": "function", "function": call("pear", 1)},
            ],
        },
        {"role": "assistant", "content": "Sold."},
        {"content": "Sold too."},
        WELCOME,
    ],
    "single": {"content": WELCOME},
    "misspelt": [{"content": "hm", "tool_call": []}],
    "user": [{"role": "user", "content": "hm"}],
    "nameless": [{"tool_calls": [{"arguments": {}}]}],
}
"""


def test_gold_replies_for_tools_and_several_turns_are_plain_dicts(ramify, tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    result = ramify("validate", str(tmp_path / "shop.py"))
    lines = {words[1]: line for line in result.stdout.splitlines() if len(words := line.split()) > 3}
    for name in ("plain", "together", "openai"):
        assert name not in lines
    output = " ".join(result.stdout.split())  # the table breaks lines
    assert "the script has 1 reply, but the conversation is not over" in output
    assert "gold[0]: unknown key 'tool_call'; did you mean 'tool_calls'?" in output
    assert "gold[0]: role 'user', expected 'assistant'" in output
    assert "gold[0].tool_calls[0] needs a name" in output


def test_images_that_a_rollout_would_refuse_fail_their_task(tmp_path, capsys):
    (tmp_path / "pictures.py").write_text(IMAGES)
    assert main(["validate", str(tmp_path / "pictures.py")]) == 1
    output = capsys.readouterr().out
    assert "11 tasks, 1 valid, 0 checked in part, 10 failed" in output
    lines = {words[1]: line for line in output.splitlines() if len(words := line.split()) > 3}
    assert "fine" not in lines
    reasons = {
        "address": "https://example.com/cat.png",
        "svg": "format 'svg'",
        "svg-as-png": "format 'svg'",
        "gif": "format 'gif'",
        "huge": "6000 × 6000 pixels",
        "truncated": "damaged or incomplete png",
        "user": "format 'svg'",
        "many": "at most 32",
    }
    for key, reason in reasons.items():
        assert "EnvironmentFault" in lines[key] and reason in lines[key]
