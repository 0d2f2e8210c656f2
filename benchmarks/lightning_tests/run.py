"""Lightning's own tests as the measure of hasten's compatibility. README.md says what is measured and how.

python benchmarks/lightning_tests/run.py --baseline            # once: what passes here with Lightning's Trainer
python benchmarks/lightning_tests/run.py --hasten --topic core # with hasten's Trainer in its place
python benchmarks/lightning_tests/run.py --hasten --only-failed -k optimizer
python benchmarks/lightning_tests/run.py --errors              # what fails most, from the stored results
python benchmarks/lightning_tests/run.py --table               # the table, from the stored results
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from child import Outcome, run_files
from classify import Verdict, case_kind, files_in_scope, judge_file, topic_of

HERE = Path(__file__).resolve().parent
TESTS = Path(os.environ.get("LIGHTNING_TESTS", "/work/public/src/lightning/tests"))
BASELINE = HERE / "baseline.json"
HASTEN = Path(os.environ.get("HASTEN_OUTCOMES", HERE / "hasten.json"))
"""What each Trainer's tests came to: kept, and brought up to date by each run."""
RESULTS, TABLE = HERE / "results.json", HERE / "results.md"
"""Made again from these two and the verdicts."""
RELEASE = "360bd5b83c5020322ce7dec54f6c6179b74ea5c7"
"""Lightning's commit "Prepare release 2.6.1", from which the tests come."""


@dataclass(frozen=True)
class Row:
    """One test (one parametrized case), as stored in results.json. `hasten` is "" where it has not run yet."""

    file: str
    name: str
    topic: str
    kind: str
    reason: str
    texts: bool
    baseline: str
    baseline_error: str
    hasten: str
    error: str
    where: str

    @property
    def id(self) -> str:
        return f"{self.file}::{self.name}"

    @property
    def counts(self) -> bool:
        """Whether this test is part of the measure: public, and passing here with Lightning's own Trainer."""
        return self.kind == "public" and self.baseline == "passed"

    @property
    def counts_apart(self) -> bool:
        """The same for tests that are nearly public."""
        return self.kind == "near" and self.baseline == "passed"


