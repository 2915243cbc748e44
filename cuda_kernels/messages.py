"""Compile messages: one short line on stderr for each loop or kernel that is compiled once and kept on disk.

`logging.getLogger("cuda_kernels").setLevel("WARNING")` silences them; a program that has set the logger up itself keeps
its own way.
"""

import logging
import sys

logger = logging.getLogger("cuda_kernels")


class _StandardError(logging.StreamHandler):
    """Writes to whatever sys.stderr is at that moment."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def announce(text):
    """Say what is being compiled."""
    if not logger.handlers and logger.level == logging.NOTSET:
        handler = _StandardError()
        handler.setFormatter(logging.Formatter("cuda_kernels: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    logger.info(text)
