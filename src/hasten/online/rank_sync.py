"""Switches techniques on all ranks of a training at the same step: rank 0 decides, the others follow.

Rank 0 writes commands into the store by which the ranks found each other, one a slot, in order. The others read them
at the same places of the training as it wrote them: behind each step at which it was told of one, and behind each
pass. A switch is followed by everybody's answer, so that what fails in one rank is off in all before they train on.

A slot is taken once, by rank 0's command or by a rank that has waited too long for it (rank 0 has run out of batches,
or validates alone). Then nobody switches any more, and all go on with what all have on: ranks never hold different
plans, and never wait for each other for longer than that.

A technique may also fail inside a step, in one rank alone: workers that cannot be started, say. That rank goes on
without it at once, and tells rank 0 when it next reads commands; rank 0 then has it off in all, when it next lets them
train on. What rank 0 itself loses so, the others lose there too. Until then the ranks compute the same steps, each in
its own way: no technique changes what they send to each other.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.online.eligibility import installed, ranks_joined, ranks_started
from hasten.plan import Setting
from hasten.switchboard import Switchboard

if TYPE_CHECKING:
    from hasten.evidence.open_pass import OpenPass
    from hasten.evidence.recorder import Recorder
    from hasten.online.auto import Auto
    from hasten.online.options import AutoOptions

_NEVER = sys.maxsize
_SEARCHES = itertools.count()  # each fit of a process has slots of its own; all ranks have the same fits
_PATIENCE = 60.0  # seconds that a rank waits for another
_GIVEN_UP = json.dumps({"do": "given up"})


class Slots:
    """The commands that all ranks read, and what they answer.

    Args:
        store: That of the process group, or any other that all ranks share.
        patience: Seconds to wait for another rank.
    """

    def __init__(self, store: Any, patience: float = _PATIENCE) -> None:
        self._store, self._patience = store, timedelta(seconds=patience)
        self.number = 0  # of the next slot
        self._heard = 0  # complaints

    def write(self, command: dict[str, Any]) -> bool:
        """Take the next slot; return whether nobody had given it up."""
        text, key = json.dumps(command), f"slot {self.number}"
        self.number += 1
        try:
            return bool(self._store.compare_set(key, "", text).decode() == text)
        except RuntimeError:  # the store is gone: the group was taken down before the process ends
            return False

    def read(self) -> dict[str, Any]:
        """Return the next slot's command; where it does not come, take the slot and give up."""
        key = f"slot {self.number}"
        self.number += 1
        try:
            self._store.wait([key], self._patience)
            text = self._store.get(key).decode()
        except RuntimeError:  # torch's for time that is over, and for a store that is gone with rank 0
            text = self._give_up(key)
        return dict(json.loads(text))

    def _give_up(self, key: str) -> str:
        """Take a slot whose command does not come; return the command if it came just now."""
        try:
            return str(self._store.compare_set(key, "", _GIVEN_UP).decode())
        except RuntimeError:
            return _GIVEN_UP

    def answer(self, rank: int, broken: Iterable[str]) -> None:
        """Say which techniques do not work in this rank, behind the last command."""
        self._store.set(f"answer {self.number} {rank}", json.dumps(sorted(broken)))

    def answers(self, ranks: int) -> set[str] | None:
        """Return what does not work in any other rank; None where one does not answer."""
        keys = [f"answer {self.number} {rank}" for rank in range(1, ranks)]
        try:
            self._store.wait(keys, self._patience / 2)  # before others that have answered give up the next slot
            return {name for key in keys for name in json.loads(self._store.get(key))}
        except RuntimeError:
            return None

    def complain(self, names: Iterable[str]) -> None:
        """Say which techniques failed in this rank inside a step."""
        try:
            number = self._store.add("complaints", 1)
            self._store.set(f"complaint {number}", json.dumps(sorted(names)))
        except RuntimeError:  # the store is gone with rank 0, which the next command says
            return

    def complaints(self) -> set[str]:
        """Return what failed in other ranks since this was asked last, without waiting."""
        names: set[str] = set()
        try:
            while self._store.check([key := f"complaint {self._heard + 1}"]):
                self._heard += 1
                names.update(json.loads(self._store.get(key)))
        except RuntimeError:  # the store is gone, which the next command says
            pass
        return names


class LeadingBoard(Switchboard):
    """The switchboard of rank 0: what is switched on it is switched in all ranks.

    Attributes:
        slots: Where commands are written; None before the ranks are known.
        ranks: How many there are.
        lost: Why the others can no longer be led; "" while they are.
    """

    slots: Slots | None = None
    ranks = 1
    lost = ""
    _told: frozenset[str] = frozenset()  # of what is broken, the others know this

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """Switch here and in all other ranks; nothing is done once they can no longer be led."""
        if self.slots is None:
            super().switch(wanted)
            return
        if self.lost or not self._command({"do": "switch", "on": dict(wanted)}):
            return
        super().switch(wanted)
        broken = self.slots.answers(self.ranks)
        if broken is None and self._command({"do": "switch", "on": {}}):
            super().switch({})
            self._command({"do": "over"})
            self.lost = "another rank did not answer in time; all is off in all ranks"
        elif broken is not None:
            self._lose(broken)

    def lead(self, slots: Slots | None, ranks: int) -> None:
        """Lead so many ranks from here on; None: there are no others."""
        self.slots, self.ranks, self.lost = slots, ranks, ""
        self._told = frozenset()

    def go_on(self, until: int) -> None:
        """Let the others train on: they need not ask again before so many steps are over.

        What failed in a step, here or in another rank, is off in all before.
        """
        if self.slots is not None and not self.lost:
            self._lose(self.slots.complaints())
        if self.slots is not None and not self.lost:
            self._command({"do": "go on", "until": until})

    def _lose(self, elsewhere: Iterable[str]) -> None:
        """Have off in all ranks what failed in one: these in another, or any in this."""
        fail(self, elsewhere)
        if new := frozenset(self.broken) - self._told:
            self._told |= new
            self._command({"do": "broken", "names": sorted(new)})

    def over(self) -> None:
        """Nothing will be switched any more."""
        super().over()
        self.dismiss()

    def dismiss(self) -> None:
        """Tell the others that nothing will be switched any more."""
        if self.slots is not None and not self.lost:
            self._command({"do": "over"})
        self.slots = None

    def _command(self, command: dict[str, Any]) -> bool:
        assert self.slots is not None
        if not self.slots.write(command):
            self.lost = "another rank waited too long for this one; what is on stays on in all ranks"
        return not self.lost


