"""Findings on the wait for batches, on evidence made up."""

from __future__ import annotations

import dataclasses

import pytest

from hasten.doctor.findings.data_bound import DataBound
from hasten.doctor.findings.decoded_in_turn import DecodedInTurn
from hasten.doctor.findings.epoch_start_stall import EpochStartStall
from hasten.doctor.findings.python_getitem import PythonGetitem
from hasten.doctor.findings.sample_by_sample import SampleBySample
from hasten.doctor.findings.samples_recomputed import SamplesRecomputed
from hasten.doctor.findings.slow_decode import SlowDecode
from hasten.doctor.findings.too_many_workers import TooManyWorkers
from hasten.doctor.findings.workers_recreated import WorkersRecreated
from hasten.doctor.findings.workers_zero import WorkersZero
from hasten.evidence import Evidence, HowKnown, Pass, Probe, ProcessEnvironment, Severity, Stages
from tests.doctor.findings.made import evidence, only, use

SLOW = {"data": 0.020, "forward": 0.003, "backward": 0.006, "optimizer": 0.001, "other": 0.0}  # waits 20 of 30 ms
NO_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}


def epochs(
    *, opening: float, waiting: float, length: int = 50, step: float = 0.010, count: int = 4, **changes: object
) -> Evidence:
    """Passes of `length` steps that begin with `opening` seconds in iter() and `waiting` for the first batch."""
    made = evidence(steps=length * count, epochs=count, first_batch=opening + waiting, **changes)  # type: ignore[arg-type]
    passes = [dataclasses.replace(one, opened=one.start + opening) for one in made.passes]
    return dataclasses.replace(made, passes=tuple(passes))


# -- data_bound -------------------------------------------------------------------------------------------


def test_a_wait_for_data_is_said_with_its_share_and_place() -> None:
    """Two thirds of the step are waited for: that is the worth, and it was measured."""
    finding = only(DataBound.findings(evidence(phases=SLOW, loader=NO_WORKERS)), "data_bound")
    assert finding.worth == pytest.approx(2 / 3)
    assert (finding.severity, finding.how_known) == (Severity.HIGH, HowKnown.MEASURED)
    assert (finding.file, finding.line) == ("/home/me/train.py", 7)
    assert "67 %" in finding.what
    assert any("num_workers=0" in cause for cause in finding.details)


def test_a_healthy_step_is_not_data_bound() -> None:
    """One per cent of waiting is no finding."""
    assert not [*DataBound.findings(evidence())]
    assert not [*DataBound.findings(evidence(loaders=()))]


def test_it_says_how_many_workers_would_do() -> None:
    """Two workers make a batch each 30 ms; to make one each 10 ms takes six."""
    finding = only(DataBound.findings(evidence(phases=SLOW, machine={"cores": 16}, use=use(cpu=3.0))), "data_bound")
    assert finding.fix == "raise num_workers from 2 to 6"


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"cpu": 3.9, "workers": 2.0}, "more workers will not help"),
        ({"cpu": 2.2, "workers": 1.9}, "busy all the time"),
        ({"cpu": 0.4, "workers": 0.1}, "wait for a disk or a network"),
    ],
)
def test_it_says_why_batches_come_late(seen: dict[str, float], said: str) -> None:
    """By what the CPU did meanwhile."""
    finding = only(DataBound.findings(evidence(phases=SLOW, use=use(**seen))), "data_bound")
    assert any(said in cause for cause in finding.details)
    assert ("cheaper" in finding.fix) == (seen["cpu"] > 3)


def test_that_workers_will_not_help_is_not_said_where_there_are_none_yet() -> None:
    """`workers_zero` may propose one for the same loader: on cores that others fill, it gets a share of them."""
    finding = only(DataBound.findings(evidence(phases=SLOW, loader=NO_WORKERS, use=use(cpu=3.9))), "data_bound")
    assert not any("will not help" in cause for cause in finding.details)
    assert any("help more than workers" in cause for cause in finding.details)


def test_it_names_the_dearest_stage() -> None:
    """Where the loader was looked into."""
    stages = (Stages(0, 4, read=0.002, decode=0.015, transform=0.003),)
    finding = only(DataBound.findings(evidence(phases=SLOW, stages=stages)), "data_bound")
    assert any("20 ms" in cause and "75 % of it decode" in cause for cause in finding.details)


