"""`refops golden`: golden files. `refops.golden` decides what they hold."""

from refops.commands.arguments import (
    VALUE_DTYPES,
    add_operation,
    integer_argument,
    operation_of,
    params_of,
    scaling_of,
    shape_argument,
)
from refops.commands.usage import EXIT_FINE, UsageError
from refops.display.console import ProgressBar, print_json
from refops.display.oracle import print_golden, print_golden_matrix, written_as_dict
from refops.files import FileError
from refops.golden import INPUT_KINDS, GoldenWriter, Recipe, golden_matrix

EXAMPLES = """\
examples:
  refops golden --op swiglu --scaling mxfp8 --shape 64x256 --out golden
  refops golden --op quantize --scaling mxfp8 --set scale_rounding=floor
      --shape 64x128 --dtype float32 --inputs extreme --seed 7 --out golden
  refops golden --op quantize --scaling mxfp8 --shape 128x512
      --swizzled-scales --out golden
  refops golden --all --out golden

"""


def add_golden(command, scaling_list):
    """Add `refops golden`."""
    p = command(
        "golden",
        run_golden,
        "Write golden files: inputs, and what an operation must write for them.",
        "\nsafetensors with a JSON header, and a manifest with SHA-256 of each file. The\n"
        "same arguments give the same bytes on every machine.",
        epilog=EXAMPLES + scaling_list,
    )
    add_operation(p)
    p.add_argument("--shape", type=shape_argument, metavar="MxK", help="shape of x (gated: [act | gate])")
    p.add_argument("--dtype", choices=VALUE_DTYPES, help="dtype of x and dy (default bfloat16)")
    p.add_argument("--seed", type=_seed, default=0, metavar="N", help="64-bit seed of the inputs (default 0)")
    p.add_argument(
        "--inputs",
        choices=list(INPUT_KINDS),
        help="mixed (default): bell-shaped, heavy-tailed, ties, zeros; extreme: subnormal, huge; special: NaN, inf; "
        "rounding: mixed, with an amax that rounding to 16 bits changes; tiny: around the least normal float32",
    )
    p.add_argument("--columnwise", action="store_true", help="dequantize: from the columnwise copy")
    p.add_argument("--swizzled-scales", action="store_true", help="write scales in the order that GEMMs read")
    p.add_argument("--all", action="store_true", help="every operation, scaling, dtype and kind of inputs (700 MB)")
    p.add_argument("--out", metavar="DIR", required=True, help="where; made if it is not there")


def _seed(text):
    return integer_argument(text, "an integer in [0, 2^64)", lambda value: 0 <= value < 1 << 64)


def run_golden(arguments):
    """`refops golden`: one golden file, or all of them."""
    recipes = _all_recipes(arguments) if arguments.all else [_recipe(arguments)]
    writer = GoldenWriter(arguments.out)
    golden = None
    try:
        with writer, ProgressBar() as show:
            for done, recipe in enumerate(recipes):
                show(done, len(recipes), recipe.file_name)
                golden = _add(writer, recipe, arguments)
    except FileError as error:
        raise UsageError(f"--out {error}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"--out must be a directory that can be written; got {arguments.out!r}: {reason}") from None
    if arguments.json:
        print_json(written_as_dict(arguments.out, writer.written))
    elif arguments.all:
        print_golden_matrix(arguments.out, writer.written)
    else:
        print_golden(writer.path_of(recipes[0]), golden)
    return EXIT_FINE


def _add(writer, recipe, arguments):
    try:
        return writer.add(recipe)
    except (ValueError, TypeError) as error:
        if arguments.all or "; got" not in str(error):
            raise
        first = str(error).split(" ", 1)[0]
        option = "--param " if first in recipe.params else "--" if first == "scaling" else "--shape does not fit: "
        raise UsageError(" ".join(f"{option}{error}".split())) from None


def _all_recipes(arguments):
    for name in ("op", "scaling", "set", "param", "shape", "dtype", "inputs", "columnwise", "swizzled_scales"):
        if getattr(arguments, name):
            raise UsageError(f"give either --all or --{name.replace('_', '-')}; got both")
    return list(golden_matrix(arguments.seed))


def _recipe(arguments):
    for name in ("op", "shape"):
        if getattr(arguments, name) is None:
            raise UsageError(f"give --op and --shape, or --all; got no --{name} (see refops golden --help)")
    operation = operation_of(arguments)
    scaling, params = scaling_of(arguments), params_of(arguments, operation)
    if scaling is not None and scaling.random is not None and scaling.random.bits is not None:
        raise UsageError("--set random_bits must not be given to golden, which writes its own; got it")
    try:
        return Recipe(
            operation.name,
            scaling,
            arguments.shape,
            arguments.dtype,
            arguments.seed,
            arguments.inputs or "mixed",
            params,
            arguments.columnwise,
            arguments.swizzled_scales,
        )
    except (ValueError, TypeError) as error:
        name, _, rest = str(error).partition(" ")
        raise UsageError(f"--{name.replace('_', '-')} {rest}") from None
