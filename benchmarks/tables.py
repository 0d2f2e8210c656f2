"""Writes docs/measured.md from the raw results in benchmarks/results.

python benchmarks/tables.py
"""

import json
import statistics
from typing import Any

from hand_tuned import BENCHMARKS
from trainer_contenders import CONTENDERS

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

Plans were found in one process that trains on ([how](tune.md)), on {machine};
two quiet cores, two pairs each, before changes of 2026-11-23 to the search's budgets and its estimate of noise. One of
the MLP's two pairs was disturbed: its ratios lie far apart.

Where the image plan stays behind the twin, looked at stage by stage in two runs each (19.4 ms a step beside 15.7): the
twin stores its weights channels last, so that compiled code need not turn them and their gradients (about 1.5 ms;
hasten leaves them as they lie, since the script and its files would see other strides), and it uses Inductor's C++
wrapper (about 0.5 to 1 ms, for half a minute more of compiling); the rest is the loader (0.4 ms) and the loss.

| training | budget | hasten | by hand | of hand | parity | plan |
|---|---|---|---|---|---|---|"""

AUTO = """## Tuned while it trains

`benchmarks/auto_vs_plan.py`: whole runs from start to end, search and start-up in them, as often as rounds are given.
`auto`, `plan`: how many times faster than plain Python `hasten run --auto` and the best plan known are; `of the gain`:
share of the seconds that the plan saves which --auto saves too. Losses are those of the last epoch.

| training, plain run | rounds | auto | plan | of the gain | loss plain / auto / plan |
|---|---|---|---|---|---|"""

PUBLIC = """## Training scripts by others, unchanged

`benchmarks/public/run.py` on public scripts (commits: `benchmarks/public/scripts.toml`), with local data and
short settings of their own flags. `whole run` is the wall time of the process, start-up included; `steps` the pace of
the script's own progress lines. Neither uses hasten's clock. Two pairs each: a check that nothing breaks or
slows down, not as the best that can be had.

Tuned in two minutes, on two quiet cores: mnist, mnist_rnn and super_resolution by the search of commit fb1ba1e
([how](tune.md)); imagenet_dummy, dcgan_fake, nanogpt, mingpt_adder, timm_train and yunjey_feedforward by that of
ca456f7, which knew less of how long short trainings are (there super_resolution's whole run was 0.82x, compiled for
5 s; mnist's 1.11x, with a cache in one epoch; mnist_rnn's plan was empty); vae and the two word language models by that
of 8ee5a51. The other three rows are those of an older search, which asked one question a process in 60 to 140 seconds;
they are not measured again yet.
"""

REGRET = """## What a short budget leaves behind

`benchmarks/tune_regret.py`: each script tuned at several budgets, knowing nothing of other tunes; then plain Python
and all plans run in turn, in fresh processes. The best plan known is the fastest of all plans that any of these tunes
found, of one by hand (bf16, fused optimizer, channels_last), and of the fastest with one technique left out at a time:
a plan that nobody tried may be faster. Figures are pace of the plan / pace of the best plan. `orders apart`: by how
much the fastest of several plans is faster than the slowest, found at {at:g} s under other seeds of the search.

Machine: {machine}.
"""

TRAINER = """## What a Trainer costs per step

`benchmarks/trainer_overhead.py`: a tiny MLP (Linear 32-32-2, batch 32, TensorDataset, SGD), so small that the trainer's
own cost shows; each trainer in turn with a plain loop, {rounds} rounds of {turns} turns. What happens at the end of an
epoch, checkpoints included, is in it. `weights`: those of the plain loop, to the last bit.

Machine: {machine}; {used}.

| trainer | CPU time, ratio | wall time, ratio | weights | goal |
|---|---|---|---|---|"""

IMPORTS = """## Imports

`benchmarks/import_time.py`: seconds of wall time more than `import torch` alone, in turn with it, {rounds} rounds.

| import | seconds more |
|---|---|"""

LIGHTNING_MODULES = """## LightningModules by others, unchanged

