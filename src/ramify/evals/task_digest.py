"""The digest by which an eval notices that a task has changed since its rollouts were sampled."""

import hashlib

from ramify.dialects.media import FILE_SCHEME
from ramify.env import Task
from ramify.env.task import IDENTITY_DIGITS
from ramify.errors import EnvironmentFault
from ramify.harness.initial_messages import build_initial_messages

IMAGE_TIMEOUT = 60.0  # seconds to read the images of one task


def compute_task_digest(task: Task) -> str:
    """Return the digest of a task's content, and of the image files that its prompt names with `file://`.

    An image that cannot be read is left out: the rollout fails with the reason.
    """
    if isinstance(task.prompt, str) or FILE_SCHEME not in str(task.prompt):
        return task.content_digest
    try:
        _, media = build_initial_messages(task)
    except EnvironmentFault:
        media = {}
    if not media:
        return task.content_digest
    text = ":".join([task.content_digest, *sorted(media)])
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_DIGITS]
