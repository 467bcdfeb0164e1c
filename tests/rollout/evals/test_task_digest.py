"""The digest by which an eval notices a changed task, together with the image files that its prompt names."""

import pytest

import ramify as rf
from ramify.env.tasksets.color_codeword import make_square, make_square_url
from ramify.rollout.evals.plan import compute_task_digest


def make_task(*urls: str) -> rf.Task:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts = [*images, {"type": "text", "text": "Which colour?"}]
    return rf.Task(prompt=[{"role": "user", "content": parts}], key="square")


async def test_changed_image_file_changes_the_digest_and_not_the_identity(tmp_path):
    file = tmp_path / "square.png"
    for task in (make_task(f"file://{file}"), make_task(f"file://{tmp_path}/missing.png", f"file://{file}")):
        file.write_bytes(make_square((255, 0, 0)))
        red = await compute_task_digest(task)
        file.write_bytes(make_square((0, 0, 255)))
        blue = await compute_task_digest(task)
        file.write_bytes(make_square((255, 0, 0)))
        assert (red != blue, await compute_task_digest(task)) == (True, red)
        assert (len(red), task.identity) == (16, "square")


@pytest.mark.parametrize("prompt", ["see file:///a.png", None, [{"role": "user", "content": "file:///a.png"}]])
async def test_task_without_image_files_has_its_content_digest(prompt):
    task = rf.Task(prompt=prompt, system="Be brief.")
    assert await compute_task_digest(task) == task.content_digest


async def test_data_url_and_missing_file_have_the_content_digest(tmp_path):
    for url in (make_square_url("A"), f"file://{tmp_path}/missing.png"):
        assert await compute_task_digest(make_task(url)) == make_task(url).content_digest