`benchmarks/lightning_modules/compare.py`: modules, datamodules and callbacks of public repositories (commits:
`benchmarks/lightning_modules/modules.toml`), on small synthetic data, under Lightning's Trainer and under hasten's
with the same seed. `equal`: losses, learning rates and metrics of each batch, validations, weights, optimizer state and
random states, all to the last bit. `Lightning twice`: the same for two runs under Lightning.
"""

LIGHTNING_TESTS = """## Lightning's own tests

`benchmarks/lightning_tests`: the tests of Lightning 2.6.1 with hasten's Trainer in the place of Lightning's. Counted
are those that use only the public face and pass here under Lightning's own Trainer; `wording`: failures of tests that
check the words of a message. How tests are sorted: [README](../benchmarks/lightning_tests/README.md).
"""

GUARDS = """## What guards cost

`benchmarks/guard_cost.py`: each technique as it is, beside itself at commit 474bcd3, which had no guards, on a
training in which it acts; CPU time a step on one thread, in turn, the median of five pairs (least to most). The goal
was 1.01; {missed} of {all} are above it on steps this short. A guard costs microseconds a call, so that longer steps
hide it; the blocks of `activation_checkpointing` are run again with everything they saw, which the old one did not do.

| technique | a step | with guards |
|---|---|---|
"""
LISTENING = """`benchmarks/listening_cost.py`: a tiny MLP with its DataLoader, so small that the cost shows; CPU time
of the training process, plain Python and listening in turn, the median of the pairs (least to most). All of the first
1000 steps are listened to, of those after 20 000 one in 32. The few steps that doctor looks into are not in it: their
time is left out of its figures. Bare wrappers, which only call on, are the least that listening from Python can cost
in the places where hasten listens."""

CORPUS = """`benchmarks/doctor/corpus.py`: `ill/` holds scripts with one planted illness each, `healthy/` scripts
without; what else is true of a script was judged by hand. Scripts for a GPU are read only. Recall: planted findings
that were given. Precision: findings given that were planted or are true as well. Scripts and rules were written by the
same people, and the rules were mended on these scripts: how others are judged is not shown by it. A planted script near
its finding's threshold (`frequent_validation`: a fifth of the time) is found or missed as the machine is."""

TRACEML = """`benchmarks/doctor/beside_traceml.py`: four short trainings with a known truth, each in turn with plain
Python, {turns} turns; CPU time of the training process in its median step, beside plain Python's. TraceML ran the
script as it is, and once more with the `with trace_step(model)` around each step that it asks for. Other work ran on
the machine meanwhile, so costs are rough. The first training made ten times as long got the same words from TraceML."""

NOT_RUN = {
    "tune_regret.json": "How far plans found in 1, 2 and 5 minutes are from the best plan known, and how far five\n"
    "tunes of one script are apart: `benchmarks/tune_regret.py` has not been run.",
    "auto_vs_plan.json": "Whole runs of 3, 10 and 30 minutes under `hasten run --auto`:\n"
    "`benchmarks/auto_vs_plan.py` has not been run.",
}

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
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f}-{ordered[-1]:.2f})"


def answer_of(parity: dict[str, Any]) -> str:
    """A report's answer; what was measured with hasten-report/1 has `ok` instead."""
    return parity.get("answer") or ("holds" if parity["ok"] else "not shown")


def against_hand() -> list[str]:
    record = read("tune_vs_hand.json")
    machine = f"{record['machine']['cores']} cores of {record['machine']['cpu']}, torch {record['machine']['torch']}"
    lines = [HAND.format(machine=machine)]
    for name, case in record["cases"].items():
        plan = ", ".join(kept["name"] for kept in case["techniques"])
        ratios = [spread(case["ratios"][key]) for key in ("hasten_epoch", "by_hand_epoch", "of_hand_epoch")]
        parity = answer_of(case["parity"])
        lines.append(f"| {NAMES[name]} | {case['budget']} | {' | '.join(ratios)} | {parity} | {plan} |")
    return [*lines, ""]


