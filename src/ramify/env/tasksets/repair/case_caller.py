"""The program that calls the functions of an agent's module. It runs in the sandbox of the rewards, without Ramify.

It reads {"file", "cases": [{"id", "function", "args"}]} and writes one line {"id", "result"} for each call. A result is
{"value": ...} or {"raises": the name of the exception}. Whatever the module does to this process, it can only change
what is reported, and what should be reported is not in the sandbox.
"""

import importlib.util
import json
import os
import sys
from typing import Any


def call_case(module: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one call as plain data."""
    try:
        value = getattr(module, case["function"])(*case["args"])
        return {"value": json.loads(json.dumps(value))}
    except BaseException as error:  # noqa: BLE001 - the module may raise anything, SystemExit too
        return {"raises": type(error).__name__}


def load_module(file: str) -> Any:
    """Import a file as a module."""
    name = os.path.basename(file).removesuffix(".py")  # noqa: PTH119 - without imports that are slow
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Call all cases."""
    request = json.loads(sys.stdin.buffer.readline())
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that what the module prints does not mix with the reports
    module = load_module(request["file"])
    for case in request["cases"]:
        reports.write(json.dumps({"id": case["id"], "result": call_case(module, case)}) + "\n")
        reports.flush()


if __name__ == "__main__":
    main()
