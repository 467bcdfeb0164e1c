"""A run with damaged files is refused or reported, and nothing is deleted."""

import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.core.errors import RunDamaged
from ramify.run.store import Ledger, RunStore, open_run
from ramify.run.store.audit import check_storage
from ramify.run.store.ledger import GroupRecord
from ramify.run.store.run_log import RunLog
from ramify.train.checkpoint_manifest import CheckpointManifest, checksum_files
from tests.support.traces import make_rollout

TMPFS = "/dev/shm" if Path("/dev/shm").is_dir() else None  # syncs are free there
IDENTITY = {"model": "tiny"}


async def fill(path: Path, rollouts: int = 3) -> None:
    with open_run(path, IDENTITY) as store:
        ledger = Ledger.open(store)
        await ledger.declare_source("reverse", 100)
        for number in range(rollouts):
            await ledger.issue_groups([GroupRecord(number, "reverse", number, 1)])
            await ledger.record_sampled(number, 0, *make_rollout(number, text="a reply " * 50))


@pytest.fixture
async def run():
    """A training run with rollouts and a checkpoint."""
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        path = Path(folder) / "run"
        await fill(path)
        (path / "checkpoints" / "step_000002").mkdir(parents=True)
        weights = path / "checkpoints" / "step_000002" / "weights"
        weights.write_bytes(b"weights")
        manifest = CheckpointManifest(step=2, optimizer="adamw", note={}, files=checksum_files([weights]))
        manifest.write(weights.parent)
        (path / "config.toml").write_text("[[train]]\n")
        yield path


def remove(path: Path) -> None:
    for file in path.glob("run.sqlite*"):
        file.unlink()


def empty(path: Path) -> None:
    remove(path)
    (path / "run.sqlite").touch()


def drop_tables(path: Path) -> None:
    remove(path)
    sqlite3.connect(path / "run.sqlite").executescript("CREATE TABLE other (x); DROP TABLE other; VACUUM").close()


def delete_rows(path: Path) -> None:
    connection = sqlite3.connect(path / "run.sqlite", isolation_level=None)
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        connection.execute(f"DELETE FROM {table}")
    connection.close()
    (path / "run.sqlite.sha256").unlink()  # as if its writer had been killed


