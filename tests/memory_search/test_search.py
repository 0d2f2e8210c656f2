"""The search for a plan that fits, on trainings made of a law: what a machine would take minutes to show."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import HastenError, Plan
from hasten.batch.attempt import Attempt
from hasten.memory_search.limit import Limit, limit_of
from hasten.memory_search.savings import savings_for
from hasten.memory_search.search import SearchResult, find_plan, settings_of
from hasten.memory_search.words import as_json, lines, plan_of
from hasten.plan import Setting
from hasten.techniques import check
from hasten.techniques.compute.compile import compiler
from hasten.techniques.memory.blocks import words_of
from hasten.techniques.recompute.costs import BlockCost
from tests.techniques.conftest import CPU, GPU, OLD_CPU, evidence_of

MB = 10**6
NAMES = [saving.name for saving in savings_for(CPU) if not saving.instead_of]
BLOCKS = 12
NOTED = {"activation_checkpointing": f"{BLOCKS} x block", "optimizer_in_backward": "optimizer", "precision": "model"}


@dataclass
class Law:
    """A training whose memory and time follow a law.

    Attributes:
        saves: Bytes that each technique takes away, of `base`.
        times: What each multiplies a step by.
        fails: What a technique's error says, where it cannot act.
        idle: Techniques that find nothing to act on.
    """

    limit: int
    base: int = 1000 * MB
    saves: Mapping[str, int] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    fails: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    asked: list[dict[str, Setting]] = field(default_factory=list)
    interrupts: int = 1000

    def share(self, name: str, setting: Setting) -> float:
        if isinstance(setting, dict):
            return 1.1 - float(setting["activation_budget"])
        return again(setting) / BLOCKS if name == "activation_checkpointing" else 1.0

    def run(self, *, plan: Mapping[str, Setting]) -> Attempt:
        check(Plan(dict(plan)))  # nothing is tried that cannot be together
        self.asked.append(dict(plan))
        if len(self.asked) > self.interrupts:
            raise KeyboardInterrupt
        if failing := [self.fails[name] for name in plan if name in self.fails]:
            return Attempt(0, "failed", reason=failing[0])
        acts = {name: self.share(name, setting) for name, setting in plan.items() if name not in self.idle}
        peak = self.base - sum(int(share * self.saves.get(name, 0)) for name, share in acts.items())
        seconds = 0.01
        for name, share in acts.items():
            seconds *= 1 + share * (self.times.get(name, 1.0) - 1)
        noted = {name: NOTED.get(name, "process") for name in acts}
        blocks: tuple[BlockCost, ...] = ()
        if "activation_checkpointing" in noted:
            count = again(plan["activation_checkpointing"])
            noted["activation_checkpointing"] = f"{count} x block"
            held = self.saves.get("activation_checkpointing", 0) // BLOCKS
            blocks = tuple(BlockCost(f"blocks.{place}", "Block", 1e-3, held, place) for place in range(count))
        evidence = dataclasses.replace(evidence_of(), installed=noted)
        if peak > self.limit:
            return Attempt(0, "out of memory", reason="ended at the limit")
        return Attempt(0, "ok", peak, 0, seconds, evidence=evidence, blocks=blocks)


def again(setting: Setting) -> int:
    """How many blocks are computed again."""
    if isinstance(setting, str):
        return len(words_of(setting))
    return setting if type(setting) is int else BLOCKS


def climbed_on_gpu(room: int, **law: Any) -> tuple[SearchResult, Law]:
    training = Law(room, **law)
    limit = Limit(round(room / 0.95), "so much")
    return find_plan(training, limit, savings_for(GPU), lambda line: None), training


def test_activations_go_to_the_host_where_computing_them_again_is_not_enough() -> None:
    saves = {"activation_checkpointing": 600 * MB, "activation_offload": 800 * MB, "precision": 50 * MB}
    found, law = climbed_on_gpu(600 * MB, saves=saves)
    assert list(found.chosen.plan) == ["activation_checkpointing"]
    assert not any("activation_offload" in plan for plan in law.asked)
    found, law = climbed_on_gpu(300 * MB, saves=saves)
    assert found.chosen.plan == {"activation_offload": True}
    assert found.excluded["activation_checkpointing"].startswith("it is not enough: activation_offload")
    assert not any({"activation_offload", "activation_checkpointing"} <= plan.keys() for plan in law.asked)
    check(Plan(found.chosen.plan))
    with pytest.raises(HastenError, match="not even under"):
        climbed_on_gpu(100 * MB, saves=saves)


TABLE = {"optimizer_in_backward": 200 * MB, "host_embeddings": 800 * MB}


def test_great_tables_go_to_the_host_where_nothing_else_is_enough() -> None:
    found, law = climbed_on_gpu(300 * MB, saves=TABLE)
    assert found.chosen.plan == {"host_embeddings": True}
    assert found.excluded["optimizer_in_backward"].startswith("it is not enough: host_embeddings")
    assert sum("host_embeddings" in plan for plan in law.asked) < len(law.asked) / 2
    found, law = climbed_on_gpu(850 * MB, saves=TABLE)
    assert found.chosen.plan == {"optimizer_in_backward": True}
    assert not any("host_embeddings" in plan for plan in law.asked)


def test_activations_on_the_host_come_back_beside_tables_that_compiled_code_cannot_look_up() -> None:
    found, _ = climbed_on_gpu(200 * MB, saves={**TABLE, "host_embeddings": 500 * MB, "activation_offload": 400 * MB})
    assert found.chosen.plan == {"activation_offload": True, "host_embeddings": True}
    assert "activation_offload" not in found.excluded


def test_what_fails_does_not_come_back_and_leaves_its_place_to_tables_on_the_host() -> None:
    said = "HastenError: hasten: optimizer_in_backward: the script clips gradients"
    found, law = climbed_on_gpu(300 * MB, saves=TABLE, fails={"optimizer_in_backward": said})
    assert found.chosen.plan == {"host_embeddings": True}
    assert found.excluded["optimizer_in_backward"] == "the script clips gradients"
    assert sum("optimizer_in_backward" in plan for plan in law.asked) == 1


def test_a_model_without_great_tables_loses_nothing_by_them() -> None:
    saves = {"optimizer_in_backward": 300 * MB, "activation_offload": 400 * MB}
    found, _ = climbed_on_gpu(350 * MB, saves=saves, idle=("host_embeddings",))
    assert found.chosen.plan == {"optimizer_in_backward": True, "activation_offload": True}
    with pytest.raises(HastenError, match="not even under"):
        climbed_on_gpu(200 * MB, saves=saves, idle=("host_embeddings",))


def test_blocks_that_cannot_be_computed_again_leave_their_place_to_the_host() -> None:
    said = "HastenError: hasten: activation_checkpointing: no block can be run again"
    saves = {"activation_offload": 800 * MB}
    found, _ = climbed_on_gpu(300 * MB, saves=saves, fails={"activation_checkpointing": said})
    assert found.chosen.plan == {"activation_offload": True}


@pytest.mark.skipif(not compiler(), reason="no C++ compiler, without which nothing is compiled")
def test_a_compiled_model_with_a_budget_comes_last_and_keeps_as_much_as_fits() -> None:
    saves = {"activation_checkpointing": 300 * MB, "compile": 600 * MB}
    found, law = climbed(750 * MB, saves=saves)
    assert list(found.chosen.plan) == ["activation_checkpointing"]
    assert not any("compile" in plan for plan in law.asked)
    found, law = climbed(650 * MB, saves=saves)
    assert found.chosen.plan == {"compile": {"mode": "default", "activation_budget": 0.5}}
    check(Plan(found.chosen.plan))
    assert not any({"compile", "activation_checkpointing"} <= plan.keys() for plan in law.asked)
    found, law = climbed(450 * MB, saves=saves)
    assert found.chosen.plan == {"compile": {"mode": "default", "activation_budget": 0.1}}
    spare = [saving.instead_of for saving in savings_for(GPU) if saving.instead_of]
    assert spare == ["activation_checkpointing", "activation_offload", "optimizer_in_backward"]


def test_a_cpu_has_no_host_to_move_activations_to() -> None:
    assert "activation_offload" not in [saving.name for saving in savings_for(CPU)]
    assert [saving.name for saving in savings_for(GPU, {"activation_offload"})] == ["activation_offload"]


def climbed(room: int, until: float = float("inf"), **law: Any) -> tuple[SearchResult, Law]:
    training = Law(room, **law)
    return find_plan(
        training, Limit(round(room / 0.95), "so much"), savings_for(CPU), lambda line: None, until
    ), training


def test_what_fits_as_it_is_gets_no_plan() -> None:
    found, law = climbed(1000 * MB)
    assert found.chosen.plan == {}
    assert law.asked == [{}]
    assert "fits into so much as it is" in lines(found, ("train.py",), "hasten.toml")[0]


def test_the_first_rung_that_is_enough_is_the_plan() -> None:
    found, _ = climbed(900 * MB, saves={"optimizer_in_backward": 150 * MB, "activation_checkpointing": 600 * MB})
    assert found.chosen.plan == {"optimizer_in_backward": True}


def test_savings_are_added_until_it_fits_and_what_is_not_needed_goes() -> None:
    saves = {"optimizer_in_backward": 100 * MB, "allocator": 10 * MB, "activation_checkpointing": 600 * MB}
    times = {"optimizer_in_backward": 1.01, "allocator": 1.2, "activation_checkpointing": 1.33}
    found, _ = climbed(300 * MB, saves=saves, times=times, idle=("no_grad_validation", "chunked_loss", "precision"))
    assert found.chosen.plan == {"optimizer_in_backward": True, "activation_checkpointing": True}
    assert found.excluded["precision"] == "it found nothing to act on"
    assert found.without("optimizer_in_backward") is not None


def test_as_few_blocks_are_computed_again_as_fit() -> None:
    saves, times = {"activation_checkpointing": 600 * MB}, {"activation_checkpointing": 1.33}
    for room in range(400, 1000, 50):
        found, _ = climbed(room * MB, saves=saves, times=times)
        needed = -(-(1000 - room) * BLOCKS // 600)
        assert found.chosen.plan == {"activation_checkpointing": needed if needed < BLOCKS else True}
        assert found.chosen.peak <= room * MB


def test_bf16_that_makes_steps_shorter_stays() -> None:
    saves = {"precision": 200 * MB, "activation_checkpointing": 600 * MB}
    times = {"precision": 0.5, "activation_checkpointing": 1.33}
    found, _ = climbed(600 * MB, saves=saves, times=times)
    assert found.chosen.plan["precision"] == "bf16-mixed"


def test_a_way_that_mostly_is_dearer_is_taken_where_it_is_not() -> None:
    saves = {"precision": 400 * MB, "activation_checkpointing": 500 * MB}
    found, _ = climbed(650 * MB, saves=saves, times={"precision": 3.0, "activation_checkpointing": 1.1})
    assert list(found.chosen.plan) == ["activation_checkpointing"]


def test_a_technique_that_fails_is_left_out_with_its_reason() -> None:
    why = "the script looks at a gradient (linalg_vector_norm)"
    said = f"HastenError: hasten: optimizer_in_backward: {why}"
    found, law = climbed(500 * MB, saves={"activation_checkpointing": 600 * MB}, fails={"optimizer_in_backward": said})
    assert found.excluded["optimizer_in_backward"] == why
    assert not any("optimizer_in_backward" in plan for plan in law.asked[2:])
    assert any(why in line for line in lines(found, ("train.py",), "hasten.toml"))


def test_bf16_that_takes_more_than_it_saves_is_left_out() -> None:
    found, _ = climbed(500 * MB, saves={"precision": -300 * MB, "activation_checkpointing": 600 * MB})
    assert "precision" not in found.chosen.plan


def test_a_limit_below_the_model_is_one_clear_message() -> None:
    with pytest.raises(HastenError, match="does not fit into so much, not even under") as raised:
        climbed(100 * MB, saves={"activation_checkpointing": 600 * MB})
    assert "batch smaller" in raised.value.fix


def test_a_script_that_fails_by_itself_is_said() -> None:
    class Fails(Law):
        def run(self, *, plan: Mapping[str, Setting]) -> Attempt:
            return Attempt(0, "failed", reason="ZeroDivisionError: train.py:3")

    with pytest.raises(HastenError, match=r"fails without any plan.*ZeroDivisionError"):
        find_plan(Fails(MB), limit_of(MB, on_gpu=False), savings_for(CPU), lambda line: None)


def test_a_peak_that_only_the_process_saw_counts() -> None:
    class Late(Law):
        def run(self, *, plan: Mapping[str, Setting]) -> Attempt:
            attempt = super().run(plan=plan)
            return dataclasses.replace(attempt, before=910 * MB) if "precision" not in plan else attempt

    law = Late(900 * MB, saves={"precision": 200 * MB, "optimizer_in_backward": 200 * MB})
    found = find_plan(law, Limit(round(900 * MB / 0.95), "so much"), savings_for(CPU), lambda line: None)
    assert "precision" in found.chosen.plan


def test_a_script_that_clips_and_does_not_fit_is_told_both() -> None:
    why = "the script looks at a gradient (linalg_vector_norm)"
    with pytest.raises(HastenError) as raised:
        climbed(300 * MB, fails={"optimizer_in_backward": f"HastenError: hasten: optimizer_in_backward: {why}"})
    first, second, *rest = raised.value.message.splitlines()
    assert "optimizer_in_backward" not in first
    assert all("activation_checkpointing was left out: it is not enough" in line for line in rest)
    assert second == f"optimizer_in_backward was left out: {why}"


@pytest.mark.parametrize("trials", range(2, 8))
def test_ctrl_c_keeps_the_best_so_far(trials: int) -> None:
    saves = {"optimizer_in_backward": 100 * MB, "activation_checkpointing": 600 * MB}
    found, _ = climbed(550 * MB, saves=saves, times={"activation_checkpointing": 1.33}, interrupts=trials)
    assert found.interrupted
    assert found.chosen.fits
    assert found.unexamined == ["whether a cheaper plan fits: stopped by Ctrl-C"]


def test_a_budget_that_is_over_leaves_a_plan_that_fits_and_says_so() -> None:
    found, law = climbed(550 * MB, until=0.0, saves={"activation_checkpointing": 600 * MB}, idle=("precision",))
    assert len(law.asked) == 2
    assert found.chosen.fits
    assert "precision" not in found.chosen.plan
    assert "--budget" in found.unexamined[0]
    law = Law(550 * MB, saves={"activation_checkpointing": 600 * MB})
    savings, limit = (
        savings_for(CPU, {"allocator", "activation_checkpointing"}),
        Limit(round(550 * MB / 0.95), "so much"),
    )
    ended = find_plan(law, limit, savings, lambda line: None, 0.0)
    assert ended.chosen.plan == {"allocator": "lean", "activation_checkpointing": True}


def test_a_script_that_is_known_to_run_out_of_memory_is_not_run_as_it_is_again() -> None:
    law = Law(900 * MB, saves={"optimizer_in_backward": 150 * MB})
    limit = Limit(round(900 * MB / 0.95), "so much")
    found = find_plan(law, limit, savings_for(CPU), lambda line: None, ran_out="as tune's first trial showed")
    assert {} not in law.asked
    assert found.chosen.plan == {"optimizer_in_backward": True}
    assert "as tune's first trial showed" in lines(found, ("train.py",), "hasten.toml")[0]


def test_what_a_busy_machine_says_of_times_keeps_nothing_that_is_not_needed() -> None:
    saves = {"optimizer_in_backward": 20 * MB, "allocator": 200 * MB}
    found, _ = climbed(850 * MB, saves=saves, times={"optimizer_in_backward": 0.5})
    assert found.chosen.plan == {"allocator": "lean"}


def test_bf16_comes_last_where_the_hardware_has_none_and_the_heap_not_on_a_gpu() -> None:
    assert [saving.name for saving in savings_for(OLD_CPU) if not saving.instead_of][-1] == "precision"
    assert NAMES[-1] == "activation_checkpointing"
    assert "allocator" not in [saving.name for saving in savings_for(GPU)]
    assert [saving.name for saving in savings_for(CPU, {"precision"})] == ["precision"]


def test_the_plan_and_the_figures_say_what_each_technique_brought(tmp_path: Path) -> None:
    saves = {"optimizer_in_backward": 200 * MB, "activation_checkpointing": 600 * MB}
    found, _ = climbed(450 * MB, saves=saves, times={"activation_checkpointing": 1.33}, idle=("precision",))
    plan = plan_of(found, ("train.py", "--big"), CPU, "2.13.0")
    check(plan)
    plan.write(tmp_path / "p.toml")
    text = (tmp_path / "p.toml").read_text()
    assert "exact; without it: out of memory" in text
    assert Plan.read(tmp_path / "p.toml").techniques == found.chosen.plan
    data = json.loads(json.dumps(as_json(found, ("train.py", "--big"))))
    assert data["plan"] == found.chosen.plan
    assert len(data["tries"]) == len(found.tries)
    page = "\n".join(lines(found, ("train.py", "--big"), "p.toml"))
    assert "hasten run --plan p.toml train.py --big" in page
    assert "Not checked here" in page


@given(
    saves=st.fixed_dictionaries({name: st.integers(0, 160) for name in NAMES}),
    times=st.fixed_dictionaries({name: st.floats(0.7, 2.0) for name in NAMES}),
    idle=st.sets(st.sampled_from(NAMES), max_size=2),
    room=st.integers(1, 1100),
)
def test_a_plan_is_offered_if_one_fits_and_only_one_that_ran_within_the_limit(
    saves: dict[str, int], times: dict[str, float], idle: set[str], room: int
) -> None:
    law = Law(room * MB, saves={name: size * MB for name, size in saves.items()}, times=times, idle=tuple(idle))
    limit = Limit(round(room * MB / 0.95), "so much")
    least = 1000 - sum(size for name, size in saves.items() if name not in idle)
    try:
        found = find_plan(law, limit, savings_for(CPU), lambda line: None)
    except HastenError:
        assert least * MB > limit.room
        return
    assert found.chosen.fits
    assert found.chosen.peak <= limit.room
    assert found.chosen.peak == law.run(plan=found.chosen.plan).peak
    assert len(law.asked) <= 3 * len(NAMES) + 10
    tried = [settings_of(plan) for plan in law.asked[:-1]]
    assert all(a != b for a, b in itertools.combinations(tried, 2))  # nothing is asked twice
