"""The faults, what hasten does in each, and the tests that inject them. The table of docs/reliability.md is made of it.

python -m tests.faults.matrix
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
SECONDS = ROOT / "benchmarks" / "results" / "faults.json"
BEGIN, END = "<!-- faults: by python -m tests.faults.matrix -->", "<!-- end of faults -->"

_AGAIN = "time"
_NOTHING = "nothing"
_ROOT = "root, `ip`"
_SLURM = "root, SLURM, munge"
_FAILURES = "tests/trainer/resume/test_failures.py"
_HANGS = "tests/trainer/resume/test_hangs.py"
_SIGNALS = "tests/trainer/resume/test_signals.py"
_NETWORK = "tests/faults/test_network.py"
_SUBMIT = "tests/cli/test_submit.py"


@dataclass(frozen=True)
class Fault:
    """One way in which a training is disturbed.

    Attributes:
        name: As the table has it.
        does: What hasten does, and what a person sees.
        lost: What is lost.
        soon: When the training has ended or goes on; "{}" stands for the seconds measured.
        tests: `path::function` that inject it.
        needs: What these need that not every machine has; without it they are skipped, and say so.
    """

    name: str
    does: str
    lost: str
    soon: str
    tests: tuple[str, ...]
    needs: str = ""


FAULTS = (
    Fault(
        "kill -9 in a step",
        'nothing can be done in the process; `ckpt_path="last"` goes on from the newest checkpoint',
        _AGAIN,
        "at once",
        (
            "tests/faults/test_killed.py::test_in_a_step_and_in_validation",
            "tests/trainer/resume/test_killed.py::test_after_any_step",
            "tests/trainer/strategies/test_faults.py::test_it_ends_and_goes_on_to_the_same_weights",
        ),
    ),
    Fault(
        "kill -9 in save",
        "the half-written file never has a checkpoint's name; the one before is whole; the next run removes the rest",
        _AGAIN,
        "at once",
        (
            "tests/faults/test_killed.py::test_while_a_checkpoint_is_written",
            "tests/trainer/checkpoint/test_processes.py::test_a_writer_killed_at_any_moment_leaves_a_good_file",
        ),
    ),
    Fault(
        "kill -9 in validation",
        "as in a step; a validation that was cut is run again as a whole",
        _AGAIN,
        "at once",
        ("tests/faults/test_killed.py::test_in_a_step_and_in_validation",),
    ),
    Fault(
        "SIGTERM to one rank",
        "all ranks agree on a batch, save once, and exit with 143",
        _NOTHING,
        "at the end of an accumulation window",
        (f"{_SIGNALS}::test_ranks_stop_together", f"{_SIGNALS}::test_ranks_go_on_exactly"),
    ),
    Fault(
        "SIGTERM to all processes",
        "as above, once; workers that the signal reached too go on until the training has saved",
        _NOTHING,
        "at the end of an accumulation window: {}",
        (
            "tests/faults/test_signals.py::test_to_the_training_and_its_workers",
            "tests/faults/test_signals.py::test_to_all_ranks",
        ),
    ),
    Fault(
        "SIGUSR1",
        "saves and exits with 138, as after SIGTERM; where the script has a use of its own for it, that stays",
        _NOTHING,
        "at the end of an accumulation window: {}",
        (
            "tests/faults/test_signals.py::test_to_the_training_and_its_workers",
            "tests/faults/test_signals.py::test_what_a_script_means_by_sigusr1_is_left_alone",
        ),
    ),
    Fault(
        "Ctrl-C twice",
        "the first saves at the end of the batch (130); the second ends at once, with all that was started",
        "time, after the second",
        "at once",
        (f"{_SIGNALS}::test_a_second_ctrl_c_ends_at_once", f"{_HANGS}::test_it_ends_and_leaves_nothing"),
    ),
    Fault(
        "disk full in save",
        "ends with an error that names the file, what it needs and what is free; files that were there stay whole",
        _AGAIN,
        "at the next save",
        (
            "tests/faults/test_disk.py::test_a_training_goes_on_when_there_is_room_again",
            f"{_FAILURES}::test_a_full_disk_is_named_and_the_old_checkpoint_stays",
        ),
        "mount namespaces",
    ),
    Fault(
        "a flipped bit in a checkpoint",
        "the file is named, and the newest whole one beside it taken; `validate` and `test` refuse it",
        _AGAIN,
        "while it is read",
        (
            f"{_FAILURES}::test_a_damaged_checkpoint_is_named_and_the_one_before_taken",
            "tests/trainer/checkpoint/test_damage.py::test_every_flipped_bit_is_found",
        ),
    ),
    Fault(
        "a truncated checkpoint",
        "the same",
        _AGAIN,
        "while it is read",
        (
            f"{_FAILURES}::test_a_damaged_checkpoint_is_named_and_the_one_before_taken",
            "tests/trainer/checkpoint/test_damage.py::test_every_truncation_and_every_addition_is_found",
        ),
    ),
    Fault(
        "a checkpoint of another model",
        "refused before the first step, with the file and the parameters that do not fit",
        _NOTHING,
        "while it is read",
        ("tests/faults/test_other_code.py::test_a_checkpoint_of_another_model_is_named",),
    ),
    Fault(
        "NaN loss",
        "no checkpoint of lost weights is written, earlier ones stay; `NaNWatch` stops, raises, or skips the step",
        'time; with `NaNWatch("skip")` nothing',
        "in the same step on a CPU, within `every_n_steps` on a GPU",
        (
            f"{_FAILURES}::test_nan_never_replaces_a_good_checkpoint",
            "tests/trainer/callbacks/test_nan_watch.py::test_skip_is_as_if_the_batch_had_not_been",
        ),
    ),
    Fault(
        "infinite gradient",
        'the same; `NaNWatch("skip")` and `NaNWatch(watch_gradients=True)` see it before the weights do',
        'time; with `NaNWatch("skip")` nothing',
        "in the same step",
        (
            "tests/faults/test_numbers.py::test_an_infinite_gradient_never_replaces_a_good_checkpoint",
            "tests/faults/test_numbers.py::test_a_step_that_is_skipped_stays_skipped_when_the_training_goes_on",
        ),
    ),
    Fault(
        "worker killed",
        "ends with an error; `hasten.data.DataLoader` names worker, sample and batch",
        _AGAIN,
        "when its batch is waited for",
        (
            f"{_FAILURES}::test_a_worker_that_fails",
            "tests/data/test_loader_faults.py::test_a_worker_that_is_killed_is_named_with_its_sample",
        ),
    ),
    Fault(
        "worker hung",
        "`hasten.data.DataLoader` says which sample, with the worker's stack, and ends after `timeout`; torch's waits. "
        "Ctrl-C and SIGTERM end such a training, with its workers",
        _AGAIN,
        "after the loader's `timeout`; after a signal, 20 s without a move",
        (
            "tests/data/test_loader_faults.py::test_a_worker_that_hangs_is_named_with_its_stack_and_ends_by_the_timeout",
            f"{_HANGS}::test_it_ends_and_leaves_nothing",
        ),
    ),
    Fault(
        "corrupt sample",
        'ends with the sample\'s own error and its index; `on_error="skip"` or `"substitute"` goes on, and counts',
        _AGAIN,
        "when its batch is waited for",
        (
            f"{_FAILURES}::test_a_worker_that_fails",
            "tests/data/test_loader_faults.py::test_corrupt_samples_are_left_out_and_counted",
        ),
    ),
    Fault(
        "out of memory in a step",
        'ends with the error and the batch; `microbatch="auto"` computes the batch in parts, and goes on',
        "time; with `microbatch` nothing",
        "in the same step",
        (
            "tests/faults/test_memory.py::test_the_allocator_refuses_a_step",
            "tests/trainer/microbatch/test_auto.py::test_the_real_allocator_runs_out",
        ),
    ),
    Fault(
        "out of memory, killed by the kernel",
        "as kill -9; where it hits one rank of several, the last line names it and says where to look (`dmesg`)",
        _AGAIN,
        "at once",
        ("tests/faults/test_memory.py::test_the_kernel_kills_the_training",),
        "a memory cgroup that may be written",
    ),
    Fault(
        "a rank that hangs",
        "the others wait for `timeout` of the strategy (torch's default: 30 minutes over gloo, 10 over NCCL), then all "
        "end, and the one that does not answer is named; a signal ends them before",
        _AGAIN,
        "after `timeout`",
        (
            "tests/parallel/test_launch.py::test_rank_that_ends_is_named_and_all_end",
            "tests/trainer/strategies/test_ddp.py::test_a_rank_that_hangs_is_waited_for_no_longer_than_the_timeout",
            f"{_HANGS}::test_ranks_of_which_one_hangs",
        ),
    ),
    Fault(
        "a rank that raises",
        "all end; the last line names the rank, with its error; torchrun's `--max-restarts` starts them again, and "
        '`ckpt_path="last"` goes on',
        _AGAIN,
        "at once",
        (
            "tests/parallel/test_elastic.py::test_killed_ranks_start_again",
            "tests/parallel/test_launch.py::test_rank_that_ends_is_named_and_all_end",
            "tests/cli/test_devices.py::test_a_rank_that_fails_is_named_and_all_end",
        ),
    ),
    Fault(
        "a rank whose code differs",
        "refused before the first step where its model, optimizer or flags differ, with the first lines that do; under "
        "`hasten run --devices`, where weights, batches or what ranks do differ",
        _NOTHING,
        "before the first step",
        (
            "tests/faults/test_other_code.py::test_a_rank_whose_code_differs_is_named",
            "tests/cli/test_devices.py::test_a_rank_that_fails_is_named_and_all_end",
        ),
    ),
    Fault(
        "network cut and healed",
        "waits, and goes on with the same step",
        _NOTHING,
        "{} after 3 s without a network",
        (f"{_NETWORK}::test_cut_and_healed",),
        _ROOT,
    ),
    Fault(
        "network cut for good",
        "each rank waits for `timeout` of the strategy, then ends and says that it has lost another",
        _AGAIN,
        "{} with `timeout=5`",
        (f"{_NETWORK}::test_cut_for_good",),
        _ROOT,
    ),
    Fault(
        "master gone",
        "the others end when its connections close, and say that they have lost a rank",
        _AGAIN,
        "{}",
        (
            f"{_NETWORK}::test_the_master_is_gone",
            "tests/parallel/test_launch.py::test_other_ranks_die_with_the_main_process",
        ),
        _ROOT,
    ),
    Fault(
        "node gone",
        "the others wait for `timeout`, then end; under SLURM, the job is queued again and goes on; under torchrun's "
        "`--nnodes 1:2` the rest goes on",
        _AGAIN,
        "{} with `timeout=5`",
        (
            f"{_NETWORK}::test_a_machine_is_gone",
            f"{_SUBMIT}::test_a_machine_that_dies",
            "tests/parallel/test_elastic.py::test_a_lost_machine_lets_the_rest_go_on",
        ),
        f"{_ROOT}; {_SLURM}",
    ),
    Fault(
        "port taken",
        "the rank that cannot open it says so, with what to set; `devices=N` on one machine takes a free one",
        _NOTHING,
        "at the start: {}, of which most is importing torch",
        (
            "tests/faults/test_port.py::test_a_port_that_is_taken_is_said",
            "tests/cli/test_devices.py::test_machines_that_do_not_meet_are_told_so",
        ),
    ),
    Fault(
        "pre-empted",
        "saves within the GraceTime, is queued again, and goes on",
        _NOTHING,
        "{} until it is queued again",
        (f"{_SUBMIT}::test_a_training_that_is_stopped_saves_is_queued_again_and_ends_the_same",),
        _SLURM,
    ),
    Fault(
        "time limit",
        "saves `--save-seconds` before it, is queued again, and goes on",
        _NOTHING,
        "{} until it is queued again",
        (
            f"{_SUBMIT}::test_the_real_time_limit",
            f"{_SUBMIT}::test_a_training_that_is_stopped_saves_is_queued_again_and_ends_the_same",
        ),
        _SLURM,
    ),
    Fault(
        "clock set back",
        "what goes by time (checkpoints, validation) goes on; the newest checkpoint is told by its steps, not its date",
        _NOTHING,
        "not noticed",
        (
            "tests/faults/test_clock.py::test_set_back_while_it_trains",
            "tests/trainer/resume/test_last.py::test_an_old_file_whose_date_lies_ahead",
        ),
        "a C compiler",
    ),
)


def table(seconds: dict[str, list[float]]) -> str:
    """Return the table, in Markdown.

    Args:
        seconds: Name of a fault -> what was measured of it.
    """
    lines = ["| fault | what hasten does | what is lost | how soon | shown by |", "|---|---|---|---|---|"]
    for fault in FAULTS:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in fault.tests)
        needs = f"<br>needs: {fault.needs}" if fault.needs else ""
        lines.append(f"| {fault.name} | {fault.does} | {fault.lost} | {_soon(fault, seconds)} | {tests}{needs} |")
    return "\n".join(lines)


def _soon(fault: Fault, seconds: dict[str, list[float]]) -> str:
    measured = seconds.get(fault.name)
    if "{}" not in fault.soon:
        return fault.soon
    return fault.soon.format(f"{statistics.median(measured):.1f} s") if measured else "not measured"


def page(text: str) -> str:
    """Return the page with a new table in the place of its old one."""
    seconds = json.loads(SECONDS.read_text())["seconds"] if SECONDS.exists() else {}
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    restart = seconds.get("a restart", [])
    took = f"{statistics.median(restart):.0f} s" if restart else "(not measured)"
    again = f"Starting again took {took}: two Pythons import torch, meet, read the checkpoint and do a step."
    return f"{before}{BEGIN}\n{table(seconds)}\n\n{again}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(PAGE)
