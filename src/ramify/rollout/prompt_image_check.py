"""Check the images in the prompt of a task as a rollout would, without a model."""

from ramify.env import Task
from ramify.errors import EnvironmentFault, ImageInvalid
from ramify.harness.initial_messages import build_initial_messages
from ramify.images import decode_image
from ramify.render.prompt_images import check_image_count, find_image_parts


def check_prompt_images(task: Task) -> bool:
    """Return whether the prompt of a task has images. Raises EnvironmentFault if one of them cannot be used."""
    messages, images = build_initial_messages(task)
    try:
        check_image_count(len(find_image_parts(messages)))
        for image in images.values():
            decode_image(image.data)
    except ImageInvalid as error:
        raise EnvironmentFault(f"task.prompt of task {task.identity} cannot be used: {error.message}") from error
    return bool(images)
