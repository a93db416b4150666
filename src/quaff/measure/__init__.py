"""What a run cost, what the machine allows, and whether the promise held."""


def counted(n: int, noun: str, nouns: str = "") -> str:
    """`n` with its noun: 1 thread, 2 threads; `nouns` where it takes more than an s."""
    return f"{n} {noun}" if n == 1 else f"{n} {nouns or noun + 's'}"
