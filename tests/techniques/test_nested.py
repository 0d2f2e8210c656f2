"""Tensors inside batches are found and replaced, and nothing else is touched."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import torch

from hasten.techniques.nested import map_tensors, tensors_in


class Pair(NamedTuple):
    """Two things."""

    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """A frozen batch."""

    image: Any
    label: Any


class Opaque:
    """Holds a tensor where nobody looks."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)


def test_everything_of_its_kind_is_replaced_and_the_original_stays() -> None:
    one = torch.ones(2)
    opaque = Opaque()
    batch = {
        "a": [one, "text", None, 3],
        "b": Pair(one, (one,)),
        "c": collections.UserDict(x=one),
        "d": Sample(one, "cat"),
        "e": collections.OrderedDict(y=[[one]]),
        "f": opaque,
        "g": types.MappingProxyType({"x": one}),
        "h": torch.nn.utils.rnn.pack_sequence([one]),
        "i": collections.deque([one]),
        "j": types.SimpleNamespace(x=one, name="cat"),
        "k": torch.distributions.Independent(torch.distributions.Normal(one, one), 1),
    }
    new = map_tensors(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, batch)
    assert batch["a"][0] is one
    assert batch["d"].image is one
    assert (new["a"][0].tolist(), new["a"][1:]) == ([2, 2], ["text", None, 3])
    assert isinstance(new["b"], Pair)
    assert new["b"].right[0].tolist() == [2, 2]
    assert type(new["c"]) is collections.UserDict
    assert new["c"]["x"].tolist() == [2, 2]
    assert (new["d"].image.tolist(), new["d"].label) == ([2, 2], "cat")
    assert type(new["e"]) is collections.OrderedDict
    assert new["e"]["y"][0][0].tolist() == [2, 2]
    assert new["f"] is opaque
    assert new["g"] is batch["g"]
    assert new["h"].data.tolist() == [2, 2]
    assert new["i"][0].tolist() == [2, 2]
    assert (new["j"].x.tolist(), new["j"].name, batch["j"].x) == ([2, 2], "cat", one)
    assert (new["k"].mean.tolist(), batch["k"].mean.tolist()) == ([2, 2], [1, 1])


def test_what_does_not_change_is_the_same_object() -> None:
    batch = {"a": [torch.ones(1), Pair(1, torch.zeros(1))], "d": Sample(torch.ones(1), 0)}
    assert map_tensors(lambda tensor: tensor, batch) is batch
    assert len(list(tensors_in(batch))) == 3
