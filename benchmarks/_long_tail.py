"""The agent of the GPU benchmark with long-tailed lengths: one reply, whose length is drawn for each rollout."""

import math
import random
from typing import Any

import ramify as rf
from ramify.infer.dialects.model_call import ModelRequest
from ramify.rollout.harness.base import build_initial_messages

P99_OVER_MEDIAN = 8
SIGMA = math.log(P99_OVER_MEDIAN) / 2.326  # of a log-normal distribution with this 99th percentile


class Config(rf.HarnessConfig):
    median_tokens: int = 128
    max_tokens: int = 2048


class LongTail(rf.Harness):
    config: Config

    async def run(self, context: Any, session: Any, tools: Any, user: Any, stop_hooks: Any) -> str:
        """Sample one reply; the random model never ends it by itself."""
        drawn = random.Random(context.trace.id).lognormvariate(math.log(self.config.median_tokens), SIGMA)
        num_tokens = min(max(1, round(drawn)), self.config.max_tokens)
        messages, media = build_initial_messages(context.task)
        request = ModelRequest(tuple(messages), media=media, sampling_overrides={"max_tokens": num_tokens})
        await session.generate(request)
        return "done"
