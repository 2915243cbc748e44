"""Asks two solvers whether anything breaks a claim: z3 in this process, and bitwuzla, which reads what z3 writes.

Each has a minute of a processor and a few gigabytes for a question. The two share no code: z3 (Microsoft) and Bitwuzla
(Stanford) turn floats into bits by libraries of their own.
"""

import time
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any

import bitwuzla
import numpy as np
import z3
from terms import EQUATIONS, UNKNOWN, Term, congruent, constant, fresh

#: Seconds of a processor for a question; and on the wall, where others use the processors too.
SECONDS, ON_THE_WALL = 60, 240
MEGABYTES = 6000
z3.set_param("memory_max_size", MEGABYTES)


@dataclass
class Query:
    """Whether two things are the same for all inputs.

    Attributes:
        inputs: name -> `Term`, a variable.
        where: what is known of the inputs: truth values of the solver.
        got, expected: terms, or tuples of them, of one length, which are asked of one by one.
    """

    inputs: dict[str, Term]
    got: Any
    expected: Any
    where: list[Any] = field(default_factory=list)

    def pairs(self):
        """What is compared with what."""
        if not isinstance(self.got, tuple):
            return [(constant(self.got), constant(self.expected))]
        return [tuple(map(constant, pair)) for pair in zip(self.got, self.expected, strict=True)]

    def one_by_one(self):
        """A query for each thing that is compared."""
        return [replace(self, got=got, expected=expected) for got, expected in self.pairs()]

    def broken(self):
        """Assertions that only a counterexample fulfils."""
        different = [z3.Not(same(a, b)) for a, b in self.pairs()]
        return with_equations([*self.where, z3.Or(different) if len(different) > 1 else different[0]])


def same(a, b):
    """Whether two terms are one value: floats by their bits, but any NaN is any other."""
    if a.dtype.kind == "f":
        return a.node == b.node
    if a.dtype == bool:
        return a.node == b.node
    width = 8 * max(a.dtype.itemsize, b.dtype.itemsize)
    return a.astype(f"{a.dtype.kind}{width // 8}").node == b.astype(f"{b.dtype.kind}{width // 8}").node


def with_equations(formulas):
    """Formulas with what holds of the variables that occur in them."""
    found, left, seen, unknown = list(formulas), list(formulas), set(), []
    while left:
        one = left.pop()
        if one.get_id() in seen:
            continue
        seen.add(one.get_id())
        left.extend(one.children())
        if one in EQUATIONS:
            found.append(EQUATIONS[one])
            left.append(EQUATIONS[one])
        if one in UNKNOWN:
            unknown.append(one)
            left.extend(UNKNOWN[one][1:])
    found += [congruent(one, other) for one, other in combinations(unknown, 2) if congruent(one, other) is not None]
    return found


@dataclass(frozen=True)
class Answer:
    """What a solver says: "unsat" (nothing breaks the claim), "sat" or "unknown", after so many seconds."""

    says: str
    seconds: float
    inputs: dict[str, int] | None = None


def ask(solver, query, seconds=SECONDS):
    """The answer of `z3_says` or `bitwuzla_says` to all that a query compares: the first that is not "unsat"."""
    took = 0.0
    for one in query.one_by_one():
        answer = solver(one, seconds)
        took += answer.seconds
        if answer.seconds > seconds:
            answer = replace(answer, says="unknown")
        if answer.says != "unsat":
            break
    return replace(answer, seconds=took)


def z3_says(query, seconds):
    """Ask z3."""
    solver = solver_of(query, seconds)
    began = time.process_time()
    says = str(solver.check())
    took = time.process_time() - began
    if says != "sat":
        return Answer(says, took)
    model = solver.model()
    found = {name: model.eval(term.bits, model_completion=True).as_long() for name, term in query.inputs.items()}
    return Answer(says, took, found)


def solver_of(query, seconds):
    """z3 with the question."""
    solver = z3.SolverFor("QF_FPBV")
    solver.set("timeout", int(1000 * seconds * ON_THE_WALL / SECONDS))
    solver.add(*query.broken())
    return solver


def bitwuzla_says(query, seconds):
    """Ask bitwuzla, in SMT-LIB."""
    manager, options = bitwuzla.TermManager(), bitwuzla.Options()
    options.set(bitwuzla.Option.PRODUCE_MODELS, True)
    options.set(bitwuzla.Option.TIME_LIMIT_PER, int(1000 * seconds * ON_THE_WALL / SECONDS))
    options.set(bitwuzla.Option.MEMORY_LIMIT, MEGABYTES)
    parser = bitwuzla.Parser(manager, options)
    began = time.process_time()
    parser.parse(solver_of(query, seconds).to_smt2().replace("(check-sat)", ""), True, False)
    says = {"sat": "sat", "unsat": "unsat"}.get(str(parser.bitwuzla().check_sat()).split(".")[-1].lower(), "unknown")
    took = time.process_time() - began
    if says != "sat":
        return Answer(says, took)
    declared = {str(one.symbol()): one for one in parser.get_declared_funs()}
    found = dict.fromkeys(query.inputs, 0)  # of what does not matter
    for name, term in query.inputs.items():
        if str(term.bits) in declared:
            found[name] = int(str(parser.bitwuzla().get_value(declared[str(term.bits)]).value(10)))
    return Answer(says, took, found)


def numbers_of(query, inputs):
    """Return (inputs by name, what it got, what was expected) where the inputs have these bits: NumPy scalars."""
    terms = [*query.inputs.values(), *(one for pair in query.pairs() for one in pair)]
    shown = [z3.FreshBool("shown") if one.dtype == bool else fresh("shown", one.bits.size()) for one in terms]
    known = [name == (one.node if one.dtype == bool else one.bits) for name, one in zip(shown, terms, strict=True)]
    fixed = [term.bits == inputs[name] for name, term in query.inputs.items()]
    solver = z3.SolverFor("QF_FPBV")
    solver.add(*with_equations([*fixed, *known]))
    assert solver.check() == z3.sat
    numbers = [_number(solver.model(), name, one) for name, one in zip(shown, terms, strict=True)]
    others = numbers[len(query.inputs) :]
    return dict(zip(query.inputs, numbers, strict=False)), others[::2], others[1::2]


def _number(model, variable, term):
    found = model.eval(variable, model_completion=True)
    if term.dtype == bool:
        return np.bool_(z3.is_true(found))
    return np.array(found.as_long(), f"u{term.dtype.itemsize}").view(term.dtype)[()]


@cache
def versions():
    """What answers."""
    from importlib.metadata import version

    return f"z3 {version('z3-solver')}, bitwuzla {version('bitwuzla')}"
