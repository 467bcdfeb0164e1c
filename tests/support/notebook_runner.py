"""Executes the code cells of a notebook as a kernel does: `python -m tests.support.notebook_runner FILE`.

It has what matters of a kernel: an event loop runs while a cell is executed, a cell may `await`, names live in
`__main__`, which has no file, and `linecache` knows the source of a cell. It shows no rich output and has no magics.
"""

import ast
import asyncio
import inspect
import json
import linecache
import sys
from pathlib import Path


async def execute(file: Path, names: dict[str, object]) -> None:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(each for each in cells if each["cell_type"] == "code"):
        source = "".join(cell["source"])
        title = f"<cell {number}>"
        linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
        code = compile(source, title, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.iscoroutine(done):
            await done


if __name__ == "__main__":
    main = vars(sys.modules["__main__"])
    del main["__file__"]
    asyncio.run(execute(Path(sys.argv[1]), main))
