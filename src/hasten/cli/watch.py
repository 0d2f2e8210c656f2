"""`hasten watch`: show a running training live in the browser."""

from __future__ import annotations

import signal
import sys
import webbrowser
from pathlib import Path

import typer


def watch(
    place: Path = typer.Argument(
        Path(), help="The folder the run leaves its evidence in, or one of its files.", metavar="FOLDER"
    ),
    port: int = typer.Option(0, min=0, max=65535, help="Port on 127.0.0.1; 0: one that is free.", metavar="N"),
    open_page: bool = typer.Option(False, "--open", help="Open the page in the browser."),
) -> None:
    """Show a running training, as `hasten doctor` would, on a local web page; Ctrl-C ends the page, not the run.

    The run must be started by `hasten run --evidence`, `hasten doctor --evidence`, or a Trainer with a StepMonitor. The
    page is on 127.0.0.1 only, needs the token in the printed address, and can change nothing.

    From another machine: ssh -L 8800:127.0.0.1:8800 HOST hasten watch --port 8800 FOLDER

    Example: hasten watch runs/today
    """
    from hasten.doctor.views.following import FollowedRun
    from hasten.doctor.views.watch import Watch

    followed = FollowedRun(place)
    served = Watch(followed.body, followed.state, followed.page, port)
    print(served.url, flush=True)
    print(f"hasten: watching {place.resolve()}; Ctrl-C ends this page, not the run", file=sys.stderr, flush=True)
    if open_page:
        webbrowser.open(served.url)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        served.serve()
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
