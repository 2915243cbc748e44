"""What the software GPU is and how it runs: one frozen description, checked when it is made."""

from dataclasses import dataclass, fields

from refops.arguments import require_choice, require_flag, require_integer, shown

#: Target -> (major, minor) of its compute capability. A letter behind the number is of code and not of a device: code
#: for sm_90 and for sm_90a runs on the same device.
TARGETS = {
    "sm_75": (7, 5),
    "sm_80": (8, 0),
    "sm_86": (8, 6),
    "sm_89": (8, 9),
    "sm_90": (9, 0),
    "sm_90a": (9, 0),
    "sm_100": (10, 0),
    "sm_100a": (10, 0),
    "sm_103": (10, 3),
    "sm_103a": (10, 3),
    "sm_120": (12, 0),
    "sm_120a": (12, 0),
}
#: The default targets of devices 0, 1, ...: every generation that the kernels know, the most common one first.
DEFAULT_TARGETS = ("sm_90", "sm_80", "sm_100a", "sm_120a")
MOST_DEVICES = 16
#: Seeds fit into what C calls an int.
LARGEST_SEED = 2**31 - 1
LARGEST_NUMBER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The devices, and how they do their work.

    Attributes:
        targets: what each device is, names of `TARGETS`; fixed once the driver is initialised.
        deferred: work is done when somebody waits for it, not before: a missing dependence gives wrong bits.
        backward: blocks and warps run from the last to the first, and so does deferred work that is in no order.
        contract: a multiplication and an addition become one rounding wherever PTX allows it, as ptxas may do. Holds
            for code that is loaded from then on.
        perturb: 0, or a seed: approximate instructions err within the bounds that the PTX ISA documents.
        uninitialised: a read of bytes that nobody wrote is a fault. Holds for memory that is allocated from then on.
        longest: instructions that a warp may execute in a block; one that executes more is taken to be in an endless
            loop.

    Raises:
        TypeError: an attribute of another type. ValueError: a value out of its range.
    """

    targets: tuple[str, ...] = DEFAULT_TARGETS
    deferred: bool = False
    backward: bool = False
    contract: bool = False
    perturb: int = 0
    uninitialised: bool = False
    longest: int = 1 << 28

    def __post_init__(self):
        if not isinstance(self.targets, tuple):
            raise TypeError(f"targets must be a tuple of names, one for each device; got {shown(self.targets)}")
        for place, target in enumerate(self.targets):
            require_target(target, f"targets[{place}]")
        if not 1 <= len(self.targets) <= MOST_DEVICES:
            raise ValueError(f"targets must name 1 to {MOST_DEVICES} devices; got {len(self.targets)}")
        require_integer(self.perturb, "perturb", low=0, high=LARGEST_SEED + 1)
        require_integer(self.longest, "longest", low=1, high=LARGEST_NUMBER + 1)
        for name in ("deferred", "backward", "contract", "uninitialised"):
            require_flag(getattr(self, name), name)

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """(major, minor) of the compute capability of each device."""
        return tuple(TARGETS[target] for target in self.targets)

    def device_of(self, target: str) -> int:
        """Return the number of the first device of a target.

        Raises:
            ValueError: a name that is not in `TARGETS`, or no such device.
        """
        require_target(target, "target")
        if TARGETS[target] not in self.capabilities:
            raise ValueError(f"target must be one of the devices', {', '.join(self.targets)}; got {target!r}")
        return self.capabilities.index(TARGETS[target])


#: Attributes that may change between two pieces of work; `targets` may not.
BEHAVIOUR = tuple(field.name for field in fields(Settings) if field.name != "targets")


def targets_with(target: str) -> tuple[str, ...]:
    """Return `DEFAULT_TARGETS`, with one more device at the end if none of them has the target."""
    require_target(target, "target")
    known = {TARGETS[name] for name in DEFAULT_TARGETS}
    return DEFAULT_TARGETS if TARGETS[target] in known else (*DEFAULT_TARGETS, target)


def require_target(value: str, name: str) -> None:
    """Raise ValueError unless a target is in `TARGETS`."""
    require_choice(value, name, TARGETS)
