"""How often `hasten doctor` finds what is wrong, and how often what it finds is true, on scripts that are known.

    python benchmarks/doctor/corpus.py                    # all of them: about ten minutes on two cores
    python benchmarks/doctor/corpus.py retained gan       # those whose names hold one of these words
    python benchmarks/doctor/corpus.py --short-of-cpu     # again those of the last run that got too little of the CPU

`ill/` holds scripts with one planted illness each (`# plant: name`), `healthy/` scripts without any. What else is
true of a script is in its line `# also: names`: judged by hand, by making the change. `# how: source` marks scripts
for a GPU, which are only read here; `# needs: bf16` those that are ill only on a CPU with bf16 instructions.

    recall     planted findings that were given, of all that were planted
    precision  findings given that were planted or are in `also`, of all that were given
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "doctor_corpus.json"
BOUNDS = ["--steps", "150", "--seconds", "60"]


def header(text: str, key: str) -> list[str]:
    found = re.search(rf"^# {key}: (.+)$", text, re.MULTILINE)
    return re.split(r",\s*", found[1].strip()) if found else []


def examine(script: Path, how: str) -> tuple[list[dict[str, object]], str]:
    """The findings doctor gives for a script, and its verdict."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(script, folder)
        if how == "source":
            command = ["doctor", "--source", copy, "--format", "json", "--out", "out.json"]
        else:
            command = ["doctor", *BOUNDS, "--json", "out.json", copy]
        done = subprocess.run(
            [sys.executable, "-m", "hasten", *command], cwd=folder, capture_output=True, text=True, timeout=300
        )
        out = Path(folder, "out.json")
        if not out.is_file():
            raise SystemExit(f"{script.name}: no answer from doctor (exit code {done.returncode}):\n{done.stderr}")
        data = json.loads(out.read_text())
        return data["findings"], data.get("verdict", {}).get("title", "")


def judged(script: Path, given: list[str]) -> dict[str, list[str]]:
    """What was given for a script, by its labels."""
    text = script.read_text()
    planted, true = header(text, "plant"), header(text, "plant") + header(text, "also")
    return {
        "planted": planted,
        "missed": [name for name in planted if name not in given],
        "right": [name for name in given if name in true],
        "wrong": [name for name in given if name not in true],
    }


def bf16() -> bool:
    return bool(re.search(r"avx512_bf16|amx_bf16", Path("/proc/cpuinfo").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only scripts whose names hold one of these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--labels", action="store_true", help="run nothing: judge the last run by the labels of now")
    parser.add_argument(
        "--short-of-cpu", action="store_true", help="run again, and replace, what others kept from the CPU last time"
    )
    args = parser.parse_args()
    kept = {row["script"]: row for row in json.loads(args.out.read_text())["scripts"]} if args.short_of_cpu else {}
    if args.labels:
        kept = json.loads(args.out.read_text())["scripts"]
        rows = [{**row, **judged(HERE / f"{row['script']}.py", list(row["severity"]))} for row in kept]
        args.out.write_text(json.dumps({"summary": summarise(rows), "scripts": rows}, indent=1) + "\n")
        print(json.dumps(summarise(rows), indent=1))
        return
    rows = []
    for script in sorted(HERE.glob("ill/*.py")) + sorted(HERE.glob("healthy/*.py")):
        if args.words and not any(word in script.stem for word in args.words):
            continue
        text, name = script.read_text(), f"{script.parent.name}/{script.stem}"
        if name in kept and not kept[name]["verdict"].startswith("short of CPU"):
            rows.append(kept[name])
            continue
        if "bf16" in header(text, "needs") and not bf16():
            continue
        start = time.perf_counter()
        findings, verdict = examine(script, (header(text, "how") or ["run"])[0])
        given = list(dict.fromkeys(str(finding["name"]) for finding in findings))
        row = {
            "script": name,
            **judged(script, given),
            "severity": {str(finding["name"]): finding["severity"] for finding in findings},
            "verdict": verdict,
            "seconds": round(time.perf_counter() - start, 1),
        }
        rows.append(row)
        mark = "ok   " if not row["missed"] and not row["wrong"] else "WRONG"
        told = f"missed {row['missed']} wrong {row['wrong']}" if mark == "WRONG" else " ".join(given)
        print(f"{mark} {row['script']:36} {row['seconds']:5.1f} s  {told}   [{verdict}]", flush=True)
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    if not args.words:
        args.out.write_text(json.dumps({"summary": summary, "scripts": rows}, indent=1) + "\n")


def summarise(rows: list[dict[str, object]]) -> dict[str, object]:
    planted = sum(len(row["planted"]) for row in rows)
    missed = Counter(name for row in rows for name in row["missed"])
    right = sum(len(row["right"]) for row in rows)
    wrong = Counter(name for row in rows for name in row["wrong"])
    given = right + sum(wrong.values())
    healthy = [row for row in rows if row["script"].startswith("healthy/")]
    return {
        "ill scripts": len(rows) - len(healthy),
        "healthy scripts": len(healthy),
        "planted": planted,
        "recall": round(1 - sum(missed.values()) / planted, 3) if planted else None,
        "given": given,
        "precision": round(right / given, 3) if given else None,
        "healthy scripts with a false finding": sum(1 for row in healthy if row["wrong"]),
        "missed by finding": dict(missed),
        "wrong by finding": dict(wrong),
    }


if __name__ == "__main__":
    main()
