"""The quickstart on three hosts: the head; engine, env servers and a trainer rank; the other trainer rank."""

import pytest

from tests.cluster.cluster_run import ClusterRun

pytestmark = pytest.mark.run

MIN_GAIN = 0.4  # of the mean reward of the eval


@pytest.fixture
def build_run(ray_cluster):
    runs = []

    def build(name: str, **settings: object) -> ClusterRun:
        runs.append(ClusterRun(ray_cluster, name, **settings))
        return runs[-1]

    yield build
    for run in runs:
        print(run.output.read_text()[-5000:])
        run.kill()


def test_quickstart_learns_on_three_hosts(build_run):
    run = build_run("quickstart")
    run.start()
    run.finish()
    processes = run.read_record()["processes"]
    assert set(processes["trainer"]["node"].split(", ")) == {"host2", "host3"}
    assert processes["inference/0"]["node"] == "host2"
    assert processes["orchestrator"]["node"] == ""
    assert "forest" in run.read_log("trainer")
    assert (run.path / "logs" / "trainer-1.log").exists()
    means = run.read_eval_means()
    print(means)
    assert means[-1] - means[0] >= MIN_GAIN


@pytest.mark.parametrize(("number", "lost"), [(2, ["inference/0", "env/train/reverse/0", "trainer"]), (3, ["trainer"])])
def test_processes_of_a_killed_host_are_replaced_and_the_run_goes_on(build_run, ray_cluster, number, lost):
    host = ray_cluster.hosts[number - 1]
    run = build_run(f"killed-host{number}", max_steps=20, **{"cluster.lease_duration": 10})
    run.start()
    run.wait_for_step(11)  # one checkpoint is committed
    host.kill()
    ray_cluster.restart_node(host)
    run.finish()
    processes = run.read_record()["processes"]
    assert {name for name, process in processes.items() if process["restarts"]} >= set(lost)
    assert f"trainer is lost: its node {host.name}" in run.read_log("launch")
