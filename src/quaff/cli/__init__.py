"""The command line: one file per verb. This one imports nothing, so that an interrupt finds a handler from the start."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 an error or a difference, 2 wrong usage, 130 interrupted."""
    try:
        from quaff.cli.app import execute

        execute(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
