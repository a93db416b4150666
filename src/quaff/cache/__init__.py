"""What a sequence leaves behind: KV pages and who holds them."""
