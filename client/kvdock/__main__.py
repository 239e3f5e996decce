"""``python -m kvdock`` is the command ``kvdock``."""

import sys

from kvdock.cli import main

sys.exit(main())
