"""The digest by which an eval notices that a task has changed since its rollouts were sampled."""

import contextlib
import hashlib
from functools import partial
from typing import Any

from ramify.core.async_calls import call_storage
from ramify.core.errors import RamifyError
from ramify.env import Task
from ramify.env.task import IDENTITY_DIGITS
from ramify.infer.dialects.media import FILE_SCHEME, read_environment_url
from ramify.infer.dialects.message_parser import MessageParser
from ramify.trace import Media

IMAGE_TIMEOUT = 60.0  # seconds to read the images of one task


async def compute_task_digest(task: Task) -> str:
    """Return the digest of a task's content, and of the image files that its prompt names with `file://`.

    An image that cannot be read is left out: the rollout fails with the reason. Raises StorageFailed if the images
    cannot be read within IMAGE_TIMEOUT seconds.
    """
    if isinstance(task.prompt, str) or FILE_SCHEME not in str(task.prompt):
        return task.content_digest
    what = f"the images of task {task.identity}"
    hashes = await call_storage(partial(_hash_images, task.prompt), what, timeout=IMAGE_TIMEOUT)
    if not hashes:
        return task.content_digest
    text = ":".join([task.content_digest, *sorted(hashes)])
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_DIGITS]


def _hash_images(prompt: Any) -> set[str]:
    """Return the hashes of the images in the messages of a prompt that can be read."""
    parser = MessageParser(read_url=read_environment_url)
    for message in prompt:
        with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):  # it is not a chat message
            content = message["content"]
            if isinstance(content, str):
                continue
            for part in [content] if isinstance(content, Media) else content:
                with contextlib.suppress(RamifyError):
                    parser.parse_part(part)
    return set(parser.media)
