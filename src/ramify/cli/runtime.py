"""`ramify runtime list` and `ramify runtime clean`: what runtimes enforce here, and what killed processes left."""

import sys
from argparse import Namespace
from collections.abc import Sequence

from ramify.core.errors import ConfigInvalid, RamifyError
from ramify.env import Task, plugin
from ramify.env.plugin import PLUGIN_KINDS
from ramify.env.runtime import Capability, Runtime


def run(options: Namespace) -> int:
    """List the runtimes, or remove what earlier runs left behind."""
    return _clean(options.id) if options.action == "clean" else _list(options.id)


def _list(ids: Sequence[str]) -> int:
    for runtime_id in ids or _get_builtin_ids():
        print(runtime_id)
        try:
            runtime: Runtime = plugin.build_plugin("runtime", {"id": runtime_id})
            runtime.check_task(Task())
            print("  usable: yes")
        except ConfigInvalid as error:
            print(f"  usable: no: {error.message}")
            continue
        for capability in Capability:
            has_it = capability in runtime.capabilities.available
            print(f"  {capability}: {'yes' if has_it else 'no: ' + runtime.capabilities.reasons.get(capability, '')}")
    return 0


def _clean(ids: Sequence[str]) -> int:
    num_removed, failed = 0, False
    runtimes: list[Runtime] = [plugin.build_plugin("runtime", {"id": id}) for id in ids or _get_builtin_ids()]
    for runtime in runtimes:
        try:
            for line in runtime.clean(runtime.config):
                print(f"removed {line}")
                num_removed += 1
        except RamifyError as error:  # the others are cleaned all the same
            print(f"{runtime.config.id}: {error.message}", file=sys.stderr)
            failed = True
    print(f"removed {num_removed} {'thing' if num_removed == 1 else 'things'} that ended processes had left")
    return 1 if failed else 0


def _get_builtin_ids() -> list[str]:
    return sorted(PLUGIN_KINDS["runtime"].builtin_paths)
