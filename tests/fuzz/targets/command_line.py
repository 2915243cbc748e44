"""Targets of the command line: words of every kind, in process; and whole processes with broken surroundings.

An exit code is 0, 1 or 2 (130 and 141 after Ctrl-C and a closed pipe); bad use is one line on stderr; `--json` gives
one JSON document; nothing prints a traceback or a control character; an output file is whole or absent.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import hostile
import numpy as np
from arguments_fuzz import contents, laid_out
from harness import ROOT, DocumentedError, require, target

import refops
from refops.commands.arguments import DTYPES
from refops.oracle import OPERATIONS
from refops.replacing import STAGING
from refops.survey import SCALINGS

#: Besides line ends, nothing that a terminal would obey.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
ODD_WORDS = (
    "",
    " ",
    "-",
    "--",
    "-1",
    "--help",
    "nan",
    "1e999",
    "0x10",
    "9" * 400,
    "ü",
    "日本",
    "\x1b[31mred",
    "a\nb",
    "\u202e",
    "*",
    "[",
    "[bold]",
    "%s",
    "{}",
    "x" * 5000,
    "/dev/null",
    "/",
    ".",
    "..",
    "~",
    "@",
    ":",
    "=",
    "x=",
    "=x",
    "a=b=c",
    "\udcff",
    "None",
    "true",
    "1,2",
    "0",
    "-0",
    "--json",
    "$(id)",
    "'",
    '"',
    "\\",
)


def word(case):
    """A word that fits nowhere."""
    return case.choose(ODD_WORDS)


def input_file(case, name, suffix=None, *, plain=False):
    """A file of tensors, whole or not, and words about what is in it; `plain`: mostly without such words."""
    if plain and case.chance(0.9):
        return str(tensor_file(case, name, case.choose([".npy", ".npz", ".safetensors"])))
    suffix = suffix or case.choose([".npy", ".npz", ".safetensors", ".pt" if case.chance(0.1) else ".npy", ".bin"])
    if suffix == ".bin":
        path = case.folder / f"{name}.bin"
        size = case.choose([8192, 8192, 4096, 0, 100])
        path.write_bytes(contents(case, (32, 64), np.float32).tobytes()[:size])
        return str(path) + case.choose(RAW_WORDS)
    more = case.choose([*[""] * 14, "@bfloat16", ":x", ":", "@", ":nothing", "@float32:2x2"])
    return f"{tensor_file(case, name, suffix)}{more}"


#: What may stand behind the name of a raw file.
RAW_WORDS = (
    "",
    "@float32:32x64",
    "@bfloat16:64x64",
    "@uint8:8192",
    "@float32",
    "@float64:1",
    "@float32:1x2x3",
    "@float32:",
    "@float32:99999999999x9999999999",
    "@bfloat16:0x5",
)


def tensor_file(case, name, suffix):
    """Path of a file of tensors: two of three are whole."""
    path = case.folder / f"{name}{suffix}"
    if case.chance(0.35):
        hostile.make(case, path, suffix)
        return path
    array = contents(case, case.choose([(32, 64), (64, 128), (1, 32), (32,), (2, 16, 64)]), np.float32)
    if suffix == ".npy":
        np.save(path, laid_out(case, array, "fortran" if case.chance(0.2) else "plain"))
    elif suffix == ".npz":
        np.savez(path, **{case.choose(["x", "data", "w"]): array})
    elif suffix == ".safetensors":
        hostile.whole_safetensors(case, path, {case.choose(hostile.NAMES[:8]): array})
    else:
        hostile.whole_pt(case, path)
    return path


def some(case, probability, *words):
    """These words with a probability, else none."""
    return list(words) if case.chance(probability) else []


def scaling_words(case):
    """--scaling and --set, right or wrong."""
    words = some(case, 0.85, "--scaling", case.choose([*SCALINGS, *SCALINGS, "mxfp", "nvfp4", "MXFP8", word(case)]))
    return words + set_words(case, 0.25) + set_words(case, 0.05)


def set_words(case, probability):
    """--set with a field of some scaling, right or wrong."""
    fields = (
        "two_d=true",
        "scale=2",
        "fmt=e5m2",
        "fmt=e8m0",
        "scale_rounding=floor",
        "scale_rounding=even",
        "scale_format=ue5m3",
        "tensor_level=false",
        "block_size=16",
        "seed=0x10",
        "seed=-1",
        "seed=1e3",
        "block_dim=2",
        "four_over_six=mae",
        "four_over_six=none",
        "rht=true",
        "scale=nan",
        "scale=1e-45",
        "amax_epsilon=inf",
        "sign_mask=0",
        "random_bits=/dev/null",
        "random_bits=nothing.bin",
        "two_d=",
        "=",
        word(case),
    )
    return some(case, probability, "--set", case.choose(fields))


def right_check(case):
    """Words of a check that compares: a right dump, or one with a wrong byte."""
    op, scaling = case.choose(
        [("quantize", "mxfp8"), ("quantize", "nvfp4-1x16"), ("swiglu", "mxfp8"), ("gelu", None), ("dgelu", None)]
    )
    x = contents(case, case.choose([(32, 64), (64, 128)]), case.choose([np.float32, np.float16]))
    np.save(case.folder / "x.npy", x)
    words = ["--op", op, "--input", f"x={case.folder / 'x.npy'}"]
    if op == "dgelu":
        np.save(case.folder / "dy.npy", x)
        words += ["--input", f"dy={case.folder / 'dy.npy'}"]
        made = {"dx": refops.activation_grad("gelu", x, x)}
    elif op == "gelu":
        made = {"y": refops.activation("gelu", x)}
    else:
        words += ["--scaling", scaling]
        settings = SCALINGS[scaling].scaling
        q = refops.quantize(x, settings) if op == "quantize" else refops.activation_quantize(op, x, settings)
        made = {"rowwise_data": q.rowwise_data, "rowwise_scale_inv": q.rowwise_scale_inv}
    for name, array in made.items():
        data = bytearray(array.tobytes())
        if case.chance(0.3):
            data[case.below(len(data))] ^= 1 << case.below(8)
        (case.folder / f"{name}.bin").write_bytes(data)
        words += ["--output", f"{name}={case.folder / name}.bin"]
    return words


def right_golden(case):
    """Words of a golden file that can be written."""
    op = case.choose(["quantize", "swiglu", "dgelu", "relu", "dequantize"])
    scaling = ["--scaling", case.choose(["mxfp8", "nvfp4-1x16", "fp8-current", "mxfp8"])]
    return ["--op", op, *scaling, "--shape", case.choose(["32x64", "2x16x64"]), "--out", str(case.folder / "out")]


def arguments(case, command):
    """The words of one command, mostly of its grammar."""
    words = [command]
    if command in ("check", "golden") and case.chance(0.45):
        words += right_check(case) if command == "check" else right_golden(case)
        words += some(case, 0.35, "--json") + some(case, 0.1, word(case))
        return [w.replace("\x00", "") for w in words]
    if command == "formats":
        words += some(case, 0.7, case.choose([*refops.FORMATS, "E2M1", word(case)]))
    elif command == "inspect":
        words += some(case, 0.95, input_file(case, "t", plain=True))
        words += some(case, 0.2, "--tensor", case.choose(["*", "x", "w*", "data", "[", word(case)]))
        words += some(case, 0.9, "--scaling", case.choose([*SCALINGS, "mxfp8*", "nvfp4*", word(case)]))
        words += set_words(case, 0.3)
        words += some(case, 0.2, "--summary") + some(
            case, 0.1, "--dtype", case.choose(["bfloat16", "float32", word(case)])
        )
        if case.chance(0.05):
            words += picture_words(case, "p.png", "p.png", "p.svg", "p.xyz", "no/p.png", "p", "\n.png")
    elif command == "explain":
        source = case.choose(["values", "values", "file", "both", "neither"])
        if source in ("values", "both"):
            listed = [
                "0.1,-0.25,1,3",
                "0.1,-0.25,1,3",
                "3;2;1",
                "nan",
                "inf,-inf",
                "1e39,-1e-46",
                ",,1,",
                ";",
                "1;2;3",
                "-1",
                ",".join(["1"] * 300),
                "0x10",
                "1_000",
                "\u0661",
                word(case),
            ]
            words += ["--values", case.choose(listed)]
        if source in ("file", "both"):
            words += [input_file(case, "t", plain=True)]
        words += scaling_words(case)
        for option in ("--row", "--block"):
            words += some(case, 0.3, option, case.choose(["0", "1", "31", "1000000", "-1", "9" * 30, word(case)]))
        words += some(case, 0.2, "--columnwise") + some(
            case, 0.2, "--dtype", case.choose(["float32", "float16", "bfloat16", "x"])
        )
        words += some(case, 0.2, "--tensor", case.choose(["x", "*", word(case)]))
    elif command == "check":
        words += some(
            case, 0.95, "--op", case.choose([*OPERATIONS, "matmul", "quantize", "swiglu", "gelu", word(case)])
        )
        words += scaling_words(case)
        for _ in range(case.choose([0, 1, 1, 1, 2, 3])):
            name = case.choose(
                [
                    "",
                    "",
                    "x=",
                    "dy=",
                    "row_scales=",
                    "data=",
                    "rowwise_data=",
                    "amax_history=",
                    "a=",
                    "b=",
                    "b_codes=",
                    "z=",
                ]
            )
            words += ["--input", name + input_file(case, f"i{len(words)}")]
        for option in ("--data", "--scale", "--amax", "--outputs"):
            words += some(case, 0.35, option, input_file(case, f"o{len(words)}"))
        words += some(
            case, 0.4, "--output", case.choose(["y=", "dx=", "dbias=", "", "z="]) + input_file(case, f"o{len(words)}")
        )
        words += some(case, 0.1, "--golden", input_file(case, "g", ".safetensors"))
        words += some(case, 0.2, "--ulp", case.choose(["0", "2", "1e400", "-1", "nan", word(case)]))
        words += some(
            case,
            0.1,
            "--param",
            case.choose(["limit=3", "alpha=x", "fmt=e4m3", "margin=1", "layout=km,kn", word(case)]),
        )
        words += some(case, 0.1, "--swizzled-scales") + some(case, 0.1, "--padding", case.choose(["zero", "x"]))
        words += some(case, 0.1, "--out-dtype", case.choose([*DTYPES])) + some(case, 0.1, "--random-bits", "any")
    elif command == "golden":
        words += some(case, 0.95, "--op", case.choose([*OPERATIONS, "quantize", "swiglu", word(case)]))
        words += scaling_words(case)
        words += some(
            case,
            0.95,
            "--shape",
            case.choose(
                [
                    "32x64",
                    "64x128",
                    "2x16x64",
                    "1",
                    "0x32",
                    "x",
                    "1x",
                    "-1x2",
                    "99999999999x2",
                    "x".join(["1"] * 65),
                    "65536x65536",
                    "\uff132x2",
                    word(case),
                ]
            ),
        )
        words += some(case, 0.4, "--dtype", case.choose(["float32", "float16", "bfloat16", "uint8"]))
        words += some(
            case, 0.3, "--seed", case.choose(["0", "0xffffffffffffffff", str(2**64), "-1", "1.5", word(case)])
        )
        words += some(case, 0.3, "--inputs", case.choose(["mixed", "extreme", "special", "none"]))
        words += some(case, 0.2, "--columnwise") + some(
            case, 0.05, "--param", case.choose(["limit=3", "fmt=e4m3", word(case)])
        )
        words += some(
            case,
            0.95,
            "--out",
            str(case.folder / case.choose(["out", "out", "a/b/c", "file", "x" * 300, "ü\n", "\x1b[31m"])),
        )
        if case.chance(0.1):
            (case.folder / "file").write_text("a file")
    elif command == "report":  # whole reports take minutes: only what ends before them
        words += (
            ["--section", case.choose(["nothing", "", word(case)])]
            if case.chance(0.5)
            else ["--vectors", str(case.folder)]
        )
        words += some(case, 0.5, "--data", str(case.folder / "missing.safetensors"))
    words += some(case, 0.35, "--json")
    if case.chance(0.12):
        words.insert(case.below(len(words) + 1), word(case))
    if case.chance(0.05):
        words.pop(case.below(len(words)))
    return [w.replace("\x00", "") for w in words]


def run_in_process(case, words):
    """Call `refops.cli.main` with files for stdout and stderr; return (exit code, stdout, stderr)."""
    from refops import cli

    kept = sys.stdout, sys.stderr
    with (
        open(case.folder / "stdout", "w+", encoding=case.choose(["utf-8", "utf-8", "ascii"])) as out,
        open(case.folder / "stderr", "w+", encoding="utf-8") as err,
    ):
        sys.stdout, sys.stderr = out, err
        try:
            code = cli.main(words)
        finally:
            sys.stdout, sys.stderr = kept
            out.flush(), err.flush()
        return code, *((case.folder / name).read_text(errors="surrogateescape") for name in ("stdout", "stderr"))


def judge(code, out, err, words, allowed=(0, 1, 2)):
    """The rules of the module's docstring."""
    require(code in allowed, "another exit code", code, words)
    for text in (out or "", err):
        require("Traceback" not in text, "a traceback", text[-2000:], words)
        found = CONTROL.search(text)
        require(
            found is None,
            "a control character",
            words,
            text[max(0, found.start() - 60) : found.end() + 20] if found else "",
        )
    if code == 2:
        lines = err.strip("\n").split("\n")
        require(len(lines) == 1 and lines[0].startswith("refops: error: "), "not one line of error", err, words)
        require(len(err) < 12000, "a line of error without end", len(err), words[:4])
    elif code in (0, 1):
        require(err == "", "something on stderr", err, words)
        require(code == 0 or words[0] in ("check", "report"), "a mismatch of what is not compared", words)
    if "--json" in words and code in (0, 1) and out is not None and not {"--help", "-h", "--version"} & set(words):
        document = json.loads(out, parse_constant=lambda constant: require(False, "not JSON", constant))
        if words[0] == "check":
            require(document["ok"] == (code == 0), "the exit code contradicts the verdict", code, words)


