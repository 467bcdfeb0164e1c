"""A taskset whose `path` does not exist names the key, and says what is expected there."""

import sys

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env import Taskset, plugin
from ramify.env.tasksets.wiki_search import ArticleIndex

EXPECTED = {
    "wiki-search": r"taskset\.path: \S+ does not exist; expected a directory of .* or a jsonl file",
    "reverse-text": r"taskset\.path: \S+ cannot be read: .*; expected a file with one text per line",
    "harbor": r"taskset\.path: \S+ does not exist; expected a folder of tasks",
}


@pytest.mark.parametrize("id", EXPECTED)
def test_a_missing_path_is_named_with_what_is_expected(id, tmp_path):
    with pytest.raises(ConfigInvalid, match=EXPECTED[id]):
        taskset: Taskset = plugin.build_plugin("taskset", {"id": id, "path": str(tmp_path / "nothing")})
        next(iter(taskset.load()))


def test_a_missing_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)  # as if it were not installed
    with pytest.raises(ConfigInvalid, match="pip install bm25s"):
        ArticleIndex({"Rome": "A city."})
