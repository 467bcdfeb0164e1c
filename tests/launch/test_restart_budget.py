"""Restarts of a process are limited and delayed."""

from ramify.launch.supervised_process import MAX_DELAY, RESTART_WINDOW, RestartBudget


def test_restart_budget_counts_per_hour_with_growing_delays():
    now = 0.0
    budget = RestartBudget(3, clock=lambda: now)
    assert [budget.take_restart() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    now = RESTART_WINDOW
    assert budget.take_restart() == 0.5
    many = RestartBudget(100, clock=lambda: now)
    assert [many.take_restart() for _ in range(20)][-1] == MAX_DELAY
