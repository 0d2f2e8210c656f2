"""The record that a process leaves: whatever ends it, what was written before is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hasten.online.record import Event, MeasuredBlock, Record, read

BLOCK = MeasuredBlock(12.5, 0.75, 30, (0, 3), "search", (0.1, 0.2, 0.0), "")
EVENT = Event("broken", (1,), 2.0, "RuntimeError: „Nein“ \n two lines")

ANY = st.one_of(
    st.builds(
        MeasuredBlock,
        st.floats(0, 1e9),
        st.floats(1e-9, 1e6),
        st.integers(1, 10**9),
        st.lists(st.integers(0, 40), unique=True).map(tuple),
        st.sampled_from(["baseline", "search", "plan"]),
        st.lists(st.floats(0, 10)).map(tuple),
        st.text(),
    ),
    st.builds(Event, st.text(), st.lists(st.integers(0, 40)).map(tuple), st.floats(0, 1e6), st.text()),
)


@given(st.lists(ANY, max_size=6), st.integers(0, 400))
def test_what_is_written_is_read_wherever_it_breaks_off(all_: list[MeasuredBlock | Event], cut: int) -> None:
    """A file that breaks off anywhere gives what is whole; read on from there, it gives the rest."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "blocks")
        record = Record(str(path))
        for one in all_:
            record.write(one)
        whole = path.read_bytes()
        path.write_bytes(whole[:cut])
        first, offset = read(path)
        assert first == all_[: len(first)]
        assert offset <= cut
        path.write_bytes(whole)
        rest, end = read(path, offset)
        assert [*first, *rest] == all_
        assert end == len(whole)
        assert read(path, end) == ([], end)


def test_a_file_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "blocks", 7) == ([], 7)


def test_a_last_line_that_is_half_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    Record(str(path)).write(BLOCK)
    with path.open("ab") as file:
        file.write(b'{"is": "Event", "kind": "sw')
    seen, offset = read(path)
    assert seen == [BLOCK]
    with path.open("ab") as file:
        file.write(b'itch", "on": [1, 2]}\n')
    assert read(path, offset)[0] == [Event("switch", (1, 2))]


def test_a_second_process_adds_to_it(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    for one in (BLOCK, EVENT):
        Record(str(path)).write(one)
    assert read(path)[0] == [BLOCK, EVENT]


WRITES = """
import os, signal, sys
from hasten.online.record import Event, Record
record = Record(sys.argv[1])
for number in range(1000):
    record.write(Event("switch", (number,)))
    if number == 500:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_written_before_a_kill_is_there(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITES, str(tmp_path / "blocks")], check=False)
    assert done.returncode == -9
    assert [one.on[0] for one in read(tmp_path / "blocks")[0]] == list(range(501))


def test_it_is_read_without_torch() -> None:
    code = "import sys; from hasten.online import course, record, schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
