"""Writing a file so that what stands under its name is whole: the old one, or the new one, or none.

A full disk, an error or Ctrl-C halfway must not cost the file that was there. Golden files, several at once with a
manifest, are `refops.golden.storage`'s.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

#: Start of the names of the folders that new files are written in, beside the old ones.
STAGING = ".refops-"


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to; when the block ends without an error, the file there takes the place of `path`.

    The path has the same name in a folder of its own, so whatever else the block writes there (matplotlib puts a
    .pgf file's images beside it) moves along. A link is followed; a device or a pipe is written to as it is.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=path.parent))
    try:
        staged = staging / path.name
        yield staged
        if path.is_file():
            shutil.copymode(path, staged)
        for file in sorted(staging.iterdir(), key=lambda file: file == staged):  # what it refers to goes before it
            with open(file, "r+b") as handle:
                os.fsync(handle.fileno())  # a disk may say only now that it is full
            os.replace(file, path.parent / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
