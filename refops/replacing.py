"""Write files atomically: their names always hold whole files, either the old ones or the new ones, or nothing.

A full disk, an error or Ctrl-C halfway must not cost the files that were there.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    with replacing_files(path.parent, last=path.name) as staging:
        staged = staging / path.name
        yield staged
        if path.is_file():
            shutil.copymode(path, staged)


@contextmanager
def replacing_files(directory: Path, *, last: str) -> Iterator[Path]:
    """Yield a folder to write to; when the block ends without an error, all files there move into `directory`.

    Every file is on the disk before the first one moves. `last`, which refers to the others, moves after them.

    Raises:
        OSError: a file cannot be written, or a directory is in its place; `directory` is as it was.
    """
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=directory))
    try:
        yield staging
        files = sorted(staging.iterdir(), key=lambda file: (file.name == last, file.name))
        for file in files:
            if (directory / file.name).is_dir():
                raise IsADirectoryError(f"{directory / file.name} is a directory")
            with open(file, "r+b") as handle:
                os.fsync(handle.fileno())  # a disk may say only now that it is full
        try:
            _move(files, directory)
        except KeyboardInterrupt:  # everything is on the disk already: finishing is the only state that is whole
            _move([file for file in files if file.exists()], directory)
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move(files, directory):
    for file in files:
        os.replace(file, directory / file.name)
    with suppress(OSError):  # not every system can synchronise the names in a directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
