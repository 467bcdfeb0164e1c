"""Random rollouts, and beside each the plain record of what the engine saw.

A `Script` is a list of turns as a gateway would report them. It is written without looking at any trace: a small world
of conversations ("lines") is continued, retried, rewritten, cut and started anew, and every call notes its prompt, its
sample and the images in the prompt as ordinary lists. Those notes are the oracle: whatever the graph does with a turn,
the path to the reply has to read like them. Vocabularies are tiny, so that prefixes collide by accident all the time.

One generator serves both sizes: `scripts()` drives it from hypothesis (and shrinks), `big_script` from a seed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from ramify.trace import (
    Media,
    MediaPart,
    Message,
    MessageSpan,
    ModelCall,
    PromptMedia,
    TextPart,
    ToolCall,
    Trace,
    TraceBuilder,
    Turn,
    Usage,
    VersionSpan,
)

PLACEHOLDER = 0  # what stands for an image in the prompt; text may use the same id, to be nasty
IMAGES = tuple(Media.from_bytes(bytes([65 + i]) * (3 + i), "image/png") for i in range(3))
ROLES = ("system", "user", "tool")
KINDS = (
    "go_on",
    "retry",
    "identical_retry",
    "rewrite",
    "drop",
    "resplit",
    "swap_image",
    "root",
    "empty_message",
    "empty_reply",
    "image",
    "arrays",
    "versions_change",
    "untrainable",
    "open_end",
)


@dataclass(frozen=True)
class Piece:
    """One message of a conversation with its tokens; `body` and image places count from its first token."""

    message: Message
    ids: tuple[int, ...]
    body: tuple[int, int]
    images: tuple[tuple[int, int, int, Media], ...] = ()  # (part, start, stop, image)


@dataclass(frozen=True)
class Seen:
    """What the engine saw and did in one call."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[np.float32]
    images: list[tuple[int, int, str]]  # (start, stop, hash) in prompt tokens
    versions: tuple[VersionSpan, ...]
    message: Message


@dataclass
class Script:
    """Turns in order of arrival, what the engine saw in each, and how often each kind of thing happened."""

    turns: list[Turn] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def replay(script: Script, trace: Trace | None = None) -> tuple[Trace, list[int]]:
    """The script recorded in a trace, and the reply node of each of its turns."""
    trace = Trace(id="t") if trace is None else trace
    builder = TraceBuilder(trace)
    return trace, [builder.add_turn(turn) for turn in script.turns]


def write_script(
    rng: random.Random, turns: int, *, vocabulary: int = 4, images: bool = True, longest: int = 12, prefix: str = "call"
) -> Script:
    """A script of `turns` calls whose conversations hold up to about `longest` messages."""
    return _Writer(rng, vocabulary, images, longest, prefix).write(turns)


def scripts(*, max_turns: int = 8, min_turns: int = 1, images: bool = True) -> st.SearchStrategy[Script]:
    """Scripts under hypothesis: every random decision is drawn, so failures shrink to few turns and few tokens."""
    return st.builds(
        lambda rng, turns, vocabulary: write_script(rng, turns, vocabulary=vocabulary, images=images),
        st.randoms(use_true_random=False),
        st.integers(min_turns, max_turns),
        st.integers(2, 5),
    )


def tidy_scripts(*, max_turns: int = 8) -> st.SearchStrategy[Script]:
    """Scripts in which equal tokens mean equal messages: no accidents, nothing retokenized, no two equal samples."""
    return st.builds(
        lambda rng, turns: _Writer(rng, 0, True, 12, "call", tidy=True).write(turns),
        st.randoms(use_true_random=False),
        st.integers(1, max_turns),
    )


def big_script(seed: int, turns: int = 1500, *, images: bool = True, vocabulary: int = 5) -> Script:
    """A long script from a seed: about two nodes a turn, with every kind of thing in it many times."""
    return write_script(random.Random(seed), turns, vocabulary=vocabulary, images=images, longest=16)


def decorate(trace: Trace, rng: random.Random) -> None:
    """Set some of the header's plain data, as scoring and bookkeeping would."""
    trace.rewards[f"r{rng.randint(0, 2)}"] = rng.choice([None, (rng.random(), 1.0), (1, 0.5)])
    trace.metrics[f"m{rng.randint(0, 2)}"] = rng.random()
    trace.info[f"i{rng.randint(0, 2)}"] = rng.choice(["text", 3, None, [1, {"deep": [True, -0.5]}], {"a": {"b": "ü"}}])
    trace.timing.model = rng.random()


