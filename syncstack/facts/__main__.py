"""``python -m syncstack.facts``: print the facts of this process as JSON."""

from __future__ import annotations

import sys

import msgspec

from syncstack.facts.collect import collect


def main() -> None:
    """Print the facts as one JSON document."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(collect()), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
