"""Where a local file system puts new folders."""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

# linux/fs.h and ext4.h
_GET_FLAGS, _SET_FLAGS, _TOP_OF_HIERARCHY = 0x80086601, 0x40086602, 0x00020000


def spread_subfolders(folder: Path) -> None:
    """Let every new folder in this one get a part of the disk of its own, where the file system can (ext4).

    ext4 otherwise places it, and all files in it, in the block group of its parent, and looks for a free
    inode there one by one: beside an environment of 100,000 files that makes each new file cost over a
    millisecond instead of a twentieth. Does nothing where it is not possible.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = struct.unpack("l", fcntl.ioctl(descriptor, _GET_FLAGS, struct.pack("l", 0)))[0]
            fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", flags | _TOP_OF_HIERARCHY))
        finally:
            os.close(descriptor)
