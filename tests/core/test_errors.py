"""Failure classes have stable names, and their serialized form is lossless."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core import errors
from ramify.core.errors import (
    ConfigInvalid,
    ContextOverflow,
    EnvironmentFault,
    Failure,
    ImageMissing,
    JudgeError,
    PermanentFailure,
    PolicyFailure,
    ProcessDied,
    ProviderError,
    RamifyError,
    TransientFailure,
    UnknownFailure,
    failure_classes,
)

DOCS_PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
FAILURE_CLASSES = {name: cls for name, cls in failure_classes().items() if cls.__module__.startswith("ramify.")}
POLICY_FAILURES = {
    "ContextOverflow",
    "BudgetExceeded",
    "MalformedCall",
    "AgentFailed",
    "ImageInvalid",
    "QuotaExceeded",
}


def raise_and_catch(exc: BaseException) -> BaseException:
    """Return the exception with a traceback."""
    try:
        raise exc
    except BaseException as caught:  # noqa: BLE001 - any exception is returned
        return caught


def round_trip(failure: Failure) -> Failure:
    from_msgpack = msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure)
    from_json = msgspec.json.decode(msgspec.json.encode(failure), type=Failure)
    assert from_msgpack == from_json
    return from_msgpack


# -- classes ----------------------------------------------------------------------------------------------------------


def test_every_failure_is_exported_under_its_name():
    for name, cls in FAILURE_CLASSES.items():
        assert cls.name == name == cls.__name__
        assert getattr(errors, name) is cls


def test_only_failures_caused_by_the_agent_blame_the_policy_and_none_of_them_is_retryable():
    policy_failures = {name: cls for name, cls in FAILURE_CLASSES.items() if cls.blame == "policy"}
    assert set(policy_failures) == POLICY_FAILURES
    assert not any(cls.retryable for cls in policy_failures.values())


def test_duplicate_names_are_refused():
    with pytest.raises(TypeError, match="ProcessDied"):
        type("ProcessDied", (TransientFailure,), {})
    assert failure_classes()["ProcessDied"] is ProcessDied


def test_a_failure_outside_the_three_branches_is_refused():
    with pytest.raises(TypeError, match="PolicyFailure, TransientFailure, PermanentFailure"):
        type("Undeclared", (RamifyError,), {})
    assert "Undeclared" not in failure_classes()


def test_a_subclass_inherits_blame_and_retryable_and_has_its_own_name():
    class RateLimited(ProviderError):
        """The provider limits the request rate."""

    assert (RateLimited.name, RateLimited.blame, RateLimited.retryable) == ("RateLimited", "system", True)
    with pytest.raises(RateLimited):
        raise round_trip(Failure.from_exception(RateLimited("429"))).to_exception()


@pytest.mark.process
def test_errors_imports_no_other_package_of_ramify():
    script = "import sys, ramify.core.errors; print(*[m for m in sys.modules if m.split('.')[0] == 'ramify'])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert {".".join(name.split(".")[:3]) for name in loaded.stdout.split()} == {
        "ramify",
        "ramify.core",
        "ramify.core.errors",
    }


# -- documentation ----------------------------------------------------------------------------------------------------


def read_docs_tables() -> dict[str, dict[str, list[str]]]:
    """Return the rows of each section of the page: what happened and what to do, by name."""
    tables: dict[str, dict[str, list[str]]] = {}
    rows: dict[str, list[str]] = {}
    for line in DOCS_PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            rows = tables.setdefault(line.removeprefix("## "), {})
        elif (match := re.fullmatch(r"`(\w+)`", cells[0])) and len(cells) == 3:
            assert match[1] not in rows, f"{match[1]} is on the page twice"
            rows[match[1]] = cells[1:]
    return tables


def read_docs_tree() -> list[str]:
    text = DOCS_PAGE.read_text(encoding="utf-8").partition("```\n")[2].partition("```")[0]
    return [re.sub(r"  +blame.*", "", line) for line in text.splitlines()]


def draw_tree(cls: type[RamifyError], indent: str = "") -> list[str]:
    children = [child for child in cls.__subclasses__() if child.__module__ == errors.__name__]
    lines: list[str] = []
    for child in children:
        branch, below = ("└── ", "    ") if child is children[-1] else ("├── ", "│   ")
        lines += [f"{indent}{branch}{child.__name__}", *draw_tree(child, indent + below)]
    return lines


def test_the_docs_list_every_failure_with_its_docstring():
    tables = read_docs_tables()
    branches = {"Policy failures": PolicyFailure, "Transient failures": TransientFailure}
    for title, branch in (branches | {"Permanent failures": PermanentFailure}).items():
        classes = {name: cls for name, cls in FAILURE_CLASSES.items() if issubclass(cls, branch)}
        assert list(tables[title]) == list(classes)
        for name, cls in classes.items():
            assert tables[title][name] == [" ".join(part.split()) for part in str(inspect.getdoc(cls)).split("\n\n")]


def test_the_docs_draw_the_tree():
    assert read_docs_tree() == ["RamifyError", *draw_tree(RamifyError)]


# -- serialization ---------------------------------------------------------------------------------------------------


def test_a_failure_survives_a_process_boundary():
    for cls in FAILURE_CLASSES.values():
        failure = Failure.from_exception(raise_and_catch(cls("what was expected, what was found")))
        error = round_trip(failure).to_exception()
        assert type(error) is cls
        assert str(error) == "what was expected, what was found"
        assert Failure.from_exception(error) == failure


def test_the_details_of_a_failure_survive_a_process_boundary():
    error = ConfigInvalid(problems=[("seq_len", "expected at least 1, got 0", "run.toml"), ("", "no task")])
    rebuilt = round_trip(Failure.from_exception(error)).to_exception()
    assert isinstance(rebuilt, ConfigInvalid)
    assert rebuilt.problems == error.problems
    assert str(rebuilt) == str(error)
    assert str(error).splitlines()[1:] == ["  seq_len: expected at least 1, got 0 (run.toml)", "  no task"]
    missing = round_trip(Failure.from_exception(ImageMissing("upload it", ["ab"]))).to_exception()
    assert isinstance(missing, ImageMissing)
    assert missing.hashes == ("ab",)


def test_one_problem_is_one_line():
    assert str(ConfigInvalid("expected at least 1, got 0", key="seq_len")) == "seq_len: expected at least 1, got 0"


def test_only_raised_exceptions_have_a_traceback():
    assert Failure.from_exception(ContextOverflow("the prompt filled the window")).traceback is None
    text = Failure.from_exception(raise_and_catch(EnvironmentFault("boom"))).traceback
    assert text is not None
    assert "in raise_and_catch" in text
    assert text.rstrip().endswith("EnvironmentFault: boom")


def test_the_original_traceback_is_a_note_and_survives_a_second_process_boundary():
    first = round_trip(Failure.from_exception(raise_and_catch(ProcessDied("exit code -9"))))
    error = first.to_exception()
    assert any("in raise_and_catch" in note for note in error.__notes__)
    assert Failure.from_exception(raise_and_catch(error)).traceback == first.traceback


def test_an_explicit_cause_is_kept():
    try:
        try:
            raise ValueError("not a number")
        except ValueError as inner:
            raise JudgeError("the judge's answer could not be read") from inner
    except JudgeError as outer:
        failure = Failure.from_exception(outer)
    assert failure.cause is not None
    assert (failure.cause.name, failure.cause.message) == ("builtins.ValueError", "not a number")
    assert failure.cause.traceback is not None
    error = round_trip(failure).to_exception()
    assert isinstance(error.__cause__, UnknownFailure)
    assert error.__cause__.name == "builtins.ValueError"


def test_an_implicit_cause_is_kept_unless_it_was_suppressed():
    def fail(suppress: bool) -> Failure:
        try:
            try:
                raise KeyError("k")
            except KeyError:
                if suppress:
                    raise JudgeError("no verdict") from None
                raise JudgeError("no verdict")  # noqa: B904 - the implicit chain is what is tested
        except JudgeError as error:
            return Failure.from_exception(error)

    cause = fail(suppress=False).cause
    assert cause is not None
    assert cause.name == "builtins.KeyError"
    assert fail(suppress=True).cause is None


def test_a_cyclic_chain_of_causes_ends():
    one, two = ProcessDied("one"), ProcessDied("two")
    one.__cause__, two.__cause__ = two, one
    failure = Failure.from_exception(one)
    assert failure.cause is not None
    assert failure.cause.message == "two"
    assert failure.cause.cause is None


def test_a_long_chain_of_causes_is_truncated():
    error: Exception = ValueError("0")
    for number in range(1, 10_000):
        outer = ValueError(str(number))
        outer.__cause__ = error
        error = outer
    failure, length = Failure.from_exception(error, wrap_as=EnvironmentFault), 0
    while (failure := failure.cause) is not None:
        length += 1
    assert 1 < length <= 16


def test_the_traceback_of_deep_recursion_is_short():
    def one(n: int) -> int:
        return two(n + 1)

    def two(n: int) -> int:
        return one(n + 1)

    try:
        one(0)
    except RecursionError as error:
        text = Failure.from_exception(error, wrap_as=EnvironmentFault).cause
    assert text is not None
    assert text.traceback is not None
    assert len(text.traceback) < 20_000


# -- other exceptions -------------------------------------------------------------------------------------------------


def test_other_exceptions_keep_their_qualified_name():
    failure = Failure.from_exception(raise_and_catch(ValueError("bad")))
    assert (failure.name, failure.message) == ("builtins.ValueError", "bad")
    assert (failure.blame, failure.retryable) == ("system", False)
    assert failure.traceback is not None


def test_with_wrap_as_other_exceptions_become_the_cause():
    failure = Failure.from_exception(raise_and_catch(ValueError("bad")), wrap_as=EnvironmentFault)
    assert (failure.name, failure.message) == ("EnvironmentFault", "ValueError: bad")
    assert (failure.blame, failure.retryable) == (EnvironmentFault.blame, EnvironmentFault.retryable)
    assert failure.traceback is None
    assert failure.cause == Failure.from_exception(failure.cause.to_exception()) if failure.cause else False
    assert failure.cause is not None
    assert failure.cause.name == "builtins.ValueError"
    assert failure.cause.traceback is not None


def test_wrap_as_does_not_apply_to_ramify_errors():
    assert Failure.from_exception(ProcessDied("gone"), wrap_as=EnvironmentFault).name == "ProcessDied"


def test_an_unknown_name_keeps_all_fields():
    failure = Failure(name="FromTheFuture", message="new", blame="policy", retryable=True)
    error = failure.to_exception()
    assert type(error) is UnknownFailure
    assert (error.name, error.blame, error.retryable) == ("FromTheFuture", "policy", True)
    assert "FromTheFuture" in str(error)
    assert Failure.from_exception(error) == failure


def test_an_exception_whose_str_raises_is_reported():
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    failure = Failure.from_exception(raise_and_catch(Unprintable()), wrap_as=EnvironmentFault)
    assert "Unprintable" in failure.message


def test_a_message_with_lone_surrogates_is_escaped():
    failure = Failure.from_exception(raise_and_catch(errors.SandboxError("bad file name \udcff")))
    assert round_trip(failure).message == "bad file name \\udcff"


messages = st.text()
names = st.one_of(st.sampled_from(sorted(FAILURE_CLASSES)), st.from_regex(r"[a-z]+\.[A-Z][a-zA-Z]+", fullmatch=True))


def failures(causes: st.SearchStrategy[Failure]) -> st.SearchStrategy[Failure]:
    return st.builds(
        Failure,
        name=names,
        message=messages,
        blame=st.sampled_from(["policy", "system"]),
        retryable=st.booleans(),
        traceback=st.none() | messages,
        cause=st.none() | causes,
    )


@given(st.recursive(failures(st.nothing()), failures, max_leaves=8))
def test_serialization_is_lossless(failure):
    assert round_trip(failure) == failure


@given(st.lists(st.tuples(st.sampled_from(sorted(FAILURE_CLASSES)), messages), min_size=1, max_size=8))
def test_exceptions_and_failures_convert_into_each_other(links):
    error: RamifyError | None = None
    for name, message in links:
        outer = FAILURE_CLASSES[name](message)
        outer.__cause__ = error
        error = outer
    assert error is not None
    failure = Failure.from_exception(error)
    rebuilt = round_trip(failure).to_exception()
    assert Failure.from_exception(rebuilt) == failure
    current: BaseException | None = rebuilt
    for name, message in reversed(links):
        assert isinstance(current, FAILURE_CLASSES[name])
        assert str(current) == message
        current = current.__cause__
    assert current is None
