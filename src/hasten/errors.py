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
