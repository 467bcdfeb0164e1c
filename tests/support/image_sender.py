"""A taskset whose agent sends the requests of its task to the gateway, in a file as a user would write it."""

from collections.abc import Iterator

import httpx

import ramify as rf


class ImageSender(rf.Taskset):
    """`task.contents` are the contents of user messages; each is sent in a request of its own."""

    def load(self) -> Iterator[rf.Task]:
        yield rf.Task(prompt="send", contents=[])

    async def run_agent(self, task: rf.Task, endpoint: rf.Endpoint, trace: rf.Trace) -> str:
        answers = []
        async with httpx.AsyncClient(
            base_url=endpoint.base_url, headers={"authorization": f"Bearer {endpoint.api_key}"}, timeout=60
        ) as client:
            for content in task.contents:
                messages = [{"role": "user", "content": content}]
                answer = await client.post("chat/completions", json={"model": "policy", "messages": messages})
                error = answer.json().get("error")
                answers.append([answer.status_code, error["type"] if error else ""])
        trace.info["answers"] = answers
        return "done"

    @rf.reward
    def sent(self, trace: rf.Trace) -> float:
        return float(len(trace.info["answers"]))