def whole_outputs(case):
    """Golden folders hold whole files and a manifest, or nothing; a picture is whole; no temporary files."""
    from refops.golden import read_golden

    left = [p for p in case.folder.rglob("*") if p.name.startswith(STAGING) or p.name.endswith((".tmp", "~"))]
    require(not left, "temporary files were left", left)
    for manifest in case.folder.rglob("manifest.json"):
        for name in json.loads(manifest.read_text())["files"]:
            read_golden(manifest.parent / name)
    for picture in case.folder.rglob("*.png"):
        require(picture.read_bytes() == OLD or is_whole(picture), "half a picture", picture)
    for picture in case.folder.rglob("*.svg"):
        require(picture.read_bytes() == OLD or picture.read_text().rstrip().endswith("</svg>"), "half a picture")


#: What stands where a picture is to be drawn.
OLD = b"the old picture"


def is_whole(picture):
    """Whether a PNG file is complete: matplotlib reads every pixel."""
    from matplotlib import image

    try:
        return image.imread(picture).size > 0
    except Exception:  # whatever a decoder says of half a file
        return False


def picture_words(case, *names):
    """--plot, now and then over an old picture."""
    path = case.folder / case.choose(names)
    if case.chance(0.5) and path.parent.is_dir() and path.suffix in (".png", ".svg"):
        path.write_bytes(OLD)
    return ["--plot", str(path)]


