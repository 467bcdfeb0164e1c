"""The harness rlm: code in a REPL of the runtime, recursive calls as branches, and the faults of a policy's code."""

import pytest

import ramify as rf
from ramify.cli.app import main
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.orchestrate.algorithms import get_trainable_nodes
from ramify.rollout import Environment, SourceConfig
from ramify.rollout.harness.rlm import extract_final
from ramify.run.store import RolloutRecord, RunStore
from ramify.trace import AnnotatedTrace, Annotation, build_forest
from tests.rollout.runtime.conftest import skip_unless_available
from tests.support.attempts import OneTask, error_names, list_messages, load_env, run_one, tool_call

pytestmark = pytest.mark.process


def python(code: str) -> str:
    return tool_call("python", code=code)


class Counting(OneTask):
    """A taskset whose tool counts its calls, and whose reward reads the answer."""

    def setup(self, state):
        state.count = 0

    @rf.tool
    def count(self, step: int, state) -> dict:
        """Count on.

        Args:
            step: how far
        """
        state.count += step
        return {"count": state.count}

    @rf.reward
    def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


async def run_rlm(script, task=None, taskset=Counting, runtime="local", **options):
    harness = {"id": "rlm", **options.pop("harness", {})}
    env = load_env(taskset, harness=harness, runtime={"id": runtime}, **options)
    return await run_one(env, script, **({} if task is None else {"task": task}))


def outputs(trace) -> list[str]:
    return [text for role, text in list_messages(trace) if role == "tool"]


@pytest.fixture(params=["local", "sandbox"])
def runtime(request) -> str:
    skip_unless_available(request.param)
    return request.param


LOCAL = pytest.mark.parametrize(
    "runtime",
    ["local", pytest.param("sandbox", marks=pytest.mark.full("other tests run code in the REPL of a sandbox"))],
    indirect=True,
)


# -- the REPL --------------------------------------------------------------------------------------------------------


@LOCAL
async def test_code_sees_the_context_and_keeps_its_variables(runtime):
    task = rf.Task(prompt="a b c", answer="c", system="Find the last letter.")
    trace = await run_rlm([python("letters = context.split()"), python("answer = letters[-1]")], task, runtime=runtime)
    assert trace.stop == "answer_is_set"
    assert trace.last_reply == "c"
    assert trace.reward == 1.0
    assert list_messages(trace)[1] == ("user", "Find the last letter.\n\na b c")


@LOCAL
async def test_output_is_that_of_prints_child_processes_and_the_last_expression(runtime):
    code = (
        "import subprocess, sys\nprint('one')\nsubprocess.run(['echo', 'two'])\nprint('three', file=sys.stderr)\n4 + 0"
    )
    trace = await run_rlm([python(code), "done"], runtime=runtime)
    assert outputs(trace) == ["one\ntwo\nthree\n4\n"]


@LOCAL
async def test_tools_of_the_taskset_are_functions_and_can_be_called_directly(runtime):
    code = "import json\ncount(1)\nprint(json.loads(count(step=2))['count'], count('x'), sep='|')"
    trace = await run_rlm([python(code), tool_call("count", step=1), "FINAL(42)"], runtime=runtime)
    first, second = outputs(trace)
    assert first.startswith("3|error: count: argument step")
    assert second == '{"count":4}'
    assert trace.reward == 1.0  # FINAL(...) marks the answer
    assert trace.stop == "done"


async def test_errors_are_shown_with_the_line_of_the_code():
    trace = await run_rlm([python("x = 1\nx.y"), python("if"), python("exit(3)"), python("print(x)"), "done"])
    attribute, syntax, ended, kept = outputs(trace)
    assert 'File "<run 1>", line 2' in attribute
    assert "AttributeError" in attribute
    assert "repl_script" not in attribute
    assert "SyntaxError" in syntax
    assert "SystemExit: 3" in ended
    assert kept == "1\n"


