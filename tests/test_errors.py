"""The failure taxonomy: stable names on every failure, and a wire form that loses nothing on the way."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify import errors
from ramify.errors import (
    ConfigInvalid,
    ContextOverflow,
    EnvironmentFault,
    Failure,
    JudgeError,
    ProviderError,
    RamifyError,
    UnknownFailure,
    WorkerDied,
    failure_classes,
)

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
OURS = {name: cls for name, cls in failure_classes().items() if cls.__module__.startswith("ramify.")}
POLICY = {"ContextOverflow", "BudgetExceeded", "RolloutDeadline", "MalformedCall", "AgentExit"}


def raised(exc: BaseException) -> BaseException:
    """The same exception after some code really raised it."""
    try:
        raise exc
    except BaseException as caught:  # noqa: BLE001 - the test wants it back whatever it is
        return caught


def over_the_wire(failure: Failure) -> Failure:
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure)
    spelled = msgspec.json.decode(msgspec.json.encode(failure), type=Failure)
    assert packed == spelled
    return packed


# -- the taxonomy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_failure_has_a_stable_name_a_blame_and_says_whether_to_retry(name):
    cls = OURS[name]
    assert cls.name == name == cls.__name__
    assert cls.blame in ("policy", "system")
    assert isinstance(cls.retryable, bool)
    assert getattr(errors, name) is cls
    assert name in errors.__all__


def test_the_policy_is_blamed_for_exactly_what_it_can_cause():
    assert {name for name, cls in OURS.items() if cls.blame == "policy"} == POLICY


def test_a_failure_of_the_policy_is_a_result_and_never_run_again():
    assert not any(cls.retryable for cls in OURS.values() if cls.blame == "policy")


def test_two_failures_with_one_name_are_refused():
    with pytest.raises(TypeError, match="WorkerDied"):
        type("WorkerDied", (RamifyError,), {}, blame="system", retryable=True)
    assert failure_classes()["WorkerDied"] is WorkerDied


def test_a_failure_that_does_not_say_whom_to_blame_is_refused():
    with pytest.raises(TypeError, match="blame"):
        type("Shrug", (RamifyError,), {}, retryable=True)
    with pytest.raises(TypeError, match="blame"):
        type("Shrug", (RamifyError,), {}, blame="user", retryable=True)
    with pytest.raises(TypeError, match="retryable"):
        type("Shrug", (RamifyError,), {}, blame="system")
    assert "Shrug" not in failure_classes()


def test_a_special_case_inherits_blame_and_retry_and_gets_its_own_name():
    class RateLimited(ProviderError):
        """The provider asked us to slow down."""

    assert (RateLimited.name, RateLimited.blame, RateLimited.retryable) == ("RateLimited", "system", True)
    with pytest.raises(RateLimited):
        raise over_the_wire(Failure.from_exception(RateLimited("429"))).to_exception()


def test_the_taxonomy_imports_nothing_of_ours():
    script = "import sys, ramify.errors; print(*[m for m in sys.modules if m.split('.')[0] == 'ramify'])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert {name.split(".")[1] for name in loaded.stdout.split() if "." in name} == {"errors"}


# -- page and code ----------------------------------------------------------------------------------------------------


def rows_of_the_page() -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (match := re.fullmatch(r"`(\w+)`", cells[0])) and len(cells) == 5:
            assert match[1] not in rows, f"{match[1]} stands twice on the page"
            rows[match[1]] = cells[1:]
    return rows


def test_the_page_explains_every_failure_and_no_other():
    assert set(rows_of_the_page()) == set(OURS)


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_page_says_what_the_code_says(name):
    happened, advice = (" ".join(part.split()) for part in str(inspect.getdoc(OURS[name])).split("\n\n"))
    blame = OURS[name].blame
    assert rows_of_the_page()[name] == [blame, "yes" if OURS[name].retryable else "no", happened, advice]


# -- the wire form ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_failure_survives_a_process_boundary(name):
    failure = Failure.from_exception(raised(OURS[name]("what was expected, what was found")))
    error = over_the_wire(failure).to_exception()
    assert type(error) is OURS[name]
    assert str(error) == "what was expected, what was found"
    assert Failure.from_exception(error) == failure


def test_a_traceback_is_kept_where_code_raised_and_only_there():
    assert Failure.from_exception(ContextOverflow("the prompt filled the window")).traceback is None
    text = Failure.from_exception(raised(EnvironmentFault("boom"))).traceback
    assert text is not None
    assert "in raised" in text
    assert text.rstrip().endswith("EnvironmentFault: boom")


def test_the_traceback_of_the_first_raise_outlives_a_second_hop():
    first = over_the_wire(Failure.from_exception(raised(WorkerDied("exit code -9"))))
    second = Failure.from_exception(raised(first.to_exception()))
    assert second.traceback == first.traceback


def test_a_printed_error_shows_where_the_other_process_raised_it():
    error = over_the_wire(Failure.from_exception(raised(WorkerDied("exit code -9")))).to_exception()
    assert any("in raised" in note for note in error.__notes__)


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
    error = over_the_wire(failure).to_exception()
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


def test_a_chain_that_bites_its_tail_ends():
    one, two = WorkerDied("one"), WorkerDied("two")
    one.__cause__, two.__cause__ = two, one
    failure = Failure.from_exception(one)
    assert failure.cause is not None
    assert failure.cause.message == "two"
    assert failure.cause.cause is None


def test_an_endless_chain_is_cut():
    error: Exception = ValueError("0")
    for number in range(1, 10_000):
        outer = ValueError(str(number))
        outer.__cause__ = error
        error = outer
    link, length = Failure.from_exception(error, wrap_as=EnvironmentFault), 0
    while (link := link.cause) is not None:
        length += 1
    assert 1 < length <= 16


def test_deep_recursion_gives_a_short_traceback():
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


# -- exceptions that are not ours -------------------------------------------------------------------------------------


def test_a_foreign_exception_keeps_its_own_name_when_nobody_claims_it():
    failure = Failure.from_exception(raised(ValueError("bad")))
    assert (failure.name, failure.message, failure.blame, failure.retryable) == (
        "builtins.ValueError",
        "bad",
        "system",
        False,
    )
    assert failure.traceback is not None


def test_a_foreign_exception_becomes_what_the_caller_says_and_stays_visible_as_its_cause():
    failure = Failure.from_exception(raised(ValueError("bad")), wrap_as=EnvironmentFault)
    assert (failure.name, failure.message) == ("EnvironmentFault", "ValueError: bad")
    assert (failure.blame, failure.retryable) == (EnvironmentFault.blame, EnvironmentFault.retryable)
    assert failure.traceback is None
    assert failure.cause == Failure.from_exception(failure.cause.to_exception()) if failure.cause else False
    assert failure.cause is not None
    assert failure.cause.name == "builtins.ValueError"
    assert failure.cause.traceback is not None


def test_the_callers_choice_does_not_rename_a_failure_of_ours():
    assert Failure.from_exception(WorkerDied("gone"), wrap_as=EnvironmentFault).name == "WorkerDied"


def test_an_unknown_name_keeps_everything_it_said():
    failure = Failure(name="FromTheFuture", message="new", blame="policy", retryable=True)
    error = failure.to_exception()
    assert type(error) is UnknownFailure
    assert (error.name, error.blame, error.retryable) == ("FromTheFuture", "policy", True)
    assert "FromTheFuture" in str(error)
    assert Failure.from_exception(error) == failure


def test_an_exception_that_cannot_print_itself_is_still_reported():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    failure = Failure.from_exception(raised(Mute()), wrap_as=EnvironmentFault)
    assert "Mute" in failure.message


def test_a_message_that_is_not_unicode_still_travels():
    failure = Failure.from_exception(raised(SandboxedName("bad file name \udcff")))
    assert over_the_wire(failure).message == "bad file name \\udcff"


SandboxedName = errors.SandboxError
messages = st.text()
names = st.one_of(st.sampled_from(sorted(OURS)), st.from_regex(r"[a-z]+\.[A-Z][a-zA-Z]+", fullmatch=True))


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
def test_the_wire_form_is_lossless(failure):
    assert over_the_wire(failure) == failure


@given(st.lists(st.tuples(st.sampled_from(sorted(OURS)), messages), min_size=1, max_size=8))
def test_error_and_failure_are_two_forms_of_one_thing(links):
    error: RamifyError | None = None
    for name, message in links:
        outer = OURS[name](message)
        outer.__cause__ = error
        error = outer
    assert error is not None
    failure = Failure.from_exception(error)
    again = over_the_wire(failure).to_exception()
    assert Failure.from_exception(again) == failure
    walked: BaseException | None = again
    for name, message in reversed(links):
        assert isinstance(walked, OURS[name])
        assert str(walked) == message
        walked = walked.__cause__
    assert walked is None


def test_config_errors_read_as_their_message():
    assert str(ConfigInvalid("max_steps: expected an integer")) == "max_steps: expected an integer"
