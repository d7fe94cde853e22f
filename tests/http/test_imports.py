"""What the HTTP front may load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_ingress_never_imports_torch():
    """In a fresh process, because tests beside this one may have imported it."""
    script = "import sys, cluster.app, cluster.ingress; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
