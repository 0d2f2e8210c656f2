"""Open the store through which ranks find each other, served by rank 0 or by a launcher."""

from __future__ import annotations

import socket
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from hasten.errors import HastenError
from hasten.parallel.place import RankPlace

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]


def serve_store(size: int) -> TCPStore:
    """Return a new store for the ranks of this machine, on a free port.

    It listens before the port is published, so no other program can take the port. Other machines cannot reach it.
    It is served until the returned object is deleted.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Give torch a listening socket. Its own would listen on all addresses, by IPv6, and ask the DNS for the name of
    # each rank that connects (::ffff:127.0.0.1 is in nobody's /etc/hosts): if the DNS does not answer, that takes five
    # or ten seconds per rank.
    listening = socket.create_server(("127.0.0.1", 0), backlog=max(128, size))
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def open_store(place: RankPlace, limit: timedelta) -> Store:
    """Open the store through which the ranks find each other, and wait for all of them. Return it.

    Raises:
        HastenError: It cannot be reached, or some ranks did not join within `limit`; names them.
    """
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    try:
        if place.launcher == "hasten":
            store: Store = TCPStore(place.address, place.port, place.size, is_master=False, timeout=limit)
        else:
            url = "env://" if place.launcher == "torchrun" else f"tcp://{place.address}:{place.port}"
            store, _, _ = next(rendezvous(url, place.rank, place.size, timeout=limit))
    except DistNetworkError as error:
        raise _unreachable(place, str(error)) from error
    return _own_part(store, place, limit)


def _own_part(store: Store, place: RankPlace, limit: timedelta) -> Store:
    """Return a part of the store that only these ranks use, once all of them have joined.

    torchrun's agent restarts ranks, and by default gives each generation the same store. Keys of earlier ranks point to
    processes that are gone; ranks that read them would wait forever. So rank 0 draws a random name for the meeting and
    publishes it. The others register under that name, and rank 0 publishes the list of all. A rank that read an old
    name does not find itself in the list, and continues to poll for the new one.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = PrefixStore("hasten", store)
    store.set_timeout(limit)
    myself = uuid.uuid4().hex
    if place.rank == 0:
        store.set("meeting", myself)
    # Poll in Python, where signals are handled, rather than wait inside torch.
    end = time.monotonic() + limit.total_seconds()
    while True:
        name = store.get("meeting").decode() if store.check(["meeting"]) else ""
        if name:
            store.set(f"{name}/here/{place.rank}", myself)
        missing = [rank for rank in range(place.size) if not (name and store.check([f"{name}/here/{rank}"]))]
        if place.rank == 0 and not missing:
            store.set(f"{name}/all", ",".join(store.get(f"{name}/here/{r}").decode() for r in range(place.size)))
        if name and store.check([f"{name}/all"]) and myself in store.get(f"{name}/all").decode().split(","):
            return PrefixStore(name, store)
        if time.monotonic() > end:
            missing = [rank for rank in missing if rank != place.rank] or [0]
            absent = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise HastenError(
                f"After {limit.total_seconds():g} s {absent} of {place.size} had not joined rank {place.rank} "
                f"at {place.address}:{place.port}.",
                "Look at what those ranks wrote: every rank must run the same script up to the Trainer's first call.",
            )
        time.sleep(0.02)


def _unreachable(place: RankPlace, reason: str) -> HastenError:
    """Return the error for a store that this rank cannot open or reach."""
    where = f"{place.address}:{place.port}"
    if "EADDRINUSE" in reason:
        return HastenError(
            f"Rank {place.rank} cannot open {where}, where the {place.size} ranks are to meet: another program listens "
            "there.",
            "Set MASTER_PORT to a free port on all machines (torchrun: --master-port); a run that was just killed may "
            "hold it for a moment: `ss -ltnp` names the program.",
            code=1,
        )
    return HastenError(
        f"Rank {place.rank} of {place.size} cannot meet the others at {where}: {reason.splitlines()[0]}",
        "Rank 0 must run on that machine, and this one must reach it there: look for a firewall, another network "
        "interface, or a rank 0 that has ended.",
        code=1,
    )
