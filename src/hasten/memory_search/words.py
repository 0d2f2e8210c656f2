"""Describe the result of a search for a plan that fits: as lines for a terminal, as JSON, and as a plan."""

from __future__ import annotations

import datetime
import shlex
from typing import Any

import hasten
from hasten.batch.trouble import rise_in_words
from hasten.batch.words import gigabytes
from hasten.evidence import Machine
from hasten.memory_search.search import PlanTrial, SearchResult, came_to, in_words
from hasten.plan import DEFAULT_NAME, Plan
from hasten.techniques import CATALOGUE, Effect
from hasten.tuner.report_paths import shorten

SCHEMA = "hasten-memory/1"


def lines(result: SearchResult, command: tuple[str, ...], out: str) -> list[str]:
    """Return the result as lines for a terminal.

    Args:
        result: The search's result.
        command: The training's command line.
        out: Path of the plan file, as the user gave it.
    """
    if not result.chosen.plan:
        return [
            f"the training fits into {result.limit.words} as it is: {came_to(result.plain)}",
            *_rising(result),
            "No plan was written. To make it faster: hasten tune, without --memory.",
        ]
    chosen, attempt = result.chosen, result.chosen.attempt
    page = [
        f"as it is, the training does not fit into {result.limit.words}: {result.plain.attempt.reason}",
        f"it fits under: {in_words(chosen.plan)}",
        f"peak {gigabytes(chosen.peak)}{_predicted(chosen)}, a step takes {attempt.seconds * 1e3:.1f} ms",
        *_rising(result),
        "",
        f"{'':<28}{'effect':<12}without it",
    ]
    for name, setting in chosen.plan.items():
        page.append(f"  {name:<26}{CATALOGUE[name].effect_of(setting):<12}{_without(result, name)}")
    page += ["", "what was tried:", f"{'peak':>12}{'ms a step':>12}   plan"]
    page += [_row(tried) for tried in result.tries]
    page += [f"left out: {name}: {why}" for name, why in result.excluded.items()]
    page += [f"not looked at: {sentence}" for sentence in result.unexamined]
    plan = [] if out == DEFAULT_NAME else ["--plan", out]
    page += ["", *_unchecked(result), f"Run it: {shlex.join(['hasten', 'run', *plan, *command])}"]
    return page


def as_json(result: SearchResult, command: tuple[str, ...]) -> dict[str, Any]:
    """Return the result as plain data for a file."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "memory_limit_bytes": result.limit.size,
        "trial_limit_bytes": result.limit.room,
        "fits_as_it_is": result.plain.fits,
        "plan": dict(result.chosen.plan),
        "peak_bytes": result.chosen.peak,
        "predicted_peak_bytes": result.chosen.predicted or None,
        "step_seconds": result.chosen.attempt.seconds,
        "rises_bytes_a_step": round(result.chosen.attempt.grows),
        "checked": False,
        "tries": [
            {
                "plan": dict(tried.plan),
                "outcome": tried.attempt.outcome,
                "reason": tried.attempt.reason,
                "peak_bytes": tried.peak if tried.fits else None,
                "predicted_peak_bytes": tried.predicted or None,
                "step_seconds": tried.attempt.seconds if tried.fits else None,
            }
            for tried in result.tries
        ],
        "left_out": dict(result.excluded),
        "not_looked_at": list(result.unexamined),
        "interrupted": result.interrupted,
    }


def plan_of(result: SearchResult, command: tuple[str, ...], machine: Machine, torch: str) -> Plan:
    """Return the chosen plan, with a comment on each technique: its effect, and the result without it."""
    chosen = result.chosen
    made = {
        "command": shorten(" ".join(command)),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hasten": hasten.__version__,
        "torch": torch,
        "memory": f"{result.limit.words}; peak {gigabytes(chosen.peak)}{_predicted(chosen)}",
        "step": f"{chosen.attempt.seconds * 1e3:.1f} ms",
        "check": "not known",
    }
    comments = {
        name: f"{CATALOGUE[name].effect_of(setting)}; without it: {_without(result, name)}"
        for name, setting in chosen.plan.items()
    }
    machine_facts = {"device": machine.device, "cpu": machine.cpu, "cores": machine.cores, "gpus": machine.gpus}
    return Plan(chosen.plan, comments, made, machine_facts)


def _rising(result: SearchResult) -> list[str]:
    """Return a warning that the plan fits a short trial but not a long run; empty if memory does not rise."""
    grows = result.chosen.attempt.grows
    return [f"BUT {rise_in_words(grows, result.limit.size - result.chosen.peak)}"] if grows else []


def _predicted(tried: PlanTrial) -> str:
    return f" ({gigabytes(tried.predicted)} predicted)" if tried.predicted else ""


def _without(result: SearchResult, name: str) -> str:
    """Return the result of the chosen plan without a technique."""
    tried = result.without(name)
    if tried is None:
        return "not tried"
    # A larger plan than "the chosen one without it" did not fit, so neither would that.
    even_under = "" if len(tried.plan) < len(result.chosen.plan) else f", even under {in_words(tried.plan)}"
    return came_to(tried) + even_under


def _row(tried: PlanTrial) -> str:
    if not tried.fits:
        return f"{tried.attempt.outcome:>24}   {in_words(tried.plan)}"
    return f"{gigabytes(tried.peak):>12}{tried.attempt.seconds * 1e3:>12.1f}   {in_words(tried.plan)}"


def _unchecked(result: SearchResult) -> list[str]:
    exact = all(CATALOGUE[name].effect_of(setting) is Effect.EXACT for name, setting in result.chosen.plan.items())
    return [
        "By what its techniques promise, the plan trains to the same bits as the script does without a limit."
        if exact
        else "By what its techniques promise, the plan computes the same mathematics in other rounding.",
        "Not checked here: where the plain run does not fit there is nothing to compare with. `hasten check` compares",
        "the two on a machine where it does.",
    ]