def load(path: Path) -> dict[str, Any]:
    """A stored JSON file, or an empty dict where there is none yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def store(path: Path, content: Any) -> None:
    """Write JSON, one line for each test, so that a killed run leaves the old file."""
    blocks = []
    for key, block in content.items():
        if isinstance(block, list):
            blocks.append(f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in block) + "\n]")
        else:
            rows = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(block.items()))
            blocks.append(f'"{key}": {{\n' + ",\n".join(rows) + "\n}")
    new = path.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    new.replace(path)


def function_of(test: str) -> str:
    """``file.py::test_x[a-b]`` -> ``test_x``; ``file.py::TestY::test_x`` -> ``TestY``."""
    return test.partition("::")[2].partition("[")[0].split("::")[0]


def case_of(test: str) -> str:
    """``file.py::test_x[a-b]`` -> ``a-b``."""
    return test.partition("[")[2].rstrip("]")


def rows_of(verdicts: dict[str, dict[str, Verdict]]) -> list[Row]:
    """Verdicts, baseline and hasten outcomes put together; a function that never ran here is one row."""
    baseline, hasten = load(BASELINE).get("tests", {}), load(HASTEN).get("tests", {})
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for test in baseline:
        cases[test.partition("::")[0], function_of(test)].append(test)
    rows = []
    for file, functions in verdicts.items():
        for name, verdict in functions.items():
            for test in cases.get((file, name), [f"{file}::{name}"]):
                kind, reason = case_kind(verdict, case_of(test))
                before, now = baseline.get(test, {}), hasten.get(test, {})
                row = Row(
                    file=file,
                    name=test.partition("::")[2],
                    topic=verdict.topic,
                    kind=kind,
                    reason=reason,
                    texts=verdict.texts,
                    baseline=before.get("outcome", ""),
                    baseline_error=before.get("error", ""),
                    hasten=now.get("outcome", ""),
                    error=now.get("error", ""),
                    where=now.get("where", ""),
                )
                rows.append(row)
    return rows


@dataclass(frozen=True)
class Work:
    """What to run in one process. A function of which no case is known yet stands in ``wanted`` by its own name."""

    files: tuple[str, ...]
    wanted: tuple[str, ...]
    skip: tuple[str, ...]


def run(work: list[Work], trainer: str, args: argparse.Namespace) -> None:
    """Run the files, and store after each, so that a stopped run keeps what it has."""
    path = HASTEN if trainer == "hasten" else BASELINE
    with ThreadPoolExecutor(args.jobs) as pool:
        limits = {"k": args.k, "test_limit": args.timeout, "file_limit": args.file_timeout}
        running = {pool.submit(run_files, TESTS, [*one.files], trainer, [*one.skip], **limits): one for one in work}
        for done in as_completed(running):
            one = running[done]
            outcomes, tail = done.result()
            outcomes = complete(one, outcomes, tail, bool(args.k))
            tests = load(path).get("tests", {}) | {test: asdict(outcome) for test, outcome in outcomes.items()}
            store(path, {"made with": made_with(), "tests": tests})
            show(one, outcomes)
            if args.verbose:
                print(tail)


def complete(one: Work, outcomes: dict[str, Outcome], tail: str, chosen: bool) -> dict[str, Outcome]:
    """Outcomes for all wanted tests: where a file did not import, or nothing ran at all, each of its tests failed.

    ``chosen``: pytest's `-k` left some out, so that a missing outcome means nothing.
    """
    if not outcomes and not chosen:
        last = next(iter(reversed(tail.strip().splitlines())), "nothing ran")
        return dict.fromkeys(one.wanted, Outcome("failed", last))
    broken = {test.partition("::")[0]: outcome for test, outcome in outcomes.items() if test.endswith("::(import)")}
    whole = {test: outcome for test, outcome in outcomes.items() if not test.endswith("::(import)")}
    return whole | {test: broken[test.partition("::")[0]] for test in one.wanted if test.partition("::")[0] in broken}


def show(one: Work, outcomes: dict[str, Outcome]) -> None:
    """One line for the process, and one for each test that did not pass."""
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    name = one.files[0] if len(one.files) == 1 else f"{topic_of(one.files[0])}, {len(one.files)} files"
    print(f"{name}: " + (", ".join(f"{n} {what}" for what, n in counts.items()) or "nothing ran"))
    for test, outcome in outcomes.items():
        if outcome.outcome not in ("passed", "skipped", "xfailed"):
            print(f"    {outcome.outcome} {test.partition('::')[2]}: {outcome.error} [{outcome.where}]")


def made_with() -> dict[str, str]:
    """Versions, so that a difference between two results can be explained."""
    packages = ("lightning", "torch", "hasten", "pytest")
    return {name: version(name) for name in packages} | {"python": platform.python_version(), "tests": RELEASE}


def table(rows: list[Row]) -> str:
    """The measure by topic, as Markdown. The unit is one test; a parametrized case is a test."""
    head = "| topic | public, pass here | hasten passes | fails | of these on wording | not run yet | % |"
    rest = (
        " near: pass here | hasten passes | public, do not pass here | internal | machines | elsewhere | no Trainer |"
    )
    lines = [head + rest, "|---|" + "---:|" * 13]
    topics = [*sorted({row.topic for row in rows}), "all"]
    for topic in topics:
        chosen = [row for row in rows if topic in ("all", row.topic)]
        measured = [row for row in chosen if row.counts]
        passed = sum(row.hasten == "passed" for row in measured)
        new = sum(row.hasten == "" for row in measured)
        failed = [row for row in measured if row.hasten not in ("passed", "")]
        percent = f"{100 * passed / len(measured):.0f}" if measured else ""
        kinds = Counter(row.kind for row in chosen)
        numbers = [len(measured), passed, len(failed), sum(row.texts for row in failed), new, percent]
        near = [row for row in chosen if row.counts_apart]
        numbers += [len(near), sum(row.hasten == "passed" for row in near)]
        numbers += [kinds["public"] - len(measured), kinds["internal"], kinds["machines"], kinds["elsewhere"]]
        name = "**all**" if topic == "all" else topic
        lines.append("| " + " | ".join([name, *map(str, [*numbers, kinds["no_trainer"]])]) + " |")
    return "\n".join(lines) + "\n"


def errors(rows: list[Row]) -> str:
    """What fails with hasten, grouped by the first line of the error, most frequent first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if (row.counts or row.counts_apart) and row.hasten not in ("passed", ""):
            groups[f"{row.error or row.hasten}  [{row.where}]"].append(row)
    lines = []
    for error, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(group):4}  {error}")
        lines += [f"        {row.id}" for row in group[:3]]
        lines += [f"        and {len(group) - 3} more"] if len(group) > 3 else []
    return "\n".join(lines) or "nothing failed (or nothing has run: --hasten)"


