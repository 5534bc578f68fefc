"""One tree of errors. Every message says what was wrong, where, and what the user can do about it."""

from __future__ import annotations


class QuireError(Exception):
    """Base of everything Quire raises on purpose: the message is for the user, no stack trace
    needed.
    """


class ModelNotFoundError(QuireError):
    """No model under that name: the message lists what was tried and what to do."""


class ModelFormatError(QuireError):
    """A model's files are broken or don't belong together: names the file, the tensor, expected and
    got.
    """


class UnsupportedModelError(QuireError):
    """The files are sound, but this architecture, quantisation or tokenizer is not one Quire runs."""


class TemplateError(QuireError):
    """The chat template refused the messages or could not be rendered."""


class InvalidRequestError(QuireError, ValueError):
    """A request's field is out of range or of the wrong type; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def reason(error: Exception) -> str:
    """Why a file could not be read or written, in words: without [Errno 2] and without the path,
    which the message has already.
    """
    words = error.strerror if isinstance(error, OSError) else None
    return words[0].lower() + words[1:] if words else str(error)


class DeviceError(QuireError):
    """The device or dtype asked for is not to be had on this machine."""


class CapacityError(QuireError):
    """Model, cache or request can't fit into memory: the message shows the sum and what to change."""


class NoRoomNowError(CapacityError):
    """It would fit, but what others use is in the way: it may be tried again later."""


class EngineError(QuireError):
    """The engine failed while computing; requests in flight end with this."""


NO_TOKEN_LEFT = "no token is left to choose from: masks and bans forbid all"
"""How a request ends whose own parameters contradict each other, which shows only while it runs."""
