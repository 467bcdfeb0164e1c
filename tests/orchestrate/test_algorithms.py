"""Each algorithm is compared with its formula."""

import math

import pytest

from ramify.core.errors import ConfigInvalid, OperationInvalid
from ramify.env import plugin
from ramify.trace import Message
from tests.support.traces import make_group, make_trace


def advantages(id: str, traces, **options) -> list[float]:
    annotations = plugin.build_plugin("algorithm", {"id": id, **options}).annotate(traces)
    return [annotation.advantage for annotation in annotations]


REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5)
MEAN = 0.5
STD = math.sqrt(4 * 0.25 / 4)


def test_grpo_is_the_distance_from_the_mean_in_standard_deviations():
    expected = [(reward - MEAN) / STD for reward in REWARDS]
    assert advantages("grpo", make_group(*REWARDS)) == pytest.approx(expected, rel=1e-5)


def test_grpo_without_normalization_is_the_distance_from_the_mean():
    expected = [reward - MEAN for reward in REWARDS]
    assert advantages("grpo", make_group(*REWARDS), normalize=False) == pytest.approx(expected)
    assert advantages("dr_grpo", make_group(*REWARDS)) == pytest.approx(expected)


def test_grpo_subtracts_the_length_penalty_from_the_reward():
    traces = [
        make_trace("a", 1.0, range(10, 12)),
        make_trace("b", 1.0, range(10, 14)),
        make_trace("c", 1.0, range(10, 18)),
    ]
    rewards = [1.0, 1.0 - 0.3 * 2 / 6, 1.0 - 0.3]
    mean = sum(rewards) / 3
    computed = advantages("grpo", traces, normalize=False, length_penalty=0.3)
    assert computed == pytest.approx([reward - mean for reward in rewards])
    same = [make_trace("a", 1.0), make_trace("b", 0.0)]
    assert advantages("grpo", same, normalize=False, length_penalty=0.3) == pytest.approx([0.5, -0.5])


def test_rloo_is_the_distance_from_the_mean_of_the_others():
    expected = [reward - (sum(REWARDS) - reward) / 4 for reward in REWARDS]
    assert advantages("rloo", make_group(*REWARDS)) == pytest.approx(expected)
    assert advantages("rloo", make_group(1.0)) == [0.0]


def test_max_rl_divides_by_the_mean():
    assert advantages("max_rl", make_group(1.0, 0.0, 0.0, 0.0)) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert advantages("max_rl", make_group(1.0, 1.0, 1.0, 0.0)) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert advantages("max_rl", make_group(0.0, 0.0)) == [0.0, 0.0]


