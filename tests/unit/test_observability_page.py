"""docs/observability.md names metrics that there are, in queries that Prometheus understands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from tests.deploy.prometheus import binary
from triton_diffusion.metric import METRICS, PREFIX

PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()


def test_the_page_names_only_metrics_that_there_are_each_as_prometheus_stores_it() -> None:
    named = set(re.findall(rf"{PREFIX}\w+", PAGE))
    stored = set(METRICS)
    for name, metric in METRICS.items():
        if metric.kind == "histogram":
            stored |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    assert named <= stored
    assert len(named) > 10


def test_prometheus_understands_the_queries(tmp_path: Path) -> None:
    queries = re.findall(r"^\| [^|]+\| `(.+)` \|$", PAGE, re.MULTILINE)
    queries = [query for query in queries if "(" in query]
    assert len(queries) == 10
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}))
    checked = subprocess.run([binary("promtool"), "check", "rules", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(queries)} rules found" in checked.stdout
