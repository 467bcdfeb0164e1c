"""`python -m tests.infer.breaking MODEL`: a native server whose engine fails when the process is told to (SIGUSR1)."""

import asyncio
import signal
import sys
import threading
from pathlib import Path

from ramify.infer.config import ServerConfig
from ramify.infer.engine import Engine
from ramify.infer.request import EngineRequest
from ramify.infer.server import serve
from tests.infer.llama import build_core

SLOW = 0.01  # seconds of a step: whoever asks for hundreds of tokens is still there when it happens


def main(model: Path) -> None:
    core = build_core(model, kv_tokens=8192)
    told, step = threading.Event(), core.step

    def breaking() -> list[EngineRequest]:
        if told.wait(SLOW):
            raise RuntimeError("the device is gone")
        return step()

    core.step = breaking
    signal.signal(signal.SIGUSR1, lambda *_: told.set())
    asyncio.run(serve(Engine(core), name="llama", config=ServerConfig(port=0, shutdown=2)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
