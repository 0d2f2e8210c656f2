"""Writes docs/measured.md from the raw results in benchmarks/results.

python benchmarks/tables.py
"""

import json
from typing import Any

from hand_tuned import BENCHMARKS

RESULTS = BENCHMARKS / "results"
PAGE = BENCHMARKS.parent / "docs" / "measured.md"

HEAD = """# What was measured

Written by `python benchmarks/tables.py` from the raw results in
[`benchmarks/results`](../benchmarks/results). All figures are ratios: both sides ran in turn on the same machine, each
in a process of its own; the median of the pairs is given, with the lowest and the highest pair.
"""

HAND = """## Against an expert's hand

`benchmarks/tune_vs_hand.py` tunes an unchanged script and compares the plan with a twin of the script that was tuned by
hand (same model, batch size, optimizer and data). Ratios are of whole epochs, the first left out. `of hand` is the
plan's speed beside the twin's; the goal was 0.9.

Machine: {machine}. It was shared with other work, which ran at a lower priority meanwhile.

| training | budget | hasten | by hand | of hand | parity | plan |
|---|---|---|---|---|---|---|"""

PUBLIC = """## Training scripts by others, unchanged

`benchmarks/public/run.py` on public scripts (commits: `benchmarks/public/scripts.toml`), with local data and
short settings of their own flags. `whole run` is the wall time of the process, start-up included; `steps` the pace of
the script's own progress lines. Neither uses hasten's clock. Two pairs each: a check that nothing breaks or
slows down, not as the best that can be had.
"""

NAMES = {
    "image": "stone-age images: small ResNet, CIFAR-10 JPEGs, batch 8",
    "lstm": "word LSTM, WikiText-2",
    "mlp": "tabular MLP, TensorDataset",
    "mlp-tiny": "tiny MLP, TensorDataset",
    "gpt": "character GPT, tinyshakespeare, no DataLoader",
}


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.2f} ({ordered[0]:.2f}-{ordered[-1]:.2f})"


def against_hand() -> list[str]:
    record = read("tune_vs_hand.json")
    machine = f"{record['machine']['cores']} cores of {record['machine']['cpu']}, torch {record['machine']['torch']}"
    lines = [HAND.format(machine=machine)]
    for name, case in record["cases"].items():
        plan = ", ".join(kept["name"] for kept in case["techniques"])
        ratios = [spread(case["ratios"][key]) for key in ("hasten_epoch", "by_hand_epoch", "of_hand_epoch")]
        parity = "holds" if case["parity"]["ok"] else "not shown"
        lines.append(f"| {NAMES[name]} | {case['budget']} | {' | '.join(ratios)} | {parity} | {plan} |")
    return [*lines, ""]


def listening() -> list[str]:
    record = read("listening_cost.json")
    cost = f"{record['microseconds']:.0f} us of CPU time a step on a tiny MLP"
    share = f"{record['percent_of_5_ms']:.2f} % of a 5 ms step ({len(record['pairs_seconds'])} pairs)"
    return ["## The cost of listening", "", f"`benchmarks/listening_cost.py`: {cost}, {share}.", ""]


def public() -> list[str]:
    lines = [PUBLIC]
    table = (RESULTS / "public-scripts.md").read_text(encoding="utf-8").splitlines()
    for line in table:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            lines.append("| " + " | ".join(cells[:6]) + " |")
    return [*lines, "", "What was refused, and why, is in `benchmarks/results/public-scripts.md`.", ""]


def main() -> None:
    parts = (("tune_vs_hand.json", against_hand), ("listening_cost.json", listening), ("public-scripts.md", public))
    lines = [HEAD]
    for name, part in parts:
        if (RESULTS / name).exists():
            lines += part()
    lines += [
        "## Not measured here",
        "",
        "No GPU was at hand: pinned memory, device prefetch, cudnn_benchmark, TF32 and 16-mixed on a GPU have not been",
        "measured, and their GPU paths have not been run.",
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