def chosen_files(args: argparse.Namespace) -> list[str]:
    """The files that ``--topic`` and ``--file`` leave."""
    files = files_in_scope(TESTS)
    if args.topic:
        wanted = tuple(f"tests_pytorch/{topic.strip('/')}/" for topic in args.topic)
        files = [file for file in files if file.startswith(wanted)]
    if args.file:
        files = [file for file in files if any(name in file for name in args.file)]
    return files


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", action="store_true", help="run with Lightning's Trainer; writes baseline.json")
    parser.add_argument("--hasten", action="store_true", help="run with hasten's Trainer; writes results.json")
    parser.add_argument("--topic", action="append", help="a folder under tests_pytorch, such as trainer/flags")
    parser.add_argument("--file", action="append", help="part of a file's path")
    parser.add_argument("-k", default="", help="pytest's -k")
    parser.add_argument("--only-failed", action="store_true", help="only what did not pass with hasten last time")
    parser.add_argument("--new", action="store_true", help="only files with a test that has no stored outcome yet")
    parser.add_argument("--by-topic", action="store_true", help="a folder's files in one process: starts less often")
    parser.add_argument("--machines", action="store_true", help="also the tests that need several processes")
    parser.add_argument("--errors", action="store_true", help="show stored failures, grouped")
    parser.add_argument("--table", action="store_true", help="show the table of stored results")
    parser.add_argument("--verdicts", action="store_true", help="show each function's kind and the reason")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time (default 1)")
    parser.add_argument("--timeout", type=int, default=60, help="seconds a test may take (default 60)")
    parser.add_argument("--file-timeout", type=int, default=900, help="seconds a process may take (default 900)")
    parser.add_argument("--verbose", action="store_true", help="show pytest's own output")
    return parser.parse_args()


def plan(files: list[str], verdicts: dict[str, dict[str, Verdict]], args: argparse.Namespace) -> list[Work]:
    """What is to run, for the files in which something is; with ``--by-topic`` a folder's files run together."""
    kinds = {"public", "near", "machines"} if args.machines else {"public", "near"}
    skip: dict[str, list[str]] = {file: [] for file in files}
    wanted: dict[str, list[str]] = {file: [] for file in files}
    for row in rows_of({file: verdicts[file] for file in files}):
        want = row.kind in kinds
        if args.hasten:
            want &= row.baseline == "passed"
            want &= not args.only_failed or row.hasten not in ("passed", "")
        want &= not args.new or (row.hasten if args.hasten else row.baseline) == ""
        (wanted if want else skip)[row.file].append(row.id)
        groups: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if wanted[file]:
            groups[topic_of(file) if args.by_topic else file].append(file)
    join = itertools.chain.from_iterable
    return [
        Work(tuple(group), tuple(join(wanted[file] for file in group)), tuple(join(skip[file] for file in group)))
        for group in groups.values()
    ]


def main() -> None:
    args = arguments()
    if not TESTS.exists():
        raise SystemExit(
            f"Lightning's tests are not in {TESTS}. README.md says how to get them; or set LIGHTNING_TESTS."
        )
    verdicts = {file: judge_file(TESTS, file) for file in files_in_scope(TESTS)}
    files = chosen_files(args)
    if args.baseline or args.hasten:
        run(plan(files, verdicts, args), "hasten" if args.hasten else "lightning", args)
    rows = rows_of(verdicts)
    made = {name: load(path).get("made with", {}) for name, path in (("baseline", BASELINE), ("hasten", HASTEN))}
    store(RESULTS, {"made with": made, "tests": [asdict(row) for row in rows]})
    TABLE.write_text(table(rows))
    rows = [row for row in rows if row.file in files]
    if args.verdicts:
        print("\n".join(f"{row.kind:10} {row.id}  {row.reason}" for row in rows))
    if args.errors:
        print(errors(rows))
    elif not args.verdicts:
        print(table(rows))


if __name__ == "__main__":
    main()
