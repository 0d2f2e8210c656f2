"""Where hasten's own words end and the training's begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.cli.command import split_line as _split
from tests.taps.scripts import HASTEN, environment, execute

TAKING = {"--plan", "--evidence"}
OWN = st.one_of(
    st.just(["--no-plan"]),
    st.just(["--quiet"]),
    st.tuples(st.sampled_from(sorted(TAKING)), st.text(min_size=1, max_size=8)).map(list),
    st.tuples(st.sampled_from(sorted(TAKING)), st.text(max_size=8)).map(lambda pair: ["=".join(pair)]),
)
SCRIPT = st.one_of(
    st.from_regex(r"[a-z./][a-z./ ]{0,8}", fullmatch=True).map(lambda name: [name]),
    st.from_regex(r"[a-z.]{1,8}", fullmatch=True).map(lambda name: ["-m", name]),
)


@given(st.lists(OWN, max_size=4), SCRIPT, st.lists(st.text(max_size=8), max_size=6), st.booleans())
def test_the_trainings_words_are_left_as_they_are(
    own: list[list[str]], script: list[str], words: list[str], dashes: bool
) -> None:
    ours = [word for option in own for word in option]
    line = [*ours, *(["--"] if dashes else []), *script, *words]
    split = _split(line, TAKING)
    assert line[:split] == ours
    assert line[split:] == [*script, *words]


@pytest.mark.parametrize("command", ["run", "tune"])
def test_help_names_what_follows(tmp_path, command: str) -> None:
    done = execute(HASTEN, command, "--help", cwd=tmp_path)
    assert done.code == 0
    assert "[OPTIONS] SCRIPT|-m MODULE [ARGS]..." in done.out


def test_help_and_catalogue_need_no_torch(tmp_path) -> None:
    """Where torch cannot be imported at all, these still answer."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    env = environment(PYTHONPATH=str(tmp_path))
    for arguments in (["--help"], ["--version"], ["techniques"], ["techniques", "--markdown"], ["run", "--help"]):
        done = execute(HASTEN, *arguments, cwd=tmp_path, env=env)
        assert (done.code, done.err) == (0, ""), arguments
        assert done.out
