"""The seccomp profile of containers: that of podman, without the sockets that lead out of a container's network.

A socket of the family AF_VSOCK reaches the host of a virtual machine whatever network a container has. Docker refuses
it from version 23 on; podman's own profile does not, so containers get a copy of that profile which allows only the
families below. io_uring and socketcall could open sockets that no filter sees, and are left out.
"""

import json
from pathlib import Path
from typing import Any

from ramify.rollout.runtime.container_engine import ContainerEngine, get_engine_info

ALLOWED_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
REMOVED_CALLS = ("socket", "socketcall", "io_uring_setup", "io_uring_enter", "io_uring_register")


def build_seccomp_profile(engine: ContainerEngine) -> str | None:
    """Return the profile as JSON, None for an engine that brings its own or has none."""
    path = Path(get_engine_info(engine).get("host", {}).get("security", {}).get("seccompProfilePath", ""))
    if engine.name != "podman" or not engine.is_local or not path.is_file():
        return None
    profile: dict[str, Any] = json.loads(path.read_text())
    rules: list[dict[str, Any]] = []
    for rule in profile["syscalls"]:
        names = [name for name in rule["names"] if name not in REMOVED_CALLS]
        if names:
            rules.append({**rule, "names": names})
    for family in ALLOWED_FAMILIES:
        condition = {"index": 0, "value": family, "valueTwo": 0, "op": "SCMP_CMP_EQ"}
        rules.append(
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [condition], "includes": {}, "excludes": {}}
        )
    return json.dumps({**profile, "syscalls": rules})
