"""What a tune learned is kept beside its plan; the next tune of the same training goes on from there."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection
from pathlib import Path

import pytest

from hasten.evidence import Evidence, ModelFacts, this_machine
from hasten.evidence.plain import tuples
from hasten.online.course import Course
from hasten.online.options import Candidate, OnlineOptions
from hasten.tuner.search_state import SearchState
from hasten.tuner.store import RecalledTraining, applied, drop_again, recall, remember
from hasten.tuner.training_key import Key, key_of
from tests.report.conftest import build
from tests.tuner.evidence import evidence

COMMAND = ("train.py", "--epochs", "90", "--data", "/srv/amaryllis/images")
NET = ModelFacts(
    "Net", 1000, 1000, {"Conv2d": 3, "Linear": 1}, "float32", "cpu", False, "", 100, 10, 0, False, ((8, 3, 32, 32),)
)
CANDIDATES = (
    Candidate("precision", "bf16-mixed", -0.1, 0.3),
    Candidate("channels_last", True, -0.05, 0.2),
    Candidate("cpu_threads", 1, -0.02, 0.2),
    Candidate("allocator", "glibc", -0.03, 0.1),
)
TRULY = (-0.5, -0.02, 0.3, -0.1)  # of log(seconds per step)
TOGETHER = -0.1  # precision and channels_last


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    return tmp_path / ".hasten"


def seen(**model: object) -> Evidence:
    """Evidence of a training of one network."""
    return evidence([[0.1] * 10], models=(dataclasses.replace(NET, **model),))  # type: ignore[arg-type]


def key(**others: object) -> Key:
    return dataclasses.replace(key_of(COMMAND, seen()), **others)  # type: ignore[arg-type]


def block(course: Course, on: Collection[int], effects: tuple[float, ...] = TRULY) -> None:
    """A block as this training would run it."""
    pair = TOGETHER if {0, 1} <= set(on) else 0.0
    course.add_block(on, 0.1 * math.exp(sum(effects[i] for i in on) + pair))


def tuned(candidates: tuple[Candidate, ...] = CANDIDATES, blocks: int = 30) -> SearchState:
    """A search that came to its end."""
    course = Course(candidates)
    block(course, ())
    block(course, course.all_on())
    for _ in range(blocks):
        block(course, course.draw_set())
    found = SearchState(course)
    found.chosen = course.chosen()
    return found


def again(
    folder: Path, now: Key | None = None, candidates: tuple[Candidate, ...] = CANDIDATES
) -> tuple[RecalledTraining | None, Course]:
    """The next tune's beginning."""
    recalled = recall(folder, now or key())
    course = Course(applied(candidates, recalled), prior=recalled.prior if recalled else None)
    drop_again(course, recalled)
    return recalled, course


def beside_the_plan(course: Course, on: Collection[int]) -> list[tuple[float, float]]:
    return [(one.mean, one.spread) for one in course.estimates(on)]


def test_the_next_tune_knows_at_once_what_the_last_one_found(folder: Path) -> None:
    found = tuned()
    assert remember(folder, key(), found, build()) == ""
    recalled, course = again(folder)
    assert recalled is not None
    assert recalled.message.startswith("continues from what the tune of 2026-11-20 learned (.hasten/train-")
    before, now = beside_the_plan(found.course, found.chosen), beside_the_plan(course, found.chosen)
    for (mean, _), (expected, spread) in zip(before, now, strict=True):
        assert expected == pytest.approx(mean, abs=1e-6)
        assert 0.045 <= spread < 0.25, "new blocks can overturn it"
    assert course.all_on() == found.chosen == {0, 1, 3}
    for on in ((), (), course.all_on(), course.all_on()):
        block(course, on)
    assert not course.doubtful(), "four blocks that agree are enough"
    assert course.chosen() == found.chosen


