"""Distributes tests over the workers of xdist.

A file runs in one worker, and the slowest directories start first. In a run of all tests, some of the workers
collect the tests that import torch and other heavy libraries (`HEAVY_TESTS`); the others do not import them, which
saves each of them ten seconds and half a gigabyte.

A worker that crashes is replaced, and its test fails. The scheduler of xdist would run the crashed test again, and
could wait without end: it assigns to the new worker a unit that has already run, or one with a single test, which a
worker starts only when it knows the next one.
"""

import os
import sys
from pathlib import Path

import pytest

try:
    from xdist.report import report_collection_diff
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # some suites run in environments without xdist
    LoadScopeScheduling = object

# Files and directories in the order in which they start; the others follow. A long one that starts last ends alone.
SLOWEST_FIRST = (
    "tests/rl/test_faults.py",  # makes the finished run, for which other files would wait
    "tests/model/kernels/test_cuda_kernels.py",  # half a minute in one test
    "tests/train/",
    "tests/infer/",
    "tests/rl/",
    "tests/cli/",
    "tests/model/",
    "tests/launch/",
)

HAS_GPU = Path("/dev/nvidiactl").exists()

# Tests that import a heavy library. A module that is missing here and imports one fails the collection.
HEAVY_LIBRARIES = ("torch", "transformers", "anthropic", "openai", "sympy")
HEAVY_TESTS = (
    "tests/contract/",
    "tests/infer/gateway/",
    "tests/infer/test_",
    "tests/model/images/",
    "tests/model/kernels/cpu/",
    "tests/model/kernels/test_kernel_targets.py",
    "tests/model/kernels/test_paged_attention.py",
    "tests/model/kernels/test_quantization.py",
    *(["tests/model/kernels/test_cuda_kernels.py"] if HAS_GPU else []),  # without one, it only starts a process
    "tests/model/test_",
    "tests/train/",
    "tests/launch/test_memory.py",
    "tests/tools/test_benchmark_config.py",
    "tests/tools/test_plans_benchmark.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_init.py",
    "tests/cli/test_push.py",
    "tests/infer/client/test_announced_weights.py",
    "tests/rollout/envserver/test_bad_images.py",  # imports a test of the gateway
    "tests/rollout/test_served_tools.py",  # imports the sessions of the gateway's tests
    "tests/orchestrate/test_named_models.py",
    "tests/orchestrate/test_reference_scores.py",
    "tests/launch/test_sft_evals.py",
    "tests/model/render/test_prompt_images.py",
    "tests/rl/test_circle.py",
    "tests/rl/test_finished_run.py",
    "tests/rl/test_model_kinds.py",
    "tests/test_api_page.py",
    "tests/test_docs.py",
    "tests/test_face.py",
    "tests/test_minimal_rl.py",
    "tests/test_scripted_server.py",
    "tests/tools/test_stages.py",
)
HEAVY_SHARE = 3 / 8  # of the workers of a run of all tests; heavy tests take as much of its CPU time


def is_heavy_test(path: str) -> bool:
    """Return whether the test at this path, relative to the root, may import a heavy library while it is collected."""
    return path.startswith(HEAVY_TESTS)


def get_start_order(nodeid: str) -> int:
    """Return the position of a test's directory in `SLOWEST_FIRST`, or its length."""
    positions = (position for position, directory in enumerate(SLOWEST_FIRST) if nodeid.startswith(directory))
    return next(positions, len(SLOWEST_FIRST))


