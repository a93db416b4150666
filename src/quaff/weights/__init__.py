"""Views of a checkpoint -> packed weights in memory, within one byte budget."""
