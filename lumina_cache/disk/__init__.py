"""Arrays in files: the disk tier's store of blocks, and files that a user saves a whole cache to."""

from .lease import Lease
from .saved import SavedBlocks, load_blocks, save_blocks
from .store import DiskBlock, DiskStore

__all__ = ["DiskBlock", "DiskStore", "Lease", "SavedBlocks", "load_blocks", "save_blocks"]