async def test_tracebacks_have_no_frames_of_the_repl_itself():
    code = "try:\n    llm('x')\nexcept RuntimeError:\n    1 / 0"
    trace = await run_rlm([python(code), "done"], harness={"max_depth": 0})
    (output,) = outputs(trace)
    assert output.count('File "') == output.count('File "<run 1>"') == 2
    assert "RuntimeError: BudgetExceeded: llm: calls may be nested 0 deep" in output
    assert output.endswith("ZeroDivisionError: division by zero\n")


async def test_long_output_is_cut_to_the_budget():
    code = "print('a' * 300_000 + 'b' * 300_000)"
    trace = await run_rlm([python(code), python("print('é' * 200)"), "done"], harness={"max_output_chars": 200})
    long, short = outputs(trace)
    assert long.startswith("a" * 100 + "\n... (cut to 200 characters) ...\n")
    assert long.endswith("b" * 99 + "\n")
    assert short == cut_expected("é" * 200 + "\n")


def cut_expected(text: str) -> str:
    return f"{text[:100]}\n... (cut to 200 characters) ...\n{text[-100:]}"


async def test_long_prompt_is_cut_but_the_context_is_whole():
    task = rf.Task(prompt="x" * 2_000_000 + "END", answer="2000003")
    trace = await run_rlm([python("answer = len(context)")], task, harness={"max_prompt_chars": 100})
    assert trace.reward == 1.0
    shown = list_messages(trace)[1][1]
    assert len(shown) < 200
    assert shown.endswith("END")
    assert "`context` holds all" in shown


async def test_a_task_may_have_a_context_of_its_own():
    task = rf.Task(prompt="How many?", context=["a", "b"], answer="2")
    assert (await run_rlm([python("answer = len(context)")], task)).reward == 1.0


async def test_messages_larger_than_a_line_of_the_runtime_arrive():
    code = "big = 'x' * 3_000_000\nanswer = str(len(llm(big)))"
    trace = await run_rlm([python(code), "y" * 50], harness={"max_prompt_chars": 100})
    assert trace.last_reply == "50"


async def test_wrong_arguments_of_python_are_shown_to_the_model():
    trace = await run_rlm([tool_call("python", program="1"), "done"])
    assert outputs(trace)[0].startswith("error: python: Object")


def test_the_models_reply_can_be_the_answer():
    assert extract_final("So it is FINAL(f(x) + (1)) .") == "f(x) + (1)"
    assert extract_final("FINAL(open") == "open"
    assert extract_final("no mark") == "no mark"


# -- recursive calls -------------------------------------------------------------------------------------------------

RECURSIVE = "first, second = llm('one'), llm('two')\nanswer = '+'.join([first, second, *llm_batch(['a', 'b', 'c'])])"


async def test_calls_of_llm_are_branches_of_one_tree(runtime):
    trace = await run_rlm([python(RECURSIVE), "1", "2", "3", "4", "5"], runtime=runtime)
    assert trace.last_reply == "1+2+3+4+5"
    (root,) = [node for node in trace.nodes if node.parent < 0]
    task, *prompts = [trace.nodes[child].message.text for child in root.children]
    assert task == "Be brief.\n\ngo"
    assert sorted(prompts) == ["a", "b", "c", "one", "two"]
    assert len(trace.branches) == len(trace.sampled_nodes) == 6
    assert get_trainable_nodes(trace) == trace.sampled_nodes
    annotations = tuple(Annotation(trace.id, node, advantage=1.0) for node in get_trainable_nodes(trace))
    forest = build_forest([AnnotatedTrace(trace, annotations)])
    assert len(forest.token_ids) <= trace.total_tokens < forest.flat_tokens / 4  # a shared prompt is there once
    assert len(forest.targets) == trace.completion_len


async def test_show_prints_calls_of_llm_as_a_tree_with_their_caller(tmp_path, capsys):
    trace = await run_rlm([python(RECURSIVE), "1", "2", "3", "4", "5"])
    with RunStore.open(tmp_path / "run") as store:
        store.submit_change(lambda *_: None, [(RolloutRecord("r1", "task", 0), [trace])]).result(60)
    assert main(["show", str(tmp_path / "run"), "r1"]) == 0
    shown = capsys.readouterr().out
    assert "13 messages, 6 branches" in shown
    assert shown.count("── llm() of [2] at [0]\n") == 5
    assert "stop answer_is_set" in shown


