"""`python -m kitestring_cli.generate`: the files that are made from the models, written into the tree.

`files()` says what they must hold; a test compares it with what is checked in.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kitestring_api.crd import definitions
from kitestring_api.reference import reference

MANIFESTS = Path("crds/manifests")
REFERENCE = Path("docs/api.md")


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: kubectl reads them, people do not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def manifest_text(definition: dict[str, Any]) -> str:
    """A CustomResourceDefinition as YAML, keys in their order."""
    return yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def files() -> dict[Path, str]:
    """Text of every generated file, by its path in the tree."""
    head = "# Generated from the models in crds/kitestring_api by `make generate`. Do not edit.\n"
    manifests = {
        MANIFESTS / f"{name}.yaml": head + manifest_text(definition) for name, definition in definitions().items()
    }
    return manifests | {REFERENCE: reference()}


def write(root: Path, wanted: Mapping[Path, str]) -> list[Path]:
    """Write what differs of the `wanted` files below `root`; the paths written."""
    written = []
    for path, text in wanted.items():
        target = root / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    for path in write(Path.cwd(), files()):
        sys.stdout.write(f"{path}\n")
