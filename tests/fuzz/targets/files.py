"""Targets of the file readers: whole files come back as they were written, others end in a one-line `FileError`."""

import hostile
import numpy as np
from arguments_fuzz import wrong
from harness import CheckError, DocumentedError, require, target

from arrays import same_bits
from refops.files import FileError, UnsupportedTensorError, open_tensors, read_safetensors
from refops.golden import Golden
from refops.replacing import STAGING


def read(case, path):
    """Every tensor in a file, by each of its readers."""
    found = {}
    with open_tensors(path) as tensors:
        require(len({t.name for t in tensors}) == len(tensors), "two tensors of one name")
        for tensor in tensors[:40]:
            for reader in (tensor.read_bits, tensor.load):
                try:
                    array = reader()
                except (UnsupportedTensorError, FileError) as error:
                    require_one_line(error)
                    continue
                if isinstance(array, tuple):
                    array, note = array
                    require(
                        array.ndim and array.size and array.dtype.isnative and isinstance(note, str),
                        "not loaded",
                        array,
                    )
                else:
                    found[tensor.name] = array
                array.sum(dtype=np.float64) if array.dtype.kind == "f" else array.tobytes()[:1]
    return found


def require_one_line(error):
    """A message of one line that names no inside of a parser."""
    text = str(error)
    require("\n" not in text and len(text) < 4000, "the message is not one line", text)


def reading(suffix, cases):
    """A target of one format."""

    @target(
        f"read_{suffix[1:]}", cases=cases, seconds=30, needs=("refops.files", *(("torch",) if suffix == ".pt" else ()))
    )
    def run(case):
        path = case.folder / f"file{suffix}"
        expected = hostile.make(case, path, suffix)
        before = path.read_bytes()
        try:
            with np.errstate(all="ignore"):
                found = read(case, path)
        except FileError as error:
            require_one_line(error)
            require(expected is None, "a whole file is refused", error)
            raise DocumentedError(str(error)) from error
        require(path.read_bytes() == before, "the file was changed")
        if expected is not None:
            require(set(found) == set(expected), "other names", set(found), set(expected))
            for name, array in expected.items():
                require(same_bits(found[name], array), "other values", name)


for _suffix, _cases in ((".safetensors", 600), (".npy", 500), (".npz", 400), (".pt", 350)):
    reading(_suffix, _cases)


@target("read_safetensors_arrays", cases=300, needs=("refops.files",))
def read_safetensors_arrays(case):
    """`read_safetensors`, which the oracle's golden files go through."""
    path = case.folder / "file.safetensors"
    expected = hostile.make(case, path, ".safetensors")
    try:
        found, metadata = read_safetensors(path)
    except FileError as error:
        require_one_line(error)
        require(expected is None, "a whole file is refused", error)
        raise DocumentedError(str(error)) from error
    require(isinstance(metadata, dict), "metadata is no dict", metadata)
    for name, array in (expected or {}).items():
        require(same_bits(found[name], array), "other values", name)


# --- golden files -----------------------------------------------------------------------------------------------------

OPS = (
    "quantize",
    "swiglu",
    "dgelu",
    "gelu",
    "dequantize",
    "scaled_swiglu",
    "scaled_dsrelu",
    "update_delayed_scale",
    "dsituglu",
    "relu",
)


def golden_arguments(case):
    """(op, scaling, options) of a golden file, mostly ones that fit together."""
    import refops

    op = case.choose(OPS)
    takes = op in ("quantize", "dequantize") or (case.chance(0.5) and not op.startswith(("scaled", "update")))
    scaling = case.choose(list(refops.survey.SCALINGS)) if takes or case.chance(0.05) else None
    if scaling is not None and case.chance(0.4):
        from arguments_fuzz import SCALINGS

        scaling = case.draw(SCALINGS)
    options = {"shape": case.choose([(32, 64), (64, 128), (2, 16, 64), (1, 32), (0, 64), (7, 33), (64,)])}
    if case.chance(0.4):
        options["dtype"] = case.choose(["float32", "float16", "bfloat16", np.float32])
    if case.chance(0.4):
        options["seed"] = case.choose([0, 1, 2**63, 2**64 - 1])
    if case.chance(0.4):
        options["inputs"] = case.choose(["mixed", "extreme", "special"])
    if op == "update_delayed_scale":
        options["params"] = {"fmt": case.choose([refops.E4M3, refops.E5M2])}
        options["dtype"] = "float32"
    if case.chance(0.2):
        options[case.choose(list(options))] = wrong(case)
    if case.chance(0.05):
        op = wrong(case)
    return op, scaling, options


