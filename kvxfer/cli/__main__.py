"""``python -m kvxfer.cli``."""

import sys

from kvxfer.cli import main

sys.exit(main())
