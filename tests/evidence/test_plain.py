"""Plain data: every text in it can be changed, and JSON gives back what it was made of."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hasten.evidence.plain import tuples, with_texts

numbers = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()


@dataclass(frozen=True)
class Row:
    """A part of a report."""

    name: str
    values: tuple[Any, ...] = ()


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(st.sampled_from(["/home/me/a", "/home/me/b"]), inner)
            | st.builds(Row, st.just("/home/me/row"), st.tuples(inner))
        ),
        max_leaves=12,
    )


@given(nested(numbers | st.just("/home/me/file")))
def test_no_text_is_left_out_wherever_it_stands(value: Any) -> None:
    """Behind a number in a row too: a path of the machine would stand in a report."""
    changed = with_texts(value, lambda text: text.replace("/home/me/", ""))
    assert "/home/me" not in repr(changed)
    assert repr(changed) == repr(value).replace("/home/me/", "")


@given(nested(numbers | st.text()).map(lambda value: Row("row", (value,))))
def test_what_json_gave_back_is_what_it_was(row: Row) -> None:
    plain = dataclasses.asdict(row)
    assert repr(tuples(json.loads(json.dumps(plain)))) == repr(plain)
