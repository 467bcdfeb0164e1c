"""Slurm on namespace hosts, of which the first runs the controller.

RAMIFY_SLURM names the root of an installation of Slurm and munge, such as / or a directory into which their Debian
packages were extracted.
"""

import os
import platform
import subprocess
import time
from pathlib import Path

from tests.cluster.hosts import Host, Hosts

START_TIMEOUT = 30.0  # seconds for the nodes to be idle
SLURMD_TIMEOUT = 15  # seconds without an answer after which a node is down
CONFIG = """
ClusterName=test
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
PluginDir={plugins}
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout={timeout}
KillWait=5
CommunicationParameters=NoAddrCache
JobRequeue=1
"""


class SlurmCluster:
    """A Slurm cluster on hosts, each with four cores."""

    def __init__(self, hosts: Hosts, root: Path) -> None:
        self.hosts, self.root, self.directory = hosts, root, hosts.directory / "slurm"
        libraries = root / "usr/lib" / f"{platform.machine()}-linux-gnu"
        self.plugins = next(
            (path for path in (libraries / "slurm-wlm", libraries / "slurm") if path.is_dir()), libraries
        )
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        }
        if root != Path("/"):  # jobs get this variable too, and would load the system's libpython with it
            self.environment["LD_LIBRARY_PATH"] = f"{libraries}:{self.plugins}"
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        """Start munge, the controller, and a node on each host."""
        for name in ("state", *(f"spool.{self.hosts[i].name}" for i in range(len(self.hosts)))):
            (self.directory / name).mkdir(parents=True)
        self._write_config()
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.directory.chmod(0o755)
        names = {"key-file": key.name, "socket": "munge.sock", "pid-file": "munge.pid"}
        names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        files = [f"--{option}={self.directory / name}" for option, name in names.items()]
        self._start(self.hosts[0], self._find("munged"), "--force", "--foreground", *files)
        self._start(self.hosts[0], self._find("slurmctld"), "-D")
        for number in range(len(self.hosts)):
            self.start_node(self.hosts[number])
        deadline = time.monotonic() + START_TIMEOUT
        while self.run("sinfo", "--noheader", "--format=%D %T").strip() != f"{len(self.hosts)} idle":
            assert time.monotonic() < deadline, self.run("sinfo", "--long")
            time.sleep(0.2)

    def start_node(self, host: Host) -> None:
        """Start the daemon of a node."""
        self._start(host, self._find("slurmd"), "-D", "-d", self._find("slurmstepd"))

    def run(self, *command: str) -> str:
        """Run a command of Slurm on the first host, and return its output."""
        return self.hosts[0].run(*command, env=self.environment).stdout

    def get_state(self, job: str) -> tuple[str, int]:
        """Return the state of a job, and how often it was requeued. A busy controller may answer with nothing."""
        for _ in range(10):
            fields = dict(field.partition("=")[::2] for field in self.run("scontrol", "show", "job", job).split())
            if "JobState" in fields:
                break
            time.sleep(1)
        return fields["JobState"], int(fields["Restarts"])

    def close(self) -> None:
        """End all daemons."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(20)

    def _start(self, host: Host, *command: str) -> None:
        log = (self.directory / "daemons.log").open("a")
        with log:
            daemon = host.popen(*command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._daemons.append(daemon)

    def _find(self, program: str) -> str:
        names = (self.root / "usr/sbin" / f"{program}-wlm", self.root / "usr/sbin" / program)
        return str(next(path for path in names if path.is_file()))

    def _write_config(self) -> None:
        controller = self.hosts[0]
        text = CONFIG.format(
            controller=controller.name,
            controller_address=controller.address,
            directory=self.directory,
            plugins=self.plugins,
            timeout=SLURMD_TIMEOUT,
        )
        for number in range(len(self.hosts)):
            host = self.hosts[number]
            text += f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=4000 State=UNKNOWN\n"
        names = ",".join(self.hosts[number].name for number in range(len(self.hosts)))
        text += f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"
        (self.directory / "slurm.conf").write_text(text)
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
