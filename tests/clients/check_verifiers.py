"""verifiers 0.4 against a server with both of its clients: `eval`, which relays chats, and `train`, which sends tokens.

The harness runs in this process, so that no program has to be installed. Run by an interpreter that has verifiers:
`python check_verifiers.py http://127.0.0.1:8000 TOKENIZER_DIRECTORY`.
"""

import asyncio
import sys

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["OneTurn", "Words"]  # what verifiers finds in the module that an id names
QUESTION = "Reverse: abc"


class Word(vf.Task):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class Words(vf.Taskset):
    def load(self):
        return [Word(vf.TaskData(prompt=QUESTION)) for _ in range(2)]


class OneTurn(vf.Harness):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {secret}"}) as http:
            answer = await http.post(f"{endpoint.rstrip('/')}/chat/completions", json=body)
            answer.raise_for_status()
        return ProgramResult(0, "", "")


async def main(url: str, tokenizer: str) -> None:
    ids = {"taskset": {"id": "check_verifiers"}}
    agent = {"harness": {"id": "check_verifiers"}, "runtime": {"type": "subprocess"}}
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate({**ids, "agent": agent}))
    clients = {
        "eval": vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY"),
        "train": vf.TrainClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY", renderer_model_name=tokenizer),
    }
    async with env.serving():
        for name, client in clients.items():
            context = vf.ModelContext(model="tiny", client=client)
            for task in env.taskset.take(2):
                episode = await env.run_episode(task, context)
                (trace,) = episode.traces
                assert episode.ok, (episode.errors, trace.errors)
                assert trace.reward == 1.0, trace
            print(f"{name} client: 2 rollouts, the last reply is {trace.last_reply!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
