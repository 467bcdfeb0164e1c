"""The images of a run are files in `media/`: traces refer to them by hash, and no text holds their base64."""

import base64
import json

import pytest

from ramify.run.store import RunStore, export_run
from ramify.run.store.image_store import ImageStore
from ramify.trace import Media, MediaPart, MediaRef, Message, TextPart, Trace
from tests.support.images import make_media
from tests.support.traces import make_rollout

IMAGES = [make_media(40, 30, seed=seed) for seed in range(2)]


def image_rollout(number: int, *images: Media):
    record, _ = make_rollout(number)
    url = f"data:image/png;base64,{base64.b64encode(IMAGES[0].data).decode()}"
    prompt = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    trace = Trace(id=f"t{number}", task={"prompt": prompt})
    parts = tuple(MediaPart(image.hash) for image in images)
    refs = [MediaRef(index + 1, trace.add_media(image), 2 * index, 2 * index + 2) for index, image in enumerate(images)]
    trace.graph.add_node(-1, Message("user", (TextPart("look: "), *parts)), [9] * 2 * len(images), media=refs)
    return record, [trace]


@pytest.fixture
async def store(tmp_path):
    with RunStore.open(tmp_path / "run") as store:
        await store.add_rollout(*image_rollout(0, *IMAGES))
        await store.add_rollout(*image_rollout(1, IMAGES[1]))
        yield store


def test_each_image_is_stored_once_and_traces_hold_hashes(store):
    files = {path.name: path.read_bytes() for path in (store.path / "media").iterdir()}
    assert files == {f"{image.hash}.png": image.data for image in IMAGES}
    (trace,) = store.read_traces("r0")
    assert [media.data for media in trace.graph.media] == [b"", b""]
    assert [store.images.read(media) for media in trace.graph.media] == IMAGES
    assert [ref.media for ref in trace.nodes[0].media] == [0, 1]


async def test_an_image_is_stored_before_the_trace_that_refers_to_it(tmp_path, monkeypatch):
    def fail(self, items):
        raise OSError(28, "No space left on device")

    with RunStore.open(tmp_path / "run") as store:
        monkeypatch.setattr(ImageStore, "write", fail)
        with pytest.raises(Exception, match="no room"):
            await store.add_rollout(*image_rollout(0, *IMAGES))
        assert store.rollouts() == []


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_export_has_no_base64_but_the_files_of_images(store, tmp_path, format):
    path = tmp_path / f"run.{format}"
    export_run(store, format, path)
    if format == "jsonl":
        text = path.read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        media = [line["media"] for line in lines]
    else:
        import pyarrow.parquet as pq

        lines = pq.read_table(path).to_pylist()
        text, media = str(lines), [json.loads(line["media"]) for line in lines]
    assert "base64" not in text and f"[image 40×30 png {IMAGES[0].hash[:4]}]" in text
    entries = [{"hash": image.hash, "mime": "image/png", "file": f"media/{image.hash}.png"} for image in IMAGES]
    assert media == [entries, entries[1:]]
