"""Makes bench/ importable: the end-to-end tests run the same models and engines as the demo."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
