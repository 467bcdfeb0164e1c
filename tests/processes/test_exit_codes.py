"""Exit codes are described in words."""

from ramify.processes.exit import describe_exit, is_signal_exit


def test_describe_exit():
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(128 + 9) == describe_exit(-9) == "was killed by SIGKILL"


def test_exit_by_signal():
    assert is_signal_exit(128 + 15) and is_signal_exit(-15)
    assert not is_signal_exit(0) and not is_signal_exit(127)
