"""What a run says it is waiting for."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from ramify.orchestrate import telling
from ramify.orchestrate.admission import Admission, Shape
from ramify.orchestrate.service import TrainerService
from ramify.store.entries import Marks


def test_a_run_whose_steps_are_all_done_waits_for_their_checkpoint():
    """Without it none of them counts: a trainer that cannot write it, or is gone, is who to look at."""
    admission = Admission(Shape(1, slots=2, window=1), last_step=1)
    admission.issue(0)
    admission.score(0)
    admission.cut(admission.ready() or ())
    admission.apply(1)
    core: Any = SimpleNamespace(admission=admission, marks=Marks(committed=0, acknowledged=1))
    unused: Any = None
    service = TrainerService(core, unused, unused, policy="tiny", steps=1, replaced=unused)
    service._met = True
    opened = asyncio.Event()
    opened.set()
    run: Any = SimpleNamespace(
        core=core,
        service=service,
        progress=SimpleNamespace(moved=time.monotonic()),
        config=SimpleNamespace(orchestrator=SimpleNamespace(stall_timeout=60.0)),
        sampling=SimpleNamespace(open=opened, out=0),
        weights=SimpleNamespace(waiting_since=None),
        evaluating=SimpleNamespace(running={}),
        client=SimpleNamespace(down={}),
        loads=[],
    )
    assert [(wait["who"], wait["waits_for"]) for wait in telling.why(run)] == [
        ("orchestrator", "the checkpoint of step 1")
    ]
    core.marks = Marks(committed=1, acknowledged=1)
    assert telling.why(run) == []