def test_what_was_learned_beside_others_counts_for_less(folder: Path) -> None:
    """The report says to tune again when nothing else runs: what was true only beside others must not prevail."""
    beside = tuned(candidates=CANDIDATES)
    remember(folder, key(), beside, build(disturbed=0.45))
    recalled, course = again(folder)
    assert recalled is not None
    assert "while others took 45 % of the CPU: it counts for less" in recalled.message
    assert not recalled.unchanged
    assert [one.known for one in course.candidates] == [None] * 4
    less = [spread for _, spread in beside_the_plan(course, beside.chosen)]
    remember(folder, key(), beside, build())
    _, course = again(folder)
    assert all(wide > spread for wide, (_, spread) in zip(less, beside_the_plan(course, beside.chosen), strict=True))


def test_known_as_a_sum_only_stays_known_as_a_sum(folder: Path) -> None:
    """Two techniques that were never on without each other: neither is known alone, both together are."""
    candidates = (Candidate("precision", "bf16-mixed", -0.1, 0.3), Candidate("allocator", "glibc", -0.1, 0.3))
    course = Course(candidates)
    for on in ((), (0, 1)) * 10:
        block(course, on, (-0.6, 0.1))
    found = SearchState(course, chosen=frozenset({0, 1}))
    remember(folder, key(), found, build())
    _, next_ = again(folder, candidates=candidates)
    assert next_.posterior.gain({0, 1})[0] == pytest.approx(-0.6, abs=0.02)
    assert next_.posterior.gain({0, 1})[1] < 0.12
    assert next_.posterior.estimate(0, ()).spread > 0.15
    assert [one.known for one in next_.candidates] == [None, None]


def test_a_process_is_told_what_is_known(folder: Path) -> None:
    """What is known goes to the process that is tuned by way of JSON."""
    remember(folder, key(), tuned(), build())
    recalled = recall(folder, key())
    assert recalled is not None
    options = OnlineOptions(applied(CANDIDATES, recalled), "", 0.0, 0.0, prior=recalled.prior)
    read = OnlineOptions.from_json(tuples(json.loads(json.dumps(dataclasses.asdict(options)))))
    one = Course(read.candidates, prior=read.prior)
    other = Course(options.candidates, prior=options.prior)
    assert one.all_on() == other.all_on()
    assert beside_the_plan(one, {0, 1}) == beside_the_plan(other, {0, 1})


def test_new_blocks_overturn_what_was_known(folder: Path) -> None:
    remember(folder, key(), tuned(), build())
    _, course = again(folder)
    now = (-0.5, -0.02, 0.3, 0.25)  # the allocator does harm today
    block(course, ())
    block(course, course.all_on(), now)
    assert 3 in course.doubtful()
    for _ in range(25):
        block(course, course.draw_set(), now)
    assert course.chosen() == {0, 1}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch": "2.12"}, "torch 2.12 -> 2.13: what was known is not used"),
        ({"hasten": "0.0"}, "hasten 0.0 -> "),
        ({"cpu": "Pentium", "cores": 1, "gpus": ()}, "another machine: Pentium, 1 cores -> "),
        ({"models": key_of(COMMAND, seen(parameters=2048)).models}, "the model changed: 2,048 -> 1,000 parameters: "),
        (
            {"models": key_of(COMMAND, seen(input_shapes=((4, 3),))).models},
            "the model changed: inputs 4x3 -> 8x3x32x32",
        ),
        ({"models": key_of(COMMAND, seen(layers={"Conv2d": 4})).models}, "the model changed: other layers in Net"),
        ({"models": ()}, "the model changed: 0 -> 1 models"),
    ],
)
def test_elsewhere_nothing_is_used_and_what_changed_is_said(
    folder: Path, changed: dict[str, object], said: str
) -> None:
    remember(folder, key(**changed), tuned(), build())
    recalled, course = again(folder, key(torch="2.13"))
    assert recalled is not None
    assert said in recalled.message
    assert recalled.message.endswith("what was known is not used")
    assert tuple(course.candidates) == CANDIDATES


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"code": "0" * 16}, "train.py changed: "), ({"arguments": ("--epochs", "3")}, "other arguments: --epochs 3 -> ")],
)
def test_with_another_script_body_it_counts_for_less(folder: Path, changed: dict[str, object], said: str) -> None:
    remember(folder, key(**changed), tuned(), build())
    recalled, course = again(folder)
    assert recalled is not None
    assert recalled.message.startswith(said)
    assert "counts for less" in recalled.message
    assert not any(one.known for one in course.candidates)
    means, spreads = zip(*beside_the_plan(course, {0, 1, 3}), strict=True)
    assert [mean < -0.3 for mean in means] == [True, False, False, False]
    assert all(spread >= 0.09 for spread in spreads)
    assert course.doubtful() == [0, 1, 2, 3]


