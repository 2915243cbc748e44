"""What kernels did, counted while they ran on the software GPU, and what follows from the counts.

Counts say nothing of time. They are sums over all launches of a kernel; `difference` gives those of some launches.
"""

from dataclasses import dataclass, fields, replace

from cuda_kernels.emulator import loading

#: Bytes of a sector, the unit in which global memory is read and written.
SECTOR = 32
#: Fields that describe a kernel and are no counts.
NOT_COUNTS = ("kernel", "registers", "shared", "local")


@dataclass(frozen=True)
class KernelCounters:
    """The counts of one kernel.

    Attributes:
        kernel: its name in PTX.
        registers, shared, local: registers of a thread (0: not known), bytes of shared memory of a block and of local
            memory of a thread.
        launches, blocks: how often it ran, and in how many blocks altogether.
        warp_instructions, thread_instructions: instructions, counted for each warp, and for each lane that took part.
        divergent_branches: branches that only some lanes of a warp took.
        barriers: how often the warps of a block met. atomics: atomic instructions of warps.
        global_loads, global_load_sectors, global_load_bytes: requests of warps, sectors that they touched, bytes that
            the lanes asked for; stores likewise.
        shared_accesses, shared_wavefronts, shared_ideal: requests of warps to shared memory, passes that they take,
            and passes that they would take without bank conflicts.
        seconds: time that the software GPU took.
    """

    kernel: str
    registers: int
    shared: int
    local: int
    launches: int
    blocks: int
    warp_instructions: int
    thread_instructions: int
    divergent_branches: int
    barriers: int
    atomics: int
    global_loads: int
    global_load_sectors: int
    global_load_bytes: int
    global_stores: int
    global_store_sectors: int
    global_store_bytes: int
    shared_accesses: int
    shared_wavefronts: int
    shared_ideal: int
    seconds: float

    @property
    def load_sectors_per_request(self) -> float:
        """Sectors that a warp's load touches, on average; 0 without loads."""
        return _ratio(self.global_load_sectors, self.global_loads)

    @property
    def store_sectors_per_request(self) -> float:
        """Sectors that a warp's store touches, on average; 0 without stores."""
        return _ratio(self.global_store_sectors, self.global_stores)

    @property
    def used_load_share(self) -> float:
        """Share of the sectors' bytes that the lanes asked for. More than 1: lanes read the same bytes."""
        return _ratio(self.global_load_bytes, SECTOR * self.global_load_sectors)

    @property
    def used_store_share(self) -> float:
        """Share of the sectors' bytes that the lanes wrote."""
        return _ratio(self.global_store_bytes, SECTOR * self.global_store_sectors)

    @property
    def wavefronts_over_ideal(self) -> float:
        """Passes through shared memory, divided by those without bank conflicts; 1 is best, 0 without accesses."""
        return _ratio(self.shared_wavefronts, self.shared_ideal)

    @property
    def active_lanes(self) -> float:
        """Lanes that take part in an instruction, on average; 32 is best."""
        return _ratio(self.thread_instructions, self.warp_instructions)

    def difference(self, before: "KernelCounters | None") -> "KernelCounters":
        """Return the counts since `before`; None stands for a kernel that had not run."""
        if before is None:
            return self
        if self.kernel != before.kernel:
            raise ValueError(f"before must be of the kernel {self.kernel}; got {before.kernel}")
        names = [one.name for one in fields(self) if one.name not in NOT_COUNTS]
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in names})


def counters() -> list[KernelCounters]:
    """Return the counts of every kernel that ran, in the order of their first runs."""
    return [KernelCounters(**one) for one in loading.counted()]


def _ratio(numerator, denominator):
    return numerator / denominator if denominator else 0.0
