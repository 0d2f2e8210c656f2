"""Switch techniques on all ranks of a training at the same step: rank 0 decides, the others follow.

Rank 0 writes commands into the process group's store, one per numbered slot. The other ranks read the slots in order,
at the same places of the training: after the steps that rank 0 named, and after each pass. Every rank answers a switch,
so that a technique that fails in one rank is off in all before training continues.

A slot is taken once: by rank 0's command, or by a rank that has waited too long for it (rank 0 has run out of batches,
or validates alone). After the latter nobody switches any more, and all ranks continue with the set that all have on. So
ranks never run different plans, and never wait for each other longer than that.

A technique may also fail inside a step in one rank alone (workers that cannot be started). That rank continues without
it at once, and complains to rank 0 when it next reads commands; rank 0 then switches it off in all ranks. Until then
the ranks compute the same steps in different ways, which is safe: no technique changes what ranks send to each other.
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
_SEARCHES = itertools.count()  # numbers the fits of a process, each with slots of its own; all ranks run the same fits
_PATIENCE = 60.0  # seconds that a rank waits for another
_GIVEN_UP = json.dumps({"do": "given up"})


class Slots:
    """Commands from rank 0 and answers to them, in a store that all ranks share.

    Args:
        store: The process group's store, or any other that all ranks share.
        patience: Seconds to wait for another rank.
    """

    def __init__(self, store: Any, patience: float = _PATIENCE) -> None:
        self._store, self._patience = store, timedelta(seconds=patience)
        self.number = 0  # of the next slot
        self._complaints_read = 0  # complaints

    def write(self, command: dict[str, Any]) -> bool:
        """Write a command to the next slot. Return False if a rank has given that slot up."""
        text, key = json.dumps(command), f"slot {self.number}"
        self.number += 1
        try:
            return bool(self._store.compare_set(key, "", text).decode() == text)
        except RuntimeError:  # the store is gone: the process group was destroyed before the process ended
            return False

    def read(self) -> dict[str, Any]:
        """Return the next slot's command. If it does not come in time, take the slot and give up."""
        key = f"slot {self.number}"
        self.number += 1
        try:
            self._store.wait([key], self._patience)
            text = self._store.get(key).decode()
        except RuntimeError:  # torch raises it for a time-out, and for a store that is gone with rank 0
            text = self._give_up(key)
        return dict(json.loads(text))

    def _give_up(self, key: str) -> str:
        """Take a slot whose command did not come. Return its command if it came just now, else "given up"."""
        try:
            return str(self._store.compare_set(key, "", _GIVEN_UP).decode())
        except RuntimeError:
            return _GIVEN_UP

    def answer(self, rank: int, broken: Iterable[str]) -> None:
        """Answer the last command with the names of the techniques that do not work in this rank."""
        self._store.set(f"answer {self.number} {rank}", json.dumps(sorted(broken)))

    def answers(self, ranks: int) -> set[str] | None:
        """Return the techniques that do not work in some other rank; None if a rank does not answer."""
        keys = [f"answer {self.number} {rank}" for rank in range(1, ranks)]
        try:
            # Half the patience: ranks that have answered already wait for the next slot, and must not give it up first.
            self._store.wait(keys, self._patience / 2)
            return {name for key in keys for name in json.loads(self._store.get(key))}
        except RuntimeError:
            return None

    def complain(self, names: Iterable[str]) -> None:
        """Report the techniques that failed in this rank inside a step."""
        try:
            number = self._store.add("complaints", 1)
            self._store.set(f"complaint {number}", json.dumps(sorted(names)))
        except RuntimeError:  # the store is gone with rank 0: the next command notices
            return

    def complaints(self) -> set[str]:
        """Return the techniques that other ranks reported since the last call. Does not wait."""
        names: set[str] = set()
        try:
            while self._store.check([key := f"complaint {self._complaints_read + 1}"]):
                self._complaints_read += 1
                names.update(json.loads(self._store.get(key)))
        except RuntimeError:  # the store is gone: the next command notices
            pass
        return names


class LeadingBoard(Switchboard):
    """Switchboard of rank 0, which switches all ranks.

    Attributes:
        slots: Slots for commands; None before the ranks are known.
        ranks: Number of ranks.
        lost_reason: Why the others can no longer be led; "" while they can.
    """

    slots: Slots | None = None
    ranks = 1
    lost_reason = ""
    _known_broken: frozenset[str] = frozenset()  # the broken techniques that the other ranks know of

    def switch(self, settings: Mapping[str, Setting]) -> None:
        """Switch here and in all other ranks. Do nothing once they can no longer be led."""
        if self.slots is None:
            super().switch(settings)
            return
        if self.lost_reason or not self._command({"do": "switch", "on": dict(settings)}):
            return
        super().switch(settings)
        broken = self.slots.answers(self.ranks)
        if broken is None and self._command({"do": "switch", "on": {}}):
            super().switch({})
            self._command({"do": "over"})
            self.lost_reason = "another rank did not answer in time; all is off in all ranks"
        elif broken is not None:
            self._lose(broken)

    def lead(self, slots: Slots | None, ranks: int) -> None:
        """Lead `ranks` ranks from here on by these slots; None if there are no others."""
        self.slots, self.ranks, self.lost_reason = slots, ranks, ""
        self._known_broken = frozenset()

    def go_on(self, until: int) -> None:
        """Let the other ranks train until step `until`, when they read commands again.

        Before that, switch off in all ranks what failed inside a step in any of them.
        """
        if self.slots is not None and not self.lost_reason:
            self._lose(self.slots.complaints())
        if self.slots is not None and not self.lost_reason:
            self._command({"do": "go on", "until": until})

    def _lose(self, elsewhere: Iterable[str]) -> None:
        """Switch off in all ranks the techniques that failed elsewhere, and those that failed here."""
        fail(self, elsewhere)
        if newly_broken := frozenset(self.broken) - self._known_broken:
            self._known_broken |= newly_broken
            self._command({"do": "broken", "names": sorted(newly_broken)})

    def teardown(self) -> None:
        """End switching, here and in all other ranks."""
        super().teardown()
        self.dismiss()

    def dismiss(self) -> None:
        """Tell the others that nothing will be switched any more."""
        if self.slots is not None and not self.lost_reason:
            self._command({"do": "over"})
        self.slots = None

    def _command(self, command: dict[str, Any]) -> bool:
        assert self.slots is not None
        if not self.slots.write(command):
            self.lost_reason = "another rank waited too long for this one; what is on stays on in all ranks"
        return not self.lost_reason