def results(path: Path) -> dict[str, bytes]:
    files = [*path.glob("traces/*"), *path.glob("checkpoints/*/*")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("damage", [remove, empty, drop_tables, delete_rows])
def test_an_index_without_contents_is_refused_and_nothing_is_changed(run, damage):
    damage(run)
    before = results(run)
    assert any(before.values())
    with pytest.raises(RunDamaged) as refused:
        open_run(run, IDENTITY)
    assert "1 trace segment, 1 checkpoint" in refused.value.message
    assert "--fresh" in refused.value.message
    assert "-m PATH" not in refused.value.message, "there are no weights to use"
    assert results(run) == before
    with open_run(run, IDENTITY, fresh=True) as store:
        assert store.rollouts() == []
    assert results(run.with_name("run.old-1")) == before


def test_an_index_with_a_damaged_page_is_refused_and_nothing_is_changed(run):
    sqlite3.connect(run / "run.sqlite").execute("PRAGMA wal_checkpoint(TRUNCATE)").connection.close()
    path, before = run / "run.sqlite", results(run)
    intact = path.read_bytes()
    damaged = [intact[:start] + bytes(4096) + intact[start + 4096 :] for start in range(4096, len(intact), 4096)]
    for content in [*damaged, intact[: len(intact) // 2]]:
        path.write_bytes(content)
        with pytest.raises(RunDamaged, match="is damaged"):
            open_run(run, IDENTITY)
        assert results(run) == before
        for log in run.glob("run.sqlite-*"):
            log.unlink()
    path.write_bytes(intact)
    with open_run(run, IDENTITY) as store:
        assert len(store.rollouts()) == 3


@pytest.mark.parametrize("damage", [remove, empty, drop_tables])
def test_commands_that_read_a_damaged_run_report_it(run, damage, capsys):
    damage(run)
    with pytest.raises(RunDamaged):
        RunStore.open(run, write=False)
    for command in (["show"], ["why"], ["why", "--audit"], ["metrics"]):
        assert main([command[0], str(run), *command[1:]]) == 1
        assert "RunDamaged" in capsys.readouterr().err


def test_a_run_killed_before_its_first_commit_is_resumed(tmp_path):
    with open_run(tmp_path / "run", IDENTITY):
        pass
    (tmp_path / "run" / "traces" / "000000.seg").write_bytes(b"a frame that no row points to")
    with open_run(tmp_path / "run", IDENTITY) as store:
        assert (store.path / "traces" / "000000.seg").stat().st_size == 0


# -- the audit ---------------------------------------------------------------------------------------------------------


def audit(run: Path, capsys) -> tuple[int, str]:
    code = main(["why", str(run), "--audit"])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("damaged_file", ["weights", "checkpoint.json"])
def test_the_audit_names_a_damaged_checkpoint(run, capsys, damaged_file):
    path = run / "checkpoints" / "step_000002" / damaged_file
    path.write_bytes(path.read_bytes().replace(b"w", b"v", 1))
    code, output = audit(run, capsys)
    assert code == 1
    assert f"step_000002/{damaged_file} is damaged" in output


def test_the_audit_of_an_eval_checks_its_files(run, capsys):
    (run / "config.toml").write_text("[taskset]\n")
    assert audit(run, capsys)[0] == 0


def test_a_changed_byte_anywhere_in_a_segment_is_reported(run):
    path = run / "traces" / "000000.seg"
    intact = path.read_bytes()
    for index in range(0, len(intact), max(1, len(intact) // 40)):
        path.write_bytes(intact[:index] + bytes([intact[index] ^ 1]) + intact[index + 1 :])
        with RunStore.open(run, write=False) as store:
            assert any("000000.seg" in line for line in check_storage(store)), index
    path.write_bytes(intact[:-1])
    with RunStore.open(run, write=False) as store:
        assert any("000000.seg" in line for line in check_storage(store))
    path.write_bytes(intact)


async def test_frames_of_replaced_rollouts_are_checked(run):
    with RunStore.open(run) as store:
        await store.add_rollout(*make_rollout(0, text="another reply"))
    path = run / "traces" / "000000.seg"
    intact = path.read_bytes()
    path.write_bytes(intact[:20] + bytes([intact[20] ^ 1]) + intact[21:])  # in the frame of the replaced rollout
    with RunStore.open(run, write=False) as store:
        assert check_storage(store)
        assert all(store.read_traces(row.id) for row in store.rollouts())


def test_damaged_frames_are_reported_even_if_the_index_cannot_be_read_completely(run):
    path = run / "traces" / "000000.seg"
    intact = path.read_bytes()
    path.write_bytes(intact[:20] + bytes([intact[20] ^ 1]) + intact[21:])
    connection = sqlite3.connect(run / "run.sqlite", isolation_level=None)
    connection.execute("UPDATE rollouts SET summary = x'c1' WHERE id = 'r2'")
    connection.close()
    with RunStore.open(run, write=False) as store:
        problems = check_storage(store)
    assert any("000000.seg: bytes [" in line for line in problems)
    assert "the index cannot be read" in problems[-1]


def flip_bit(path: Path, index: int) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1 << index % 8
    path.write_bytes(content)


def test_any_changed_byte_of_a_closed_database_is_reported(run, capsys):
    path = run / "run.sqlite"
    intact, positions = path.read_bytes(), random.Random(0)
    header = range(0, 100, 7)
    pages = [page * 4096 + positions.randrange(4096) for page in range(len(intact) // 4096)]
    for index in [*header, *pages]:
        flip_bit(path, index)
        code, output = audit(run, capsys)
        assert code == 1, index
        assert "Traceback" not in output
        path.write_bytes(intact)
    assert audit(run, capsys)[0] == 0


def test_a_changed_value_is_refused_until_the_user_accepts_it(run):
    with sqlite3.connect(run / "run.sqlite") as connection:
        connection.execute("UPDATE rollouts SET reward = 9 WHERE id = 'r1'")
    connection.close()
    with pytest.raises(RunDamaged, match=r"run\.sqlite\.sha256") as refused:
        open_run(run, IDENTITY)
    assert "if you changed or replaced it yourself, delete" in refused.value.message
    (run / "run.sqlite.sha256").unlink()
    with open_run(run, IDENTITY) as store:
        assert store.rollouts(id="r1")[0].reward == 9


def test_a_checksum_without_a_database_is_ignored(tmp_path):
    open_run(tmp_path / "run", IDENTITY).close()
    (tmp_path / "run" / "run.sqlite").unlink()  # a run without results may start over
    with open_run(tmp_path / "run", IDENTITY) as store:
        assert not store.rollouts()


def test_a_killed_run_has_no_checksum_and_the_audit_says_so(run, tmp_path, capsys):
    assert "no checksum" not in audit(run, capsys)[1]
    with open_run(run, IDENTITY):
        shutil.copytree(run, tmp_path / "killed")
    code, output = audit(tmp_path / "killed", capsys)
    assert code == 0
    assert "run.sqlite has no checksum" in output


def test_a_reader_of_the_last_commit_only_delays_the_checksum(run):
    with open_run(run, IDENTITY):
        pass
    with RunStore.open(run, write=False, lock=False) as reader:
        assert reader.rollouts()
        with open_run(run, IDENTITY) as store:
            store.set_fact("key", 1)
        assert not (run / "run.sqlite.sha256").exists(), "the reader keeps pages in the write-ahead log"
    with open_run(run, IDENTITY):
        pass
    assert (run / "run.sqlite.sha256").exists()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE facts SET value = x'c1'",
        "UPDATE attempts SET notes = x'c1'",
        "UPDATE groups SET state = 'trainee'",
        "INSERT INTO marks VALUES ('comitted', 1)",
        "INSERT INTO events VALUES (0, 'started', x'c1')",
        "INSERT INTO batches VALUES (0, x'c1', x'80', x'80')",
        "INSERT INTO served VALUES (0, 0, x'c1')",
    ],
)
def test_a_row_that_cannot_be_decoded_is_damage(run, capsys, change):
    with sqlite3.connect(run / "run.sqlite") as connection:
        connection.execute(change)
    connection.close()
    (run / "run.sqlite.sha256").unlink()
    with RunStore.open(run, write=False) as store, pytest.raises(RunDamaged, match="cannot be decoded"):
        read_everything(store)
    code, output = audit(run, capsys)
    assert "DecodeError" not in output
    assert code == 1 or "facts" in change, "the audit reads no facts"


def read_everything(store: RunStore) -> None:
    ledger = Ledger.open_readonly(store)
    store.get_fact("identity")
    RunLog(store).events()
    for read in (ledger.progress, ledger.groups, ledger.attempts, ledger.batches, ledger.served_batches):
        read()


def test_a_reward_that_differs_from_its_trace_is_reported(run, capsys):
    sqlite3.connect(run / "run.sqlite", isolation_level=None).execute("UPDATE rollouts SET reward = 9 WHERE id = 'r1'")
    code, output = audit(run, capsys)
    assert code == 1
    assert "rollout r1: the index has reward 9.0, its trace 0.5" in output