# -- workers_zero -----------------------------------------------------------------------------------------


def test_workers_are_proposed_with_what_they_would_bring() -> None:
    """20 of 30 ms are waited for; four cores bring the step down to its own 10 ms and a batch's passing."""
    made = evidence(phases=SLOW, loader=NO_WORKERS, use=use(cpu=1.0))
    finding = WorkersZero.run(made)
    assert finding is not None
    assert (finding.name, finding.technique) == ("workers_zero", "loader_workers")
    assert finding.worth == pytest.approx((0.030 - 0.0105) / 0.030, rel=0.03)
    assert finding.fix == "give the loader num_workers=2, persistent_workers=True"
    assert finding.setting == "{num_workers = 2, prefetch_factor = 2}"
    assert finding.how_known is HowKnown.ESTIMATED


def test_a_saturated_machine_gains_less_from_workers() -> None:
    """All of four cores are busy already: nothing can be saved."""
    assert WorkersZero.run(evidence(phases=SLOW, loader=NO_WORKERS, use=use(cpu=4.0))) is None


@pytest.mark.parametrize(
    ("cpu", "cores", "least", "most"),
    [
        (2.0, (1.0, 1.0), 0.0, 0.0),  # the training fills both cores
        (1.9, (0.96, 0.97), 0.0, 0.06),
        (1.5, (0.8, 0.7), 0.2, 0.25),  # half a core is idle
        (1.0, (1.0, 1.0), 0.25, 0.33),  # others fill what it leaves, and would have to share it
        (1.0, (0.5, 0.5), 0.45, 0.5),  # a core is idle
    ],
)
def test_workers_promise_no_more_than_the_idle_cpu(
    cpu: float, cores: tuple[float, ...], least: float, most: float
) -> None:
    """On two cores: work that is there already has to be shared by what they have left."""
    phases = {**SLOW, "data": 0.0170, "backward": 0.009}  # waits 17 of 30 ms
    made = evidence(phases=phases, loader=NO_WORKERS, machine={"cores": 2}, use=use(cpu=cpu, cores=cores))
    finding = WorkersZero.run(made)
    worth = finding.worth if finding is not None else 0.0
    assert worth is not None
    assert least <= worth <= most
    fix = only(DataBound.findings(made), "data_bound").fix
    assert ("samples cheaper" in fix) == (sum(cores) > 1.9)


@pytest.mark.parametrize(
    ("one_thread", "backward", "least", "most"),
    [
        (1.0, 0.001, 0.35, 0.48),  # one core makes the samples, and the threads of the other only wait
        (1.9, 0.001, 0.0, 0.06),  # both make them
        (0.0, 0.001, 0.0, 0.06),  # nobody knows
        (1.0, 0.020, 0.08, 0.15),  # the training has work for both most of the time
    ],
)
def test_threads_that_wait_take_the_cores_of_workers(
    one_thread: float, backward: float, least: float, most: float
) -> None:
    """Both cores are busy; how a sample is made on one thread says with what."""
    phases = {**SLOW, "data": 0.0270 - backward, "forward": 0.001, "backward": backward}
    loader = {**NO_WORKERS, "probe": Probe(True, 0.001, one_thread=one_thread)}
    seen = use(cpu=1.9, cores=(0.96, 0.97))
    made = evidence(phases=phases, loader=loader, machine={"cores": 2}, use=seen, flags={"threads": 2})
    finding = WorkersZero.run(made)
    worth = finding.worth if finding is not None else 0.0
    assert worth is not None
    assert least <= worth <= most
    assert (least > 0) == (finding is not None and "OMP_WAIT_POLICY=PASSIVE" in finding.fix)
    bound = only(DataBound.findings(made), "data_bound")
    assert (least > 0) == ("worker processes" in bound.fix)
    assert (least > 0) == any("the others only wait for work" in cause for cause in bound.details)