def fail(board: Switchboard, names: Iterable[str]) -> None:
    """Switch these techniques off for good: they failed in another rank."""
    for name in sorted(set(names) - set(board.broken)):
        first = next((one for one in board.techniques if one.name == name and one.switchable), None)
        if first is not None:
            board.failed(first, HastenError("it failed in another rank"))


def board_of(options: AutoOptions, recorder: Recorder | None) -> Switchboard:
    """The Run of a process that is switched; that of rank 0 has the others switched with it."""
    leads = ranks_started() > 1 and os.environ.get("RANK", "0") == "0" and not options.replay
    return (LeadingBoard if leads else Switchboard)(installed(options), recorder)


class Leading:
    """Rank 0: tunes, and has the others switched with it.

    Args:
        auto: Decides.
        board: The one that it switches.
    """

    def __init__(self, auto: Auto, board: LeadingBoard) -> None:
        self._auto, self._board = auto, board
        self._until = 0

    def on_step(self, steps: int) -> int | None:
        """A step is over."""
        if not self._until:
            commands = slots()
            self._board.lead(commands, ranks_joined())
            if commands is None and ranks_joined() > 1:
                self._auto.abandon("the ranks were started again, over the store of those before")
                self._until = _NEVER
        if steps < self._until:
            return self._until
        again = self._auto.on_step(steps)
        self._until = steps + 1 if again is None else again
        self._go_on()
        return self._until

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """A pass is over."""
        self._auto.on_pass(opened, began)
        if not began and opened.trained and self._until:
            self._go_on()

    def close(self) -> None:
        """The process ends, or the fit."""
        self._auto.close()
        self._board.dismiss()

    def _go_on(self) -> None:
        if self._until >= _NEVER:
            self._board.dismiss()
            return
        self._board.go_on(self._until)
        if self._board.lost:
            self._auto.abandon(self._board.lost)
            self._until = _NEVER


class Following:
    """Any other rank: does as rank 0 did.

    Args:
        board: Switches techniques.
        recorder: Counts steps.
        rank: Of this process.
        over: Called when nobody needs to hear of steps any more.
    """

    def __init__(self, board: Switchboard, recorder: Recorder, rank: int, over: Callable[[], None]) -> None:
        self._board, self._rank, self._over = board, rank, over
        recorder.may_rest = False
        self._slots: Slots | None = None
        self._until = 0
        self._told: set[str] = set()  # of what is broken, rank 0 knows this

    def on_step(self, steps: int) -> int | None:
        """A step is over."""
        if self._slots is None and not self._until:
            self._slots = slots()
        if steps >= self._until:
            self._obey()
        return self._until

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """A pass is over."""
        if not began and opened.trained and self._until:
            self._obey()

    def close(self) -> None:
        """The process ends, or the fit."""
        self._slots, self._until = None, _NEVER

    def _obey(self) -> None:
        """Do what rank 0 did, until it went on."""
        if self._slots is not None and (new := set(self._board.broken) - self._told):
            self._slots.complain(new)
            self._told |= new
        while self._slots is not None:
            command = self._slots.read()
            if command["do"] == "go on":
                self._until = command["until"]
                return
            if command["do"] == "switch":
                self._switch(command["on"])
                self._slots.answer(self._rank, self._board.broken)
                self._told |= set(self._board.broken)
            elif command["do"] == "broken":
                fail(self._board, command["names"])
                self._told |= set(command["names"])
            else:
                self.close()
                self._over()
        self._until = _NEVER

    def _switch(self, wanted: dict[str, Setting]) -> None:
        try:
            self._board.switch(wanted)
        except HastenError as error:  # another machine, where something of it cannot be switched
            for technique in self._board.techniques:
                if technique.name in wanted:
                    self._board.failed(technique, error)
            for name in wanted:
                self._board.broken.setdefault(name, str(error))


def slots() -> Slots | None:
    """Return the commands of this process's group; None where it has none, or where earlier ranks have left theirs.

    torchrun hands ranks that it starts again the store of those before: their commands would be taken for rank 0's.
    """
    if ranks_joined() < 2:
        return None
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = PrefixStore(f"hasten switches {next(_SEARCHES)} of {dist.get_world_size()}", _get_default_store())
    return Slots(store) if store.add(f"here {dist.get_rank()}", 1) == 1 else None
