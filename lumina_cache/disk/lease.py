"""Who uses a store: a cache and its copies share one, and the last of them closes it."""

from __future__ import annotations

from ..errors import DiskTierError
from .store import DiskStore

__all__ = ["Lease"]


class Lease:
    """A store in the hands of a cache and its copies; closed behind the last of them, if it was made for them.

    Args:
        own: whether the store was made for these caches. One that the caller passed is the caller's to close.
    """

    def __init__(self, store: DiskStore, *, own: bool) -> None:
        self.store = store
        self._own = own
        self._users = 0

    def take(self) -> None:
        """One cache more uses the store."""
        self._users += 1

    def give_up(self) -> DiskTierError | None:
        """One cache less does; returns what the file system had against deleting the files, if anything."""
        self._users -= 1
        if self._own and self._users == 0:
            try:
                self.store.close()
            except DiskTierError as error:
                return error
        return None