def fail(board: Switchboard, names: Iterable[str]) -> None:
    """Switch these techniques off for good, because they failed in another rank."""
    for name in sorted(set(names) - set(board.broken)):
        broken = next(
            (technique for technique in board.techniques if technique.name == name and technique.switchable), None
        )
        if broken is not None:
            board.failed(broken, HastenError("it failed in another rank"))


def board_of(options: AutoOptions, recorder: Recorder | None) -> Switchboard:
    """Return the switchboard of a process under `--auto` or `--replay`. Rank 0's switches all ranks."""
    leads = ranks_started() > 1 and os.environ.get("RANK", "0") == "0" and not options.replay
    return (LeadingBoard if leads else Switchboard)(installed(options), recorder)


class LeadingRank:
    """Rank 0's listener: tunes, and makes the other ranks follow.

    Args:
        auto: The tuning.
        board: The switchboard that it switches.
    """

    def __init__(self, auto: Auto, board: LeadingBoard) -> None:
        self._auto, self._board = auto, board
        self._until = 0

    def on_step(self, steps: int) -> int | None:
        """Tune after this step, then let the other ranks go on. Return the number of the step to be called after."""
        if not self._until:
            commands = slots()
            self._board.lead(commands, ranks_joined())
            if commands is None and ranks_joined() > 1:
                self._auto.abandon("the ranks were started again, over the store of those before")
                self._until = _NEVER
        if steps < self._until:
            return self._until
        next_call = self._auto.on_step(steps)
        self._until = steps + 1 if next_call is None else next_call
        self._go_on()
        return self._until

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """Tell the tuning of the pass; after a training pass, let the other ranks go on."""
        self._auto.on_pass(opened, began)
        if not began and opened.trained and self._until:
            self._go_on()

    def close(self) -> None:
        """End the tuning, as the process or the fit ends."""
        self._auto.close()
        self._board.dismiss()

    def _go_on(self) -> None:
        if self._until >= _NEVER:
            self._board.dismiss()
            return
        self._board.go_on(self._until)
        if self._board.lost_reason:
            self._auto.abandon(self._board.lost_reason)
            self._until = _NEVER


class FollowingRank:
    """Listener of any other rank: carries out rank 0's commands.

    Args:
        board: The switchboard of this rank.
        recorder: Counts steps.
        rank: Rank of this process.
        stop_listening: Called when no further step needs to be reported.
    """

    def __init__(self, board: Switchboard, recorder: Recorder, rank: int, stop_listening: Callable[[], None]) -> None:
        self._board, self._rank, self._stop_listening = board, rank, stop_listening
        recorder.may_rest = False
        self._slots: Slots | None = None
        self._until = 0
        self._known_broken: set[str] = set()  # the broken techniques that rank 0 knows of

    def on_step(self, steps: int) -> int | None:
        """Carry out commands that are due after this step. Return the number of the step to be called after."""
        if self._slots is None and not self._until:
            self._slots = slots()
        if steps >= self._until:
            self._obey()
        return self._until

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """Carry out the commands that follow a training pass."""
        if not began and opened.trained and self._until:
            self._obey()

    def close(self) -> None:
        """Stop following, as the process or the fit ends."""
        self._slots, self._until = None, _NEVER

    def _obey(self) -> None:
        """Carry out commands up to the next "go on"."""
        if self._slots is not None and (newly_broken := set(self._board.broken) - self._known_broken):
            self._slots.complain(newly_broken)
            self._known_broken |= newly_broken
        while self._slots is not None:
            command = self._slots.read()
            if command["do"] == "go on":
                self._until = command["until"]
                return
            if command["do"] == "switch":
                self._switch(command["on"])
                self._slots.answer(self._rank, self._board.broken)
                self._known_broken |= set(self._board.broken)
            elif command["do"] == "broken":
                fail(self._board, command["names"])
                self._known_broken |= set(command["names"])
            else:
                self.close()
                self._stop_listening()
        self._until = _NEVER

    def _switch(self, settings: dict[str, Setting]) -> None:
        try:
            self._board.switch(settings)
        except HastenError as error:  # this rank's machine differs from rank 0's, and lacks one of the settings
            for technique in self._board.techniques:
                if technique.name in settings:
                    self._board.failed(technique, error)
            for name in settings:
                self._board.broken.setdefault(name, str(error))


def slots() -> Slots | None:
    """Return the slots of this process group; None if there is no group, or if earlier ranks used its store.

    Ranks that torchrun restarts get the store of those before, whose commands they would take for rank 0's.
    """
    if ranks_joined() < 2:
        return None
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = PrefixStore(f"hasten switches {next(_SEARCHES)} of {dist.get_world_size()}", _get_default_store())
    return Slots(store) if store.add(f"here {dist.get_rank()}", 1) == 1 else None
