"""`python -m overtone` is the command `overtone`."""

import sys

from overtone.cli import main

sys.exit(main())