def test_the_key_reads_the_script_and_its_arguments(folder: Path) -> None:
    before = key()
    (folder.parent / "train.py").write_text("import torch  # changed\n")
    assert key() != before
    assert key().effects_key == before.effects_key
    package = folder.parent / "pkg"
    package.mkdir()
    (package / "job.py").write_text("pass\n")
    module = key_of(("-m", "pkg.job", "--lr", "0.1"), seen())
    assert (module.script, module.code != "", module.arguments) == ("pkg.job", True, ("-m", "--lr", "0.1"))
    launched = key_of(("torchrun", "--nproc-per-node", "2", "train.py", "-x"), seen())
    assert (launched.script, launched.code) == ("train.py", key().code)


def test_no_path_of_the_machine_is_kept(folder: Path, tmp_path: Path) -> None:
    found = tuned()
    found.course.drop([2], f"crashed: no such file /srv/amaryllis/images/1.png, {tmp_path}/train.py:3", lasting=True)
    elsewhere = key_of(
        (str(tmp_path / "train.py"), "--data=/srv/amaryllis/images", "--out", "/home/amaryllis/runs/1"), seen()
    )
    assert remember(folder, elsewhere, found, build()) == ""
    (path,) = folder.iterdir()
    text = path.read_text()
    assert str(tmp_path) not in text
    assert "amaryllis" not in text
    assert "images" in text
    assert json.loads(text)["learned"][2]["off"].endswith("train.py:3")


def test_what_crashed_stays_off_until_the_script_changes(folder: Path) -> None:
    found = tuned()
    found.course.drop([2], "it crashed: out of threads", lasting=True)
    found.course.drop([3], "fresh processes did not confirm it: 0.98x")
    remember(folder, key(), found, build())
    _, course = again(folder)
    assert course.dropped == {2: "in an earlier tune: it crashed: out of threads"}
    remember(folder, key(), SearchState(course), build())
    assert again(folder)[1].dropped == course.dropped
    assert again(folder, key(code="0" * 16))[1].dropped == {}


def test_a_tune_that_asked_less_forgets_nothing(folder: Path) -> None:
    remember(folder, key(), tuned(), build())
    remember(folder, key(), tuned(CANDIDATES[:2]), build())
    recalled, course = again(folder)
    assert recalled is not None
    assert set(recalled.results) == {one.key for one in CANDIDATES}
    assert course.all_on() == {0, 1, 3}


def test_nothing_measured_leaves_no_file(folder: Path) -> None:
    assert remember(folder, key(), SearchState(Course(CANDIDATES)), build()) == ""
    assert not folder.exists()
    assert recall(folder, key()) is None


