"""`python -m tests.infer.failing_server MODEL`: a native server whose engine fails on SIGUSR1."""

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

STEP_SECONDS = 0.01  # slow, so that requests for hundreds of tokens are still running when it fails


def main(model: Path) -> None:
    core = build_core(model, kv_cache_tokens=8192)
    must_fail, step = threading.Event(), core.step

    def step_or_fail() -> list[EngineRequest]:
        if must_fail.wait(STEP_SECONDS):
            raise RuntimeError("the device is gone")
        return step()

    core.step = step_or_fail
    signal.signal(signal.SIGUSR1, lambda *_: must_fail.set())
    asyncio.run(serve(Engine(core), name="llama", config=ServerConfig(port=0, shutdown_timeout=2)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
