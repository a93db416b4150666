"""What a run cost, what the machine allows, and whether the promise held."""
