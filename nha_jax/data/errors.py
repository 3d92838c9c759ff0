"""The error that every problem with the user's data is reported as."""


class DataError(ValueError):
    """The data cannot be used as configured; the message says in one sentence what to change."""
