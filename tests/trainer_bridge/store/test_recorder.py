"""Recording: what is written, what is kept, and that storage can never stop a step."""

from __future__ import annotations

import io
import logging
import multiprocessing
import resource
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from rollout.errors import InvalidRequest
from tests.trainer_bridge.samples import sample
from tests.trainer_bridge.store.runs import batch, record_run
from trainer_bridge.compare import compare
from trainer_bridge.store import recorder as recorder_module
from trainer_bridge.store.facts import RunHead, StepFacts
from trainer_bridge.store.reader import RunStore
from trainer_bridge.store.recorder import Recorder, RecordOptions
from trainer_bridge.store.schema import SAMPLES, STEPS, TOKENS


def test_duckdb_reads_the_tables_by_their_partitions(tmp_path: Path) -> None:
    comparisons, totals = record_run(tmp_path, broken_from=1)
    assert (totals.written, totals.dropped, totals.waiting) == (3, 0, 0)
    assert totals.bytes == sum(p.stat().st_size for p in tmp_path.rglob("*.parquet"))
    rows = duckdb.execute(
        f"SELECT run, step, tokens, equal_tokens, max_abs FROM read_parquet('{tmp_path}/run=*/steps/*/*.parquet', "
        "hive_partitioning=true) ORDER BY step"
    ).fetchall()
    assert rows == [("run", i, c.tokens, c.equal_tokens, c.max_abs) for i, c in enumerate(comparisons)]
    unequal = duckdb.execute(
        f"SELECT step, count(*) FROM read_parquet('{tmp_path}/run=*/tokens/*/*.parquet', hive_partitioning=true) "
        "WHERE rollout_bits <> trainer_bits AND mask GROUP BY step ORDER BY step"
    ).fetchall()
    assert unequal == [(i, c.unequal_tokens) for i, c in enumerate(comparisons) if c.unequal_tokens]


def test_every_file_has_the_documented_columns(tmp_path: Path) -> None:
    record_run(tmp_path, broken_from=0)
    for table, schema in (("steps", STEPS), ("samples", SAMPLES), ("tokens", TOKENS)):
        files = sorted((tmp_path / "run=run" / table).rglob("*.parquet"))
        assert len(files) == 3
        assert all(pq.read_schema(file).equals(schema) for file in files)
    assert not list(tmp_path.rglob(".*")), "no partial file is left"


def test_bits_survive_the_round_trip_nan_payloads_included(tmp_path: Path) -> None:
    payload = np.array([0x7FC00123], np.uint32).view(np.float32)[0]
    one = sample([-0.0, payload, -1.0], [0.0, payload, -1.0], mask=[1, 0, 1])
    recorder = Recorder(tmp_path, RunHead("r"))
    recorder.record(StepFacts(0), [one], compare([one]))
    assert recorder.close().written == 1
    table = pq.read_table(next((tmp_path / "run=r/tokens").rglob("*.parquet")), partitioning=None)
    assert table.column("rollout_bits").to_numpy().astype(np.uint32).tolist() == [0x80000000, 0x7FC00123, 0xBF800000]
    assert table.column("trainer_bits").to_numpy().astype(np.uint32).tolist() == [0, 0x7FC00123, 0xBF800000]
    assert table.column("ulp").to_pylist() == [1, None, 0], "-0.0 and +0.0 differ; masked tokens have no distance"


@pytest.mark.parametrize(("rate", "equal_kept"), [(0.0, 0), (1.0, 6)])
def test_unequal_samples_are_always_kept_whole_and_equal_ones_by_rate(
    tmp_path: Path, rate: float, equal_kept: int
) -> None:
    comparisons, _ = record_run(tmp_path, steps=2, broken_from=1, keep_rate=rate)
    kept = {}
    for file in (tmp_path / "run=run/samples").rglob("*.parquet"):
        table = pq.read_table(file, partitioning=None)
        kept[file.parent.name] = (table.num_rows, sum(table.column("unequal").to_pylist()))
    assert kept.get("step=0", (0, 0))[0] == equal_kept
    assert kept["step=1"] == (6, comparisons[1].unequal_tokens)


def test_a_sampling_rate_draws_by_name_not_by_chance(tmp_path: Path) -> None:
    for root in ("a", "b"):
        record_run(tmp_path / root, steps=8, keep_rate=0.5)
    names = [
        sorted(
            (row["request_id"], row["sample_index"])
            for file in (tmp_path / root).rglob("samples/*/*.parquet")
            for row in pq.read_table(file, partitioning=None).to_pylist()
        )
        for root in ("a", "b")
    ]
    assert names[0] == names[1] and 0 < len(names[0]) < 48


