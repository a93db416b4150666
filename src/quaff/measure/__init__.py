"""What a run cost, what the machine allows, and whether the promise held."""


def counted(n: int, noun: str) -> str:
    """`n` with its noun: 1 thread, 2 threads."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
