"""What an eval checks before its first rollout."""

import threading

import pytest

from ramify.core.errors import StorageFailed
from ramify.infer.dialects import media
from ramify.rollout import Environment
from ramify.rollout.evals import policy
from ramify.rollout.evals.config import EvalConfig
from tests.rollout.evals.test_task_digest import make_task


@pytest.mark.process
@pytest.mark.timeout(60)
async def test_images_of_a_task_are_read_within_a_deadline(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(policy, "IMAGE_TIMEOUT", 0.1)
    monkeypatch.setattr(media, "read_image_file", lambda path: answers.wait())
    config = EvalConfig(taskset={"id": "reverse-text"})
    check = policy.check_task_images(
        config, Environment.load(config.source), make_task(f"file://{tmp_path}/square.png")
    )
    try:
        with pytest.raises(StorageFailed, match=r"the images of task square: the storage did not answer within 0.1 s"):
            await check
    finally:
        answers.set()
