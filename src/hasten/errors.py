"""Errors shown to the user: each says what went wrong, where, and how to fix it."""


class HastenError(Exception):
    """An error that stops hasten; commands print it as one message, without a traceback.

    Args:
        message: What went wrong and where.
        fix: What the user can do about it.
        code: The command's exit code, never 0.
    """

    def __init__(self, message: str, fix: str = "", code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.code = code

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message


OUT_OF_MEMORY = (
    "OutOfMemoryError", "MemoryError", "out of memory", "annot allocate memory", "can't allocate memory",
    "_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""Texts in errors that mean memory has run out: from torch's GPU and CPU allocators, Python, cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or a cause in its `__cause__` chain, says that memory has run out."""
    while error is not None:
        if any(word in f"{type(error).__name__}: {error}" for word in OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


_REFUSED_WORDS = ("ermission", "No such file", "CalledProcessError", "EOF")


def script_fails(reason: str, log: str, resumed: bool = False) -> HastenError:
    """Return the error for a script that fails in a trial even without any technique.

    Args:
        reason: The exception that the script raised, and where.
        log: The end of the script's output, or "".
        resumed: Whether the script was resuming from what an earlier run, which did not fail, had saved.
    """
    sandbox = ""
    # The trial's sandbox may be to blame: it refuses writes by native code (`h5py.File("out.h5", "w")`) outside the
    # scratch folder, and stdin is empty (`input()` raises EOFError).
    if any(word in reason + log for word in _REFUSED_WORDS):
        sandbox = (
            "\n  If it works without hasten: in a trial, what native code or a subprocess writes outside the scratch "
            "folder is refused, and there is no input to read"
        )
    last_words = f"\nIts last words:\n{log}" if log else ""
    when = ", resuming from what it saved," if resumed else ""
    return HastenError(
        f"the script{when} fails without any plan, before hasten changed anything: {reason}{last_words}",
        f"fix it first{sandbox}",
    )
