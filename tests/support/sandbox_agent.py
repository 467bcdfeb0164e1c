"""An agent that does without a model what a test says: it writes files into its sandbox and runs a command there."""

import asyncio
from itertools import islice

from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.rollout.harness import Harness, HarnessConfig
from ramify.rollout.validation import ScriptedPolicy


class SandboxAgentConfig(HarnessConfig):
    files: dict[str, str] = {}
    command: str = ""


class SandboxAgent(Harness):
    config: SandboxAgentConfig

    async def run(self, context, session, tools, user, stop_hooks):
        for path, text in self.config.files.items():
            await context.runtime.write(path, text)
        if self.config.command:
            result = await context.runtime.run(self.config.command, timeout=30)
            context.trace.info["command"] = [result.returncode, result.text]
        return "done"


async def work(taskset, *, kind="local", files=None, command="", index=0, **source):
    """Return the trace of an agent that writes these files and runs this command on one task."""
    agent = {"id": "tests.support.sandbox_agent:SandboxAgent", "files": files or {}, "command": command}
    runtime = {
        "id": kind,
        "num_prepared": 0,
        "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    }  # plugins are slow to import
    env = Environment.load(SourceConfig(taskset=taskset, harness=agent, runtime=runtime, **source))
    task = next(islice(env.iter_tasks(), index, None))
    async with asyncio.timeout(60):
        try:
            (trace,) = (await run_attempt(env, task, policy=ScriptedPolicy(), id="r1")).traces
        finally:
            await env.close()
    return trace
