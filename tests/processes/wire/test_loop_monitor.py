"""Stacks of other threads."""

import subprocess
import sys
import threading

import pytest

from ramify.processes.wire.loop_monitor import format_thread_stack


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


@pytest.mark.process
def test_stacks_can_be_read_while_c_threads_enter_and_leave_python():
    """A thread of a C library makes its thread state without the interpreter lock. A crash would end this process."""
    script = """if True:
        import ctypes, threading
        from ramify.processes.wire.loop_monitor import format_thread_stack

        library = ctypes.CDLL(None)
        enter_python = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
        may_end = threading.Event()

        def start_threads():
            thread = ctypes.c_ulong()
            while not may_end.is_set():
                if library.pthread_create(ctypes.byref(thread), None, enter_python, None) == 0:
                    library.pthread_join(thread, None)

        threads = [threading.Thread(target=start_threads) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5000):
            assert "in <module>" in format_thread_stack(threading.main_thread().ident)
        may_end.set()
    """
    assert subprocess.run([sys.executable, "-c", script], timeout=240).returncode == 0
