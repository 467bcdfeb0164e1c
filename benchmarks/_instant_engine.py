"""An inference server in its own process that answers at once, so that only the cost of the framework remains.

It implements the generate API over real sockets. The answer depends on the number of stop tokens in the prompt: with
fewer than `--turns` it is `--call`, if given, else `--text`. `--late` delays it. It uses only the standard library,
because the competitor's interpreter starts it too.
"""

import argparse
import asyncio
import json

MODEL = {"id": "instant", "object": "model", "owned_by": "ramify", "max_model_len": 4096}
VERSION = {"policy": "instant", "incarnation": 0, "step": 1}


def build_response(ids):
    """Return the HTTP response with a finished sample."""
    logprobs = [-0.0625 * (1 + index % 13) for index in range(len(ids))]
    entries = [{"token": f"token_id:{id}", "logprob": value, "top_logprobs": []} for id, value in zip(ids, logprobs)]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": entries}}
    choice["policy_versions"] = [["instant", 0, 1, len(ids)]]
    usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
    return response({"request_id": "1", "choices": [choice], "usage": usage})


def response(body):
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data


class InstantEngine(asyncio.Protocol):
    """One connection to the engine."""

    def __init__(self, text, call, stop, turns, delay, card):
        self.text, self.call, self.turns, self.delay = text, call, turns, delay
        self.stop = b",%d," % stop
        self.models = response({"object": "list", "data": [{**MODEL, **card, "version": VERSION}]})
        self.health = response({"status": "ok"})
        self.read = b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.read += data
        while (end := self.read.find(b"\r\n\r\n")) >= 0:
            head = self.read[:end].lower()
            index = head.find(b"content-length:")
            size = int(head[index + 15 :].split(b"\r\n", 1)[0]) if index >= 0 else 0
            if len(self.read) < end + 4 + size:
                return
            body, self.read = self.read[end + 4 : end + 4 + size], self.read[end + 4 + size :]
            path = head.split(b" ", 2)[1]
            data = self._answer(path, body)
            if self.delay and path.endswith(b"/generate"):
                asyncio.get_running_loop().call_later(self.delay, self.transport.write, data)
            else:
                self.transport.write(data)

    def _answer(self, path, body):
        if path.endswith(b"/generate"):
            early = self.call and body.replace(b" ", b"").count(self.stop) < self.turns
            return self.call if early else self.text
        return self.models if path.endswith(b"/models") else self.health


async def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--text", type=json.loads, required=True)
    flags.add_argument("--call", type=json.loads)
    flags.add_argument("--stop", type=int, required=True)
    flags.add_argument("--turns", type=int, default=0)
    flags.add_argument("--late", type=float, default=0.0, help="seconds before a sample is returned")
    flags.add_argument("--card", type=json.loads, default={}, help="further fields of its model card")
    args = flags.parse_args()
    text, call = build_response(args.text), build_response(args.call) if args.call else None
    server = await asyncio.get_running_loop().create_server(
        lambda: InstantEngine(text, call, args.stop, args.turns, args.late, args.card), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
