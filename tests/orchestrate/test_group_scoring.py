"""A group with values that are not finite is dropped with that reason, and the run continues with the others."""

import math
import warnings

import pytest

from ramify.env import plugin
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.curriculum import DifficultyConfig, DifficultyCurriculum, SourceMix
from ramify.orchestrate.group_scoring import ScoringRules, SourceSpec
from ramify.orchestrate.group_tracker import GroupProgress
from ramify.orchestrate.progress import RunProgress
from ramify.run.store import RunLog
from ramify.run.store.audit import audit
from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.ledger import Ledger
from tests.support.traces import make_trace

ALGORITHMS = [{"id": "dr_grpo"}, {"id": "rloo"}, {"id": "grpo", "normalize": False}, {"id": "grpo"}, {"id": "max_rl"}]
TYPICAL = [-0.5, -0.5]


async def open_core(ledger: Ledger, algorithm: dict) -> OrchestratorCore:
    mix = SourceMix({"it": 1.0}, {"it": DifficultyCurriculum(DifficultyConfig(), 4, "0")})
    sources = {"it": SourceSpec(name="it", algorithm=plugin.build_plugin("algorithm", algorithm), group_size=2)}
    return await OrchestratorCore.open(
        ledger, mix, sources, ScoringRules(1000, seq_len=64), AdmissionLimits.from_max_staleness(1, 2), 4
    )


async def sample(core: OrchestratorCore, number: int, rewards: tuple[float, float], logprobs: list[float]) -> None:
    """Record the two attempts of a group; the second has typical logprobs."""
    for attempt, reward in enumerate(rewards):
        core.next_attempt(9)
        trace = make_trace(f"{number}.{attempt}", reward, logprobs=TYPICAL if attempt else logprobs)
        progress = await core.record_attempt(number, attempt, [trace])
    assert progress is GroupProgress.COMPLETE


async def score_in_new_process(ledger: Ledger, algorithm: dict, rewards: tuple[float, float], logprobs=TYPICAL) -> None:
    """Sample such a group and a typical one in one process, and score both in the next."""
    core = await open_core(ledger, algorithm)
    await core.issue_groups()
    await sample(core, 0, rewards, logprobs)
    await sample(core, 1, (0.0, 1.0), TYPICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        core = await open_core(ledger, algorithm)
        progress = RunProgress(RunLog(ledger.store))
        for number in core.get_groups_to_score():
            group, traces = core.get_group(number), core.get_traces(number)
            scored = await core.score_group(number)
            progress.record_group(group, traces, scored.batch_group is not None, scored.fired_by_filter)
        await core.form_batches()
        progress.record_batches({0: [0]})
    assert audit(ledger, finished=False) == []
    assert ledger.get_group(1).state is GroupState.BATCHED


@pytest.mark.parametrize("rewards", [(1e39, 0.0), (1.7e308, -1.7e308)], ids=["float32", "float64"])
@pytest.mark.parametrize("algorithm", ALGORITHMS[:3], ids=["dr_grpo", "rloo", "grpo"])
async def test_reward_beyond_float32_drops_its_group(ledger, algorithm, rewards):
    await score_in_new_process(ledger, algorithm, rewards)
    group = ledger.get_group(0)
    assert group.reason is DropReason.NOT_FINITE
    assert "advantage" in group.detail
    assert f"rewards from {min(rewards):g} to {max(rewards):g}" in group.detail


async def test_group_below_min_reward_is_dropped_with_that_reason(ledger):
    await score_in_new_process(ledger, {"id": "sft", "min_reward": 0.75}, (0.5, 0.25))
    group = ledger.get_group(0)
    assert group.reason is DropReason.BELOW_MIN_REWARD
    assert group.detail == "no attempt reached min_reward = 0.75"


@pytest.mark.parametrize("algorithm", ALGORITHMS[3:], ids=["grpo", "max_rl"])
async def test_extreme_rewards_do_not_end_the_run(ledger, algorithm):
    await score_in_new_process(ledger, algorithm, (1.7e308, -1.7e308))
    assert ledger.get_group(0).state in (GroupState.DROPPED, GroupState.BATCHED, GroupState.SCORED)


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
async def test_logprob_that_is_not_finite_drops_its_group(ledger, logprob):
    await score_in_new_process(ledger, ALGORITHMS[0], (1.0, 0.0), [-0.5, logprob])
    group = ledger.get_group(0)
    assert group.reason is DropReason.NOT_FINITE
    assert "no finite sampler logprob" in group.detail
    assert "0.0" in group.detail  # the trace
