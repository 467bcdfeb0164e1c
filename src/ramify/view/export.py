"""One run as a single HTML file: the page itself, and the answers to everything that it asks.

The file contains the page's style and scripts, and recorded answers as JSON. A content-security policy allows exactly
these scripts, by their hashes, and no request to anywhere, so the file is as safe to open as the page.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from ramify.core.errors import ConfigInvalid
from ramify.core.files import replace_file
from ramify.view.queries import RunQueries
from ramify.view.rollout_filter import RolloutFilter
from ramify.view.server import STATIC_DIR

NUM_WORST, NUM_BEST = 6, 2  # rollouts of a file for which none is named
MAX_TOKENS = 50_000  # of a rollout whose tokens are in the file
INDEX_TIMEOUT = 600.0  # seconds

IMPORT_LINE = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
EXPORT_KEYWORD = re.compile(r"^export (?=(async )?(function|class|const|let) )", re.MULTILINE)


def export_run(queries: RunQueries, run: str, path: Path, rollout_ids: Sequence[str] = ()) -> int:
    """Write a run to the file `path` and return the number of rollouts in it.

    Without `rollout_ids`, it has the worst and the best rollouts. Raises ConfigInvalid for a rollout that is not there.
    """
    ids = list(dict.fromkeys(rollout_ids)) or choose_rollouts(queries, run)
    answers = list(_record_answers(queries, run, ids))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as partial_path:
        partial_path.write_text(build_page(run, answers), encoding="utf-8")
    return len(ids)


def choose_rollouts(queries: RunQueries, run: str) -> list[str]:
    """Return the ids of the worst and the best rollouts of a run, its first source before others."""
    queries.wait_for_index(run, INDEX_TIMEOUT)
    sources: list[str] = queries.get_run(run)["sources"]
    facets = queries.list_rollouts(run)["facets"]["source"]
    rollout_filter = RolloutFilter(source=next((source for source in sources if source in facets), None))
    worst = queries.list_rollouts(run, rollout_filter, sort="reward", descending=False)["rows"][:NUM_WORST]
    best = queries.list_rollouts(run, rollout_filter, sort="reward", descending=True)["rows"][:NUM_BEST]
    return list(dict.fromkeys(row["id"] for row in (*worst, *best)))


def build_page(run: str, answers: Sequence[tuple[str, Any]]) -> str:
    """Return the HTML of a file with these answers, by key."""
    style = (STATIC_DIR / "style.css").read_text("utf-8")
    script = bundle_scripts()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")  # so that no text ends the element
    title = run.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title} · Ramify</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        f'<script type="application/json" id="recorded">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def bundle_scripts() -> str:
    """Return all scripts of the page as one: each after those that it imports, without imports and exports."""
    sources: dict[str, str] = {}

    def add(name: str) -> None:
        if name in sources:
            return
        text = (STATIC_DIR / name).read_text("utf-8")
        sources[name] = ""  # a mark, should modules import each other
        for imported in IMPORT_LINE.findall(text):
            add(imported)
        del sources[name]
        sources[name] = EXPORT_KEYWORD.sub("", IMPORT_LINE.sub("", text))

    add("theme.js")
    add("main.js")
    return "\n".join(sources.values())


def make_key(path: str, params: Mapping[str, Any]) -> str:
    """Return the key of an answer, which the page builds in the same way: path and sorted parameters."""
    values = {name: cast(list[Any], value) if isinstance(value, list) else [value] for name, value in params.items()}
    entries = [[name, str(entry)] for name, value in values.items() for entry in value if entry not in ("", None)]
    entries.sort(key=",".join)
    return json.dumps([path, entries], ensure_ascii=False, separators=(",", ":"))


def _record_answers(queries: RunQueries, run: str, ids: Sequence[str]) -> Iterator[tuple[str, Any]]:
    summaries: list[dict[str, Any]] = [{**entry, "waits": []} for entry in queries.list_runs() if entry["name"] == run]
    live_state: dict[str, Any] = {"status": {}, "wait_list": [], "waits": [], "processes": []}
    names: list[str] = queries.get_metrics(run)["all_names"]
    description = {**queries.get_run(run), **live_state}
    groups: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    yield make_key("runs", {}), summaries
    yield make_key("run", {"run": run}), description
    yield make_key("metrics", {"run": run}), queries.get_metrics(run, [name for name in names if "/age_" not in name])
    for id in ids:
        rollout = queries.get_rollout(run, id)
        yield make_key("rollout", {"run": run, "id": id}), rollout
        yield from _record_tokens(queries, run, id, rollout)
        rows.append(queries.get_row(run, id))
        group = rollout["group"]
        key = {"group": group["number"]} if group else {"source": rollout["source"], "task": rollout["task"]}
        groups[make_key("group", {"run": run, **key})] = key
    for key in groups.values():
        arguments = (key.get("group"), key.get("source", ""), key.get("task", ""))
        yield make_key("group", {"run": run, **key}), queries.get_group(run, *arguments)
        yield make_key("forest", {"run": run, **key}), queries.get_forest(run, *arguments)
    rows.sort(key=lambda row: (row["reward"] is None, row["reward"], row["id"]))
    table: dict[str, Any] = {"total": len(rows), "rows": rows, "indexed": 1.0, "page_size": len(rows), "facets": {}}
    yield make_key("rollouts", {"run": run}), {**table, "run_total": description["rollouts"]}
    yield make_key("excerpts", {"run": run, "id": list(ids)}), queries.get_excerpts(run, ids)


def _record_tokens(queries: RunQueries, run: str, id: str, rollout: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for number, trace in enumerate(rollout["traces"]):
        if trace["tokens"] > MAX_TOKENS:
            continue
        for tokens in queries.iter_tokens(run, id, number, [node["index"] for node in trace["nodes"]]):
            key = make_key("tokens", {"run": run, "id": id, "trace": number, "node": [tokens["node"]]})
            yield key, [tokens]


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def find_only_run(queries: RunQueries) -> str:
    """Return the name of the only run of a folder. Raises ConfigInvalid if it has none or several."""
    names = list(queries.folder.list_runs())
    if len(names) != 1:
        known = f"the folder has {', '.join(names)}" if names else "there is none in the folder"
        raise ConfigInvalid(f"--export writes one run, name its directory instead of {queries.folder.path}: {known}")
    return names[0]
