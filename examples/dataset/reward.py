"""A reward of one's own: how near the reply is to the answer."""

from difflib import SequenceMatcher

import ramify as rf


def close(task: rf.Task, trace: rf.Trace) -> float:
    """1 for the answer, a share for what resembles it."""
    reply = trace.last_reply.strip().rstrip(".").lower()
    return SequenceMatcher(None, reply, str(task.answer).lower(), autojunk=False).ratio()
