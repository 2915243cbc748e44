"""What a kernel's text shows before it runs: its holes, and shapes that Numba could not compile."""

import ast
import inspect
import textwrap

#: What makes arrays whose shape Numba must know while it compiles.
OF_CONSTANT_SHAPE = ("cuda.shared.array", "cuda.local.array")
#: Nodes of an expression that Python's own compiler computes.
LITERAL = (ast.Constant, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)


def holes(kernel):
    """A line for each `...` in a function's source."""
    marks = [node for node in _nodes(kernel) if isinstance(node, ast.Constant) and node.value is ...]
    for number in sorted({node.lineno for node in marks}):
        yield _line(kernel, number)


def shapes_known_at_launch(kernel):
    """(reason, line) for each shape of shared or local memory that is known only when the kernel is launched.

    Numba takes literals, variables that are assigned one, and global names; of anything that a kernel computes, though
    it be of constants, it says that no `array` has this signature.
    """
    nodes = _nodes(kernel)
    constants = _constant_names(nodes)
    for node in nodes:
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in OF_CONSTANT_SHAPE:
            shapes = [one.value for one in node.keywords if one.arg == "shape"] or node.args[:1]
            sizes = [size for shape in shapes for size in (shape.elts if isinstance(shape, ast.Tuple) else [shape])]
            for size in sizes:
                if not _is_constant(size, kernel, constants):
                    yield f"the shape of {name} must be constant; got {ast.unparse(size)}", _line(kernel, node.lineno)


def _nodes(kernel):
    """The nodes of a function's source, whose first line is 1; none where the source cannot be read."""
    try:
        return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kernel)))))
    except OSError:
        return []


def _line(kernel, number):
    """A line of a function's source, the first one 1, in words."""
    lines, first = textwrap.dedent(inspect.getsource(kernel)).splitlines(), kernel.__code__.co_firstlineno
    return f"line {first + number - 1}: {lines[number - 1].strip()}"


def _constant_names(nodes):
    """The variables that are assigned once, a literal."""
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and _is_literal(node.value)]
    targets = [target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)]
    return {name for name in targets if stored.count(name) == 1}


def _is_constant(size, kernel, constants):
    """Whether Numba knows a number of a shape while it compiles."""
    if isinstance(size, ast.Name):
        return size.id in constants or size.id not in kernel.__code__.co_varnames
    return _is_literal(size)


def _is_literal(node):
    """Whether an expression has nothing but literals."""
    return all(isinstance(one, LITERAL) for one in ast.walk(node))
