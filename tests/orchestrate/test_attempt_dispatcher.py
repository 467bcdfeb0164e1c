"""The dispatcher sends attempts to env servers, scores complete groups, and reports what fails."""

import asyncio
import re
from dataclasses import replace

import pytest

from ramify.core.async_calls import cancel_all
from ramify.core.errors import Failure, ModelUnsupported, RequestInvalid
from ramify.env import plugin
from ramify.orchestrate.attempt_dispatcher import AttemptDispatcher
from ramify.orchestrate.connected_source import ConnectedSource, TaskCache
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.progress import RunProgress
from ramify.rollout.envserver.messages import GroupScores, TaskItem, TaskPage
from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.run_log import RunLog
from ramify.trace import Trace
from tests.support.orchestrator import TASKS, World, open_core, record_all, sample_group, take_attempts
from tests.support.traces import make_trace


def make_dispatcher(
    core: OrchestratorCore, client, *, max_tries: int = 1, group_rewards=(), retry_delay: float = 0.0, **options
):
    """Return a dispatcher whose sources are all served by `client`."""
    sources = {
        name: ConnectedSource(
            name=name,
            servers=client,
            tasks=TaskCache(name, client),
            attempt_timeout=9.0,
            max_tries=max_tries,
            server_timeout=9.0,
            group_rewards=frozenset(group_rewards),
            retry_delay=retry_delay,
        )
        for name in TASKS
    }
    callbacks = dict.fromkeys(("on_group_scored", "on_failure"), lambda *_: None)
    return AttemptDispatcher(core, sources, **{"seed": 0, "get_limit": lambda: 0, **callbacks, **options})


