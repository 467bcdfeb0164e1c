"""Connecting to Ray without Ray: an address at which nobody answers is refused within its deadlines."""

import contextlib
import logging
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from ramify.cli import main
from ramify.core.errors import ConfigInvalid
from ramify.launch.ray_launcher import connect_to_ray
from tests.support.ray import RayError


@pytest.fixture
def ray(monkeypatch):
    """A module `ray` that records how it is initialized; `init_calls` has the addresses."""
    module = SimpleNamespace(init_calls=[], on_init=lambda: None, exceptions=SimpleNamespace(RayError=RayError))

    def init(*, address, **_):
        module.init_calls.append(address)
        logging.getLogger("ray._private.worker").warning("SIGTERM handler is not set because current thread ...")
        module.on_init()

    module.init = init
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, module if name == "ray" else SimpleNamespace())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return module


@pytest.fixture
def listening_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_address():
    with contextlib.closing(socket.socket()) as bound:  # bound, so that nobody else listens there
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_missing_ray_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigInvalid, match=r"cluster.launcher: 'ray' needs the extra `ray`: pip install"):
        connect_to_ray("auto")


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_address_that_refuses_connections_is_never_given_to_ray(ray, closed_address, prefix):
    with pytest.raises(ConfigInvalid) as error:
        connect_to_ray(f"{prefix}{closed_address}")
    assert f"cluster.address: no Ray cluster answers at '{prefix}{closed_address}': " in error.value.message
    assert "; start it with `ray start --head`, or set cluster.address" in error.value.message
    assert ray.init_calls == []


def test_address_of_the_environment_is_checked_and_named(ray, closed_address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", closed_address)
    with pytest.raises(ConfigInvalid, match=rf"no Ray cluster answers at '{closed_address}' \(RAY_ADDRESS\): "):
        connect_to_ray("auto")
    assert ray.init_calls == []


def test_address_that_listens_is_given_to_ray_unchanged(ray, listening_address, monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", listening_address)
    for address in ("auto", listening_address, f"ray://{listening_address}"):
        assert connect_to_ray(address) is ray
        assert ray.init_calls.pop() == address
    assert caplog.messages == []  # Ray's warning about the thread says nothing to a user


@pytest.mark.parametrize("address", ["auto", "local", "ray://name-without-port"])
def test_address_without_host_and_port_is_left_to_ray(ray, address):
    connect_to_ray(address)
    assert ray.init_calls == [address]


def test_cluster_that_accepts_but_never_answers_ends_with_the_deadline(ray, listening_address):
    released = threading.Event()
    ray.on_init = lambda: released.wait(60)
    with pytest.raises(ConfigInvalid, match=rf"answers at '{listening_address}': no answer within 0.2 s; start it"):
        connect_to_ray(listening_address, timeout=0.2)
    released.set()


@pytest.mark.parametrize("failure", [ConnectionError("no running Ray instance"), RayError("wrong token")])
def test_failure_of_ray_is_named(ray, failure):
    def fail():
        raise failure

    ray.on_init = fail
    with pytest.raises(ConfigInvalid, match=rf"no Ray cluster answers at 'auto': {failure}"):
        connect_to_ray("auto")


@pytest.mark.process
@pytest.mark.usefixtures("check_plugins_in_process")
def test_dry_run_without_an_answer_plans_the_configured_nodes(ray, closed_address, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["reverse-text", "--cluster", "ray", "--cluster.address", closed_address, "--cluster.node.cores", "64"]
    assert main(["rl", *args, "--dry-run"]) == 0
    reason = f"because cluster.address: no Ray cluster answers at '{closed_address}'"
    assert f"nodes as in [cluster.node], {reason}" in capsys.readouterr().out
