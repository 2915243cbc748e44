"""Golden files on disk: written whole or not at all, listed in a manifest, verified when read.

The safetensors format is written here, in twenty lines, and not by its library: the library's order of metadata and its
interface have changed between versions, and these bytes must not. Reading goes through the library, which checks what
was written. One writer at a time may use a directory.
"""

import json
from contextlib import contextmanager, suppress
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

from refops.files import SAFETENSORS_DTYPES, FileError, read_safetensors
from refops.golden.damage import what_differs
from refops.golden.dump import Golden, build_golden
from refops.golden.header import canonical_json, digest, parse_header
from refops.golden.matrix import Recipe
from refops.hints import DTypeLike
from refops.replacing import replacing_files
from refops.scalings import Scaling

#: Key of the header in the file's `__metadata__`.
HEADER_KEY = "refops"
MANIFEST = "manifest.json"
#: dtype -> its name in a safetensors file; bytes are bytes, whatever codes they hold.
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items() if name != "F4"}


# --- bytes -----------------------------------------------------------------------------------------------------------


def golden_bytes(golden: Golden) -> bytes:
    """Return the bytes of a golden file.

    safetensors: 8 bytes length of a JSON text (little-endian), the text padded with spaces to a multiple of 8, the
    arrays. Arrays of wider elements come first, so that every one is aligned; then by name.
    """
    names = sorted(golden.arrays, key=lambda name: (-golden.arrays[name].itemsize, name))
    entries, chunks, offset = {"__metadata__": {HEADER_KEY: canonical_json(golden.header)}}, [], 0
    for name in names:
        array = golden.arrays[name]
        dtype = array.dtype.newbyteorder("<")
        data = array.astype(dtype, copy=False).tobytes()
        end = offset + len(data)
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        chunks.append(data)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def read_golden(path: str | PathLike[str]) -> Golden:
    """Return the `Golden` in a file, every array and the header verified against its digest.

    Raises:
        FileError: no such file, not a golden file, truncated or changed since it was written; of a changed one the
            message names the array and its first byte that differ, where they can be told (`refops.golden.damage`).
    """
    arrays, metadata = read_safetensors(path)
    header = parse_header(metadata.get(HEADER_KEY), path)
    found = digest(header, arrays)
    if found != header.get("digest"):
        raise FileError(
            f"must be as it was written; got {str(path)!r}: its contents do not match its digest, expected "
            f"{header.get('digest')}, found {found}: {what_differs(header, arrays)}"
        )
    golden = Golden(header, arrays)
    try:
        golden.case().fit_outputs(golden.outputs)
    except Exception as error:  # a header that a digest vouches for, but of a file that this version cannot use
        reason = " ".join(str(error).split())
        raise FileError(f"must be a golden file that refops can use; got {str(path)!r}: {reason}") from error
    return golden


# --- files -----------------------------------------------------------------------------------------------------------


def write_golden(
    directory: str | PathLike[str],
    op: str,
    scaling: Scaling | str | None = None,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike | None = None,
    seed: int = 0,
    inputs: str = "mixed",
    params: dict[str, Any] | None = None,
    swizzled_scales: bool = False,
) -> Path:
    """Write one golden file and list it in the directory's manifest.

    Args:
        directory: where; made if it is not there.
        op, scaling, shape, dtype, seed, inputs, params, swizzled_scales: as `Recipe` has them.

    Returns:
        Path of the file.

    Raises:
        ValueError, TypeError: arguments that do not fit together. OSError: it cannot be written. Nothing is left then.
    """
    params = {} if params is None else params
    recipe = Recipe(op, scaling, shape, dtype, seed, inputs, params, swizzled_scales=swizzled_scales)
    with GoldenWriter(directory) as writer:
        writer.add(recipe)
    return writer.path_of(recipe)


class GoldenWriter:
    """A directory of golden files that changes as a whole: `with GoldenWriter(folder) as writer: writer.add(recipe)`.

    When the `with` block ends the files that were added are moved into place, the manifest last; when it ends with an
    exception (or Ctrl-C) nothing happens to the directory.

    Attributes:
        written: file name -> {"sha256", "bytes"} of what was added.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self._directory = Path(directory)
        self.written: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "GoldenWriter":
        self._change = self._changing()
        self._staging = self._change.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._change.__exit__(kind, error, traceback)

    @contextmanager
    def _changing(self):
        """Yield the folder that files are written in until all of them, and the manifest of all, are moved."""
        with _made(self._directory):
            listed = _read_manifest(self._directory / MANIFEST)
            with replacing_files(self._directory, last=MANIFEST) as staging:
                yield staging
                kept = {name: entry for name, entry in listed.items() if (self._directory / name).is_file()}
                files = dict(sorted((kept | self.written).items()))
                (staging / MANIFEST).write_bytes((json.dumps({"files": files}, indent=1) + "\n").encode())

    def add(self, recipe: Recipe) -> Golden:
        """Build the file of `recipe` and write it beside its place; returns its `Golden`."""
        golden = build_golden(recipe)
        data = golden_bytes(golden)
        (self._staging / recipe.file_name).write_bytes(data)
        self.written[recipe.file_name] = {"sha256": sha256(data).hexdigest(), "bytes": len(data)}
        return golden

    def path_of(self, recipe: Recipe) -> Path:
        """Where the file of `recipe` is once the `with` block has ended."""
        return self._directory / recipe.file_name


@contextmanager
def _made(directory):
    """Make a directory and its missing parents; at the end remove those that stayed empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # not empty: it holds what was written
                path.rmdir()


def _read_manifest(path):
    """What a manifest lists: file name -> {"sha256", "bytes"}; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text())["files"]
        return {str(name): {"sha256": str(e["sha256"]), "bytes": int(e["bytes"])} for name, e in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise FileError(f"must hold a manifest of golden files or none; got {str(path)!r}") from None