class FlakyGroupReward:
    """An env server whose group reward raises a few times."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures, self.num_calls = failures, 0

    async def score_group(self, task, traces, **_) -> GroupScores:
        self.num_calls += 1
        metrics = [{"judge/calls": trace.metrics.get("judge/calls", 0.0) + 0.5} for trace in traces]
        info = [{"judge": index} for index in range(len(traces))]
        if self.failures:
            failure = self.failures.pop(0)
            return GroupScores([{"best": None} for _ in traces], [[failure] for _ in traces], metrics, info)
        rewards = [{"best": (float(index), 1.0)} for index in range(len(traces))]
        return GroupScores(rewards, [[] for _ in traces], metrics, info)


@pytest.mark.parametrize("times", [1, 2])
async def test_failing_group_reward_is_retried_and_reported(ledger, times):
    asleep = Failure("JudgeError", "the judge sleeps", "system", True)
    core = await open_core(ledger, World(size=2), group_rewards=frozenset(["best"]))
    await sample_group(core, 0, rewards=(0.0, 0.0), best=None)
    failures: list[str] = []
    scored_traces: list[Trace] = []
    dispatcher = make_dispatcher(
        core,
        FlakyGroupReward([asleep] * times),
        max_tries=2,
        group_rewards=["best"],
        on_group_scored=lambda group, traces, *_: scored_traces.extend(traces),
        on_failure=lambda origin, failure: failures.append(failure.name),
    )
    await run_until_scored(core, dispatcher)
    assert failures == ["JudgeError"] * times
    group = ledger.get_group(0)
    if times == 1:
        assert group.state is GroupState.SCORED
        calls = [(trace.metrics["judge/calls"], trace.info["judge"]) for trace in scored_traces]
        assert calls == [(1.0, 0), (1.0, 1)]  # the calls of the failed try are paid for too
    else:
        assert (group.reason, group.detail) == (DropReason.UNSCORED, "JudgeError: the judge sleeps")


class UnsupportedScorer:
    """A scorer whose model cannot score the rollouts, whatever they are."""

    async def score(self, group, traces, algorithm) -> None:
        raise ModelUnsupported("rollouts with images cannot be scored")


async def test_rollouts_that_no_model_can_score_end_the_run(ledger):
    core = await open_core(ledger, World(size=2))
    await sample_group(core, 0)
    dispatcher = make_dispatcher(core, FlakyGroupReward([]), reference_scorer=UnsupportedScorer())
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(30):
            await dispatcher.run()
    assert [type(error) for error in ended.value.exceptions] == [ModelUnsupported]


async def run_until_scored(core: OrchestratorCore, dispatcher: AttemptDispatcher) -> None:
    """Run the dispatcher until every complete group is scored."""
    running = asyncio.create_task(dispatcher.run())
    async with asyncio.timeout(30):
        while core.get_groups_to_score() and not running.done():
            await asyncio.sleep(0.01)
    assert not running.done(), running.exception()
    await cancel_all([running])


class FailingGroupReward:
    """An env server whose group reward fails after the run has dropped all other groups."""

    def __init__(self, core: OrchestratorCore) -> None:
        self.core = core
        self.num_calls = 0

    async def score_group(self, task, traces, **_) -> None:
        self.num_calls += 1
        for number in self.core.get_groups_to_score()[1:]:
            await self.core.drop_group(number, DropReason.RUN_ENDED)
        raise RequestInvalid("it cannot")


async def test_run_may_end_while_groups_of_an_earlier_process_are_scored(ledger):
    core = await open_core(ledger, World())
    await core.issue_groups()
    await record_all(core)
    assert len(core.get_groups_to_score()) > 1
    client = FailingGroupReward(core)
    await run_until_scored(core, make_dispatcher(core, client, group_rewards=["best"]))
    assert client.num_calls == 1
    assert {group.reason for group in ledger.groups()} == {DropReason.UNSCORED, DropReason.RUN_ENDED}


class HeldEnvServer:
    """An env server that holds each request until the test releases it; a rollout, or the tasks, then fail."""

    def __init__(self, *, has_tasks: bool = True) -> None:
        self.has_tasks = has_tasks
        self.requests: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.address: str | None = None

    def find_address(self, rollout_id: str) -> str | None:
        return self.address

    async def hold(self) -> None:
        await self.requests.put(release := asyncio.Event())
        await release.wait()

    async def tasks(self, start, count, **_) -> TaskPage:
        await self.hold()
        if not self.has_tasks:
            raise RequestInvalid("it has none")
        return TaskPage([TaskItem(str(number), {"idx": number}) for number in range(count)], True)

    async def run(self, task, **_) -> None:
        self.address = "tcp://10.0.0.1:5000"
        try:
            await self.hold()
            raise RequestInvalid("it cannot")
        finally:
            self.address = None


@pytest.mark.parametrize("has_tasks", [True, False])
async def test_oldest_attempt_says_where_it_is(ledger, has_tasks):
    def describe_oldest(dispatcher: AttemptDispatcher) -> str:
        return dispatcher.describe_oldest_attempt().removeprefix("oldest attempt ")

    client, failed = HeldEnvServer(has_tasks=has_tasks), asyncio.Event()
    core = await open_core(ledger, World())
    dispatcher = make_dispatcher(
        core, client, retry_delay=60.0, get_limit=lambda: 1, on_failure=lambda *_: failed.set()
    )
    dispatcher.weights_ready.set()
    running = asyncio.create_task(dispatcher.run())
    async with asyncio.timeout(30):
        release = await client.requests.get()
        assert re.fullmatch(r"0\.0: 0 s \(timeout 9 s\), source \w+, not sent yet", describe_oldest(dispatcher))
        release.set()
        if has_tasks:  # otherwise it is never sent
            release = await client.requests.get()
            assert describe_oldest(dispatcher).endswith(" at tcp://10.0.0.1:5000")
            release.set()
        await failed.wait()
        assert describe_oldest(dispatcher).endswith(", failed with RequestInvalid")
    await cancel_all([running])


@pytest.mark.parametrize("mode", ["monitor", "enforce"])
async def test_filter_rates_are_step_metrics(ledger, mode):
    core = await open_core(ledger, World())
    tables = [{"id": "gibberish"}, {"id": "zero_advantage", "mode": mode}]
    core.scoring_rules = replace(
        core.scoring_rules, filters=tuple(plugin.build_plugin("filter", table) for table in tables)
    )
    await core.issue_groups()
    attempts = take_attempts(core)
    for queued in attempts:
        reward = 1.0 if queued.group == 0 else float(queued.attempt == 0)
        trace = make_trace(f"{queued.group}.{queued.attempt}", reward)
        await core.record_attempt(queued.group, queued.attempt, [trace])
    progress = RunProgress(RunLog(ledger.store))
    callbacks = {"on_group_scored": progress.record_group, "on_failure": progress.record_failure}
    dispatcher = make_dispatcher(core, FlakyGroupReward([]), **callbacks)
    await run_until_scored(core, dispatcher)
    progress.record_batches({0: [0]})
    same = [queued for queued in attempts if queued.group == 0]
    assert progress.latest_metrics["rollouts"] == len(attempts) > len(same) == 2
    assert progress.latest_metrics["filter/zero_advantage"] == pytest.approx(len(same) / len(attempts))
    assert progress.latest_metrics["filter/gibberish"] == 0.0
    assert ledger.get_group(0).state is (GroupState.DROPPED if mode == "enforce" else GroupState.BATCHED)
