"""Read runs to compare, from doctor's JSON or from evidence."""

from __future__ import annotations

from pathlib import Path

from hasten import files
from hasten.doctor.diagnose import diagnose
from hasten.doctor.verdict.diagnosis import SCHEMA as DIAGNOSIS
from hasten.doctor.verdict.diagnosis import Diagnosis, makes_sense, read_diagnosis
from hasten.errors import HastenError
from hasten.evidence import read_evidence
from hasten.evidence.schema import SCHEMA as EVIDENCE


def read(path: Path) -> list[Diagnosis]:
    """Return the diagnoses of a file (one) or of a folder of such files.

    A file is doctor's JSON, or evidence, of which the diagnosis is made.

    Raises:
        HastenError: There is no such file, it is neither of the two, or the folder has no JSON files.
    """
    if not path.is_dir():
        return [_read(path)]
    paths = sorted(path.glob("*.json"))
    if not paths:
        raise HastenError(f"no JSON files in the folder {path}", "put diagnoses or evidence of the same training there")
    return [_read(file) for file in paths]


def _read(path: Path) -> Diagnosis:
    """Return the diagnosis of one file."""
    try:
        data = files.parse_json(files.read_bytes(path))
    except FileNotFoundError:
        raise HastenError(f"no file {path}", f"`hasten doctor --json {path} SCRIPT` writes one") from None
    except OSError as error:
        raise HastenError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise HastenError(
            f"{path} is not JSON: {error}", "name what `hasten doctor --json FILE` wrote, or evidence"
        ) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == DIAGNOSIS:
        return read_diagnosis(path)
    if schema == EVIDENCE:
        evidence = read_evidence(path)
        with makes_sense(path):
            return diagnose(evidence)
    description = f"of the schema {schema}" if isinstance(schema, str) else "of no schema"
    raise HastenError(
        f"{path} is {description}, neither a diagnosis ({DIAGNOSIS}) nor evidence ({EVIDENCE})",
        "name what `hasten doctor --json FILE` or `hasten run --evidence FILE` wrote",
    )
