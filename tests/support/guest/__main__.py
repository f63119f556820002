"""Runs tests with the kernels of another processor: `python -m tests.support.guest neon tests/unit/kernels/cpu/test_linear.py`.

The first argument is the instruction set, the others are those of pytest.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.guest.kernels import build

with tempfile.TemporaryDirectory() as folder:
    program = build(sys.argv[1], Path(folder))
    environment = {**os.environ, "INFLIGHT_TEST_GUEST": f"{sys.argv[1]}={program}"}
    sys.exit(subprocess.run([sys.executable, "-m", "pytest", *sys.argv[2:]], env=environment, check=False).returncode)
