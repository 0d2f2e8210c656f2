"""The smallest set of techniques that parts is found, whichever it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hasten.check.run import culprits

NAMES = [f"technique_{number}" for number in range(18)]


@given(
    st.integers(1, 18).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=3)))
)
def test_what_is_found_is_what_parts(case: tuple[int, set[int]]) -> None:
    count, guilty = case
    wanted = [name for number, name in enumerate(NAMES[:count]) if number in guilty]
    asked = []

    def parts(names: list[str]) -> bool:
        asked.append(names)
        return set(wanted) <= set(names)

    assert culprits(NAMES[:count], parts) == wanted
    assert len(asked) <= 60
