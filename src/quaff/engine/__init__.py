"""The loop: requests in, batches through the model, tokens out."""
