"""`python -m fa4_inductor doctor|explain`."""

import sys

from fa4_inductor.cli import main

if __name__ == "__main__":
    sys.exit(main())
