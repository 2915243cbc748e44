"""How long a diagnosis may search: processor time of this process, and the progress it reports."""

import time


class Budget:
    """Processor seconds that may be spent from now on.

    Attributes:
        seconds: how many; None for as many as it takes.
        progress: function (seconds spent, seconds allowed or None), called now and then; None for nobody.
        ran_out: whether the search was ended by it.
    """

    def __init__(self, seconds=None, progress=None):
        self.seconds, self.progress = seconds, progress
        self.ran_out = False
        self._start = self._told = time.process_time()

    def is_spent(self):
        """Whether nothing is left; reports progress ten times a second."""
        now = time.process_time()
        spent = now - self._start
        if self.progress is not None and now - self._told > 0.1:
            self._told = now
            self.progress(spent, self.seconds)
        if self.seconds is not None and spent > self.seconds:
            self.ran_out = True
        return self.ran_out
