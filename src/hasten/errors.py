"""The errors a person may see: each says what was wrong, where, and what to do."""


class HastenError(Exception):
    """Something hasten cannot go on with; printed as one message, never as a traceback.

    Args:
        message: What was wrong and where.
        fix: What the person can do about it.
        code: Exit code of the command, never 0.
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
"""What errors say when memory has run out: torch's allocators for GPUs and CPUs, Python, cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, says that memory has run out."""
    while error is not None:
        if any(word in f"{type(error).__name__}: {error}" for word in OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


_REFUSED_WORDS = ("ermission", "No such file", "CalledProcessError", "EOF")


def script_fails(reason: str, log: str, resumed: bool = False) -> HastenError:
    """Return the error for a script that fails in a trial without any technique.

    Args:
        reason: What it raised, and where.
        log: Its last words, or nothing.
        resumed: Whether it was to go on from what it had saved in a run before that did not fail.
    """
    sandbox = ""
    if any(word in reason + log for word in _REFUSED_WORDS):  # `h5py.File("out.h5", "w")`, `input()`
        sandbox = (
            "\n  If it works without hasten: in a trial, what native code or a subprocess writes outside the scratch "
            "folder is refused, and there is no input to read"
        )
    said = f"\nIts last words:\n{log}" if log else ""
    when = ", told to go on from what it saved," if resumed else ""
    return HastenError(
        f"the script{when} fails by itself, before hasten changed anything: {reason}{said}", f"mend it first{sandbox}"
    )