def in_process(command, cases):
    """A target of one command."""

    @target(f"cli_{command}", cases=cases, seconds=60, needs=("refops.cli", "refops.oracle.diagnosis"))
    def run(case):
        words = arguments(case, command)
        code, out, err = run_in_process(case, words)
        judge(code, out, err, words)
        whole_outputs(case)
        if code == 2:
            raise DocumentedError(err)


for _command, _cases in (
    ("formats", 150),
    ("inspect", 350),
    ("explain", 450),
    ("check", 600),
    ("golden", 350),
    ("report", 60),
    ("", 60),
):
    if _command:
        in_process(_command, _cases)


@target("cli_sqnr", cases=60, seconds=60, needs=("refops.cli",))
def cli_sqnr(case):
    """`inspect` reports the SQNR that NumPy computes from the dequantized tensor."""
    x = case.rng.standard_normal(case.choose([(32, 64), (16, 128), (128, 256)])).astype(np.float32)
    x *= np.float32(2.0 ** case.below(20, -20))
    np.save(case.folder / "x.npy", x)
    name = case.choose(list(SCALINGS))
    words = ["inspect", str(case.folder / "x.npy"), "--scaling", name, "--json"]
    code, out, err = run_in_process(case, words)
    judge(code, out, err, words)
    if code == 2:  # shapes that the scaling does not take
        raise DocumentedError(err)
    ((measured,),) = (tensor["scalings"] for tensor in json.loads(out)["tensors"])
    columnwise = SCALINGS[name].columnwise
    q = refops.quantize(x, SCALINGS[name].scaling, rowwise=not columnwise, columnwise=columnwise)
    error = x.astype(np.float64) - refops.dequantize(q)
    expected = 10 * np.log10(np.square(x, dtype=np.float64).sum() / np.square(error).sum())
    require(abs(measured["sqnr_db"] - expected) < 1e-6, "another SQNR", measured["sqnr_db"], expected)


