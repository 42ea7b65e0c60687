"""How the core refuses a request: a reason of the errors table and a message for the caller."""


class RefusedError(Exception):
    """A request that cannot be taken. The message never holds the caller's input."""

    def __init__(self, reason: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