@dataclass
class _Writer:
    rng: random.Random
    vocabulary: int
    images: bool
    longest: int
    prefix: str
    tidy: bool = False  # every token id but the placeholder's is used once
    used: int = PLACEHOLDER
    script: Script = field(default_factory=Script)
    lines: list[tuple[Piece, ...]] = field(default_factory=list)  # histories, before and after each call
    asked: list[tuple[tuple[Piece, ...], list[int], list[int]]] = field(default_factory=list)  # history, gen, reply

    def write(self, turns: int) -> Script:
        while len(self.script.turns) < turns:
            self._act()
        return self.script

    def _act(self) -> None:
        rng = self.rng
        roll = rng.randint(0, 9) if self.lines else 9
        if roll == 9 and len(self.lines) > 100 and rng.random() < 0.7:
            roll = 0  # enough roots
        if roll <= 3:
            recent = self.lines[-1] if rng.random() < 0.7 else rng.choice(self.lines)
            self._count("go_on")
            self._call(self._grown(recent[: self.longest]))
        elif roll <= 5 and self.asked:
            self._retry()
        elif roll <= 8:
            self._call(self._altered(rng.choice(self.lines)))
        else:
            self._count("root")
            self._call(self._grown(()))

    def _retry(self) -> None:
        line, opening, reply = self.rng.choice(self.asked)
        identical = not self.tidy and self.rng.random() < 0.4
        self._count("identical_retry" if identical else "retry")
        self._call(line, opening, reply if identical else None)

    def _grown(self, line: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return line + tuple(self._piece() for _ in range(self.rng.randint(0, 2)))

    def _altered(self, line: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The history `line`, rewritten the way harnesses do it: compaction, dropped turns, other tokenization."""
        rng = self.rng
        if not line:
            return self._grown(line)
        index = rng.randint(0, len(line) - 1)
        shown = [i for i, piece in enumerate(line) if piece.images]
        ways = ["rewrite", "drop", "cut"] + ["swap_image"] * (4 if shown else 0) + ["resplit"] * (not self.tidy)
        how = rng.choice(ways)
        self._count("drop" if how == "cut" else how)
        if how == "rewrite":
            return (*line[:index], self._piece(), *line[index + 1 :])
        if how == "drop":
            return line[:index] + line[index + 1 :]
        if how == "cut":
            return self._grown(line[:index])
        if how == "swap_image":
            index = rng.choice(shown)
            return (*line[:index], self._other_image(line[index]), *line[index + 1 :])
        return self._resplit(line, index)

    def _other_image(self, piece: Piece) -> Piece:
        images = tuple((part, a, b, self.rng.choice(IMAGES)) for part, a, b, _ in piece.images)
        return replace(piece, images=images, message=_message(piece.message.role, "shown", images))

    def _resplit(self, line: tuple[Piece, ...], index: int) -> tuple[Piece, ...]:
        """The same tokens as two messages, where there was one; no image is cut."""
        piece = line[index]
        if piece.images or len(piece.ids) < 2:
            return self._grown(line)
        cut = self.rng.randint(1, len(piece.ids) - 1)
        low, high = piece.body
        first = Piece(Message("user", "half"), piece.ids[:cut], (min(low, cut), min(high, cut)))
        remaining = Piece(Message("user", "rest"), piece.ids[cut:], (max(low - cut, 0), max(high - cut, 0)))
        return (*line[:index], first, remaining, *line[index + 1 :])

    def _piece(self) -> Piece:
        rng = self.rng
        role = rng.choice(ROLES)
        if rng.random() < 0.15:
            self._count("empty_message")
            return Piece(Message(role, rng.choice(("", "unseen"))), (), (0, 0))
        if self.images and rng.random() < 0.3:
            return self._shown(role)
        ids = self._ids(1, 4)
        low = rng.randint(0, len(ids))
        return Piece(Message(role, f"says {rng.randint(0, 3)}"), tuple(ids), (low, rng.randint(low, len(ids))))

    def _shown(self, role: str) -> Piece:
        """A message with one or two images between pieces of text."""
        rng = self.rng
        ids = self._ids(1 if self.tidy else 0, 2)
        low, images = len(ids), []
        for part in range(rng.randint(1, 2)):
            start = len(ids)
            ids += [PLACEHOLDER] * rng.randint(1, 2)
            images.append((part, start, len(ids), rng.choice(IMAGES)))
            ids += self._ids(0, 1)
        self._count("image")
        return Piece(_message(role, "shown", images), tuple(ids), (low, len(ids)), tuple(images))

    def _call(self, line: tuple[Piece, ...], opening: list[int] | None = None, reply: list[int] | None = None) -> None:
        number = len(self.script.turns)  # decides what needs no luck: every value has its turn
        opening = self._ids(0, 2) if opening is None else opening
        reply = self._ids(1 if self.tidy else 0, 4) if reply is None else reply
        spans, media, prompt = _laid_out(line)
        prompt += opening
        message = _reply(number, reply)
        logprobs = [np.float32(-(10 * number + i + 1) / 7) for i in range(len(reply))]
        versions = self._versions(len(reply))
        trainable = number % 10 != 4
        turn = Turn(
            call=_called(f"{self.prefix}{number}", number, prompt, reply),
            prompt_ids=np.array(prompt, np.int32),
            spans=spans,
            reply=message,
            reply_ids=list(reply),
            logprobs=list(logprobs),
            versions=versions,
            media=media,
            arrays=self._arrays(len(reply)),
            trainable=trainable,
        )
        images = [(item.start, item.stop, item.media.hash) for item in media]
        self.script.turns.append(turn)
        self.script.seen.append(Seen(prompt, list(reply), logprobs, images, versions, message))
        self.script.kinds.update({"empty_reply": not reply, "untrainable": not trainable})
        self._remember(line, opening, reply, message)

    def _remember(self, line: tuple[Piece, ...], opening: list[int], reply: list[int], message: Message) -> None:
        closing = self._ids(0, 1)
        self._count("open_end" if closing else "closed_end")  # open: template tokens follow the reply
        body = (len(opening), len(opening) + len(reply))
        answered = Piece(message, (*opening, *reply, *closing), body)
        self.lines += [line, (*line, answered)]
        self.asked.append((line, opening, reply))

    def _versions(self, count: int) -> tuple[VersionSpan, ...]:
        rng = self.rng
        if count and rng.random() < 0.2:
            return ()
        first = rng.randint(0, count)
        runs = [("p", first), (rng.choice("pq"), count - first)]
        found = tuple(VersionSpan(policy, 1, 7 + i, n) for i, (policy, n) in enumerate(runs) if n)
        self.script.kinds["versions_change"] += len(found) > 1
        return found

    def _arrays(self, count: int) -> dict[str, np.ndarray]:
        rng = self.rng
        if rng.random() < 0.7:
            return {}
        self._count("arrays")
        values = np.arange(count * 2)
        experts = rng.choice((values.astype(np.uint8), values.astype(">i2"), values / 2)).reshape(count, 2)
        return {"experts": experts, "allowed": np.ones(count, bool)}

    def _ids(self, low: int, high: int) -> list[int]:
        count = self.rng.randint(low, high)
        if self.tidy:
            self.used += count
            return list(range(self.used - count + 1, self.used + 1))
        return [self.rng.randint(0, self.vocabulary - 1) for _ in range(count)]

    def _count(self, kind: str) -> None:
        self.script.kinds[kind] += 1


def _reply(number: int, ids: list[int]) -> Message:
    if number % 5 == 3:
        return Message("assistant", "", "thinks", (ToolCall("c1", "search", '{"q": 1}'),))
    return Message("assistant", f"answers {len(ids)} {number % 2}")


def _called(name: str, number: int, prompt: list[int], reply: list[int]) -> ModelCall:
    usage = Usage(len(prompt), len(reply), number % (len(prompt) + 1))
    finish = "length" if number % 3 == 2 else "stop"
    return ModelCall(name, "policy", "policy@3", {"temperature": 0.5}, finish, usage, number, number + 1)


def _message(role: str, text: str, images: list | tuple) -> Message:
    return Message(role, (TextPart(text), *(MediaPart(image.hash) for *_, image in images)))


def _laid_out(line: tuple[Piece, ...]) -> tuple[list[MessageSpan], list[PromptMedia], list[int]]:
    """The line as one prompt: spans and images counted from its first token."""
    spans: list[MessageSpan] = []
    media: list[PromptMedia] = []
    prompt: list[int] = []
    for number, piece in enumerate(line):
        start = len(prompt)
        prompt += piece.ids
        spans.append(MessageSpan(piece.message, len(prompt), (start + piece.body[0], start + piece.body[1])))
        media += [PromptMedia(image, number, part + 1, start + a, start + b) for part, a, b, image in piece.images]
    return spans, media, prompt
