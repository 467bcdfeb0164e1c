"""The harness taskset: a taskset that runs its agent itself."""

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.infer.gateway import Gateway
from tests.rollout.test_train_calls import complete
from tests.support.attempts import OneTask, error_names, list_messages, load_env, run_one


class TwoCalls(OneTask):
    async def run_agent(self, task, endpoint, state) -> str:
        messages = [{"role": "user", "content": task.prompt}]
        state.first = await complete(endpoint, messages)
        messages += [{"role": "assistant", "content": state.first}, {"role": "user", "content": "again"}]
        state.second = await complete(endpoint, messages)
        return "twice"

    @rf.reward
    def equal(self, state) -> float:
        return float(state.first == state.second)


async def rollout(taskset: type[rf.Taskset], script: list[str], **source) -> rf.Trace:
    async with Gateway() as gateway:
        return await run_one(load_env(taskset, **source), script, gateway=gateway)


async def test_hook_runs_the_agent_and_its_calls_are_the_trace():
    trace = await rollout(TwoCalls, ["one", "one"])
    assert [text for role, text in list_messages(trace) if role == "assistant"] == ["one", "one"]
    assert (trace.stop, trace.reward, trace.harness["id"]) == ("twice", 1.0, "taskset")
    assert all(node.is_trainable for node in trace.nodes if node.call is not None)


async def test_limit_ends_the_agent_and_is_its_stop_reason():
    class Patient(OneTask):
        async def run_agent(self, task, endpoint) -> str:
            for number in range(2):
                try:
                    await complete(endpoint, [{"role": "user", "content": f"{task.prompt} {number}"}])
                except KeyError:  # the response has no choices
                    return "refused"
            return "done"

    assert (await rollout(Patient, ["one", "two"], max_turns=1)).stop == "max_turns"


async def test_result_that_is_no_text_is_an_environment_fault():
    class Silent(OneTask):
        async def run_agent(self) -> None:
            return None

    assert error_names(await rollout(Silent, [])) == ["EnvironmentFault"]


def test_unusable_hooks_are_refused_when_the_taskset_is_loaded():
    class WithTool(TwoCalls):
        @rf.tool
        def add(self, a: int) -> int:
            """Add one."""
            return a + 1

    with pytest.raises(ConfigInvalid, match="runs its agent alone; remove add"):
        load_env(WithTool)
    with pytest.raises(ConfigInvalid, match="needs a taskset with a hook `run_agent`"):
        load_env(OneTask, harness={"id": "taskset"})
