"""The list of conventions, and what makes a function one.

A convention is a function with a name and a sentence that the user reads. Two kinds:

    @computing("scale-floor", "The scale bytes follow ...", stage="scale")
    def scale_floor(replay):           # exchanges one stage of a replay (`refops.oracle.replay`)
        replay.require(replay.layout.scale_format == E8M0)
        replay.scale_code = lambda rule, amax, tensor_scale: ...

    @reading("swapped-nibbles", "Each byte holds ...")
    def swapped_nibbles(dump):         # lays the dump out as it should be
        ...

`require` (NotApplicable) says where a convention means nothing. A convention with parameters names its choices: a
function from the replay (or dump) to a list; the convention then takes one of them as a second argument. Words that a
sentence needs go into `replay.facts` (`dump.facts`). The order of registration breaks ties: common ones come first.
"""

from collections.abc import Callable
from dataclasses import dataclass

#: Every convention by name, the common ones first.
CONVENTIONS: dict[str, "Convention"] = {}


@dataclass(frozen=True)
class Convention:
    """A rule that a kernel may follow instead of TE's.

    Attributes:
        name: kebab-case.
        sentence: one sentence, with {words} from `facts`.
        function: what applies it.
        stage: the stage that it changes, or a function from the choice to it; "layout" for readings.
        choices: function from a replay or dump to the parameters to try, or None.
        fields: fields of settings that it exchanges; `other-setting` stands for those that no convention names.
        last: whether any other that explains as much is named first: it is rare, or fits a number to the dump.
        alone: whether it is tried by itself alone, in all places, and not together with another: it is rare, so that
            a pair with it is not worth its time.
    """

    name: str
    sentence: str
    function: Callable
    stage: str | Callable
    choices: Callable | None = None
    fields: tuple[str, ...] = ()
    last: bool = False
    alone: bool = False

    @property
    def reads(self):
        """Whether it rearranges the dump instead of changing a computation."""
        return self.stage == "layout"

    def stage_of(self, choice):
        """The stage that it changes with this choice."""
        return self.stage(choice) if callable(self.stage) else self.stage

    def choices_for(self, target):
        """The parameters to try; [None] for a convention that has none."""
        return [None] if self.choices is None else list(self.choices(target))

    def apply(self, target, choice=None):
        """Change a replay or dump in place; NotApplicable if the convention means nothing for it."""
        target.applied = (*target.applied, (self, choice))
        target.changed.add(self.stage_of(choice))
        before = dict(target.facts)
        if self.choices is None:
            self.function(target)
        else:
            self.function(target, choice)
        # Two conventions may use the same word: each keeps its own. What a stage finds out later is shared.
        target.facts[self.name] = {word: said for word, said in target.facts.items() if before.get(word) is not said}

    def __repr__(self):
        return f"<{self.name}>"


def computing(name, sentence, *, stage, choices=None, fields=(), last=False, alone=False):
    """Register a function that exchanges one stage of a replay."""
    return _register(name, sentence, stage, choices, fields, last, alone)


def reading(name, sentence, *, choices=None, alone=False):
    """Register a function that rearranges a dump as it should be."""
    return _register(name, sentence, "layout", choices, alone=alone)


def _register(name, sentence, stage, choices, fields=(), last=False, alone=False):
    if choices is not None and not callable(choices):
        fixed = tuple(choices)
        choices = lambda target: fixed  # noqa: E731

    def register(function):
        if name in CONVENTIONS:
            raise ValueError(f"name must be new; got {name!r} a second time")
        CONVENTIONS[name] = Convention(name, sentence, function, stage, choices, fields, last, alone)
        return function

    return register