@pytest.mark.parametrize("id", ["grpo", "dr_grpo", "rloo", "max_rl"])
def test_equal_rewards_give_zero_advantages(id):
    assert advantages(id, make_group(0.1, 0.1, 0.1)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("id", ["grpo", "dr_grpo", "rloo", "max_rl"])
def test_only_replies_of_the_policy_are_annotated(id):
    traces = [make_trace("a", 1.0, turns=3), make_trace("b", 0.0), make_trace("judge", 0.5, trainable=False)]
    annotations = plugin.build_plugin("algorithm", {"id": id}).annotate(traces)
    assert [(annotation.trace_id, annotation.node) for annotation in annotations] == [
        ("a", 1),
        ("a", 3),
        ("a", 5),
        ("b", 1),
    ]
    assert len({annotation.advantage for annotation in annotations if annotation.trace_id == "a"}) == 1
    assert all(annotation.rl == 1.0 and annotation.ce == 0.0 and annotation.span is None for annotation in annotations)


def test_advantages_are_computed_per_agent():
    traces = [
        make_trace(f"{agent}{i}", reward, agent=agent) for i in (0, 1) for agent, reward in (("a", i), ("b", 5 * i))
    ]
    annotations = plugin.build_plugin("algorithm", {"id": "dr_grpo"}).annotate(traces)
    assert {annotation.trace_id: annotation.advantage for annotation in annotations} == {
        "a0": -0.5,
        "a1": 0.5,
        "b0": -2.5,
        "b1": 2.5,
    }


def test_missing_reward_is_refused():
    with pytest.raises(OperationInvalid, match="'t9'"):
        advantages("grpo", [make_trace("t0", 1.0), make_trace("t9", None)])


def test_unknown_option_is_refused_with_a_suggestion():
    with pytest.raises(ConfigInvalid, match=r"algorithm\.normalise: unknown key; did you mean algorithm\.normalize"):
        plugin.build_plugin("algorithm", {"id": "grpo", "normalise": False})
    with pytest.raises(ConfigInvalid, match="did you mean 'grpo'"):
        plugin.build_plugin("algorithm", {"id": "gpro"})


def test_custom_algorithm_is_loaded_like_any_plugin(tmp_path):
    file = tmp_path / "best.py"
    file.write_text(
        "from ramify import Algorithm\n"
        "class Best(Algorithm):\n"
        "    def advantages(self, rewards, traces):\n"
        "        return (rewards == rewards.max()).astype(float)\n"
    )
    assert advantages(str(file), make_group(0.1, 0.7, 0.3)) == [0.0, 1.0, 0.0]


def turn_rollout(name: str, *turn_rewards: float | None, outcome: float = 0.0, weight: float = 1.0):
    trace = make_trace(name, outcome, turns=len(turn_rewards))
    trace.rewards["step"] = (sum(value or 0.0 for value in turn_rewards), weight)
    trace.info["turn_rewards"] = {"step": list(turn_rewards)}
    return trace


def test_turn_credit_compares_what_was_earned_from_a_turn_on():
    traces = [turn_rollout("a", 1.0, 0.0, 1.0, weight=0.5), turn_rollout("b", None, 1.0, outcome=3.0, weight=0.5)]
    # returns of a: 1.0, 0.5, 0.5; of b: 3.5, 3.5 and, after its end, the outcome of 3
    assert advantages("turn_credit", traces) == pytest.approx([1.0 - 3.5, 0.5 - 3.5, 0.5 - 3.0, 2.5, 3.0])


def test_baseline_of_a_turn_does_not_depend_on_where_the_rollout_stopped():
    """A rollout that goes on without reward changes no advantage of the others."""
    short = [turn_rollout("a", 1.0, 2.0), turn_rollout("b", 0.5), turn_rollout("c", 0.0, 1.0)]
    longer = [turn_rollout("a", 1.0, 2.0), turn_rollout("b", 0.5, 0.0), turn_rollout("c", 0.0, 1.0)]
    by_length = [advantages("turn_credit", traces) for traces in (short, longer)]
    assert by_length[0][:2] == pytest.approx(by_length[1][:2]) and by_length[0][-2:] == pytest.approx(by_length[1][-2:])
    assert advantages("turn_credit", [turn_rollout("a", 1.0)]) == [0.0]


def test_turn_credit_without_turn_rewards_is_rloo():
    traces = make_group(*REWARDS, turns=2)
    assert advantages("turn_credit", traces) == pytest.approx(advantages("rloo", traces))


def play_groups(*groups, **options) -> tuple[list[list[float]], dict[str, list[float]]]:
    """Return the advantages that `rae` gives to each group in turn, and its state after the last."""
    rae, state, advantages = plugin.build_plugin("algorithm", {"id": "rae", **options}), {}, []
    for traces in groups:
        annotations, state = rae.annotate_with_state(traces, state)
        advantages.append([annotation.advantage for annotation in annotations])
    return advantages, state


def test_rae_compares_an_agent_with_its_earlier_groups():
    games = [
        [make_trace("a", first, agent="first"), make_trace("b", second, agent="second")]
        for first, second in ((1.0, -1.0), (0.5, 0.5), (0.0, 2.0))
    ]
    advantages, state = play_groups(*games, decay=0.4)
    # the mean at first, then 0.4 of the baseline and 0.6 of the new reward
    assert advantages == [[1.0, -1.0], [-0.5, 1.5], pytest.approx([-0.7, 2.1])]
    assert state == {"first": [pytest.approx(0.28), 3], "second": [pytest.approx(1.16), 3]}


def test_rae_uses_no_reward_of_the_group_in_its_baseline():
    (_, advantages), state = play_groups(make_group(0.0), make_group(*REWARDS))
    assert advantages == pytest.approx(REWARDS)
    assert state == {"": [pytest.approx(MEAN / 2), 2]}


def test_echo_adds_cross_entropy_on_tool_output():
    traces = make_group(1.0, 0.0)
    node = traces[0].graph.add_node(1, Message("tool", "done"), [7, 8, 9], content_span=(1, 3))
    annotations = plugin.build_plugin("algorithm", {"id": "echo", "role_weights": {"tool": 0.25}}).annotate(traces)
    (echoed,) = [annotation for annotation in annotations if annotation.ce]
    assert (echoed.trace_id, echoed.node, echoed.span, echoed.ce, echoed.rl) == ("t0", node, (1, 3), 0.25, 0.0)
    assert [annotation.advantage for annotation in annotations[:2]] == advantages("grpo", traces)


def test_distillation_weights():
    traces = [make_trace("a", 1.0), make_trace("b", 0.25)]
    opd = plugin.build_plugin("algorithm", {"id": "opd"}).annotate(traces)
    assert [(note.trace_id, note.rl, note.ref_kl, note.needs_reference) for note in opd] == [
        ("a", 0.0, 1.0, True),
        ("b", 0.0, 1.0, True),
    ]
    sft = plugin.build_plugin("algorithm", {"id": "sft", "min_reward": 0.5}).annotate(traces)
    assert [(note.trace_id, note.rl, note.ce, note.needs_reference) for note in sft] == [("a", 0.0, 1.0, False)]
    assert {note.kl for note in plugin.build_plugin("algorithm", {"id": "grpo", "beta": 0.1}).annotate(traces)} == {0.1}


def test_group_without_trainable_calls_is_dropped_with_their_reasons():
    traces = make_group(1.0, 0.0, turns=2)
    for trace in traces:
        for node in trace.sampled_nodes:
            trace.exclude_from_training(node, "structured output")
            trace.exclude_from_training(node, "a second reason")
    reason, detail = plugin.build_plugin("algorithm", {"id": "grpo"}).get_drop_reason(traces)
    assert (reason.value, detail) == ("nothing_trainable", "4 calls are not trained (structured output)")
