"""The scripts for other schedulers in the page on clusters can be read by what would run them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_slurm_script_is_valid_bash() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)
    [script] = [block for block in blocks if "#SBATCH" in block]
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert script.startswith("#!/bin/bash\n#SBATCH ")


def test_the_kuberay_manifest_asks_for_tokens() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    documents = yaml.safe_load_all((ROOT / "examples/kuberay.yaml").read_text())
    by_kind = {document["kind"]: document["spec"] for document in documents}
    assert set(by_kind) == {"RayCluster", "NetworkPolicy"}
    assert by_kind["RayCluster"]["authOptions"] == {"mode": "token"}