@pytest.mark.parametrize(
    "loader",
    [
        {**NO_WORKERS, "dataset": "TensorDataset"},
        {**NO_WORKERS, "probe": Probe(in_memory=True)},
        {**NO_WORKERS, "probe": Probe(fork_unsafe="holds an open sqlite3.Connection (.db)")},
        {**NO_WORKERS, "batch_bytes": 4 << 30},  # not even two batches fit into /dev/shm
        {"num_workers": 1},
        {**NO_WORKERS, "role": "validation"},
    ],
)
def test_no_workers_are_proposed_where_they_would_not_help(loader: dict[str, object]) -> None:
    """In memory, unsafe, too big, there already, or not trained on."""
    assert WorkersZero.run(evidence(phases=SLOW, loader=loader)) is None


def test_cheap_batches_stay_without_workers() -> None:
    """0.4 ms of a 1 ms step are waited for, but to pass a batch between processes costs as much."""
    cheap = {"data": 0.0004, "forward": 0.0002, "backward": 0.0004, "optimizer": 0.0, "other": 0.0}
    assert WorkersZero.run(evidence(phases=cheap, loader=NO_WORKERS)) is None
    assert WorkersZero.run(evidence(loader=NO_WORKERS)) is None


def test_an_iterable_dataset_gets_one_worker() -> None:
    """Each further one would read the whole stream again."""
    finding = WorkersZero.run(evidence(phases=SLOW, loader={**NO_WORKERS, "iterable": True}, use=use(cpu=1.0)))
    assert finding is not None
    assert "num_workers=1" in finding.fix
    assert finding.worth == pytest.approx((0.030 - 0.0205) / 0.030, rel=0.03)


# -- too_many_workers, workers_recreated, epoch_start_stall -----------------------------------------------


def test_more_workers_than_cores_that_start_anew_are_too_many() -> None:
    """16 workers on 4 cores take 400 ms to start, in each epoch of 0.9 s; a quarter of them would do."""
    made = epochs(opening=0.4, waiting=0.02, loader={"num_workers": 16, "persistent_workers": False})
    finding = only(TooManyWorkers.findings(made), "too_many_workers")
    assert finding.fix == "give the loader num_workers=3"
    assert finding.worth == pytest.approx(0.4 / 0.91 * 0.75, rel=0.05)


def test_many_workers_that_keep_every_core_busy_are_a_note() -> None:
    """Fewer would make as many batches: nothing is known to be saved."""
    made = evidence(phases=SLOW, loader={"num_workers": 8}, use=use(cpu=3.9, workers=3.0))
    finding = only(TooManyWorkers.findings(made), "too_many_workers")
    assert (finding.worth, finding.severity) == (None, Severity.NOTE)
    assert "wait for each other" in finding.what
    made = evidence(phases=SLOW, loader={"num_workers": 8}, use=use(cpu=3.9, workers=0.1))
    finding = only(TooManyWorkers.findings(made), "too_many_workers")
    assert "each other" not in finding.what  # the cores are full of something else


def test_enough_workers_are_not_too_many() -> None:
    """As many as cores; or more of them, that cost nothing that was measured."""
    assert not [*TooManyWorkers.findings(epochs(opening=0.4, waiting=0.02, loader={"num_workers": 4}))]
    assert not [*TooManyWorkers.findings(epochs(opening=0.0, waiting=0.001, loader={"num_workers": 8}))]
    assert not [*TooManyWorkers.findings(evidence(loader={"num_workers": 8}, use=use(cpu=3.9)))]


def test_workers_started_anew_each_epoch_cost_their_start() -> None:
    """100 ms of each 0.61 s are spent in iter()."""
    made = epochs(opening=0.1, waiting=0.02, loader={"persistent_workers": False})
    finding = only(WorkersRecreated.findings(made), "workers_recreated")
    assert finding.worth == pytest.approx(0.1 / 0.61, rel=0.03)
    assert finding.how_known is HowKnown.MEASURED
    assert finding.technique == finding.setting == ""  # the script's own argument cures it, no technique


def test_spawned_workers_come_up_after_iter() -> None:
    """What a batch takes to make is left out of what they cost; the rest is their start."""
    loader = {"persistent_workers": False, "start_method": "spawn"}
    made = epochs(opening=0.01, waiting=2.0, loader=loader, stages=(Stages(0, 4, other=0.5),))
    finding = only(WorkersRecreated.findings(made), "workers_recreated")
    assert finding.worth == pytest.approx(1.51 / 2.5, rel=0.03)
    assert finding.how_known is HowKnown.ESTIMATED