def _damaged(text: str) -> dict[str, bytes]:
    data = json.loads(text)
    one, prior = data["learned"][0], data["prior"]

    def other(**changes: object) -> bytes:
        return json.dumps({**data, **changes}).encode()

    size = len(prior["rows"])
    return {
        "half": text[: len(text) // 2].encode(),
        "empty": b"",
        "binary": bytes(range(256)) * 9,
        "deep": b"[" * 100_000,
        "list": b"[]",
        "other schema": other(schema="hasten-store/9"),
        "other types": other(learned=7),
        "no key": other(key={}),
        "not finite": text.replace(json.dumps(one["mean"]), "1e999").encode(),
        "null": other(learned=[{**one, "mean": None}]),
        "beyond sense": other(learned=[{**one, "mean": -50.0}]),
        "negative spread": other(learned=[{**one, "spread": -1.0}]),
        "rows missing": other(prior={**prior, "mean": prior["mean"][1:]}),
        "lines missing": other(prior={**prior, "covariance": [[]] * size}),
        "no covariance": other(prior={**prior, "covariance": [[1.0] * size for _ in range(size - 1)] + [[2.0] * size]}),
        "negative covariance": other(prior={**prior, "covariance": [[-1.0] * size] * size}),
        "merge conflict": f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> other\n".encode(),
        "huge": text.encode() + b" " * (1 << 20),
    }


_KINDS = sorted(_damaged('{"learned": [{"mean": 1.5}], "prior": {"rows": ["a", "b"], "mean": [0, 0]}, "schema": "x"}'))


@pytest.mark.parametrize("kind", _KINDS)
def test_a_damaged_file_is_said_in_a_line_and_ignored(folder: Path, kind: str) -> None:
    remember(folder, key(), tuned(), build())
    (path,) = folder.iterdir()
    path.write_bytes(_damaged(path.read_text())[kind])
    recalled, course = again(folder)
    assert recalled is not None
    assert recalled.message.startswith(f".hasten/{path.name} is ignored: ")
    assert "\n" not in recalled.message
    assert len(recalled.message) < 2500
    assert tuple(course.candidates) == CANDIDATES


def test_what_is_not_a_file_is_ignored_too(folder: Path) -> None:
    remember(folder, key(), tuned(), build())
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    recalled, _ = again(folder)
    assert recalled is not None
    assert "it is not a file" in recalled.message
    path.unlink()
    path.mkdir()
    assert "is ignored" in (again(folder)[0] or RecalledTraining("")).message
    path.rmdir()
    path.symlink_to("nowhere")
    assert "is ignored" in (again(folder)[0] or RecalledTraining("")).message
    path.with_name("train-000000000000.json").write_bytes(whole)
    recalled, course = again(folder)
    assert recalled is not None
    assert recalled.unchanged, "a damaged file does not hide a good one"
    assert "is ignored" in recalled.message
    assert course.all_on() == {0, 1, 3}


def test_words_of_a_file_cannot_drive_the_terminal(folder: Path) -> None:
    remember(folder, key(torch="\x1b[2J\n" * 100), tuned(), build(created="\x1b]0;x\x07"))
    said = (again(folder)[0] or RecalledTraining("")).message
    assert said.startswith("torch ")
    assert said.isprintable()
    assert len(said) < 200


def test_somebody_elses_file_is_left_alone_and_a_folder_that_cannot_be_made_is_said(folder: Path) -> None:
    folder.mkdir()
    theirs = folder / key().file
    theirs.write_text("my notes")
    said = remember(folder, key(), tuned(), build())
    assert said.startswith("what was learned is not kept for the next tune: ")
    assert theirs.read_text() == "my notes"
    in_the_way = folder.parent / "in the way"
    in_the_way.write_text("")
    assert remember(in_the_way, key(), tuned(), build()).startswith("what was learned is not kept")
    assert "ignored" in (recall(in_the_way, key()) or RecalledTraining("")).message
    assert in_the_way.read_text() == ""


def test_this_machine_is_in_the_key() -> None:
    machine = this_machine()
    now = key()
    assert (now.cpu, now.cores, now.gpus) == (machine.cpu, machine.cores, machine.gpus)
    assert [one.name for one in now.models] == ["Net"]
