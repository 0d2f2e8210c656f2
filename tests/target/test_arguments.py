"""A script's own arguments: which set what, and command lines with other values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import HastenError
from hasten.target.arguments import Arguments, Role, arguments_of, role_of, varied, with_arguments
from hasten.target.candidates import at_length, combinations, lengths_of, proposed
from hasten.target.full_run import Candidate

ROLES = {
    Role.RATE: ["--lr", "--learning-rate", "--learning_rate", "--base-lr", "--max_lr", "optim.lr", "lr", "+optim.lr"],
    Role.BATCH: ["--batch-size", "--batch_size", "--per_device_train_batch_size", "-b", "--bs", "data.batch_size"],
    Role.EPOCHS: ["--epochs", "--num_train_epochs", "--max-epochs", "trainer.max_epochs", "-e"],
    Role.STEPS: ["--max_iters", "--max_steps", "--num-iterations", "--steps", "train.max_steps"],
    Role.FOLLOWS: ["--warmup_steps", "--warmup_iters", "--lr_decay_iters", "--num_warmup_steps"],
    Role.PARTS: ["--warmup-epochs", "--lr-step-size", "--decay-epochs", "--step_size"],
    Role.LOOKS: ["--eval_interval", "--eval_steps", "--val-interval"],
    None: [
        "--eval_batch_size", "--per_device_eval_batch_size", "--eval_iters", "--gradient_accumulation_steps",
        "--lr_decay", "--start-epoch", "--n_layer", "--beta2", "--dropout", "--min_lr", "--seed", "--log-interval",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "role"), [(name, role) for role, names in ROLES.items() for name in names])
def test_a_name_says_what_an_argument_sets(name: str, role: Role | None) -> None:
    assert role_of(name) is role


def test_what_stands_on_the_line_goes_before_what_a_parser_told() -> None:
    told = [(["-b", "--batch-size"], "8"), (["--lr"], "0.1"), (["--epochs"], "10"), (["--max_steps"], "-1")]
    found = arguments_of(["train.py", "-b", "64", "--lr=0.2"], told)
    assert {role: (one.name, one.value, one.on_command_line) for role, one in found.by_role.items()} == {
        Role.BATCH: ("-b", "64", True),
        Role.RATE: ("--lr", "0.2", True),
        Role.EPOCHS: ("--epochs", "10", False),
    }  # HF's `--max_steps -1` is no length


def test_the_length_that_is_given_goes_before_one_that_is_a_default() -> None:
    found = arguments_of(["train.py", "--max_iters", "2000"], [(["--epochs"], "10")])
    assert found.length is not None
    assert found.length.name == "--max_iters"


@pytest.mark.parametrize(
    ("command", "changes", "changed"),
    [
        ("train.py --lr 1", {"--lr": "2"}, "train.py --lr 2"),
        ("train.py --lr=1", {"--lr": "2"}, "train.py --lr=2"),
        ("train.py --lr 1 --lr 3", {"--lr": "2"}, "train.py --lr 1 --lr 2"),
        ("train.py optim.lr=1", {"optim.lr": "2"}, "train.py optim.lr=2"),
        ("train.py", {"--lr": "2"}, "train.py --lr 2"),
        ("train.py", {"optim.lr": "2"}, "train.py optim.lr=2"),
        ("train.py --lr-min 1", {"--lr": "2"}, "train.py --lr-min 1 --lr 2"),
    ],
)
def test_command_lines_with_other_values(command: str, changes: dict[str, str], changed: str) -> None:
    assert with_arguments(command.split(), changes) == changed.split()


ADAM = arguments_of(["train.py", "--lr", "1e-3", "--batch-size", "8", "--epochs", "10"])


def test_the_batch_is_proposed_with_the_rate_that_goes_with_it() -> None:
    adam = [dict(one.arguments) for one in proposed(ADAM, adaptive=True)]
    assert {"--lr": "0.002", "--batch-size": "32"} in adam
    assert {"--lr": "0.004", "--batch-size": "128"} in adam
    assert {"--lr": "0.003"} in adam
    sgd = [dict(one.arguments) for one in proposed(ADAM, adaptive=False)]
    assert {"--lr": "0.016", "--batch-size": "128"} in sgd


def test_one_of_rate_and_batch_alone_and_neither() -> None:
    rate = proposed(arguments_of(["t.py", "--lr", "0.1"]), adaptive=True)
    assert [one.arguments["--lr"] for one in rate] == ["0.3", "1", "0.03"]
    batch = proposed(arguments_of(["t.py", "--batch-size", "16"]), adaptive=True)
    assert [one.arguments["--batch-size"] for one in batch] == ["32", "64", "256"]
    assert proposed(arguments_of(["t.py", "--epochs", "3"]), adaptive=True) == []


def test_techniques_stand_in_for_arguments_that_are_not_there() -> None:
    none = arguments_of(["t.py", "--epochs", "3"])
    plans = [(dict(one.arguments), dict(one.plan)) for one in proposed(none, True, optimizes=True, loads=True)]
    assert ({}, {"batch_scale": 4}) in plans  # which brings the rate that goes with it
    assert ({}, {"batch_scale": 4, "lr_scale": 3.0}) in plans
    assert ({}, {"lr_scale": 3.0}) in plans
    rate = arguments_of(["t.py", "--lr", "0.1"])
    assert ({"--lr": "0.3"}, {"batch_scale": 4}) in [
        (one.arguments, one.plan) for one in proposed(rate, True, True, True)
    ]
    batch = arguments_of(["t.py", "--batch-size", "8"])
    assert ({"--batch-size": "32"}, {"lr_scale": 2.0}) in [
        (one.arguments, one.plan) for one in proposed(batch, True, optimizes=True)
    ]
    steps = arguments_of(["t.py", "--max_iters", "100"])
    assert at_length(Candidate({}, {"batch_scale": 4}), steps, 1.0).arguments == {"--max_iters": "25"}


def test_a_rate_that_falls_to_zero_does_so_at_the_end_of_each_length() -> None:
    found = proposed(ADAM, adaptive=True, optimizes=True, loads=True, steps=1000)
    assert [one for one in found if "schedule" in one.plan] == found[-2:]
    alone, larger = found[-2:]
    assert (alone.arguments, alone.plan) == ({"--lr": "0.003"}, {"schedule": {"kind": "linear", "steps": 1000}})
    assert (larger.arguments["--batch-size"], larger.plan["schedule"]) == ("32", {"kind": "linear", "steps": 250})
    quarter = at_length(larger, ADAM, 0.25)  # 3 epochs of 10
    assert (quarter.arguments["--epochs"], quarter.plan["schedule"]) == ("3", {"kind": "linear", "steps": 75})
    steps = arguments_of(["t.py", "--max_iters", "1000", "--lr", "1e-3", "--batch_size", "8"])
    larger = proposed(steps, adaptive=True, optimizes=True, steps=1000)[-1]
    half = at_length(larger, steps, 0.5)
    assert half.arguments["--max_iters"] == "125"
    assert half.plan["schedule"] == {"kind": "linear", "steps": 125}


def test_a_shorter_training_has_a_whole_schedule() -> None:
    arguments = arguments_of(
        [
            "t.py",
            "--max_iters",
            "2000",
            "--warmup_iters",
            "100",
            "--lr_decay_iters",
            "2000",
            "--eval_interval",
            "250",
            "--lr",
            "1e-3",
            "--batch_size",
            "8",
        ]
    )
    assert lengths_of(arguments, {}) == [0.25, 0.5, 1.0]
    quarter = at_length(Candidate({"--lr": "2e-3"}), arguments, 0.25)
    assert quarter.arguments == {
        "--lr": "2e-3", "--max_iters": "500", "--warmup_iters": "25", "--lr_decay_iters": "500",
    }  # fmt: skip
    larger = at_length(Candidate({"--batch_size": "32"}), arguments, 1.0)  # as many samples, and between two looks
    assert larger.arguments == {
        "--batch_size": "32", "--max_iters": "500", "--warmup_iters": "25", "--lr_decay_iters": "500",
        "--eval_interval": "63",
    }  # fmt: skip


def test_epochs_stay_as_many_with_a_larger_batch_and_warm_up_steps_do_not() -> None:
    arguments = arguments_of(
        ["t.py", "--epochs", "8", "--warmup-epochs", "2", "--warmup_steps", "100", "--batch-size", "8"]
    )
    found = at_length(Candidate({"--batch-size": "32"}), arguments, 0.5)
    assert found.arguments == {
        "--batch-size": "32", "--epochs": "4", "--warmup_steps": "13", "--warmup-epochs": "1",
    }  # fmt: skip


@given(st.integers(1, 500), st.floats(0.01, 1.0))
def test_a_share_of_the_length_is_never_nothing_nor_more_than_all(epochs: int, share: float) -> None:
    arguments = arguments_of(["t.py", "--epochs", str(epochs)])
    shorter = int(at_length(Candidate(), arguments, share).arguments.get("--epochs", epochs))
    assert 1 <= shorter <= epochs
    lengths = lengths_of(arguments, {})
    assert lengths == sorted(lengths)
    assert lengths[-1] == 1.0


def test_what_a_person_varies() -> None:
    wanted = varied(["--lr=1e-3,3e-3", "--batch-size=8,64"], ADAM)
    assert wanted == {"--lr": ["1e-3", "3e-3"], "--batch-size": ["8", "64"]}
    assert len(combinations(wanted, ADAM)) == 3  # one of four is the script as it is
    assert lengths_of(ADAM, {"--epochs": ["2", "3"]}) == [1.0]
    told = arguments_of(["t.py"], [(["--width"], "64"), (["--lr"], "0.1")])
    assert varied(["--width=1,2"], told) == {"--width": ["1", "2"]}


@pytest.mark.parametrize(
    ("texts", "arguments", "words"),
    [
        (["--lr"], ADAM, "not NAME=VALUE,VALUE"),
        (["--lr="], ADAM, "not NAME=VALUE,VALUE"),
        (["=1"], ADAM, "not NAME=VALUE,VALUE"),
        (["--lr=1", "--lr=2"], ADAM, "names --lr twice"),
        (["--rl=1,2"], arguments_of(["t.py"], [(["--lr"], "0.1")]), "no such argument"),
    ],
)
def test_what_cannot_be_varied_is_refused(texts: list[str], arguments: Arguments, words: str) -> None:
    with pytest.raises(HastenError, match=words):
        varied(texts, arguments)


def test_too_many_combinations_are_refused() -> None:
    values = [str(number) for number in range(1, 10)]
    with pytest.raises(HastenError, match="81 combinations"):
        combinations({"--lr": values, "--wd": values}, ADAM)
