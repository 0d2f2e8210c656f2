"""Which structures a batch may have, to be split."""

import dataclasses
from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from hasten import HastenError
from hasten.trainer.microbatch.splitting import samples_in, split

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    names: list


def rows(count, *more):
    return torch.arange(count * 2 * max(1, len(more))).reshape(count, -1)


def joined(parts):
    """The other way round."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.dim() else first
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    return first


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def batches(count):
    """Structures of tensors with `count` rows, and of texts, one a sample."""
    texts = st.just([f"text {number}" for number in range(count)])
    leaves = st.builds(lambda width: torch.arange(count * width).reshape(count, width), st.integers(1, 3))
    alone = st.sampled_from([torch.tensor(3.0), "a name", 5, None])
    return st.recursive(
        leaves | texts | alone,
        lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1) | st.tuples(inner, inner),
        max_leaves=6,
    ).map(lambda inner: {"first": rows(count), "rest": inner})


@pytest.mark.parametrize("rest", [
    (torch.tensor([[0], [1]]), torch.tensor(3.0)),
    (["a", "b"], 5),
    (["a", "b"], torch.tensor(3.0)),
    ("a name", [7, 8]),
], ids=str)  # fmt: skip
def test_columns_of_two_samples_beside_what_is_alike_for_both(rest):
    batch = {"first": rows(2), "rest": rest}
    assert same(joined(split(batch, 1)), batch)


# Not 2: of two samples, two texts may be an entry for each of them.
@given(st.data(), st.integers(3, 9), st.integers(1, 10))
def test_parts_joined_are_the_batch(data, count, size):
    batch = data.draw(batches(count))
    parts = split(batch, size)
    assert [samples_in(part) for part in parts] == [min(size, count - start) for start in range(0, count, size)]
    assert same(joined(parts), batch)


def test_containers_keep_their_classes_and_parts_share_memory():
    x = rows(5)
    for batch in (Pair(x, x), OrderedDict(x=x), Sample(x, list("abcde")), [x, x]):
        first, second = split(batch, 3)
        assert type(first) is type(batch)
        assert [samples_in(first), samples_in(second)] == [3, 2]
    assert split(Sample(x, list("abcde")), 3)[1].names == ["d", "e"]
    assert split((x,), 3)[1][0].data_ptr() == x[3:].data_ptr()
    assert split({"x": x, "a": numpy.arange(5)}, 3)[1]["a"].tolist() == [3, 4]


def test_a_batch_that_is_small_enough_is_itself_the_part():
    batch = (rows(4), rows(4))
    assert split(batch, 4)[0] is batch


def test_a_detectors_targets_are_an_entry_a_sample():
    images = torch.zeros(4, 3, 8, 8)
    targets = [{"boxes": torch.zeros(count, 4)} for count in (1, 0, 3, 4)]
    first, second = split((images, targets), 3)
    assert [len(first[1]), len(second[1])] == [3, 1]
    assert second[1][0]["boxes"].shape == (4, 4)


def image(channels=3, side=8):
    return torch.zeros(channels, side, side)


LISTS = {
    "images and labels": lambda n: ([image() for _ in range(n)], list(range(n))),
    "images and labels in a tensor": lambda n: [[image() for _ in range(n)], torch.arange(n)],
    "images and boxes, as many as channels": lambda n: (
        [image() for _ in range(n)],
        [{"boxes": torch.zeros(3, 4)} for _ in range(n)],
    ),
    "images and masks": lambda n: {"x": [image() for _ in range(n)], "y": [image(1) for _ in range(n)]},
    "images of several sizes": lambda n: ([image(side=4 + i) for i in range(n)], [torch.tensor(i) for i in range(n)]),
    "sentences": lambda n: ([torch.arange(2 + i) for i in range(n)], [torch.arange(2 + i) for i in range(n)]),
    "sentences and a tensor": lambda n: ([torch.arange(9) for _ in range(n)], torch.arange(n)),
}


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("what", LISTS)
def test_lists_with_an_entry_a_sample_are_cut_between_entries(what, count):
    batch = LISTS[what](count)
    parts = split(batch, 2)
    assert samples_in(batch) == count
    columns = [tuple(part.values()) if isinstance(part, dict) else tuple(part) for part in (batch, *parts)]
    assert same(joined(columns[1:]), columns[0])
    assert [len(part[0]) for part in columns[1:]] == [min(2, count - start) for start in range(0, count, 2)]
    assert columns[1][0][0] is columns[0][0][0]


@pytest.mark.parametrize("make", [lambda i: (image(), i), lambda i: {"x": image(), "name": f"{i}"}])
def test_a_list_of_samples_as_a_dataset_gave_them(make):
    batch = [make(i) for i in range(5)]
    assert samples_in(batch) == 5
    assert split(batch, 2) == [batch[:2], batch[2:4], batch[4:]]


def test_pairs_of_columns_are_columns():
    pairs = [[rows(8), rows(8)], [rows(8), rows(8)]]
    assert [samples_in(part) for part in split(pairs, 5)] == [5, 3]
    views = [{"ids": rows(8), "mask": rows(8)}, {"ids": rows(8), "mask": rows(8)}]
    assert split(views, 5)[1][1]["mask"].shape == (3, 2)
    with pytest.raises(HastenError, match="8 samples by its first tensor"):  # of several loaders
        split({"labelled": [rows(8), rows(8)], "more": [rows(32), rows(32)]}, 4)


def test_columns_of_two_samples_are_columns():
    first, second = split([rows(2), rows(2)], 1)
    assert [len(part) for part in (*first, *second)] == [1, 1, 1, 1]
    nested = split({"inputs": [rows(2), rows(2)], "y": rows(2)}, 1)
    assert [len(part["inputs"][1]) for part in nested] == [1, 1]


def test_texts_alone():
    assert split(["a", "b", "c"], 2) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.zeros(4, 2), torch.zeros(7)), r"4 samples by its first tensor.*\(7,\)"),
        ([torch.zeros(2, 2), torch.zeros(7)], r"\(7,\)"),
        ((torch.zeros(4, 2), pack_sequence([torch.zeros(2), torch.zeros(1)])), "PackedSequence"),
        (object(), "cannot tell how many samples a object has"),
    ],
)
def test_what_has_no_row_a_sample_is_refused(batch, said):
    with pytest.raises(HastenError, match=f"(?s){said}.*define split_batch"):
        split(batch, 1)