@pytest.mark.parametrize(
    "made",
    [
        epochs(opening=0.1, waiting=0.02),  # they stay
        epochs(opening=0.1, waiting=0.02, count=1, loader={"persistent_workers": False}),  # one epoch
        epochs(opening=0.1, waiting=0.0, length=5000, count=2, loader={"persistent_workers": False}),  # long ones
        epochs(opening=0.0, waiting=0.02, loader=NO_WORKERS),
    ],
)
def test_workers_that_stay_or_that_start_rarely_are_well(made: Evidence) -> None:
    """Persistent, a single epoch, epochs of 50 s, none."""
    assert not [*WorkersRecreated.findings(made)]


def test_the_first_batch_of_an_epoch_is_made_by_one_worker_alone() -> None:
    """Eight workers make a batch in 80 ms, one each 10 ms; each epoch of 50 begins with 80 ms of waiting."""
    made = epochs(opening=0.0, waiting=0.08, loader={"num_workers": 8}, phases={"data": 0.001})
    finding = only(EpochStartStall.findings(made), "epoch_start_stall")
    assert finding.worth == pytest.approx(0.079 / 0.6, rel=0.05)
    assert "of 8 workers" in finding.what


@pytest.mark.parametrize(
    "made",
    [
        epochs(opening=0.0, waiting=0.012, loader={"num_workers": 8}),  # hardly longer than a step
        epochs(opening=0.3, waiting=0.1, loader={"num_workers": 8, "persistent_workers": False}),  # their start
        epochs(opening=0.0, waiting=0.08, loader={"num_workers": 1}),
        epochs(opening=0.0, waiting=0.08, count=1, loader={"num_workers": 8}),
    ],
)
def test_a_quick_start_is_no_stall(made: Evidence) -> None:
    """A wait of a step, the start of workers, a single worker, a single epoch."""
    assert not [*EpochStartStall.findings(made)]


# -- what a batch is made of ------------------------------------------------------------------------------


def test_decoding_with_pil_is_named_where_it_is_waited_for() -> None:
    """Decoding is 15 of 20 ms; half of it would go."""
    stages = (Stages(0, 4, read=0.002, decode=0.015, transform=0.003, decoder="PIL", hottest="/home/me/data.py:12"),)
    made = evidence(phases=SLOW, stages=stages, loader=NO_WORKERS)
    finding = only(SlowDecode.findings(made), "slow_decode")
    assert finding.worth == pytest.approx(0.375 * 2 / 3)
    assert (finding.file, finding.line) == ("/home/me/data.py", 12)
    assert "draft" in finding.fix
    plain = dataclasses.replace(made, surroundings=ProcessEnvironment(jpeg="libjpeg"))
    assert "libjpeg-turbo" in only(SlowDecode.findings(plain), "slow_decode").fix


@pytest.mark.parametrize(
    ("stages", "phases"),
    [
        (Stages(0, 4, read=0.015, decode=0.002, decoder="PIL"), SLOW),  # it is the reading
        (Stages(0, 4, decode=0.015, decoder="simplejpeg"), SLOW),
        (Stages(0, 4, decode=0.015, decoder="PIL"), {}),  # nobody waits for it
        (Stages(1, 4, decode=0.015, decoder="PIL"), SLOW),  # another loader
        (Stages(0, 0, decode=0.015, decoder="PIL"), SLOW),  # not looked into
    ],
)
def test_decoding_that_is_quick_or_not_waited_for_is_well(stages: Stages, phases: dict[str, float]) -> None:
    """Nothing to be gained."""
    assert not [*SlowDecode.findings(evidence(phases=phases, stages=(stages,)))]


def test_samples_made_by_python_code_are_named() -> None:
    """80 % of a batch is the dataset's Python; workers are the bottleneck, so the step is shorter by the wait."""
    stages = (Stages(0, 4, other=0.040, python=0.8, hottest="/home/me/data.py:31"),)
    finding = only(PythonGetitem.findings(evidence(phases=SLOW, stages=stages)), "python_getitem")
    assert finding.worth == pytest.approx(2 / 3 - 0.0005 / 0.030)
    assert (finding.file, finding.line) == ("/home/me/data.py", 31)