class Scheduling(LoadScopeScheduling):
    """Assigns whole files to workers, which may have collected different tests."""

    def _split_scope(self, nodeid):
        return nodeid.split("::", 1)[0]

    def add_node_collection(self, node, collection):
        self.registered_collections[node] = list(collection)

    def schedule(self):
        """Build the queue of units when all workers have collected; assign units to workers that have none."""
        if self.collection is None:
            self.collection = max(self.registered_collections.values(), key=len)
            for nodeid in sorted(self.collection, key=get_start_order):
                self.workqueue.setdefault(self._split_scope(nodeid), {})[nodeid] = False
        if all(self._has_expected_collection(node) for node in self.registered_collections):
            for node in self.nodes:
                self._reschedule(node)
        else:
            self.workqueue.clear()  # which ends the run

    def _has_expected_collection(self, node) -> bool:
        """Report a worker that has collected other tests than it should: nobody would run some of them."""
        skips_heavy = node.workerinput["skips_heavy"]
        expected = [nodeid for nodeid in self.collection if not (skips_heavy and is_heavy_test(nodeid))]
        problem = report_collection_diff(
            expected, self.registered_collections[node], "the other workers", node.gateway.id
        )
        if problem:
            report = pytest.CollectReport(nodeid=node.gateway.id, outcome="failed", longrepr=problem, result=[])
            self.config.hook.pytest_collectreport(report=report)
        return not problem

    def _reschedule(self, node):
        """Assign units until the worker has more than two tests; shut it down when no unit is left that it can run."""
        if node not in self.registered_collections:
            return
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            scope = self._find_file(skips_heavy=node.workerinput["skips_heavy"])
            if scope is None:
                node.shutdown()
            else:
                self.workqueue.move_to_end(scope, last=False)
                self._assign_work_unit(node)

    def _find_file(self, skips_heavy: bool) -> str | None:
        """Return the first file that a worker can run. A worker with heavy libraries takes their tests first."""
        heavy_files = (file for file in self.workqueue if is_heavy_test(file) and not skips_heavy)
        light_files = (file for file in self.workqueue if not is_heavy_test(file))
        return next(heavy_files, None) or next(light_files, None)

    def remove_node(self, node):
        """Return the test that a crashed worker was running, and put back what it had not yet run."""
        pending = [
            (scope, nodeid)
            for scope, unit in self.assigned_work.pop(node).items()
            for nodeid, is_completed in unit.items()
            if not is_completed
        ]
        for scope, nodeid in pending[1:]:
            self.workqueue.setdefault(scope, {})[nodeid] = False
        if pending:
            for other in self.nodes:
                self._reschedule(other)
        return pending[0][1] if pending else None


class Controller:
    """Decides which workers collect the heavy tests, and makes the scheduler."""

    def __init__(self, config: pytest.Config) -> None:
        workers, all_tests = len(config.option.tx), [str(config.rootpath / path) for path in config.getini("testpaths")]
        collects_all = [str(config.invocation_params.dir / path) for path in config.args] == all_tests
        self._heavy_workers = max(1, round(workers * HEAVY_SHARE)) if collects_all else workers
        self._collecting_heavy = set()

    def pytest_configure_node(self, node):
        """Let the first workers collect the heavy tests, and whichever replaces one of them."""
        node.workerinput["skips_heavy"] = len(self._collecting_heavy) >= self._heavy_workers
        if not node.workerinput["skips_heavy"]:
            self._collecting_heavy.add(node)

    def pytest_testnodedown(self, node):
        self._collecting_heavy.discard(node)

    def pytest_xdist_make_scheduler(self, config, log):
        return Scheduling(config, log)


class Worker:
    """Keeps heavy libraries out of a worker that skips their tests, and forked processes out of its connection."""

    def __init__(self, config: pytest.Config) -> None:
        self._skips_heavy = config.workerinput["skips_heavy"]
        self._root = config.rootpath
        (interactor,) = [plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "torun")]
        connection = interactor.channel.gateway._io
        self._connection = [connection.infile.fileno(), connection.outfile.fileno()]
        os.register_at_fork(after_in_child=self._leave_connection)

    def _leave_connection(self) -> None:
        """Close a forked process's copy of the connection, or a crash of the worker would not be seen while it runs."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._connection:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    def pytest_ignore_collect(self, collection_path):
        path = collection_path.relative_to(self._root).as_posix() + ("/" if collection_path.is_dir() else "")
        return True if self._skips_heavy and is_heavy_test(path) else None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        missing = [name for name in HEAVY_LIBRARIES if name not in sys.modules]
        report = yield
        imported = [name for name in missing if name in sys.modules]
        if self._skips_heavy and imported:
            report.outcome = "failed"
            report.longrepr = (
                f"{collector.nodeid} imports {imported[0]} while it is collected. Import it in the tests or fixtures "
                "that need it, or add the file to HEAVY_TESTS in tests/support/scheduling.py."
            )
        return report


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(config), "worker")
    elif getattr(config.option, "dist", "no") != "no":
        config.pluginmanager.register(Controller(config), "controller")
