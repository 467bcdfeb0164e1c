"""The benchmark of engines times prefill and decode steps in the same way for all engines."""

import itertools
from typing import Any

import pytest

PREFILL, STEP, WARM_UP = 0.5, 0.25, 100.0  # seconds of an engine


@pytest.fixture
def engines_gpu(load_benchmark) -> Any:
    return load_benchmark("_engines_gpu")


class FakeEngine:
    """An engine whose clock advances with its tokens, and which is slow the first time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waves: list[list[list[int]]] = []
        self.known_counts: set[int] = set()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> None:
        self.waves.append(prompts)
        warm_up = 0.0 if new_tokens in self.known_counts else WARM_UP
        self.known_counts.add(new_tokens)
        self.now += warm_up + PREFILL + STEP * (new_tokens - 1)


@pytest.mark.parametrize(("new_tokens", "milliseconds"), [(1, 1e3 * PREFILL), (9, 1e3 * STEP)])
def test_a_decode_step_excludes_the_prefill_and_the_first_run(engines_gpu, new_tokens, milliseconds):
    engine = FakeEngine()
    seeds = itertools.count()
    assert engines_gpu.measure(engine.generate, 2, 3, 5, new_tokens, 2, seeds, lambda: engine.now) == milliseconds
    firsts = [tuple(wave[0]) for wave in engine.waves]
    assert len(set(firsts)) == len(firsts)  # no prompt repeats, so none is cached


def test_a_decode_wave_has_8_groups_of_16(engines_gpu):
    groups, size, length, new_tokens, runs = engines_gpu.WAVES["decode 8 x 16"]
    prompts = engines_gpu.build_prompts(groups, size, length, 0)
    assert (len(prompts), len(set(map(tuple, prompts))), length, new_tokens) == (128, 8, 368, 256)
    assert runs >= 3
