"""Stacks of other threads."""

import threading

from ramify.wire.loop_monitor import format_thread_stack


def test_stack_of_a_blocked_thread_has_its_frames_and_their_source():
    entered, may_end = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        may_end.wait()

    thread = threading.Thread(target=block)
    thread.start()
    try:
        assert entered.wait(60) and thread.ident is not None
        stack, last = format_thread_stack(thread.ident), format_thread_stack(thread.ident, limit=1)
    finally:
        may_end.set()
        thread.join()
    assert stack.index("in run\n") < stack.index("in block\n")
    assert f'File "{__file__}"' in stack and stack.endswith(last)
    assert "in block" not in last or "may_end.wait()" in last


def test_stack_of_an_unknown_thread_is_empty():
    assert format_thread_stack(1) == ""


def test_stacks_can_be_read_while_the_thread_runs():
    may_end = threading.Event()

    def recurse(depth: int) -> None:
        if depth:
            recurse(depth - 1)

    def run() -> None:
        while not may_end.is_set():
            recurse(20)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert thread.ident is not None
        stacks = [format_thread_stack(thread.ident) for _ in range(50)]
    finally:
        may_end.set()
        thread.join()
    assert all("in run" in stack for stack in stacks)


def test_stack_among_too_many_threads_is_reported_as_missing():
    may_end = threading.Event()
    threads = [threading.Thread(target=may_end.wait) for _ in range(120)]
    for thread in threads:
        thread.start()
    try:
        stack = format_thread_stack(threading.main_thread().ident or 0)
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
    assert "not available" in stack
