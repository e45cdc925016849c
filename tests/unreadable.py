"""Attributes that cannot be read, as those of some subclasses of tensors."""

from __future__ import annotations

from typing import Any


def unreadable(error: BaseException) -> Any:
    """Return a property that raises.

    >>> class Silent(torch.Tensor):  # doctest: +SKIP
    ...     nbytes = unreadable(NotImplementedError("unheard of"))
    """

    def fail(_owner: object) -> Any:
        raise error

    return property(fail)