async def test_equal_prompts_are_samples_of_one_prompt():
    trace = await run_rlm([python("answer = ' '.join(llm_batch(['same'] * 3))"), "x", "y", "z"])
    assert trace.last_reply == "x y z"
    assert [text for role, text in list_messages(trace) if role == "user"].count("same") == 1


async def test_a_call_of_llm_has_a_repl_and_tools_of_its_own():
    script = [
        python("x = 5\nanswer = llm('Reverse: abc')"),
        python("answer = context[-1:-4:-1] + str('x' in globals())"),
    ]
    trace = await run_rlm(script)
    assert trace.last_reply == "cbaFalse"
    assert trace.stop == "answer_is_set"


async def test_calls_deeper_than_the_limit_are_refused_in_the_code():
    script = [python("answer = llm('down')"), python("llm('deeper')"), "sorry"]
    trace = await run_rlm(script)
    assert trace.last_reply == "sorry"
    assert "calls may be nested 1 deep" in "".join(outputs(trace))
    assert (
        await run_rlm(
            [python("answer = llm('down')"), python("answer = llm('deeper')"), "42"], harness={"max_depth": 2}
        )
    ).reward


async def test_a_call_that_uses_all_its_turns_raises_in_the_code():
    script = [python("try:\n    llm('loop')\nexcept RuntimeError as error:\n    answer = error"), *[python("1")] * 2]
    trace = await run_rlm(script, harness={"max_sub_turns": 2})
    assert "ended without an answer: max_sub_turns" in trace.last_reply


async def test_max_turns_counts_all_calls_and_ends_the_rollout():
    trace = await run_rlm([python("llm_batch(['a', 'b', 'c'])"), "1", "2"], max_turns=3)
    assert trace.stop == "max_turns"
    assert not trace.errors
    assert len(trace.sampled_nodes) == 3


async def test_failure_of_the_engine_in_a_call_is_a_system_failure():
    trace = await run_rlm([python("llm('x')"), ProviderError("gone")])
    assert error_names(trace) == ["ProviderError"]
    assert trace.reward is None


async def test_stop_hook_ends_the_rollout_after_the_code():
    class Stopping(Counting):
        @rf.stop
        def counted(self, state) -> bool:
            return state.count >= 2

    trace = await run_rlm([python("count(1)"), python("count(1)"), "never"], taskset=Stopping)
    assert trace.stop == "counted"
    assert len(trace.sampled_nodes) == 2


# -- code that harms its REPL ----------------------------------------------------------------------------------------


async def test_a_repl_that_exits_is_replaced_and_the_model_is_told(runtime):
    trace = await run_rlm(
        [python("x = 1\nimport os\nos._exit(7)"), python("print('x' in globals(), context)"), "ok"], runtime=runtime
    )
    lost, new = outputs(trace)
    assert lost.startswith("error: the REPL exited with code 7.")
    assert "variables you set are lost" in lost
    assert new == "False go\n"
    assert not trace.errors


async def test_a_policy_that_ends_its_repl_too_often_ends_the_rollout():
    trace = await run_rlm(
        [python("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")] * 2, harness={"max_restarts": 1}
    )
    assert error_names(trace) == ["AgentFailed"]
    assert trace.errors[0].blame == "policy"
    assert trace.reward == 0.0
    assert "2 times" in trace.errors[0].message


@LOCAL
async def test_code_that_runs_too_long_is_interrupted_and_variables_are_kept(runtime):
    code = "x = 1\nimport time\ntime.sleep(60)"
    trace = await run_rlm([python(code), python("print(x)"), "ok"], harness={"run_timeout": 2}, runtime=runtime)
    slow, kept = outputs(trace)
    assert "KeyboardInterrupt" in slow
    assert slow.endswith("error: interrupted after 2 s")
    assert kept == "1\n"


