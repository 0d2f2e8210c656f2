"""Whatever a run left behind: no finding raises or claims nonsense, and the diagnosis reads back as it was written."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hasten.doctor.diagnose import diagnose
from hasten.doctor.findings import FINDINGS
from hasten.doctor.verdict.diagnosis import read_diagnosis
from hasten.doctor.verdict.jobs import jobs
from hasten.evidence import Evidence, Measurement
from tests.doctor.findings.made import evidences

NAMES = set(FINDINGS)

_times = st.floats(0.0, 10.0)
_measured = st.lists(
    st.builds(
        Measurement, st.sampled_from(sorted(NAMES)), st.just("Linear 3 -> 4: changed"),
        st.sampled_from(["", "a", "a.b and 3 like it", "/home/me/train.py:4", "anomaly"]), _times, _times,
        st.floats(0.0, 1.0), st.integers(0, 30), st.floats(0.0, 100.0), st.sampled_from(["", "batch_size=8"]),
        st.sampled_from(["", "", "no memory"]),
    ),
    max_size=6,
).map(tuple)  # fmt: skip


@settings(
    max_examples=40,
    deadline=None,
    phases=(Phase.reuse, Phase.generate),  # making such evidence smaller takes minutes
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
)
@given(seen=evidences(), measured=_measured)
def test_any_evidence_gives_findings_that_hold(
    tmp_path_factory: pytest.TempPathFactory, seen: Evidence, measured: tuple[Measurement, ...]
) -> None:
    seen = dataclasses.replace(seen, measured=measured)
    jobs(seen)
    found = diagnose(seen)
    assert not [note for note in found.notes if "a fault of hasten's" in note]  # a check that raised
    for finding in found.findings:
        assert finding.name in NAMES
        assert finding.worth is None or 0.01 <= finding.worth <= 1.0 or finding.name == "debug_tools_on"
        assert finding.worth is None or 0.0 <= finding.worth <= 1.0
        assert finding.what
        assert not finding.what.endswith(".")
        assert finding.fix
        assert finding.sources
    path = tmp_path_factory.mktemp("any") / "diagnosis.json"
    found.write(path)
    assert read_diagnosis(path).as_json() == found.as_json()
