"""Weights in an object store: complete when they can be seen, and fetched once per node."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, ProviderError, WeightsRefused, WeightsReplaced
from ramify.infer.weight_loader import WeightLoader
from ramify.model import publish_weights, remote_weights
from ramify.model.remote_weights import fetch_weights, get_run_url, remove_uploaded_weights, upload_weights
from ramify.model.weights_manifest import verify_weights
from ramify.trace import PolicyVersion
from tests.model.test_shared_weights import make_module


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/bucket/run"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_weights, "get_cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def publish(tmp_path, url, step, offset=0):
    directory = tmp_path / f"weights{offset or ''}" / f"0-{step:06}"
    tensors = {name: value + step + offset for name, value in make_module().state_dict().items()}
    publish_weights(directory, tensors, PolicyVersion("p", 0, step))
    upload_weights(directory, url)
    return directory


def test_fetched_weights_are_those_that_were_published(tmp_path, url, cache):
    directory = publish(tmp_path, url, 1)
    fetched = fetch_weights(directory.name, url)
    assert fetched.is_relative_to(cache)
    assert verify_weights(fetched).version == PolicyVersion("p", 0, 1)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == files


def test_engines_of_a_node_fetch_a_version_once(tmp_path, url, cache, monkeypatch):
    directory, calls, fetch = publish(tmp_path, url, 1), [], remote_weights._fetch
    monkeypatch.setattr(remote_weights, "_fetch", lambda *args: (calls.append(args), fetch(*args)))
    with ThreadPoolExecutor(4) as pool:
        fetched = set(pool.map(lambda _: fetch_weights(directory.name, url), range(4)))
    assert (len(calls), len(fetched)) == (1, 1)


def test_engine_loads_a_directory_of_another_machine(tmp_path, url, cache):
    directory = publish(tmp_path, url, 3)
    expected = {name: value + 3 for name, value in make_module().state_dict().items()}
    directory.rename(tmp_path / "on-another-machine")
    staged = WeightLoader(make_module(), url).stage(directory)
    assert staged.version.step == 3
    assert all(torch.equal(value, expected[name]) for name, value in staged.tensors.items())


def test_weights_of_an_earlier_run_of_the_same_name_are_not_used(tmp_path, url, cache):
    loader = WeightLoader(make_module(), url)
    for run, offset in (("first", 10), ("second", 20)):
        directory = publish(tmp_path, get_run_url(url, run), 1, offset)
        directory.rename(tmp_path / f"{run} is on another machine")
        staged, expected = loader.stage(directory, run), make_module().state_dict()
        assert all(torch.equal(value, expected[name] + 1 + offset) for name, value in staged.tensors.items())
    with pytest.raises(WeightsReplaced):
        fetch_weights("0-000001", url, "third")
    with pytest.raises(WeightsRefused, match="not the id of a run"):
        fetch_weights("0-000001", url, "../first")


def test_version_that_is_uploaded_again_is_hidden_until_it_is_complete(tmp_path, url, cache, monkeypatch):
    directory = publish(tmp_path, url, 1)
    monkeypatch.setattr(remote_weights, "UPLOAD_TIMEOUT", 0.0)
    (directory / "model.safetensors").rename(tmp_path / "model.safetensors")
    (directory / "model.safetensors").mkdir()  # cannot be copied as a file
    with pytest.raises(ProviderError):
        upload_weights(directory, url)
    with pytest.raises(WeightsReplaced):
        fetch_weights(directory.name, url)


def test_last_versions_stay_on_the_node(tmp_path, url, cache):
    for step in range(6):
        fetch_weights(publish(tmp_path, url, step).name, url)
    (node,) = cache.iterdir()
    assert sorted(path.name for path in node.iterdir()) == [".lock", "0-000003", "0-000004", "0-000005"]


def test_version_without_a_manifest_does_not_exist(tmp_path, url, cache):
    directory = publish(tmp_path, url, 1)
    (tmp_path / "bucket/run" / directory.name / "manifest.json").unlink()
    with pytest.raises(WeightsReplaced, match="a newer version was published"):
        fetch_weights(directory.name, url)
    remove_uploaded_weights(directory.name, url)  # what an interrupted removal left
    remove_uploaded_weights(directory.name, url)
    assert list((tmp_path / "bucket/run").iterdir()) == []


def test_damaged_download_is_refused_and_not_kept(tmp_path, url, cache):
    directory = publish(tmp_path, url, 1)
    file = tmp_path / "bucket/run" / directory.name / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(WeightsRefused, match="checksum"):
        fetch_weights(directory.name, url)
    file.write_bytes(data)
    assert verify_weights(fetch_weights(directory.name, url)).version.step == 1
    with pytest.raises(WeightsRefused, match="not the name of a version"):
        fetch_weights("..", url)


def test_failing_store_is_named(tmp_path, url, cache, monkeypatch):
    directory = publish(tmp_path, url, 1)
    monkeypatch.setattr(remote_weights, "UPLOAD_TIMEOUT", 0.0)
    (tmp_path / "bucket/file").write_text("not a directory")
    with pytest.raises(ProviderError, match="bucket/file/x/0-000001 cannot be read or written"):
        upload_weights(directory, f"file://{tmp_path}/bucket/file/x")
    with pytest.raises(ConfigInvalid, match=r"weights\.url: nonsense://x cannot be used"):
        upload_weights(directory, "nonsense://x")


def test_engine_does_not_wait_forever_for_another_one(tmp_path, url, cache, monkeypatch):
    directory, fetch = publish(tmp_path, url, 1), remote_weights._fetch
    started, release = threading.Event(), threading.Event()

    def fetch_slowly(*args):
        started.set()
        release.wait(10)
        fetch(*args)

    monkeypatch.setattr(remote_weights, "FETCH_TIMEOUT", 0.2)
    monkeypatch.setattr(remote_weights, "_fetch", fetch_slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fetch_weights, directory.name, url)
        assert started.wait(10)
        with pytest.raises(DeadlineExceeded, match=r"another process has not fetched the weights within 0\.2 s"):
            fetch_weights(directory.name, url)
        release.set()
        assert first.result(10).name == directory.name
