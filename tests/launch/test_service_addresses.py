"""The address book lists where the services of a run can be reached now."""

import json

from ramify.launch.execution import ServiceAddresses
from ramify.launch.launcher import ProcessSpec, ProcessStart
from ramify.run.state import ProcessState, ProcessStatus


def build_status(name: str, address: str, state: ProcessState = ProcessState.READY) -> ProcessStatus:
    return ProcessStatus(name, state, 1, 0, 0.0, address)


def test_addresses_of_running_services_are_listed(tmp_path):
    book = tmp_path / "addresses.json"
    book.write_text('{"inference": ["http://old:1"]}')
    names = {"inference/0": "inference", "inference/1": "inference", "env/train/a/0": "env/train/a", "trainer": ""}
    start = ProcessStart(("true",))
    specs = [ProcessSpec(name, tmp_path, lambda _: start, service=service) for name, service in names.items()]
    addresses = ServiceAddresses(tmp_path, specs)
    assert not book.exists()

    engines = [build_status(f"inference/{n}", f"http://10.0.0.{n}:80/health") for n in range(2)]
    addresses.update([*engines, build_status("env/train/a/0", ""), build_status("trainer", "tcp://10.0.0.9:1")])
    assert json.loads(book.read_text()) == {"inference": ["http://10.0.0.0:80", "http://10.0.0.1:80"]}

    ended = build_status("inference/0", "http://10.0.0.0:80/health", ProcessState.ENDED)
    starting = build_status("env/train/a/0", "tcp://10.0.0.2:5", ProcessState.STARTING)
    addresses.update([ended, engines[1], starting])
    assert json.loads(book.read_text()) == {"inference": ["http://10.0.0.1:80"], "env/train/a": ["tcp://10.0.0.2:5"]}
