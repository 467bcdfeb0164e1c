"""The benchmark of a step of RL sets nothing but what every user sets."""

import tomllib

USERS_KEYS = {"max_steps", "model.name", "trainer.optim.lr", "train.taskset.id", "train.sampling.max_tokens"}


def _list_keys(value: object, prefix: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(_list_keys(item, prefix) for item in value))
    if isinstance(value, dict):
        return set().union(*(_list_keys(item, f"{prefix}.{key}" if prefix else key) for key, item in value.items()))
    return {prefix}


def test_speed_is_measured_without_a_setting_for_memory(load_benchmark):
    config = load_benchmark("rl_gpu").SPEED.format(model="m", steps=8, taskset="t", max_tokens=256)
    assert _list_keys(tomllib.loads(config)) == USERS_KEYS


def test_a_plan_is_at_least_as_fast_as_the_settings_by_hand_that_fit(load_benchmark, capsys):
    plans_gpu = load_benchmark("plans_gpu")
    cases = [case for case in plans_gpu.draw_cases(20, 0, (24, 48, 80, 140)) if case["number"] in (4, 12, 14)]
    assert plans_gpu.print_plans(cases) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("too large" in line for line in lines)
    for line in lines:
        chosen, _, by_hand = line.partition("; by hand ")
        fitting = [float(setting.split()[1]) for setting in by_hand.split(", ") if not setting.endswith("too large")]
        assert fitting and float(chosen.split(": ")[1].split(",")[0].split()[1]) <= min(fitting)
