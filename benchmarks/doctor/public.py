"""Runs `hasten doctor` on public training scripts, unchanged, and sets its words beside judgements made by hand.

    python benchmarks/doctor/public.py                  # all twelve: about fifteen minutes on two cores
    python benchmarks/doctor/public.py mnist nanogpt    # these; what was said of the others stays
    python benchmarks/doctor/public.py --merge          # runs nothing: judgements and words together again

The scripts, their arguments and their data are those of benchmarks/public (see run.py and prepare.py there), of ten
repositories. judged.toml holds what a person who read the scripts says of each verdict and finding, and what came of
trying it; a verdict of another resource or a finding that is not judged there is listed as such. The page that was
printed and the evidence lie in <work>/scratch/doctor afterwards.
"""

import argparse
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "public"))

from run import Script, Workplace, load_scripts, open_terminal  # noqa: E402  (a script's folder, not a package)

RESULTS = HERE.parent / "results" / "doctor_public.json"
JUDGED = HERE / "judged.toml"
BOUNDS = ["--seconds", "100"]
NAMES = [
    "mnist",
    "word_language_model_lstm",
    "time_sequence_prediction",
    "nanogpt",
    "mingpt_adder",
    "kuangliu_cifar",
    "timm_train",
    "wgan_gp",
    "yunjey_convnet",
    "lightning_autoencoder",
    "hf_trainer_run_clm",
    "accelerate_diffusers",
]
KEPT = ("name", "line", "where", "what", "fix", "severity", "worth", "how_known", "details", "technique", "setting")


def examine(workplace: Workplace, script: Script) -> dict[str, Any]:
    """What doctor says of one script, run where a person would run it."""
    cwd = workplace.fresh(script, "doctor")
    kept = workplace.folder / "scratch" / "doctor"
    kept.mkdir(exist_ok=True)
    out = kept / f"{script.name}.json"
    out.unlink(missing_ok=True)
    asked = [*BOUNDS, "--json", str(out), "--evidence", str(kept / f"{script.name}.evidence.json")]
    stdin = open_terminal() if script.terminal else subprocess.DEVNULL
    start = time.perf_counter()
    with (kept / f"{script.name}.txt").open("w") as page:
        done = subprocess.run(
            [workplace.hasten, "doctor", *asked, *script.command],
            cwd=cwd,
            env=workplace.environment(script) | {"COLUMNS": "120"},
            stdin=stdin,
            stdout=page,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    row = {"script": script.name, "source": script.source, "code": done.returncode}
    row["seconds"] = round(time.perf_counter() - start, 1)
    if not out.is_file():
        return row | {"verdict": None, "findings": []}
    root = workplace.folder / "scratch" / script.name / "doctor"
    return row | said(json.loads(out.read_text()), (cwd, root, workplace.folder))


def said(diagnosis: dict[str, Any], folders: tuple[Path, ...]) -> dict[str, Any]:
    """What is kept of a diagnosis: nothing of this machine's folders."""
    findings = [
        {"file": finding["file"]} | {key: finding[key] for key in KEPT if finding[key] not in ("", 0, [], None)}
        for finding in diagnosis["findings"]
    ]
    words = {
        "verdict": diagnosis["verdict"],
        "steps": diagnosis["steps"],
        "step_ms": round(1000 * diagnosis["step"], 3),
        "phases": {name: round(1000 * value, 3) for name, value in diagnosis["phases"].items() if value > 0},
        "machine": diagnosis["machine"],
        "notes": diagnosis["notes"],
        "findings": findings,
    }
    text = json.dumps(words)
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    plain: dict[str, Any] = json.loads(text)
    return plain


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """Put the judgements beside what was said; what is not judged yet."""
    judged = {entry["name"]: entry for entry in tomllib.loads(JUDGED.read_text()).get("script", [])}
    open_ones = []
    for row in rows:
        entry = judged.get(row["script"], {})
        verdict = entry.get("verdict", {})
        resource = (row["verdict"] or {}).get("resource", "no answer")
        row["verdict_judged"] = {k: v for k, v in verdict.items() if k != "of"} if verdict.get("of") == resource else {}
        if not row["verdict_judged"]:
            open_ones.append(f"{row['script']}: the verdict {resource}")
        for finding in row["findings"]:
            found = next((one for one in entry.get("finding", []) if belongs(one, finding)), None)
            finding["judged"] = {k: v for k, v in (found or {}).items() if k not in ("name", "line")}
            if found is None:
                open_ones.append(f"{row['script']}: {finding['name']} {finding['file']}:{finding.get('line', 0)}")
        row["given_before"] = [
            one for one in entry.get("finding", []) if not any(belongs(one, finding) for finding in row["findings"])
        ]
        row["missed"] = [
            one for one in entry.get("missed", []) if one["name"] not in {f["name"] for f in row["findings"]}
        ]
    return open_ones


def belongs(judgement: dict[str, Any], finding: dict[str, Any]) -> bool:
    """A judgement without a line is of the rule, wherever it speaks."""
    return judgement["name"] == finding["name"] and judgement.get("line") in (None, finding.get("line"))


def summarise(rows: list[dict[str, Any]], open_ones: list[str]) -> dict[str, Any]:
    def count(judged: list[dict[str, Any]]) -> dict[str, int]:
        words = [one.get("judgement", "not judged") for one in judged]
        return {word: words.count(word) for word in ("right", "doubtful", "wrong", "not judged") if word in words}

    findings = [finding for row in rows for finding in row["findings"]]
    return {
        "scripts": len(rows),
        "repositories": len({row["source"] for row in rows}),
        "verdicts": count([row["verdict_judged"] for row in rows]),
        "findings": count([finding["judged"] for finding in findings]),
        "findings checked by making the change": sum("measured" in finding["judged"] for finding in findings),
        "missed": sum(len(row["missed"]) for row in rows),
        "not judged": open_ones,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these scripts")
    parser.add_argument("--work", type=Path, default=Path("/work/public"), help="work folder (default %(default)s)")
    parser.add_argument("--merge", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    workplace = Workplace(args.work)
    known = json.loads(args.out.read_text())["scripts"] if args.out.is_file() else []
    rows: dict[str, dict[str, Any]] = {row["script"]: row for row in known}
    scripts = [] if args.merge else load_scripts(args.names or NAMES)
    for script in scripts:
        rows[script.name] = row = examine(workplace, script)
        print(f"{script.name:28} {row['seconds']:6.1f} s  {(row['verdict'] or {}).get('title')}", flush=True)
        for finding in row["findings"]:
            worth = f"{finding['worth']:.0%} {finding['how_known']}" if "worth" in finding else ""
            print(f"    {finding['severity']:7}{finding['name']:24}{finding['file']}:{finding.get('line', 0)} {worth}")
        write(rows, args.out)
    print(json.dumps(write(rows, args.out), indent=1))


def write(rows: dict[str, dict[str, Any]], out: Path) -> dict[str, Any]:
    ordered = sorted(
        rows.values(), key=lambda row: NAMES.index(row["script"]) if row["script"] in NAMES else len(NAMES)
    )
    summary = summarise(ordered, judge(ordered))
    out.write_text(json.dumps({"summary": summary, "scripts": ordered}, indent=1) + "\n")
    return summary


if __name__ == "__main__":
    main()
