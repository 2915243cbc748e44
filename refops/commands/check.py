"""`refops check`: the verdict on what a kernel wrote. `refops.oracle` decides what is right.

The kernel's outputs are files, or the kernel itself is given and runs here (`refops.commands.kernel`).
"""

import math

import numpy as np

from refops import oracle
from refops.commands.arguments import (
    DTYPES,
    FILES,
    VALUE_DTYPES,
    add_operation,
    number_argument,
    operation_of,
    parameter_kinds,
    params_of,
    parse_file,
    read_file,
    read_raw,
    scaling_of,
    splits_argument,
)
from refops.commands.kernel import KERNELS, add_kernel, gives_kernel, run_kernel
from refops.commands.usage import EXIT_FINE, EXIT_MISMATCH, UsageError, listed, usage_errors
from refops.display.console import ProgressBar, print_json
from refops.display.oracle import print_check, print_fault, print_launch
from refops.files import SUFFIXES, FileError
from refops.golden import read_golden
from refops.oracle.dumps import other_scales
from refops.oracle.grouped import Groups
from refops.oracle.operation import JUDGED, MATMUL, QUANTIZED_ARRAYS, Case
from refops.oracle.products import ProductCase
from refops.oracle.products.case import INPUTS as PRODUCT_INPUTS
from refops.oracle.products.case import LAYOUTS, SUMS, input_name
from refops.oracle.quantized_tensors import full_name, name_hint
from refops.products import CARDS

EXAMPLES = """\
examples:
  refops check --op swiglu --scaling mxfp8 --input x.npy
      --data q.bin --scale s.bin
  refops check --op dgelu --input dy=dy.npy --input x=x.npy --output dx=dx.npy
  refops check --op quantize --scaling nvfp4-1x16 --set two_d=true
      --input x.bin@bfloat16:64x128 --outputs out.safetensors
  refops check --golden golden/FILE.safetensors --outputs out.safetensors
  refops check --op swiglu --scaling mxfp8 --input x.npy --cuda kernel.cu
      --entry swiglu_mxfp8 --grid 128 --block 256 --argument x
      --argument rowwise_data --argument rowwise_scale_inv --argument 128
  refops check --op matmul --scaling mxfp8 --input operands.safetensors
      --output y=y.npy --param layout=mk,nk --param card=blackwell

"""
ARRAYS = """\
inputs: x; for gradients dy and x; for scaled_... row_scales besides; for
  dequantize the arrays of the quantized tensor; for update_delayed_scale
  amax_history and scale; for matmul a and b (or a_codes, a_scales, a_amax,
  b_codes ...), bias, c: y = alpha a b^T + beta c + bias.
outputs: y; dx, dbias, drow_scales; where the operation quantizes
  rowwise_data, rowwise_scale_inv, amax_rowwise, the same columnwise, dbias;
  amax_history and scale. Short names: data or codes, scale or scales, amax
  (rowwise), columnwise_codes, columnwise_scales, ...

"""
#: What --param says of matmul, beside the parameters of other operations.
PARAMETERS = f"""\
parameters: --param NAME=VALUE for matmul
  layout                         how a and b lie: {" or ".join(tuple(LAYOUTS)[:2])}
                                 or {" or ".join(tuple(LAYOUTS)[2:])}
  alpha, beta                    numbers
  a_fmt, b_fmt                   the format of the codes of a, of b, where it is
                                 not that of --scaling: e4m3, e5m2 ...
  card                           demand the bits of {", ".join(CARDS[:-1])} or {CARDS[-1]}
  split_accumulator              true or false, with card: whether sums of
                                 Hopper's FP8 are promoted (default: either)
  sums                           {" or ".join(SUMS)}: refuse the short sums of
                                 Hopper's FP8 unit, or accept all that its bits
                                 may give (default: those of usual errors)

"""


