"""A worker process refuses the bad images of an agent by name, within bounded memory, and goes on."""

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from ramify.rollout.envserver import EnvClient, EnvServer
from ramify.trace import Media
from tests.infer.gateway.test_images import BAD_CONTENTS, RED
from tests.support import image_sender
from tests.support.images import data_url
from tests.support.processes import async_wait_until as wait_until
from tests.support.tricky_env_server import QUICK, make_config

pytestmark = pytest.mark.process

MAX_GROWTH = 64 * 2**20  # bytes of memory; one bomb would need 300 MB
FILL_BYTES = Media.from_bytes(b"\xff\xd8" + b"\xff" * 2**20, "image/jpeg")


def show(*images: Media) -> list[dict]:
    return [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]


def run_in_worker(engine, fork_client, tmp_path, model: str, contents: list) -> tuple[list, list[dict], int]:
    """Send the contents from one rollout of a worker, after one that only warms it up.

    Return the answers, the refusals that the trace has, and how much the worker's memory grew at most.
    """

    async def main():
        taskset = {"id": f"{image_sender.__file__}:ImageSender"}
        options = {"model": {"name": model}, "served_model": "", "pool": {"type": "static", "workers": 1}}
        config = make_config(engine.url, tmp_path, taskset=taskset, **options)
        server = await EnvServer(config, prefork_client=fork_client).start()
        client = await EnvClient(server.address, settings=QUICK).start()
        try:
            await wait_until(lambda: len(server.pool._ready_workers()) == 1, "a worker")
            await client.run({"prompt": "send", "contents": [show(RED)]}, id="first", timeout=60)
            worker = psutil.Process(server.pool._ready_workers()[0].pid)
            before = worker.memory_info().rss
            task = {"prompt": "send", "contents": contents}
            result = await client.run(task, id="second", timeout=60)
            status = Path(f"/proc/{worker.pid}/status").read_text()
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10
            assert worker.is_running() and result.crashes == 0
            trace = result.episode.traces[0]
            assert not trace.errors
            return trace.info["answers"], trace.info.get("refusals", []), peak - before
        finally:
            await client.close()
            await server.close()

    return asyncio.run(main())


def test_bad_images_are_refused_by_name_and_the_worker_lives(engine, fork_client, tmp_path):
    bad = [*BAD_CONTENTS.values(), show(FILL_BYTES)]
    answers, refusals, growth = run_in_worker(engine, fork_client, tmp_path, "tiny-vision", [*bad, show(RED)])
    assert answers == [[400, "ImageInvalid"]] * len(bad) + [[200, ""]]
    assert sum(refusal["count"] for refusal in refusals) == len(bad)
    assert {refusal["name"] for refusal in refusals} == {"ImageInvalid"}
    assert growth < MAX_GROWTH, growth


def test_an_image_for_a_text_model_is_refused_by_name_and_the_worker_lives(engine, fork_client, tmp_path):
    text = [{"type": "text", "text": "say 1"}]
    answers, refusals, _ = run_in_worker(engine, fork_client, tmp_path, "tiny", [show(RED), text])
    assert answers == [[400, "ImageInvalid"], [200, ""]]
    assert "text model" in refusals[0]["message"]