@target("cli_words", cases=200, needs=("refops.cli",))
def cli_words(case):
    """Words without grammar."""
    words = [case.choose(["inspect", "explain", "check", "golden", "formats", "report", word(case)])]
    words += [
        word(case)
        if case.chance(0.6)
        else case.choose(["--op", "--out", "--json", "--values", "--scaling", "--shape", "--set"])
        for _ in range(case.below(6))
    ]
    if words[0] == "report" or "--all" in words:
        words = ["formats"]
    words = [w.replace("\x00", "") for w in words]
    kept = os.getcwd()
    os.chdir(case.folder)
    try:
        code, out, err = run_in_process(case, words)
    finally:
        os.chdir(kept)
    judge(code, out, err, words)
    if code == 2:
        raise DocumentedError(err)


# --- whole processes --------------------------------------------------------------------------------------------------


def real_input(case):
    """A file that every command can work on for a while."""
    path = case.folder / "x.npy"
    np.save(path, case.rng.standard_normal((512, 1024)).astype(np.float32))
    return path


def commands(case):
    """Words of commands that write something."""
    path = real_input(case)
    return case.choose(
        [
            ["formats", case.choose(list(refops.FORMATS))],
            ["formats", "--json"],
            ["inspect", str(path), "--scaling", "mxfp8", "--json"],
            ["inspect", str(path), "--summary"],
            ["explain", "--scaling", "mxfp8", "--values", "1,2,3"],
            [
                "golden",
                "--op",
                "swiglu",
                "--scaling",
                "mxfp8",
                "--shape",
                "256x1024",
                "--out",
                str(case.folder / "out"),
            ],
            ["inspect", str(path), "--scaling", "mxfp8", *picture_words(case, "p.png")],
        ]
    )


