"""Certificates for 127.0.0.1 that openssl signs with their own keys."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


def make_certificate(folder: Path) -> tuple[str, str]:
    """The paths of a new certificate.pem and key.pem in `folder`, in place of older ones."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made.split(), *names], check=True, capture_output=True)
    return str(certificate), str(key)