async def test_answer_that_is_too_long_is_refused():
    script = [python("answer = 'x' * 101"), python("answer = 'y' * 100")]
    trace = await run_rlm(script, harness={"max_answer_chars": 100})
    assert "error: `answer` has 101 characters, and at most 100 are accepted" in outputs(trace)[0]
    assert trace.last_reply == "y" * 100


async def test_code_that_ignores_the_interrupt_loses_its_repl():
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"
    trace = await run_rlm([python(code), "ok"], harness={"run_timeout": 2})
    assert "ignored an interrupt" in outputs(trace)[0]
    assert trace.stop == "done"


FORGED = """
import os
for fd in range(3, 30):
    try:
        os.write(fd, MESSAGE)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "message", [b'={"op": "none"}\n', b"=" + b"[" * 50_000 + b"\n", b'={"op": "\xff"}\n', b"\n", b'={"op": "ready"}\n']
)
async def test_an_invalid_message_on_the_channel_costs_the_repl(message):
    trace = await run_rlm([python(FORGED.replace("MESSAGE", repr(message))), "ok"])
    assert outputs(trace)[0].startswith("error: the REPL sent")
    assert trace.stop == "done"


async def test_a_failed_call_of_a_batch_does_not_cost_the_others():
    script = [
        python("try:\n    llm_batch(['a', 'b'])\nexcept RuntimeError as error:\n    answer = error"),
        python("1"),
        "fine",
    ]
    trace = await run_rlm(script, harness={"max_sub_turns": 1})
    assert "max_sub_turns" in trace.last_reply
    assert ("assistant", "fine") in list_messages(trace)


async def test_batch_of_too_many_prompts_is_refused_in_the_code():
    trace = await run_rlm([python("llm_batch(['x'] * 1001)"), "ok"])
    assert "MalformedCall" in outputs(trace)[0] and "length <= 1000" in outputs(trace)[0]
    assert trace.num_turns == 2


async def test_forks_and_threads_of_the_code_do_not_disturb_the_repl():
    code = (
        "import os, threading, warnings, concurrent.futures as futures\n"
        "warnings.simplefilter('ignore')  # Python 3.12 warns of a fork beside threads\n"
        "if os.fork() == 0:\n    print('child')\nelse:\n    os.wait()\n"
        "    with futures.ThreadPoolExecutor(4) as pool:\n"
        "        print(sorted(pool.map(llm, ['a', 'b', 'c'])))\n"
    )
    trace = await run_rlm([python(code), "1", "2", "3", "ok"])
    assert outputs(trace) == ["child\n['1', '2', '3']\n"]


# -- configuration ---------------------------------------------------------------------------------------------------


def test_tool_with_a_name_of_the_repl_is_refused():
    class Clashing(OneTask):
        @rf.tool
        def llm(self, prompt: str) -> str:
            """Ask."""
            return prompt

    with pytest.raises(ConfigInvalid, match="'llm': the harness rlm uses this name"):
        load_env(Clashing, harness={"id": "rlm"})


def test_runtime_that_returns_too_short_lines_is_refused():
    with pytest.raises(ConfigInvalid, match="max_output_bytes is 100"):
        load_env(OneTask, harness={"id": "rlm"}, runtime={"id": "local", "max_output_bytes": 100})


async def list_offered_tools(harness: str) -> list[str]:
    """Return the lines that describe the tools in the first prompt of a wikispeedia rollout."""
    env = Environment.load(SourceConfig(taskset={"id": "wikispeedia"}, harness={"id": harness}))
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "done"

    await run_one(env, reply, next(env.iter_tasks()))
    return prompts[0].partition("Tools:\n")[2].partition("\nCall with")[0].splitlines()


async def test_chat_and_rlm_offer_the_same_tools():
    assert await list_offered_tools("rlm") == [
        "python(code: string) Run Python code.",
        *await list_offered_tools("chat"),
    ]
