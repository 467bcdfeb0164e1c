"""`ramify sft` on conversations with images: where an image may stand in a row, and what is trained."""

import base64
import json

import pyarrow
import pyarrow.parquet
import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env.data_rows import read_rows
from ramify.env.tasksets.color_codeword import make_square, make_square_url
from ramify.model.render import load_renderer
from ramify.trace import MediaPart
from ramify.train.sft import run_sft
from ramify.train.sft.config import SftConfig, SftDataConfig
from ramify.train.sft.conversations import parse_conversations
from ramify.train.sft.forests import build_sft_forest
from ramify.train.sft.plan import build_sft_plan
from tools.tiny.vision_model import write_initial_vision_model

RED, BLUE = make_square((255, 0, 0)), make_square((0, 0, 255))
TEXT = {"type": "text", "text": "Which letters?"}
REPLY = {"role": "assistant", "content": "AC"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vision") / "model"
    write_initial_vision_model(directory, 0)
    return directory


def make_row(*images, **columns):
    return {"messages": [{"role": "user", "content": [*images, TEXT]}, REPLY], **columns}


def parse(path):
    config = SftDataConfig(path=str(path))
    return parse_conversations(read_rows(str(path)), config)


def write_rows(directory, *rows):
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_images_stand_in_parts_beside_the_file_or_in_a_column(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    url = f"data:image/png;base64,{base64.b64encode(BLUE).decode()}"
    path = write_rows(
        tmp_path,
        make_row({"type": "image", "path": "red.png"}, {"type": "image_url", "image_url": {"url": url}}),
        make_row({"type": "image"}, {"type": "image"}, images=["red.png", {"path": None, "url": url}]),
        make_row({"type": "image", "image": "red.png"}, {"type": "input_image", "image_url": url}),
    )
    conversations = parse(path)
    assert len({conversation.messages for conversation in conversations}) == 1
    assert [media.data for media in conversations[0].media.values()] == [RED, BLUE]
    row = make_row({"type": "image"}, images=[{"bytes": RED, "path": "lost.png"}])
    row["messages"][1] = {"role": "assistant", "content": [{"type": "text", "text": "A"}]}
    table = pyarrow.Table.from_pylist([row])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (conversation,) = parse(tmp_path / "rows.parquet")
    part = conversation.messages[0].content[0]
    assert isinstance(part, MediaPart)
    assert conversation.media[part.hash].data == RED


def test_a_file_below_the_directory_may_be_named_by_its_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "red 1.png").write_bytes(RED)
    url = f"file://{tmp_path}/red%201.png"
    write_rows(
        tmp_path,
        make_row({"type": "image", "path": str(tmp_path / "red 1.png")}),
        make_row({"type": "image_url", "image_url": {"url": url}}),
        make_row({"type": "image"}, images=[url]),
    )
    monkeypatch.chdir(tmp_path.parent)
    for conversation in parse(f"{tmp_path.name}/rows.jsonl"):  # a relative path to the dataset
        assert [media.data for media in conversation.media.values()] == [RED]


EMPTY = "expected a data URL or a file below the directory of the dataset, found ''"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (make_row({"type": "image"}), "more images than its row"),
        (make_row(images=["red.png"]), "more images than the messages"),
        (make_row({"type": "image", "path": "lost.png"}), "cannot be read"),
        (make_row({"type": "image", "path": "../other.png"}), "expected a file below the directory of the dataset"),
        (make_row({"type": "image", "path": "/dev/zero"}), "expected a file below the directory of the dataset"),
        (make_row({"type": "image", "path": "rows.jsonl"}), "format 'unknown'"),
        (make_row({"type": "image", "url": "https://example.com/a.png"}), "addresses are not fetched"),
        (make_row({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "expected a complete"),
        (make_row({"type": "image_url", "image_url": {"url": "file://red.png"}}), "expected an absolute path"),
        (make_row({"type": "image_url", "image_url": {"uri": "red.png"}}), "found {'uri': 'red.png'}"),
        (make_row({"type": "image", "image": ""}), rf"content\[0\]: image: {EMPTY}"),
        (make_row({"type": "image_url", "image_url": {"url": ""}}), EMPTY),
        (make_row({"type": "image"}, images=[""]), EMPTY),
        (make_row({"type": "image"}, images=[3]), "expected an image such as .*found 3"),
        (make_row({"type": "text"}), "expected a part such as"),
        (make_row({"type": "video"}), "'video'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image", "path": "red.png"}]}]}, "only text"),
    ],
)
def test_wrong_images_are_refused_with_their_row(row, problem, tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    with pytest.raises(ConfigInvalid, match=f"row 1 .*{problem}"):
        parse(write_rows(tmp_path, row))


@pytest.mark.parametrize("table", [{}, {"validation": {"path": "rows.jsonl"}}])
def test_images_for_a_text_model_are_refused_with_their_row(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = {"messages": [{"role": "user", "content": "Which letters?"}, REPLY]}
    write_rows(tmp_path, text, make_row({"type": "image_url", "image_url": {"url": make_square_url("A")}}))
    (tmp_path / "texts.jsonl").write_text(json.dumps(text))
    data = "texts.jsonl" if table else "rows.jsonl"
    problem = r"data: row 2 of rows.jsonl needs a model that takes images; tiny is a text model: set model.name"
    with pytest.raises(ConfigInvalid, match=problem):
        build_sft_plan(SftConfig(model={"name": "tiny"}, data={"path": data}, **table))
    build_sft_plan(SftConfig(model={"name": "tiny-vision"}, data={"path": data}, **table))


def test_equal_texts_with_different_images_fork(model, tmp_path):
    images = [{"type": "image_url", "image_url": {"url": make_square_url(letter)}} for letter in "AB"]
    conversations = parse(write_rows(tmp_path, *(make_row(image) for image in images)))
    renderer = load_renderer(model)
    forest = build_sft_forest([("a", conversations[0]), ("b", conversations[1])], renderer, ["assistant"], 256)
    assert len(forest.media) == 2
    assert {span.media.data for span in forest.media} == {make_square((255, 0, 0)), make_square((0, 255, 0))}
    same = build_sft_forest([("a", conversations[0]), ("b", conversations[0])], renderer, ["assistant"], 256)
    assert len(same.media) == 1


def test_placeholders_of_different_images_do_not_count_as_a_shared_prefix(model, tmp_path):
    rows = [make_row(*[{"type": "image_url", "image_url": {"url": make_square_url(letter)}}] * 20) for letter in "AB"]
    conversations = parse(write_rows(tmp_path, *rows))
    forest = build_sft_forest(list(zip("ab", conversations)), load_renderer(model), ["assistant"], 4096)
    assert forest.num_tokens == forest.flat_tokens  # the start of the template alone is not worth merging


def test_a_run_on_images_lowers_the_loss(model, tmp_path):
    images = [{"type": "image_url", "image_url": {"url": make_square_url(letter)}} for letter in "AC"]
    path = write_rows(tmp_path, *[make_row(*images)] * 8)
    result = run_sft(
        SftConfig(
            output=tmp_path,
            model={"name": str(model)},
            data={"path": str(path)},
            batch_size=2,
            trainer={"threads": 1, "optim": {"lr": 1e-3}},
        )
    )
    losses = [row["train/loss"] for row in result.table()]
    assert losses[-1] < losses[0]
    assert result.table()[0]["forest/images"] == 2
    assert (result.weights / "preprocessor_config.json").is_file()
