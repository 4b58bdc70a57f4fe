"""Writes what an installation would have written beside a copy of the package: backends are found by entry points.

python tests/gpu/entry_points.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    info = Path(sys.argv[1], f"{project['name']}-{project['version']}.dist-info")
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [[f"[{group}]", *(f"{k} = {v}" for k, v in of.items())] for group, of in project["entry-points"].items()]
    (info / "entry_points.txt").write_text("\n".join(line for group in groups for line in group) + "\n")


if __name__ == "__main__":
    main()
