"""Two agents in sandboxes at once: neither reaches the gateway session, the files or the key of the other."""

import asyncio
import json

import pytest

import ramify as rf
from ramify.infer.gateway import Gateway
from ramify.rollout.runtime.bwrap import find_unsupported_reason
from tests.support.attempts import OneTask, load_env, run_one_async

pytestmark = [
    pytest.mark.process,
    pytest.mark.promise,
    pytest.mark.skipif(find_unsupported_reason() is not None, reason=f"no sandbox here: {find_unsupported_reason()}"),
]

# Asks the model once with its own key, then tries other keys, and prints what happened.
AGENT = """
import json, os, sys, urllib.request, urllib.error

def ask(key, path="/chat/completions", **body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        return urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code

body = {"model": "x", "messages": [{"role": "user", "content": sys.stdin.read()}]}
own = os.environ["OPENAI_API_KEY"]
print(json.dumps({
    "own": ask(own, **body),
    "none": ask("", **body),
    "guess": ask(own[:-4] + "0000", **body),
    "models without a key": ask("", "/models"),
    "keys": sorted(value for name, value in os.environ.items() if name.endswith("API_KEY")),
}))
"""


class Pair(OneTask):
    @rf.reward
    def answered(self, trace: rf.Trace) -> float:
        return 1.0


async def test_agents_reach_only_their_own_session():
    async with asyncio.timeout(60):
        env = load_env(
            Pair,
            harness={
                "id": "program",
                "command": ["python3", "-S", "agent.py"],
                "prompt": "stdin",
                "files": {"agent.py": AGENT},
            },
            runtime={"id": "sandbox"},
        )
        async with Gateway() as gateway:
            traces = await asyncio.gather(*(run_one_async(env, ["fine"], gateway=gateway) for _ in range(2)))
        await env.close()
    reports = [json.loads(trace.info["program"]["stdout"]) for trace in traces]
    for trace, report in zip(traces, reports):
        assert (report["own"], report["none"], report["guess"], report["models without a key"]) == (200, 401, 401, 401)
        assert trace.num_turns == 1 and trace.last_reply == "fine"
        assert len(set(report["keys"])) == 1
    assert reports[0]["keys"] != reports[1]["keys"]
