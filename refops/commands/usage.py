"""What the commands share: exit codes, usage errors, and suggestions for misspelt names."""

from contextlib import contextmanager
from dataclasses import MISSING, fields

from refops.arguments import similar_names
from refops.survey import SCALINGS, match_names

EXIT_FINE, EXIT_MISMATCH, EXIT_BAD_USE = 0, 1, 2
#: Names that an error message lists.
MOST_LISTED = 10


class UsageError(Exception):
    """Bad use; the message is one line that names the argument, its value and the rule."""


def match(patterns, names, argument):
    """Names that match, or a UsageError that lists similar ones, or what there is."""
    try:
        return match_names(patterns, list(names))
    except LookupError as error:
        (pattern,) = error.args
    similar = similar_names(pattern.strip("*"), names)
    if similar:
        meant = listed(_with_the_default(similar) if names is SCALINGS else similar, 3)
        raise UsageError(f"{argument} matches nothing; got {pattern!r}: did you mean {meant}?")
    most = len(SCALINGS) if names is SCALINGS else MOST_LISTED
    raise UsageError(f"{argument} must match one of {listed(names, most)}; got {pattern!r}")


def _with_the_default(similar):
    """Names of several scalings, the one that has its class's defaults marked and first, if there is just one."""
    defaults = [name for name in similar if _has_the_defaults(SCALINGS[name].scaling)]
    if len(similar) == 1 or len(defaults) != 1:
        return similar
    (default,) = defaults
    return [f"{default} (the default)", *(name for name in similar if name != default)]


def _has_the_defaults(scaling):
    with_default = [field for field in fields(scaling) if field.default is not MISSING]
    return all(getattr(scaling, field.name) == field.default for field in with_default)


def match_one(pattern, names, argument):
    """The one name that matches, or a UsageError."""
    if pattern in names:
        return pattern
    found = match([pattern], names, argument)
    if len(found) > 1:
        raise UsageError(f"{argument} must match one name; got {pattern!r}, which matches {listed(found)}")
    return found[0]


def listed(names, most=MOST_LISTED):
    names = list(names)
    if not names:
        return "no names (there are none)"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def usage_errors(option_of):
    """Turn an error about an argument ("x must be ...; got ...") into bad use of the option that gave it.

    Args:
        option_of: function from the argument's name to what stands for it in the message.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        words = str(error).split()
        message = " ".join(word for word in words if word.strip("^~"))  # a compiler's marks below a line of source
        if "; got" not in message:  # none of the caller's doing
            raise
        name, _, rest = message.partition(" ")
        raise UsageError(f"{option_of(name)} {rest}{_BFLOAT16_HINT if 'got uint16' in rest else ''}") from None


_BFLOAT16_HINT = "; if its elements are bfloat16, add @bfloat16 to the file"