def test_python_that_is_little_or_not_waited_for_is_well() -> None:
    """A tenth of a batch; or all of it, in a healthy step."""
    assert not [*PythonGetitem.findings(evidence(phases=SLOW, stages=(Stages(0, 4, decode=0.04, python=0.1),)))]
    assert not [*PythonGetitem.findings(evidence(stages=(Stages(0, 4, other=0.04, python=0.9),)))]


def test_tensors_fetched_one_by_one_are_named() -> None:
    """0.4 of 1 ms go to fetching; gathering would cost 0.08 ms and the bytes."""
    cheap = {"data": 0.0004, "forward": 0.0002, "backward": 0.0004, "optimizer": 0.0, "other": 0.0}
    loader = {**NO_WORKERS, "dataset": "TensorDataset", "batch_bytes": 100_000}
    finding = SampleBySample.run(evidence(phases=cheap, loader=loader))
    assert finding is not None
    assert (finding.name, finding.technique, finding.setting) == ("sample_by_sample", "batched_fetch", "true")
    assert finding.worth == pytest.approx((0.0004 - 80e-6 - 100_000 / 2e9) / 0.001)
    assert SampleBySample.run(evidence(phases=cheap, loader=NO_WORKERS)) is None  # not in memory
    assert SampleBySample.run(evidence(phases=cheap, loader={**loader, "default_collate": False})) is None
    assert SampleBySample.run(evidence(loader=loader)) is None  # 0.1 of 10 ms


def test_files_that_are_decoded_between_steps_are_named_where_a_function_reads_them() -> None:
    """0.9 of 1 ms of a sample, shared by the cores."""
    asked = Probe(sample_seconds=1e-3, loader_function="pil", loader_repeatable=True, loader_seconds=9e-4)
    made = evidence(phases=SLOW, loader={**NO_WORKERS, "probe": asked})
    finding = DecodedInTurn.run(made)
    assert finding is not None
    assert (finding.technique, finding.setting) == ("read_ahead", str(min(8, made.machine.cores)))
    assert finding.worth == pytest.approx(2 / 3 * (0.9 * (1 - 1 / made.machine.cores) - 0.06))
    drawing = dataclasses.replace(asked, loader_repeatable=False)
    assert DecodedInTurn.run(evidence(phases=SLOW, loader={**NO_WORKERS, "probe": drawing})) is None
    assert DecodedInTurn.run(evidence(phases=SLOW, loader={"num_workers": 2, "probe": asked})) is None


def test_samples_made_anew_are_named_where_a_probe_saw_them_repeat() -> None:
    """1 ms each, the same every time; not where they differ, or nobody asked."""
    asked = Probe(repeatable=True, sample_seconds=1e-3, sample_bytes=4096)
    finding = SamplesRecomputed.run(evidence(phases=SLOW, loader={**NO_WORKERS, "probe": asked}))
    assert finding is not None
    assert (finding.name, finding.setting) == ("samples_recomputed", '"samples"')
    assert finding.worth == pytest.approx(0.98 * 2 / 3)
    tiny = dataclasses.replace(asked, sample_bytes=16)
    few = SamplesRecomputed.run(evidence(phases=SLOW, loader={**NO_WORKERS, "probe": tiny}))
    assert few is not None
    assert "(less than 1 MiB in all)" in few.fix
    other = dataclasses.replace(asked, repeatable=False)
    assert SamplesRecomputed.run(evidence(phases=SLOW, loader={**NO_WORKERS, "probe": other})) is None
    assert SamplesRecomputed.run(evidence(phases=SLOW, loader=NO_WORKERS)) is None
    assert SamplesRecomputed.run(evidence(loader={"probe": asked})) is None
    little = {"data": 0.0005}  # 5 %, with workers that are no bottleneck
    assert SamplesRecomputed.run(evidence(phases=little, loader={"probe": asked})) is None


def test_a_pass_that_is_used_by_nobody_begins_no_epoch() -> None:
    """Passes without a batch, as `next(iter(loader))` that failed leaves them, are not counted."""
    made = epochs(opening=0.1, waiting=0.02, count=1, loader={"persistent_workers": False})
    empty = Pass(0, 0.1, 0.1, 0.2, 0, False, 0.2)
    assert not [*WorkersRecreated.findings(dataclasses.replace(made, passes=(empty, *made.passes)))]
