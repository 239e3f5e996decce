"""Makes the simulator importable, and sends vLLM's log where pytest can see it."""

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Else the messages of vLLM and of its plugins pass by pytest's capture.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")

sys.path.insert(0, str(Path(__file__).parent))

# After the path is known.
from simkit import engine, kvdock, model, start_engine

__all__ = ["engine", "kvdock", "model", "start_engine"]