def regret() -> list[str]:
    record = read("tune_regret.json")
    said, scripts = record["summary"], record["scripts"]
    machine = f"{record['machine']['cores']} cores of {record['machine']['cpu']}, torch {record['machine']['torch']}"
    budgets = list(said["budgets"])
    lines = [REGRET.format(machine=machine, at=said["orders_at"])]
    lines += [f"| script | {' | '.join(f'{budget} s' for budget in budgets)} | orders apart | best plan |"]
    lines += ["|---" * (len(budgets) + 3) + "|"]
    for name, row in scripts.items():
        if not row["done"]:
            continue
        first = {f"{one['budget']:g}": one["of_best"] for one in reversed(row["tunes"])}
        shares = [f"{first[budget]:.2f}" if first.get(budget) else "-" for budget in budgets]
        apart = f"{said['orders'][name]['apart']:.0%}" if name in said["orders"] else "-"
        best = ", ".join(row["best"] or ()) or "nothing"
        lines.append(f"| {name} | {' | '.join(shares)} | {apart} | {best} |")
    for what in ("median", "worst"):
        cells = [f"{said['budgets'][budget][what]:.2f}" for budget in budgets]
        lines.append(f"| **{what}** | {' | '.join(cells)} | | |")
    return [*lines, ""]


def auto() -> list[str]:
    lines = [AUTO]
    for row in read("auto_vs_plan.json").values():
        seconds, losses = row["seconds"], row["losses"]
        ratios = [
            spread([before / after for before, after in zip(seconds["plain"], seconds[kind], strict=True)])
            for kind in ("auto", "plan")
        ]
        last = " / ".join(f"{statistics.fmean(losses[kind]):.3f}" for kind in ("plain", "auto", "plan"))
        lines.append(
            f"| {row['script']}, {row['minutes']:g} min | {len(seconds['plain'])} | {' | '.join(ratios)} "
            f"| {row['median']['of_the_gain']:.2f} | {last} |"
        )
    return [*lines, ""]


def listening() -> list[str]:
    record = read("listening_cost.json")
    lines = ["## doctor", "", "### The cost of listening", ""]
    lines += [LISTENING, ""]
    lines += ["| who listens | more CPU time a step | of a 3 ms step | after 20 000 steps | of a 3 ms step |"]
    lines += ["|---|---|---|---|---|"]
    names = {"run": "`hasten run --evidence`", "doctor": "`hasten doctor --no-sample`", "bare": "bare wrappers"}
    for who, name in names.items():
        cells = []
        for part in ("first", "later"):
            cost, costs = record[who][part]["microseconds"], record[who][part]["all"]
            cells += [f"{cost:.0f} us ({costs[0]:.0f} to {costs[-1]:.0f})", f"{cost / 30:.2f} %"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    each = record["module"]
    more = (
        f"{each['first']:.2f} us a module in the first steps of `hasten run --evidence`, {each['later']:.2f} us later"
    )
    lines += ["", f"A model of more modules costs more, as each of them is called: {more}."]
    return [*lines, ""]


def guards() -> list[str]:
    techniques = read("guard_cost.json")["techniques"]
    middle = {name: statistics.median(one["ratios"]) for name, one in techniques.items()}
    missed = sum(ratio > 1.01 for ratio in middle.values())
    rows = [f"| {name} | {one['ms_before']:.1f} ms | {spread(one['ratios'])} |" for name, one in techniques.items()]
    return [GUARDS.format(missed=missed, all=len(middle)).rstrip("\n"), *rows, ""]


def doctor_corpus() -> list[str]:
    summary = read("doctor_corpus.json")["summary"]
    lines = ["### Scripts with planted illnesses", "", CORPUS, "", "| | |", "|---|---|"]
    for key in ("ill scripts", "healthy scripts", "planted", "recall", "given", "precision"):
        value = f"{summary[key] * 100:.0f} %" if key in ("recall", "precision") else summary[key]
        lines.append(f"| {key} | {value} |")
    for key in ("missed by finding", "wrong by finding"):
        said = ", ".join(f"{name} {count}" for name, count in summary[key].items()) or "none"
        lines.append(f"| {key} | {said} |")
    return [*lines, ""]


def beside_traceml() -> list[str]:
    record = read("doctor_beside_traceml.json")
    lines = ["### Beside TraceML 0.5.0", "", TRACEML.format(turns=record["turns"]), ""]
    lines += ["| training | truth | | CPU time a step | what it says |", "|---|---|---|---|---|"]
    for name, row in record["scripts"].items():
        for side in ("doctor", "traceml", "traceml, trace_step"):
            said = row["said"][side].replace("|", "/")
            lines.append(f"| {name} | {row['truth']} | {side} | {row['ratio'][side]:.2f}x | {said} |")
    return [*lines, ""]


def public() -> list[str]:
    lines = [PUBLIC]
    table = (RESULTS / "public-scripts.md").read_text(encoding="utf-8").splitlines()
    for line in table:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            lines.append("| " + " | ".join(cells[:6]) + " |")
    return [*lines, "", "What was refused, and why, is in `benchmarks/results/public-scripts.md`.", ""]


def trainer_overhead() -> list[str]:
    record = read("trainer_overhead.json")
    machine = f"{record['machine']['cores']} cores of {record['machine']['cpu']}, torch {record['machine']['torch']}"
    used = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "torch")
    lines = [TRAINER.format(machine=machine, used=used, rounds=record["rounds"], turns=record["turns"])]
    plain = {cost["weights"] for cost in record["plain"]}
    for name, contender in record["contenders"].items():
        goal = CONTENDERS[name].goal
        weights = "equal" if set(contender["weights"]) == plain else "differ"
        ratios = f"{spread(contender['cpu_ratios'])} | {spread(contender['wall_ratios'])}"
        lines.append(f"| {CONTENDERS[name].title} | {ratios} | {weights} | {'' if goal is None else f'{goal:.2f}'} |")
    return [*lines, ""]