def add_check(command, scaling_list):
    """Add `refops check`; `command` makes a subcommand, `scaling_list` is the help on scalings."""
    p = command(
        "check",
        run_check,
        "Judge what a kernel wrote: right or wrong, where, and why.",
        "\nExit code 0: right. 1: wrong. 2: bad use.",
        epilog=EXAMPLES + FILES + ARRAYS + PARAMETERS + KERNELS + scaling_list,
    )
    add_operation(p, JUDGED)
    p.add_argument("--input", action="append", default=[], metavar="[NAME=]FILE", help="what the kernel read")
    p.add_argument("--golden", metavar="FILE", help="take operation, settings and inputs from a golden file instead")
    p.add_argument("--data", metavar="FILE", help="output rowwise_data")
    p.add_argument("--scale", metavar="FILE", help="output rowwise_scale_inv (scale, for update_delayed_scale)")
    p.add_argument("--amax", metavar="FILE", help="output amax_rowwise")
    p.add_argument("--output", action="append", default=[], metavar="NAME=FILE", help="any output")
    p.add_argument("--outputs", metavar="FILE", help="a file that holds outputs under their names")
    add_kernel(p)
    p.add_argument(
        "--out-dtype",
        choices=VALUE_DTYPES,
        help="dtype of y or dx in raw files (default: that of x; for matmul of a or b)",
    )
    p.add_argument(
        "--ulp",
        type=_ulp,
        default=2.0,
        metavar="N",
        help="error that exp and tanh may have (default 2); 0 asks for bit equality",
    )
    p.add_argument("--swizzled-scales", action="store_true", help="the scales are in the order that GEMMs read")
    p.add_argument(
        "--m-splits",
        type=splits_argument,
        metavar="M,M,...",
        help="rows of each expert: each is a tensor of its own, stored one after another in every file",
    )
    p.add_argument(
        "--padding", choices=["ignore", "zero"], help="whether padding of scales must be zero (default: with --ulp 0)"
    )
    p.add_argument(
        "--random-bits",
        choices=["given", "any"],
        default="given",
        help="for stochastic rounding: the scaling's random bits (default), or the kernel's own, whatever they are",
    )
    p.add_argument("--no-diagnosis", action="store_true", help="do not look for what explains a wrong dump")
    p.add_argument(
        "--budget",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="processor seconds that the diagnosis may take (default 5); it reports what it has found by then",
    )


def _ulp(text):
    return number_argument(text, "a number >= 0", lambda value: 0 <= value < math.inf)


def _seconds(text):
    return number_argument(text, "a number > 0", lambda value: 0 < value < math.inf)


def run_check(arguments):
    """`refops check`: the verdict on the outputs of a kernel."""
    if arguments.golden is not None:
        op, inputs, scaling, params, swizzled = _from_golden(arguments)
    else:
        operation = _operation_given(arguments)
        op, scaling, params = operation.name, scaling_of(arguments), params_of(arguments, operation)
        if scaling is None and operation.kind == "quantize":
            raise UsageError("--scaling is required for quantize, such as --scaling mxfp8; got none")
        inputs, swizzled = _read_inputs(arguments, operation), arguments.swizzled_scales
    splits, option_of = arguments.m_splits, _option_of(arguments, op)
    with usage_errors(option_of):
        if op == MATMUL.name:
            case = ProductCase(inputs, scaling, params, swizzled_scales=swizzled)
        else:
            case = Case(op, inputs, scaling, params, swizzled_scales=swizzled)
        grouped = splits is not None and op != MATMUL.name  # whose check refuses them
        groups = Groups(op, inputs, scaling, splits, params, swizzled) if grouped else None
    given = _outputs_given(arguments, case)
    if gives_kernel(arguments):
        if groups is not None:
            raise UsageError(f"--m-splits must not be given with a kernel; got {splits}")
        written = _run_given_kernel(arguments, case, given)
        if written.fault:
            return _say_fault(arguments, written.fault)
        outputs = _with_out_dtype(arguments, case, written.outputs)
    else:
        written, outputs = None, _read_outputs(arguments, case, groups, given)
    with usage_errors(lambda name: given[name][0] if name in given else f"--outputs {name}"):
        case.fit_outputs(outputs) if groups is None else groups.split_outputs(outputs)
    with usage_errors(option_of), ProgressBar() as show:
        report = oracle.check(
            op,
            inputs,
            outputs,
            scaling=scaling,
            params=params,
            ulp=arguments.ulp,
            swizzled_scales=swizzled,
            padding=arguments.padding,
            random_bits=arguments.random_bits,
            diagnose=not arguments.no_diagnosis,
            m_splits=splits,
            budget=arguments.budget,
            progress=lambda spent, budget: show(
                min(round(spent), round(budget)), round(budget), "seconds of diagnosis"
            ),
        )
    ran = {} if written is None else {"ran": written.described, "changed_inputs": list(written.changed)}
    if arguments.json:
        print_json(report.as_dict() | ran)
    else:
        print_check(report)
        if written is not None:
            print_launch(written.described, written.changed)
    return EXIT_FINE if report.ok else EXIT_MISMATCH


def _run_given_kernel(arguments, case, given):
    """What the kernel of --ptx or --cuda wrote; no other option may give outputs."""
    if given or arguments.outputs is not None:
        files = "--outputs" if arguments.outputs is not None else next(iter(given.values()))[0]
        raise UsageError(f"{files} must not be given with a kernel, which writes the outputs itself")
    return run_kernel(arguments, case)


