"""Which release of quaff this is."""

from __future__ import annotations


def release() -> str | None:
    """The version that is installed; None where quaff runs from a folder that is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quaff")
    except PackageNotFoundError:
        return None
