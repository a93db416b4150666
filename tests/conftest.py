"""For all tests: an interrupt must interrupt, also where the shell that started them ignores it in background jobs."""

import signal


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