def import_time() -> list[str]:
    record = read("import_time.json")
    lines = [IMPORTS.format(rounds=record["rounds"])]
    torch, imports = record["torch"], record["imports"]
    for place, (name, one) in enumerate(imports.items()):
        if name == "torch":
            continue
        more = []
        for number, took in enumerate(one["took"]):
            beside = number * (len(imports) + 1) + place  # torch alone ran just before and just after
            more.append(took["wall"] - (torch[beside]["wall"] + torch[beside + 1]["wall"]) / 2)
        more.sort()
        lines.append(f"| `{one['code']}` | {more[len(more) // 2]:+.2f} ({more[0]:+.2f} to {more[-1]:+.2f}) |")
    took = sorted(one["wall"] for one in record["help"]["took"])
    return [*lines, "", f"`hasten --help`: {took[len(took) // 2]:.2f} s ({took[0]:.2f}-{took[-1]:.2f}).", ""]


def lightning_tests() -> list[str]:
    table = (BENCHMARKS / "lightning_tests" / "results.md").read_text(encoding="utf-8").splitlines()
    lines = [LIGHTNING_TESTS]
    for line in table:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            lines.append("| " + " | ".join(cells[:5] + cells[6:7]) + " |")
    return [*lines, ""]


def lightning_modules() -> list[str]:
    table = (RESULTS / "lightning-modules.md").read_text(encoding="utf-8").splitlines()
    lines = [LIGHTNING_MODULES]
    for line in table:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            lines.append("| " + " | ".join(cells[:5]) + " |")
    return [*lines, ""]


def main() -> None:
    parts = (
        (RESULTS / "tune_vs_hand.json", against_hand),
        (RESULTS / "tune_regret.json", regret),
        (RESULTS / "auto_vs_plan.json", auto),
        (RESULTS / "listening_cost.json", listening),
        (RESULTS / "guard_cost.json", guards),
        (RESULTS / "doctor_corpus.json", doctor_corpus),
        (RESULTS / "doctor_beside_traceml.json", beside_traceml),
        (RESULTS / "trainer_overhead.json", trainer_overhead),
        (RESULTS / "import_time.json", import_time),
        (RESULTS / "lightning-modules.md", lightning_modules),
        (BENCHMARKS / "lightning_tests" / "results.md", lightning_tests),
        (RESULTS / "public-scripts.md", public),
    )
    lines = [HEAD]
    for source, part in parts:
        if source.exists():
            lines += part()
    lines += [
        "## Not measured here",
        "",
        "No GPU was at hand: pinned memory, device prefetch, cudnn_benchmark, TF32 and 16-mixed on a GPU have not been",
        "measured; their GPU paths have not been run. Neither have doctor's device clock and its findings on a GPU;",
        "NVML was tested with a stand-in.",
        *(f"\n{sentence}" for name, sentence in NOT_RUN.items() if not (RESULTS / name).exists()),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
