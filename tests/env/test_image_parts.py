"""Tasks, users and tools take images in the same forms, and name the part that is in another form."""

import pytest
from PIL import Image

import ramify as rf
from ramify.core.errors import EnvironmentFault, OperationInvalid
from ramify.env.tools import Tool
from ramify.rollout.harness.base import build_initial_messages
from ramify.trace import Media, MediaPart, TextPart
from tests.support.images import data_url, make_media
from tests.support.rollout_context import make_context, run

IMAGE = make_media(8, 8)
PART = {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}
EXPECTED = (MediaPart(IMAGE.hash), TextPart("What?"))
FORMS = {"media": IMAGE, "image_url": PART, "input_image": {"type": "input_image", "image_url": data_url(IMAGE)}}


def send_as_task(*parts):
    task = rf.Task.from_wire(rf.Task(prompt=[{"role": "user", "content": [*parts]}]).to_wire())
    messages, media = build_initial_messages(task)
    return messages[0].content, list(media.values())


def send_as_user(*parts):
    class Showing(rf.User):
        def respond(self):
            return parts[0] if len(parts) == 1 else [*parts]

    context = make_context()
    message = run(Showing().next_message(context, reply=None, turn=0))
    return message.content, context.trace.graph.media


def send_as_tool_result(*parts):
    def look():
        return parts[0] if len(parts) == 1 else [*parts]

    context = make_context()
    return run(Tool.wrap(look).call(context, {})), context.trace.graph.media


SENDERS = {"task": send_as_task, "user": send_as_user, "tool": send_as_tool_result}


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("part", FORMS.values(), ids=FORMS)
def test_every_sender_may_use_every_form(send, part):
    assert send(part, "What?") == (EXPECTED, [IMAGE])
    assert send(part, {"type": "text", "text": "What?"}) == (EXPECTED, [IMAGE])


def test_an_image_may_be_sent_alone():
    assert (
        send_as_user(IMAGE) == send_as_tool_result(IMAGE) == send_as_task(IMAGE) == ((MediaPart(IMAGE.hash),), [IMAGE])
    )
    assert send_as_tool_result(PART)[1] == [IMAGE]
    assert rf.Task(prompt=[{"role": "user", "content": IMAGE}]).prompt[0]["content"] == [PART]


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("value", [Image.new("RGB", (9, 9)), IMAGE.data], ids=["pillow", "bytes"])
def test_another_object_is_refused_with_advice(send, value):
    with pytest.raises((EnvironmentFault, OperationInvalid), match=r"Media\.from_bytes\(data, 'image/png'\)"):
        send(value, "What?")


@pytest.mark.parametrize("value", [Image.new("RGB", (9, 9)), IMAGE.data, bytearray(IMAGE.data)], ids=type)
def test_an_image_inside_the_data_of_a_tool_is_refused(value):
    with pytest.raises(EnvironmentFault, match=r"Media\.from_bytes"):
        send_as_tool_result({"screens": [value]})


def test_the_data_of_a_tool_stays_data():
    assert send_as_tool_result([{"type": "image", "url": "https://a.b/c.png"}])[0].startswith('[{"type":"image"')
    assert send_as_tool_result(b"text") == ('"text"', [])


def test_a_tool_reads_no_files(tmp_path):
    (tmp_path / "a.png").write_bytes(IMAGE.data)
    part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
    content, media = send_as_tool_result(part)
    assert "error: ImageInvalid: content[0]: image: expected a data URL, found 'file:" in content and not media


@pytest.mark.parametrize("send", [send_as_task, send_as_user])
@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url", "image_url": {"url": "ok.png"}}, "a data URL or file:///PATH, found 'ok.png'"),
        ({"type": "image_url", "image_url": {"url": "/a/ok.png"}}, "a data URL or file:///PATH, found '/a/ok.png'"),
        ({"type": "image", "path": "/a/ok.png"}, "a data URL or file:///PATH, found '/a/ok.png'"),
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "file:///PATH, .*addresses are not fetched"),
        ({"type": "image_url", "image_url": {"url": "file://ok.png"}}, "expected an absolute path, as in file:///"),
        ({"type": "image_url", "image_url": {"url": ""}}, "a data URL or file:///PATH, found ''"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,PHN2Zy8+"}}, "format 'svg'"),
        ({"type": "image_url", "image_url": {"uri": "x"}}, r"'image_url': {'url': URL}}, found {'uri': 'x'}"),
        ({"type": "image_url"}, r"expected a part such as .*'url': URL}}, found {'type': 'image_url'}"),
        ({"type": "text", "txt": "x"}, "expected a part such as {'type': 'text', 'text': TEXT}"),
        ({"image_url": {"url": "x"}}, "expected a part such as"),
        (3, "expected a part such as .*found 3"),
    ],
)
def test_a_wrong_part_is_named_with_what_was_expected(send, part, problem):
    with pytest.raises(EnvironmentFault, match=rf"content\[1\]: .*{problem}"):
        send("What?", part)


def test_an_object_in_the_prompt_is_named_when_the_task_is_built():
    part = {"type": "image_url", "image_url": Image.new("RGB", (9, 9))}
    with pytest.raises(
        OperationInvalid, match=r"task\.prompt\[0\]\.content\[0\]\.image_url: a Image .*Media\.from_bytes"
    ):
        rf.Task(prompt=[{"role": "user", "content": [part]}])


def test_a_task_may_name_a_file_in_every_kind_of_part(tmp_path):
    (tmp_path / "a.png").write_bytes(IMAGE.data)
    url = f"file://{tmp_path}/a.png"
    for part in ({"type": "image", "path": url}, {"type": "image_url", "image_url": url}):
        assert send_as_task(part)[1] == [IMAGE]


def test_the_type_of_a_media_is_that_of_its_data():
    assert send_as_tool_result(Media.from_bytes(IMAGE.data, "image/jpeg"))[1] == [IMAGE]
