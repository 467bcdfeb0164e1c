"""The gateway with a real engine, `ramify serve -m tiny`, and the openai SDK; runs in `test-full`."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from ramify.infer.client import InferenceClient
from ramify.infer.gateway import Gateway, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.trace import Trace
from tests.support.engine import TINY

pytestmark = [pytest.mark.process, pytest.mark.skipif(not os.environ.get("RAMIFY_FULL"), reason="starts an engine")]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "ramify", "serve", "-m", "tiny", "--server.port", "0", "--inference.threads", "1"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield _address(process, log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"at (http://\S+)", log.read_text()):
            return match[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")


async def test_recorded_logprobs_equal_those_that_the_engine_scores(address):
    async with InferenceClient(address) as client, Gateway() as gateway:
        policy, trace = TokenPolicy(client, TINY, "tiny", max_model_len=2048), Trace(id="t1")
        session = RolloutSession(
            trace, policy, sampling=SamplingConfig(max_tokens=40), limits=RolloutLimits(), seed=1, is_training=True
        )
        end = gateway.register(session)
        async with openai.AsyncOpenAI(base_url=end.base_url, api_key=end.api_key) as agent:
            history = [{"role": "user", "content": "Reverse this text: abc"}]
            for turn in range(3):
                answer = await agent.chat.completions.create(model="gpt-x", messages=history)
                history += [{"role": "assistant", "content": answer.choices[0].message.content}]
                history += [{"role": "user", "content": f"And this one: {turn}"}]
        (branch,) = trace.branches
        scored = await client.score(branch.token_ids.tolist())
        mask = branch.sampled_mask
        assert mask.sum() == session.budget.output_tokens and "forks" not in trace.info
        np.testing.assert_allclose(branch.logprobs[mask], scored[mask], atol=0.05)
