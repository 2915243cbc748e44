"""`python -m refops`: the same as the `refops` command."""

import sys

from refops.cli import main

if __name__ == "__main__":
    sys.exit(main())
