"""Check the images in the prompt of a task as a rollout would, without a model."""

from ramify.core.errors import EnvironmentFault, ImageInvalid
from ramify.env import Task
from ramify.model.images import decode_image
from ramify.model.render.prompt_images import check_image_count, find_image_parts
from ramify.rollout.harness.initial_messages import build_initial_messages


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