def start(words, prefix=(), **options):
    """`python -m refops` as a process, behind the words of a shell."""
    # No bytecode: written under a limit of the file size it would be cut short, and nobody would notice.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "refops", *words], env=environment, stderr=subprocess.PIPE, **options
    )


@target("cli_process", cases=60, seconds=60, needs=("refops.cli",))
def cli_process(case):
    """Nobody reads stdout, or it is closed, or the disk is full, or Ctrl-C comes at any moment."""
    words = commands(case)
    how = case.choose(
        ["closed pipe", "no stdout", "full device", "file size", "file size", "interrupt", "interrupt", "interrupt"]
    )
    options, allowed, prefix = {"stdout": subprocess.DEVNULL}, (0, 1, 2), []
    if how == "closed pipe":
        options, allowed = {"stdout": subprocess.PIPE}, (0, 1, 2, 141)
    elif how == "no stdout":
        prefix = ["sh", "-c", 'exec "$@" >&-', "sh"]  # no preexec_fn: this process may have threads of JAX
    elif how == "full device":
        options = {"stdout": open("/dev/full", "wb")}  # noqa: SIM115 (the process's end closes it)
    elif how == "file size":
        blocks = case.choose([0, 1, 10, 400])
        prefix = ["sh", "-c", f"trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"", "sh"]
        options = {"stdout": open(case.folder / "stdout", "wb")}  # noqa: SIM115
    else:
        allowed = (0, 1, 2, 130)
        prefix = ["env", "--default-signal=INT"]  # a shell's background jobs ignore it, and their children too
    process = start(words, prefix, **options)
    if how == "closed pipe":
        process.stdout.close()
    if how == "interrupt":
        time.sleep(case.rng.uniform(0.02, 1.2))
        process.send_signal(signal.SIGINT)
    err = process.stderr.read().decode(errors="replace")
    process.stderr.close()
    code = process.wait()
    if options["stdout"] not in (None, subprocess.PIPE, subprocess.DEVNULL):
        options["stdout"].close()
    if how == "interrupt" and code == -signal.SIGINT:  # before Python has taken over the signal
        return
    if how == "interrupt" and code != 130 and "KeyboardInterrupt" in err and "refops/cli.py" not in err:
        return  # during the interpreter's own start, before the first line of the program
    judge(code, None, err, words, allowed)
    whole_outputs(case)
    if code:
        raise DocumentedError(f"{code} {err}")