@target(
    "golden",
    ["refops.golden.write_golden", "refops.golden.read_golden", "refops.golden.Golden"],
    cases=250,
    needs=("refops.golden", "refops.survey"),
)
def golden(case):
    """A file that was written is read; with a byte changed it is refused; a refused one leaves nothing behind."""
    op, scaling, options = golden_arguments(case)
    folder = case.folder / "out"
    try:
        path = case.call("refops.golden.write_golden", folder, op, scaling, **options)
    except DocumentedError:
        require(not folder.exists(), "something was left", list(case.folder.iterdir()))
        raise
    require({p.name for p in folder.iterdir()} == {path.name, "manifest.json"}, "other files", list(folder.iterdir()))
    made = case.call("refops.golden.read_golden", path, documented=FileError)
    require(
        isinstance(made, Golden) and case.call("refops.golden.Golden", made.header, made.arrays) is not None,
        "no Golden",
    )
    whole = path.read_bytes()
    changed = hostile.mutated(case, whole, whole)
    path.write_bytes(changed)
    worked, found = case.attempt("refops.golden.read_golden", path, documented=FileError)
    if worked:
        require(found.header == made.header, "a file with another header is taken for whole")
        for name, array in made.arrays.items():
            require(same_bits(found.arrays[name], array), "a file with other values is taken for whole", name)


@target(
    "golden_in_memory",
    ["refops.golden.Recipe", "refops.golden.build_golden", "refops.golden.golden_bytes"],
    cases=200,
    needs=("refops.golden", "refops.survey"),
)
def golden_in_memory(case):
    """The same recipe gives the same bytes; a file name holds no separator."""
    op, scaling, options = golden_arguments(case)
    recipe = case.call("refops.golden.Recipe", op, scaling, **options)
    require("/" not in recipe.file_name and len(recipe.file_name) < 250, "a file name that is none", recipe.file_name)
    data = case.call("refops.golden.golden_bytes", case.call("refops.golden.build_golden", recipe))
    require(
        data == case.call("refops.golden.golden_bytes", case.call("refops.golden.build_golden", recipe)), "other bytes"
    )


@target(
    "golden_writer", ["refops.golden.GoldenWriter", "refops.golden.golden_matrix"], cases=120, needs=("refops.golden",)
)
def golden_writer(case):
    """A folder changes as a whole: an error inside of the block, a full disk or a hostile manifest changes nothing."""
    recipes = list(case.call("refops.golden.golden_matrix", case.choose([0, 5, 2**64 - 1])))
    chosen = [recipes[case.below(len(recipes))] for _ in range(2)]
    folder = case.folder / case.choose(["out", "deep/er/out", "ü 日本", "a\nb"])
    how = case.choose(["fine", "raises", "manifest", "is a file", "full"])
    if how == "is a file":
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.write_text("a file")
    if how == "manifest":
        folder.mkdir(parents=True)
        text = case.choose(
            [
                b"",
                b"{",
                b"[]",
                b"null",
                b'{"files": 1}',
                b'{"files": {"x": 1}}',
                b"\xff\xfe",
                b'{"files": {"x": {"sha256": 1, "bytes": 1e400}}}',
                b"[" * 100000,
                b'{"files": {}}',
                b'{"files": {"x": {"sha256": "", "bytes": ' + b"9" * 5000 + b"}}}",
            ]
        )
        (folder / "manifest.json").write_bytes(text)
    before = {p: p.read_bytes() if p.is_file() else None for p in case.folder.rglob("*")}
    broken = None
    try:
        writer = case.call("refops.golden.GoldenWriter", folder)
        with writer:
            for recipe in chosen:
                writer.add(recipe)
            if how == "raises":
                raise ZeroDivisionError
    except (OSError, FileError, ZeroDivisionError) as error:
        broken = error
        require(how != "fine", "a good folder is refused", error)
    except Exception as error:
        raise CheckError(f"an undocumented error: {error!r}") from error
    after = {p: p.read_bytes() if p.is_file() else None for p in case.folder.rglob("*")}
    require(not any(STAGING in str(p) for p in after), "a hidden folder was left", list(after))
    if broken is not None:
        require(after == before, "a failed write left something", list(after))
        raise DocumentedError(repr(broken))
    for recipe in chosen:
        case.call("refops.golden.read_golden", writer.path_of(recipe), documented=FileError)
