"""The interface that harnesses of users implement."""

import ramify as rf
from ramify.rollout.harness.config import HarnessConfig
from tests.support.images import data_url, make_media


class Agent(rf.Harness):
    async def run(self, context, session, tools, user, stop_hooks) -> str:
        return "done"


def test_a_harness_gets_the_prompt_as_messages_with_the_data_of_image_files(tmp_path):
    image = make_media(8, 8)
    (tmp_path / "a.png").write_bytes(image.data)
    text = {"type": "text", "text": "What?"}
    file_part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
    data_part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    agent = Agent(HarnessConfig(id="agent"))
    task = rf.Task(system="be short", prompt=({"role": "user", "content": [file_part, text]},))
    expected = [{"role": "system", "content": "be short"}, {"role": "user", "content": [data_part, text]}]
    assert agent.format_prompt(task) == expected
    assert agent.format_prompt(rf.Task(prompt="hi")) == [{"role": "user", "content": "hi"}]
