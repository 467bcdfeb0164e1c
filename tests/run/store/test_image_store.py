"""The images of a run are written once and read back by hash."""

import pytest

from ramify.core.errors import RunDamaged
from ramify.run.store.image_store import ImageStore
from ramify.trace import Media
from tests.support.images import make_media


def test_an_image_is_written_once_and_read_back(tmp_path):
    store = ImageStore(tmp_path / "media")
    media = make_media(10, 10)
    store.write([media, media, Media(media.hash, media.mime)])
    (file,) = (tmp_path / "media").iterdir()
    assert file.name == f"{media.hash}.png" and file.read_bytes() == media.data
    written_at = file.stat().st_mtime_ns
    ImageStore(tmp_path / "media").write([media])
    assert file.stat().st_mtime_ns == written_at
    assert store.read(Media(media.hash, media.mime)) == media


def test_a_missing_or_changed_image_damages_the_run(tmp_path):
    store = ImageStore(tmp_path)
    media = make_media(10, 10)
    with pytest.raises(RunDamaged, match="is missing"):
        store.read(Media(media.hash, media.mime))
    store.write([media])
    store.path(media).write_bytes(b"other")
    with pytest.raises(RunDamaged, match="was changed"):
        store.read(Media(media.hash, media.mime))


def test_a_hash_that_is_none_names_no_file(tmp_path):
    media = make_media(10, 10)
    for hash in ("../../escaped", media.hash.upper(), media.hash + "\n", ""):
        wrong = Media(hash, media.mime, media.data)
        with pytest.raises(RunDamaged, match="expected a SHA-256"):
            ImageStore(tmp_path / "run" / "media").write([wrong])
    assert not list(tmp_path.iterdir())