def record_on_a_full_disk(root: Path) -> tuple[int, int, str, str]:
    """For a process of its own, since the limit also holds for its output: (written, dropped, last error, log)."""
    log = io.StringIO()
    logging.basicConfig(stream=log, level=logging.WARNING)
    # Writes beyond 4 KiB fail, as on a full disk: with EFBIG instead of ENOSPC, on the same path.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    _, totals = record_run(root, steps=2)
    return totals.written, totals.dropped, totals.last_error, log.getvalue()


def test_a_full_disk_loses_the_step_and_says_so(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        written, dropped, error, log = child.submit(record_on_a_full_disk, tmp_path).result()
    assert (written, dropped) == (0, 2)
    assert "File too large" in error
    assert "step 1 is not recorded" in log and "2 dropped so far, training goes on" in log
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["run.json"], "nothing half written is left"


def test_an_unwritable_folder_is_no_error_and_a_later_repair_is_noticed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.write_text("a file where the folder should be")
    samples = batch(0)
    recorder = Recorder(root, RunHead("r"))
    recorder.record(StepFacts(0), samples, compare(samples))
    while recorder.totals().waiting:
        threading.Event().wait(0.001)
    assert recorder.totals().dropped == 1
    root.unlink()
    recorder.record(StepFacts(1), samples, compare(samples))
    totals = recorder.close()
    assert (totals.written, totals.dropped) == (1, 1)
    assert (root / "run=r/run.json").exists()


def test_hanging_storage_drops_steps_instead_of_blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    write = recorder_module.write_table

    def hang(*args: object) -> None:
        released.wait(30)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder_module, "write_table", hang)
    samples = batch(0)
    recorder = Recorder(tmp_path, RunHead("r"), options=RecordOptions(queued_steps=2))
    taken = [recorder.record(StepFacts(step), samples, compare(samples)) for step in range(5)]
    assert taken == [True, True, False, False, False]
    released.set()
    totals = recorder.close()
    assert (totals.written, totals.dropped) == (2, 3)


def test_a_broken_decoder_or_sink_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> list[str]:
        raise RuntimeError("no such token")

    samples = batch(0)
    recorder = Recorder(tmp_path, RunHead("r"), options=RecordOptions(keep_rate=1.0), decode=broken, on_step=broken)  # type: ignore[arg-type]
    recorder.record(StepFacts(0), samples, compare(samples))
    assert recorder.close().dropped == 1
    assert "no such token" in caplog.text and "the sink failed on step 0" in caplog.text


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "run=1", "x" * 200])
def test_names_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="run name"):
        Recorder(tmp_path, RunHead(name))


def test_options_and_facts_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="keep_rate"):
        RecordOptions(keep_rate=1.5)
    with pytest.raises(InvalidRequest, match="queued_steps"):
        RecordOptions(queued_steps=0)
    samples = batch(0)
    recorder = Recorder(tmp_path, RunHead("r"))
    with pytest.raises(InvalidRequest, match="6 samples but facts of 0"):
        recorder.record(StepFacts(0), samples, compare(samples), [])
    recorder.close()


def test_a_step_after_the_close_is_dropped_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was taken, and nobody ever wrote it."""
    samples = batch(0)
    recorder = Recorder(tmp_path, RunHead("r"))
    assert recorder.record(StepFacts(0), samples, compare(samples))
    recorder.close()
    assert not recorder.record(StepFacts(1), samples, compare(samples))
    totals = recorder.close()
    assert (totals.written, totals.dropped, totals.waiting) == (1, 1, 0)
    assert "step 1 is not recorded (the recorder was closed)" in caplog.text


def test_many_writers_at_once_and_a_reader_beside_them(tmp_path: Path) -> None:
    """Ranks write one run on shared storage while the dashboard reads: no part is lost, none is seen half."""
    ranks, steps, done = 4, 5, threading.Event()
    seen: list[int] = []
    store = RunStore(tmp_path)

    def rank(number: int) -> None:
        recorder = Recorder(tmp_path, RunHead("run"), writer=f"rank{number}")
        for step in range(steps):
            samples = batch(number * 100 + step, samples=2)
            recorder.record(StepFacts(step), samples, compare(samples))
        assert recorder.close().written == steps

    def read() -> None:
        while not done.is_set():
            store.refresh()
            if store.names():
                seen.extend(figures["parts"] for figures in store.figures("run").values())

    with ThreadPoolExecutor(ranks + 1) as pool:
        reading = pool.submit(read)
        try:
            for writing in [pool.submit(rank, number) for number in range(ranks)]:
                writing.result(120)
        finally:
            done.set()
        reading.result(60)
    store.refresh()
    figures = store.figures("run")
    assert list(figures) == list(range(steps)) and {f["parts"] for f in figures.values()} == {ranks}
    whole = [s for number in range(ranks) for s in batch(number * 100 + 3, samples=2)]
    assert figures[3]["tokens"] == compare(whole).tokens
    assert all(1 <= parts <= ranks for parts in seen)
    assert not list(tmp_path.rglob(".*")), "no partial file is left"
