"""The errors that commtrace raises, all under one root."""


class CommtraceError(Exception):
    """Root of every error raised by commtrace."""


class ConfigurationError(CommtraceError, ValueError):
    """An option or environment variable has an unusable value; the message says which and what to write."""


class RunNotFoundError(CommtraceError, ValueError):
    """The path given does not hold a recorded run."""


class TraceFormatError(CommtraceError, ValueError):
    """A file is not a commtrace trace, or was written by an incompatible version."""


class MissingExtraError(CommtraceError, ImportError):
    """A package of an extra of commtrace is missing; the message has the command that installs it."""


class InstallationError(CommtraceError, ImportError):
    """An installed package does not work with commtrace; the message has the command that fixes it."""


class ImportFileError(CommtraceError, ValueError):
    """A file given to ``commtrace import`` is damaged or of another kind; the message says what to do."""
