"""The REPL of the harness rlm works in every runtime."""

import pytest

from ramify.rollout.harness.config import RlmHarnessConfig
from ramify.rollout.harness.repl import Repl
from tests.rollout.runtime.conftest import run_with_runtime

pytestmark = pytest.mark.process


async def answer_prompts(function, arguments):
    return [f"<{prompt}>" for prompt in arguments["prompts"]]


async def test_code_is_run_interrupted_and_restarted(kind):
    async def run_code(runtime):
        config = RlmHarnessConfig(run_timeout=2.0, max_restarts=1)
        repl = Repl(runtime, config, {"context": "x" * 100_000}, [], answer_prompts)
        try:
            codes = ["y = llm_batch(['a', 'b'])\nprint(len(context), y)", "import time\ntime.sleep(60)", "y"]
            return [await repl.run(code) for code in [*codes, "import os\nos._exit(3)", "answer = 'y' in globals()"]]
        finally:
            await repl.close()

    called, slow, kept, exited, restarted = await run_with_runtime(kind, run_code)
    assert called.output == "100000 ['<a>', '<b>']\n"
    assert slow.output.endswith("KeyboardInterrupt\n\nerror: interrupted after 2 s")
    assert kept.output == "['<a>', '<b>']\n"
    assert exited.output.startswith("error: the REPL exited with code 3.")
    assert restarted.answer == "False"
