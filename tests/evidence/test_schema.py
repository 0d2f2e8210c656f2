"""Evidence is plain JSON that reads back as it was."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import HastenError
from hasten.evidence import (
    Evidence,
    Flags,
    LoaderFacts,
    Machine,
    ModelFacts,
    OptimizerFacts,
    Pass,
    Phase,
    Probe,
    Validation,
    read_evidence,
    this_machine,
)
from hasten.evidence.machine import memory_free, memory_limit

finite = st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(0, 1e6)
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
counts = st.integers(0, 2**40)
flags_of = st.builds(Flags, threads=counts, compiler=names, anomaly=st.booleans())
machines = st.builds(
    Machine,
    cpu=names,
    cores=counts,
    memory_bytes=counts,
    shm_bytes=counts,
    device=st.sampled_from(["cpu", "cuda"]),
    gpus=st.lists(names, max_size=2).map(tuple),
    platform=names,
    python=names,
)
probes = st.builds(Probe, repeatable=st.none() | st.booleans(), sample_seconds=times, failed=names)
evidences = st.builds(
    Evidence,
    command=st.lists(names, max_size=3).map(tuple),
    machine=machines,
    flags=flags_of,
    loaders=st.just(())
    | st.tuples(
        st.builds(
            LoaderFacts,
            dataset=names,
            where=names,
            iterable=st.booleans(),
            batches=st.none() | counts,
            samples=st.none() | counts,
            batch_size=st.none() | counts,
            num_workers=counts,
            prefetch_factor=st.none() | counts,
            persistent_workers=st.booleans(),
            pin_memory=st.booleans(),
            start_method=names,
            default_collate=st.booleans(),
            own_worker_init=st.booleans(),
            role=st.sampled_from(["train", "validation", "unused"]),
            probe=st.none() | probes,
        )
    ),
    models=st.tuples(
        st.builds(
            ModelFacts,
            name=names,
            parameters=counts,
            trained_parameters=counts,
            layers=st.dictionaries(names, counts, max_size=2),
            dtype=names,
            device=names,
            compiled=st.booleans(),
            autocast=names,
            train_calls=counts,
            eval_calls=counts,
            eval_calls_with_graph=counts,
            backward_through_eval=st.booleans(),
            input_shapes=st.lists(st.lists(counts, max_size=3).map(tuple), max_size=2).map(tuple),
        )
    ),
    optimizers=st.tuples(
        st.builds(
            OptimizerFacts, names, names, counts, st.booleans(), st.none() | st.booleans(), st.booleans(), names, counts
        )
    ),
    step_start=st.lists(times, max_size=3).map(tuple),
    step_phases=st.lists(st.lists(times, min_size=9, max_size=9).map(tuple), max_size=3).map(tuple),
    losses=st.lists(st.none() | st.floats(), max_size=4).map(tuple),
    validations=st.lists(st.builds(Validation, counts, st.floats(), counts, times), max_size=3).map(tuple),
    passes=st.lists(st.builds(Pass, counts, times, times, times, counts, st.booleans()), max_size=2).map(tuple),
    step_of=st.sampled_from(["batch", "optimizer"]),
    ended=st.sampled_from(["finished", "complete", "failed"]),
    ended_at=times,
    error=names,
    skipped=st.lists(names, max_size=2).map(tuple),
    installed=st.dictionaries(names, names, max_size=2),
    peak_gpu_bytes=st.none() | counts,
)


def _with_one_entry_a_step(evidence: Evidence) -> Evidence:
    lists = ("step_start", "step_phases", "losses")
    many = min(len(getattr(evidence, name)) for name in lists)
    return dataclasses.replace(evidence, **{name: getattr(evidence, name)[:many] for name in lists})


def _as_read(evidence: Evidence) -> Evidence:
    """What JSON makes of losses that are not finite."""
    return dataclasses.replace(
        evidence,
        losses=tuple(loss if loss is not None and math.isfinite(loss) else None for loss in evidence.losses),
        validations=tuple(
            one if math.isfinite(one.loss) else dataclasses.replace(one, loss=math.inf) for one in evidence.validations
        ),
    )


@given(evidence=evidences.map(_with_one_entry_a_step))
def test_evidence_reads_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, evidence: Evidence) -> None:
    path = tmp_path_factory.mktemp("evidence") / "e.json"
    evidence.write(path)
    text = path.read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    read = read_evidence(path)
    # NaN is not equal to itself, so infinity stands for every loss that is not finite.
    assert _as_read(read) == _as_read(evidence)
    assert [one.name for one in path.parent.iterdir()] == ["e.json"]


def evidence_of(**changes: object) -> Evidence:
    whole = Evidence(
        command=("train.py",),
        machine=Machine("c", 2, 1, 1, "cpu", (), "p", "3"),
        flags=Flags(),
        loaders=(),
        models=(),
        optimizers=(),
        step_start=(),
        step_phases=(),
        losses=(),
        validations=(),
        passes=(),
        step_of="batch",
        ended="finished",
        ended_at=1.0,
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def test_a_validation_that_diverged_is_not_one_that_is_missing(tmp_path: Path) -> None:
    evidence_of(validations=(Validation(3, math.nan, 2, 1.0), Validation(5, 0.5, 2, 2.0))).write(tmp_path / "e.json")
    diverged, fine = read_evidence(tmp_path / "e.json").validations
    assert math.isnan(diverged.loss)
    assert fine.loss == 0.5


def test_options_that_are_not_finite_are_read_as_such(tmp_path: Path) -> None:
    options = {"lr": 0.1, "max_norm": math.inf, "nesterov": False, "name": "all"}
    optimizer = OptimizerFacts("SGD", "", 1, False, None, True, "", 3, options=options, rates=(0.1, math.nan))
    evidence_of(optimizers=(optimizer,)).write(tmp_path / "e.json")
    (read,) = read_evidence(tmp_path / "e.json").optimizers
    assert math.isnan(read.options.pop("max_norm"))
    assert read.options == {"lr": 0.1, "nesterov": False, "name": "all"}
    assert read.rates[0] == 0.1
    assert math.isnan(read.rates[1])


def test_shares_are_of_the_later_half_without_validation() -> None:
    early = (100.0,) + (0.0,) * 8
    late = (1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 50.0, 50.0, 0.0)
    evidence = evidence_of(step_phases=(early, late))
    assert evidence.share(Phase.DATA) == 0.25
    assert evidence.step_seconds == [100.0, 104.0]
    assert evidence_of().share(Phase.DATA) == 0.0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not evidence"),
        (b"{", "not evidence"),
        (b"\xff\xfe\x00", "not evidence"),
        (b"[]", "not evidence"),
        (b"{}", "not evidence"),
        (b'{"schema": "hasten-evidence/2"}', "not evidence of the schema hasten-evidence/1"),
        (b'{"schema": "hasten-evidence/1"}', "not evidence"),
        (b'{"schema": "hasten-evidence/1", "validations": [3]}', "not evidence"),
        (b'{"schema": "hasten-evidence/1", "validations": 3}', "not evidence"),
    ],
)
def test_broken_evidence_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "e.json"
    path.write_bytes(content)
    with pytest.raises(HastenError, match=words) as error:
        read_evidence(path)
    assert str(path) in str(error.value)


def test_evidence_of_a_later_schema_is_refused_even_where_it_would_fit(tmp_path: Path) -> None:
    evidence_of(schema="hasten-evidence/2").write(tmp_path / "e.json")
    with pytest.raises(HastenError, match="schema"):
        read_evidence(tmp_path / "e.json")


def test_missing_evidence_and_folders_are_said(tmp_path: Path) -> None:
    with pytest.raises(HastenError, match="no evidence at"):
        read_evidence(tmp_path / "e.json")
    with pytest.raises(HastenError, match="cannot read the evidence"):
        read_evidence(tmp_path)


def test_evidence_is_read_without_torch(tmp_path: Path) -> None:
    evidence_of().write(tmp_path / "e.json")
    code = (
        "import sys; from pathlib import Path; from hasten.evidence import read_evidence;"
        "print(read_evidence(Path(sys.argv[1])).ended, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "e.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert (done.stdout, done.returncode) == ("finished False\n", 0), done.stderr


def test_this_machine_is_described() -> None:
    machine = this_machine()
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert (machine.device == "cuda") == bool(machine.gpus)
    assert machine.cpu
    assert 0 < memory_free() <= memory_limit()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step_phases": ((0.0,) * 9,) * 3}, "step_phases has 3 entries, step_start 2"),
        ({"losses": (None,)}, "losses has 1 entries, step_start 2"),
        ({"numbers": (0, 5, 9)}, "numbers has 3 entries"),
        ({"step_phases": ((0.0,) * 9, (0.0,) * 8)}, "an entry of step_phases has 8 phases, not 9"),
        ({"aside": (1.0,)}, "an entry of aside has 1 phases"),
        ({"every": 0}, "every is 0"),
    ],
)
def test_evidence_whose_parts_do_not_fit_is_refused(tmp_path, changes, why):
    steps = {"step_start": (0.0, 1.0), "step_phases": ((0.0,) * 9,) * 2, "losses": (None, None)}
    evidence_of(**{**steps, **changes}).write(tmp_path / "e.json")
    with pytest.raises(HastenError, match=why):
        read_evidence(tmp_path / "e.json")


@pytest.mark.parametrize("text", ["[" * 10**5, '{"schema": ' + "9" * 9999 + "}", '{"schema": 1e400}', '{"a":' * 10**5])
def test_strange_json_is_one_message(tmp_path, text):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(HastenError, match="is not evidence"):
        read_evidence(tmp_path / "e.json")
