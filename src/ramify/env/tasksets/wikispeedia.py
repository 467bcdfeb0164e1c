"""wikispeedia: get from one article to another by following links.

The tools record the walk in `trace.info["walk"]`, so the reward, a replay and a reader of the saved trace see the same
walk.
"""

import random
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

import ramify as rf
from ramify.env.tasksets import article_graph
from ramify.env.tasksets.answers import build_tool_call_replies
from ramify.env.tasksets.splits import RangesConfig, draw_distinct

OUT_OF_TURNS = "error: the walk has ended, all turns are used."  # a reply may hold more calls than there are turns left
SYSTEM = "Go from page to page by their links until you reach the target."


class WikispeediaConfig(RangesConfig, rf.TasksetConfig):
    """The graph, and the distance between source and target.

    `num_articles = 24, num_topics = 4, max_links = 6, min_dist = 1, max_dist = 3` suits a very small model.
    """

    num_tasks: int = Field(default=1000, ge=1)
    min_dist: int = Field(default=3, ge=1)
    """Minimum number of clicks on the shortest path."""
    max_dist: int = Field(default=8, ge=1)
    max_turns: int = Field(default=30, ge=1)
    """Maximum number of tool calls."""
    num_articles: int = Field(default=400, ge=1)
    num_topics: int = Field(default=16, ge=1)
    max_links: int = Field(default=30, ge=article_graph.MIN_LINKS, le=30)
    """Maximum number of links on a page."""
    text_chars: int = Field(default=0, ge=0)
    """Number of characters of an article's text that a page shows."""
    path: Path | None = None
    """A directory with the SNAP Wikispeedia files, used instead of a generated graph; the sizes do not apply to it."""
    seed: int = 0


class WalkTask(rf.Task):
    """The ends of a path; `shortest` is the minimum number of clicks."""

    source: str
    target: str
    shortest: int


class Wikispeedia(rf.Taskset):
    """Follow links from article to article until the target is reached."""

    config: WikispeediaConfig
    task_type = WalkTask

    @cached_property
    def graph(self) -> article_graph.ArticleGraph:
        """The articles and links of the configuration."""
        config = self.config
        if config.path is not None:
            return article_graph.load_snap_graph(config.path, with_texts=config.text_chars > 0)
        return article_graph.build_graph(config.num_articles, config.num_topics, config.max_links)

    def load(self) -> Iterator[WalkTask]:
        """Draw `num_tasks` distinct pairs of articles of the split."""
        too_few_message = (
            "wikispeedia: num_tasks is {count}, but only {found} pairs at distances "
            f"{self.config.min_dist} to {self.config.max_dist} were found; widen them or take a larger graph"
        )
        for source, target, shortest in draw_distinct(
            self._draw_pairs(),
            self.config.split,
            self.config.num_tasks,
            lambda pair: f"{pair[0]} -> {pair[1]}" if pair[1] else "",
            too_few_message,
        ):
            prompt = f"Target: {target}\n{self.render_page(source)}"
            yield WalkTask(prompt=prompt, system=SYSTEM, source=source, target=target, shortest=shortest)

    def setup(self, task: WalkTask, trace: rf.Trace) -> None:
        """Start the walk at the task's source."""
        trace.info["walk"] = {"path": [task.source], "clicks": 0, "turns": 0}

    @rf.tool
    def click_link(self, article: str, task: WalkTask, trace: rf.Trace) -> str:
        """Follow a link."""
        walk = trace.info["walk"]
        if (end := self._count_turn(task, walk)) is not None:
            return end
        current = walk["path"][-1]
        links = self.graph.links[current]
        title = article_graph.match_title(article, links)
        if title is None:
            return "\n".join([f"error: {current} has no link {article!r}. Links:", *links])
        walk["path"].append(title)
        walk["clicks"] += 1
        return f"You have reached {title}." if title == task.target else self.render_page(title)

    @rf.tool
    def go_back(self, task: WalkTask, trace: rf.Trace) -> str:
        """Return to the page before."""
        path = trace.info["walk"]["path"]
        if (end := self._count_turn(task, trace.info["walk"])) is not None:
            return end
        if len(path) == 1:
            return f"error: {path[0]} is the first page, there is none before it."
        path.pop()
        return self.render_page(path[-1])

    @rf.stop
    def target_reached(self, task: WalkTask, trace: rf.Trace) -> bool:
        """Stop at the target."""
        return trace.info["walk"]["path"][-1] == task.target

    @rf.stop
    def out_of_turns(self, trace: rf.Trace) -> bool:
        """Stop after `max_turns` tool calls."""
        return trace.info["walk"]["turns"] >= self.config.max_turns

    @rf.reward
    def reached(self, task: WalkTask, trace: rf.Trace) -> float:
        """1 at the target, else 0."""
        return float(self.target_reached(task, trace))

    @rf.metric
    def clicks(self, trace: rf.Trace) -> float:
        """The number of links followed."""
        return float(trace.info["walk"]["clicks"])

    @rf.metric
    def shortest(self, task: WalkTask) -> float:
        """The number of clicks on the shortest path."""
        return float(task.shortest)

    @rf.metric
    def efficiency(self, task: WalkTask, trace: rf.Trace) -> float:
        """shortest / clicks where the target was reached, else 0."""
        return task.shortest / trace.info["walk"]["clicks"] if self.target_reached(task, trace) else 0.0

    def gold(self, task: WalkTask) -> list[rf.Message]:
        """Return the clicks of a shortest path."""
        path = article_graph.find_shortest_path(self.graph, task.source, task.target)
        return build_tool_call_replies(("click_link", {"article": title}) for title in path[1:])

    def render_page(self, title: str) -> str:
        """Return an article as the agent sees it."""
        text = self.graph.texts.get(title, "")[: self.config.text_chars]
        return "\n".join([title, *([text] if text else []), "Links:", *self.graph.links[title]])

    def _count_turn(self, task: WalkTask, walk: dict[str, Any]) -> str | None:
        """Count one tool call; return what the tool answers if the walk has ended, else None."""
        walk["turns"] += 1
        if walk["path"][-1] == task.target:
            return f"You have reached {task.target}."
        return OUT_OF_TURNS if walk["turns"] > self.config.max_turns else None

    def _draw_pairs(self) -> Iterator[tuple[str, str, int]]:
        """Yield (source, target, distance) without end; the target is empty if no article is at an allowed distance."""
        rng = random.Random(f"wikispeedia {self.config.split} {self.config.seed}")
        titles = sorted(self.graph.links)
        targets_by_source: dict[str, list[tuple[str, int]]] = {}
        while True:
            source = rng.choice(titles)
            if source not in targets_by_source:
                targets_by_source[source] = sorted(
                    (title, distance)
                    for title, distance in article_graph.compute_distances(self.graph, source).items()
                    if self.config.min_dist <= distance <= self.config.max_dist
                )
            target, distance = rng.choice(targets_by_source[source]) if targets_by_source[source] else ("", 0)
            yield source, target, distance
