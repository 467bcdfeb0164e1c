"""No engine ever labels weights with a version that they are not, whoever is killed or stopped while they are copied.

Trainers here never wait for engines, so that many copies break off.
"""

import contextlib
import multiprocessing
import random
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from ramify.core.errors import WeightsMissing, WeightsRefused, WeightsReplaced
from ramify.infer.weight_loader import WeightLoader
from ramify.model.shared_weights import Announcement, MemoryUnreadable, SharedWeights, remove_announcements
from ramify.model.weights import apply_weights, get_untied_tensors
from ramify.trace import PolicyVersion
from tests.support.processes import wait_until
from tests.support.runs import FULL
from tests.support.trainer import context

NUM_FAULTS = 40 if FULL else 3


def make_module() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def train(directory: Path, incarnation: int) -> None:
    """Announce versions whose weights all have the number of the step, and change them without waiting."""
    torch.set_num_threads(1)
    remove_announcements(directory, incarnation - 1)
    module = make_module()
    shared = SharedWeights(get_untied_tensors(module), module, directory, incarnation)
    for step in range(1, 1_000_000):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1000 * incarnation + step)
        shared.announce(PolicyVersion("p", incarnation, step), f"{incarnation}-{step:06}")
        time.sleep(random.uniform(0.0, 0.01))
        shared.withdraw()


def copy_versions(directory: Path, log: Path) -> None:
    """Copy what is announced, and write for each copy whether it was complete, broken off, or not what it should be."""
    torch.set_num_threads(1)
    module = make_module()
    loader = WeightLoader(module)
    while True:
        outcome = ""
        for path in sorted(directory.glob("announced-*.msgpack"))[-1:]:
            with contextlib.suppress(WeightsRefused, WeightsReplaced, MemoryUnreadable):
                announcement = Announcement.read(directory / f"{path.stem.removeprefix('announced-')}-0")
                if announcement is not None and announcement.is_current:
                    outcome = copy_version(loader, module, directory / announcement.directory)
        if outcome:
            with log.open("a") as file:
                file.write(f"{outcome}\n")


def copy_version(loader: WeightLoader, module: nn.Module, directory: Path) -> str:
    staged = loader.stage(directory)
    try:  # without the lock that a trainer would wait for
        apply_weights(module, staged)
    except WeightsMissing:
        return "broken"
    expected = 1000 * staged.version.incarnation + staged.version.step
    is_right = all(bool((tensor == expected).all()) for tensor in module.state_dict().values())
    return "complete" if is_right else "WRONG"


def start(function, *args) -> multiprocessing.process.BaseProcess:
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


@pytest.mark.process
@pytest.mark.promise
def test_copies_are_right_or_refused_while_trainers_and_engines_are_killed_and_stopped(tmp_path):
    rng, log, incarnation = random.Random(0), tmp_path / "log", 1
    log.touch()
    trainer = start(train, tmp_path, incarnation)
    engines = [start(copy_versions, tmp_path, log) for _ in range(2)]
    try:
        for number in range(NUM_FAULTS):
            num_lines = len(log.read_text().splitlines())
            wait_until(lambda count=num_lines: len(log.read_text().splitlines()) > count + 5, "copies")
            time.sleep(rng.uniform(0.0, 0.02))
            if number % 3 == 0:
                trainer.kill()
                trainer.join()
                incarnation += 1
                trainer = start(train, tmp_path, incarnation)
            elif number % 3 == 1:
                engines[0].kill()
                engines[0].join()
                engines.append(start(copy_versions, tmp_path, log))
                del engines[0]
            else:  # an engine that is slower than any deadline
                slow = psutil.Process(engines[0].pid)
                slow.suspend()
                time.sleep(0.1)  # some versions
                slow.resume()
    finally:
        for process in (trainer, *engines):
            process.kill()
            process.join()
    outcomes = log.read_text().splitlines()
    assert outcomes.count("complete") > 0
    assert outcomes.count("broken") > 0
    assert set(outcomes) == {"complete", "broken"}
