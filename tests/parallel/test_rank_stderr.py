"""What other ranks say is shown line by line, with the rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.parallel.rank_stderr import RankStderr


def test_lines_come_with_their_rank_and_bars_as_they_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RankStderr(str(tmp_path)) as pipes, open(pipes.of(3), "w") as one, open(pipes.of(1), "w") as other:
        one.write("\r 10%\r 50%\r100%\nsaid\n\n")
        one.flush()
        other.write("last words, without an end")
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "[rank 1] last words, without an end",
        "[rank 3] 100%",
        "[rank 3] said",
    ]