def _say_fault(arguments, fault):
    """Print what a kernel did wrong while it ran, and return the exit code."""
    if arguments.json:
        print_json({"ok": False, "fault": fault})
    else:
        print_fault(fault)
    return EXIT_MISMATCH


def _operation_given(arguments):
    if arguments.op is None:
        raise UsageError("give either --op or --golden; got neither (see refops check --help)")
    return operation_of(arguments, JUDGED)


def _from_golden(arguments):
    """Operation, inputs, settings and parameters of --golden, and whether the dump's scales are swizzled."""
    for name in ("op", "scaling", "set", "param", "input"):
        if getattr(arguments, name):
            raise UsageError(f"give either --golden or --{name}; got both: a golden file brings its own")
    try:
        golden = read_golden(arguments.golden)
    except FileError as error:
        raise UsageError(f"--golden {error}") from None
    if golden.op == "dequantize" and arguments.swizzled_scales and not golden.swizzled_scales:
        raise UsageError("--swizzled-scales must not be given with a golden file of dequantize: its scales are plain")
    stale = golden.stale_outputs()
    if stale:
        made_by = f"{arguments.golden!r} of refops {golden.header['refops']}"
        raise UsageError(
            f"--golden must hold what this refops writes; got {made_by}, whose {stale[0]} differs: write it again"
        )
    swizzled = golden.swizzled_scales or arguments.swizzled_scales
    return golden.op, golden.inputs, golden.scaling, golden.params, swizzled


def _read_inputs(arguments, operation):
    """Input name -> array of every --input."""
    names, full_name_of, needs_all = _input_names(operation)
    inputs = {}
    for text in arguments.input:
        name, equals, path = text.partition("=")
        if not equals:
            arrays = _read_unnamed_input(text, names, full_name_of)
        else:
            full = full_name_of(name)
            if full not in names:
                hint = name_hint(name, names)
                raise UsageError(f"--input must be NAME=FILE with NAME one of {', '.join(names)}; got {text!r}{hint}")
            argument = f"--input {name}"
            found = read_file(parse_file(path, argument), argument, name)
            if len(found) != 1:
                raise UsageError(f"{argument} must name one of {listed(found)} after :; got {path!r}")
            arrays = {full: next(iter(found.values()))}
        for full, array in arrays.items():
            if full in inputs:
                raise UsageError(f"--input must give {full} once; got {text!r} as well")
            inputs[full] = array
    missing = [name for name in names if name not in inputs] if needs_all else []
    if missing or not inputs:
        got = ", ".join(inputs) or "nothing"
        wanted = ", ".join(names) if needs_all else f"arrays among {', '.join(names)}"
        raise UsageError(f"--input must give {wanted} for {operation.name}; got {got}")
    return inputs


def _input_names(operation):
    """Names of an operation's inputs, a function from a name as given to one of them, and whether all are needed."""
    if operation is MATMUL:
        return PRODUCT_INPUTS, input_name, False
    if operation.kind == "dequantize":
        return QUANTIZED_ARRAYS, lambda name: full_name(name, QUANTIZED_ARRAYS), False
    return operation.inputs, lambda name: name, True


def _read_unnamed_input(text, names, full_name_of):
    """The one input, or everything in a file whose arrays are named as the inputs are."""
    spec = parse_file(text, "--input")
    found = read_file(spec, "--input", names[0] if len(names) == 1 else None)
    if len(names) == 1 and len(found) == 1:
        return {names[0]: next(iter(found.values()))}
    unknown = [name for name in found if name is None or full_name_of(name) not in names]
    if unknown:
        shown = "one of several inputs" if unknown == [None] or len(found) == 1 else f"array {unknown[0]!r}"
        raise UsageError(f"--input must be NAME=FILE with NAME one of {', '.join(names)}; got {text!r}, {shown}")
    return {full_name_of(name): array for name, array in found.items()}


def _outputs_given(arguments, case):
    """Full output name -> (argument as typed, _File) of every output that has a file of its own."""
    words = [(f"--{name}", name, getattr(arguments, name)) for name in ("data", "scale", "amax")]
    words = [word for word in words if word[2] is not None]
    for text in arguments.output:
        name, equals, path = text.partition("=")
        if not equals:
            raise UsageError(f"--output must be NAME=FILE with NAME one of {', '.join(case.slots)}; got {text!r}")
        words.append((f"--output {name}", name, path))
    given = {}
    for argument, name, path in words:
        full = full_name(name, case.slots)
        if full not in case.slots:
            unscaled = case.operation.takes_scaling and case.scaling is None
            hint = " without a scaling (give --scaling, such as --scaling mxfp8)" if unscaled else ""
            outputs, similar = ", ".join(case.slots), name_hint(name, case.slots)
            raise UsageError(
                f"{argument} is no output of {case.operation.name}{hint}{similar}: {outputs}; got {path!r}"
            )
        if full in given:
            raise UsageError(f"{argument} must be given once; got {given[full][1].text!r} and {path!r} for {full}")
        given[full] = (argument, parse_file(path, argument))
    return given


