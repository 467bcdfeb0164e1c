"""An inference server that answers at once, in a process of its own: what is left is the cost of the framework.

It speaks the generate contract over real sockets. The answer depends on how often the stop token stands in the prompt:
below `--turns` of them a call, if one was given, else the text; with `--late` a while later. Written with the standard
library alone, because the competitor's interpreter starts it too.
"""

import argparse
import asyncio
import json

MODEL = {"id": "instant", "object": "model", "owned_by": "ramify", "max_model_len": 4096}
VERSION = {"policy": "instant", "incarnation": 0, "step": 1}


def answer(ids):
    """A finished sample as the body of a response."""
    logprobs = [-0.0625 * (1 + at % 13) for at in range(len(ids))]
    entries = [{"token": f"token_id:{id}", "logprob": value, "top_logprobs": []} for id, value in zip(ids, logprobs)]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": entries}}
    choice["policy_versions"] = [["instant", 0, 1, len(ids)]]
    usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
    return response({"request_id": "1", "choices": [choice], "usage": usage})


def response(body):
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data


class Instant(asyncio.Protocol):
    """One connection."""

    def __init__(self, text, call, stop, turns, late, card):
        self.text, self.call, self.turns, self.late = text, call, turns, late
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
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.read) < end + 4 + size:
                return
            body, self.read = self.read[end + 4 : end + 4 + size], self.read[end + 4 + size :]
            path = head.split(b" ", 2)[1]
            answer = self._answer(path, body)
            if self.late and path.endswith(b"/generate"):
                asyncio.get_running_loop().call_later(self.late, self.transport.write, answer)
            else:
                self.transport.write(answer)

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
    flags.add_argument("--late", type=float, default=0.0, help="seconds before a sample is given")
    flags.add_argument("--card", type=json.loads, default={}, help="more that it says about its model")
    args = flags.parse_args()
    text, call = answer(args.text), answer(args.call) if args.call else None
    server = await asyncio.get_running_loop().create_server(
        lambda: Instant(text, call, args.stop, args.turns, args.late, args.card), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