def _read_outputs(arguments, case, groups, given):
    """Output name -> array of every output argument."""
    outputs = {}
    if arguments.outputs is not None:
        spec = parse_file(arguments.outputs, "--outputs")
        if spec.raw:
            rule = f"must end in one of {', '.join(SUFFIXES)} (raw files: --output NAME=FILE)"
            raise UsageError(f"--outputs {rule}; got {spec.path!r}")
        for name, array in read_file(spec, "--outputs").items():
            full = full_name(name, case.slots)
            if full not in case.slots:
                hint = name_hint(name, case.slots)
                raise UsageError(f"--outputs must hold arrays among {', '.join(case.slots)}; got {name!r}{hint}")
            if full in outputs or full in given:
                raise UsageError(f"--outputs must hold {full} where nothing else gives it; got it twice")
            outputs[full] = array
    for name, (argument, spec) in given.items():
        outputs[name] = _read_output(arguments, case, groups, name, argument, spec)
    if not outputs:
        raise UsageError(f"--output must give at least one of {', '.join(case.slots)}; got none")
    return _with_out_dtype(arguments, case, outputs)


def _read_output(arguments, case, groups, name, argument, spec):
    """One output: raw elements have the dtype and shape that the operation writes, or that of all experts."""
    if not spec.raw or spec.shape is not None:
        found = read_file(spec, argument, name)
        if len(found) != 1:
            raise UsageError(f"{argument} must name one of {listed(found)} after :; got {spec.text!r}")
        return next(iter(found.values()))
    slot, dtype = case.slots[name], spec.dtype
    if dtype is None:
        dtype = _value_dtype(arguments, case) if name in ("y", "dx") else slot.dtype
    shapes = (slot.shape, slot.valid) if groups is None else groups.sizes_of(name)
    shapes = dict.fromkeys(shapes)
    try:
        sizes = [(shape, dtype) for shape in shapes]

        def other(entries):
            return _other_dtype(slot, entries * dtype.itemsize) or other_scales(slot, (entries,))

        return read_raw(spec, argument, sizes, other=other)
    except FileError as error:
        raise UsageError(f"{argument} {error}") from None


def _other_dtype(slot, size):
    """The dtype whose values, as many as a slot has, take so many bytes, in words; "" where none does."""
    if slot.kind != "values":
        return ""
    fitting = [name for name in VALUE_DTYPES if math.prod(slot.shape) * DTYPES[name].itemsize == size]
    return " or ".join(f"{name} (--out-dtype {name})" for name in fitting)


def _value_dtype(arguments, case):
    """dtype of raw y or dx."""
    if arguments.out_dtype is not None:
        return DTYPES[arguments.out_dtype]
    if case.operation is MATMUL:
        return case.slots["y"].dtype
    return case.inputs["x"].dtype if "x" in case.inputs else np.dtype(np.float32)


def _with_out_dtype(arguments, case, outputs):
    """`outputs` with raw 2-byte y or dx as --out-dtype."""
    if arguments.out_dtype is None:
        return outputs
    dtype = DTYPES[arguments.out_dtype]
    values = [name for name in ("y", "dx") if name in outputs]
    if not values:
        raise UsageError(f"--out-dtype goes with output y or dx; got {arguments.out_dtype!r} with {', '.join(outputs)}")
    array = np.asarray(outputs[values[0]])
    if array.dtype.kind == "u" and array.dtype.itemsize == dtype.itemsize:
        array = array.view(dtype)
    if array.dtype != dtype:
        raise UsageError(f"--out-dtype must be that of {values[0]}, {array.dtype}; got {arguments.out_dtype!r}")
    return outputs | {values[0]: array}


def _option_of(arguments, op):
    """Function from the name of an argument of `oracle.check` to the option that gave it."""
    operation = JUDGED[op]
    inputs = _input_names(operation)[0]

    def option(name):
        if arguments.golden is not None:
            return f"--golden {arguments.golden!r} does not work: {name}"
        if name in inputs:
            return f"--input {name}"
        if name in parameter_kinds(operation):
            return f"--param {name}"
        if name == "random_bits":  # the array's shape; the choice itself is the parser's business
            return "--set random_bits"
        return {"inputs": "--input"}.get(name, f"--{name.replace('_', '-')}")

    return option
